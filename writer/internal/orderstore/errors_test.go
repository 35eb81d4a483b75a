package orderstore

import (
	"bytes"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"
)

func TestClassify_EveryErrorHasItsClass(t *testing.T) {
	want := map[class][]uint16{
		duplicate: {1062},
		data:      {1048, 1264, 1265, 1292, 1300, 1366, 1406, 1411, 3819, 3854, 4025},
		tooLarge:  {1153, 1390},
		transient: {
			1205, 1213, 1020, 1290, 1836, 1792, 1040, 1203, 1226, 1021, 1114, 1053, 1927, 2006, 2013, 1317, 1180,
			// Schema, grants and what nobody has seen yet condemn no order.
			1146, 1054, 1364, 1142, 1045, 1064, 1452, 65535,
		},
	}
	for class, numbers := range want {
		for _, n := range numbers {
			require.Equal(t, class, classify(wrapped(n)), "error %d", n)
		}
	}
	require.Equal(t, tooLarge, classify(fmt.Errorf("inserting: %w", mysql.ErrPktTooLarge)))
	for _, err := range []error{
		driver.ErrBadConn, mysql.ErrInvalidConn, mysql.ErrBusyBuffer, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed,
		&net.OpError{Op: "dial", Err: errors.New("refused")}, context.DeadlineExceeded, context.Canceled, errors.New("anything"),
	} {
		require.Equal(t, transient, classify(fmt.Errorf("inserting: %w", err)), "%v", err)
	}
}

func TestTransientError_LogsOnlyNumbersThatNobodyKnows(t *testing.T) {
	for number, logged := range map[uint16]bool{1213: false, 1205: false, 2013: false, 1142: true, 65535: true} {
		var out bytes.Buffer
		s := &Store{log: slog.New(slog.NewTextHandler(&out, nil))}
		err := s.transientError("persisting orders", wrapped(number))
		require.ErrorIs(t, err, ErrTransient)
		var e *mysql.MySQLError
		require.ErrorAs(t, err, &e, "the cause is kept")
		require.Equal(t, logged, bytes.Contains(out.Bytes(), fmt.Appendf(nil, "mysql_error=%d", number)), "error %d: %s", number, out.String())
	}
}

func wrapped(number uint16) error {
	return fmt.Errorf("inserting: %w", &insertError{&mysql.MySQLError{Number: number, Message: "no"}})
}
