package orderstore_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// packetFixture is a fixture whose store has only sessions of so small a
// max_allowed_packet. They are the smallest there is, and one that not even the
// placeholders of a batch fit into.
func packetFixture(t *testing.T, packet int) *fixture {
	t.Helper()
	server := devstack.TestDatabaseServer(t, devstack.DatabaseOptions{})
	require.NoError(t, server.CreateDatabase(t.Context(), "small"))
	f := fixtureAt(t, server.DSN("small"))
	f.voucher(7, 100_000)
	f.exec(fmt.Sprintf("SET GLOBAL max_allowed_packet = %d", packet))
	f.Store = f.open(f.dsn, 0)
	f.sql = f.DB()
	require.EqualValues(t, packet, f.number("SELECT @@max_allowed_packet"))
	return f
}

func eachPacket(t *testing.T, test func(f *fixture)) {
	for _, packet := range []int{1024, 4096} {
		t.Run(fmt.Sprint(packet), func(t *testing.T) { test(packetFixture(t, packet)) })
	}
}

func TestPersist_PacketSmallerThanTheBatchsPlaceholders(t *testing.T) {
	eachPacket(t, func(f *fixture) {
		const far = 1 << 39
		batch := run(7, 1, 1000, 0)
		for i := range batch {
			batch[i].Seq += int64(i) * 1000 // no run: read by lists
			batch[i].UserID += far
			batch[i].Reference = strings.Repeat(`\`, 64)
		}
		require.Equal(f.t, all(1000, orderstore.Persisted), f.persist(batch...))
		require.Equal(f.t, all(1000, orderstore.Persisted), f.persist(batch...), "read back")
		for i := range batch {
			batch[i].Seq += far
		}
		require.Equal(f.t, all(1000, orderstore.Conflict), f.persist(batch...))
		require.Equal(f.t, all(1000, orderstore.Ended), f.persist(batch...))
		f.books(7, 1000, 1000)
	})
}

// What is inserted in several statements is still one transaction.
func TestPersist_SmallPacketKeepsABatchWhole(t *testing.T) {
	f := packetFixture(t, 1024)
	f.exec(`CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW
IF NEW.user_id = 200 THEN SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'staged'; END IF`)
	_, err := f.Persist(f.ctx, run(7, 1, 200, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	f.books(7, 0, 0)
}

func TestHold_PacketSmallerThanItsOutcomes(t *testing.T) {
	eachPacket(t, func(f *fixture) {
		var held []orderstore.Held
		for _, o := range run(7, 1, 300, 1<<39) {
			o.Reference = strings.Repeat("r", 64)
			held = append(held, orderstore.Held{Order: o, Raw: bytes.Repeat([]byte{0}, 16<<10), Reason: "staged"})
		}
		for range 2 {
			verdicts, err := f.Hold(f.ctx, held)
			require.NoError(f.t, err)
			require.Equal(f.t, all(300, orderstore.Ended), kinds(verdicts))
		}
		for _, l := range f.letters(orderstore.DeadLetterFilter{}) {
			require.NotEmpty(f.t, l.Raw)
			require.Equal(f.t, 2, l.Tries)
		}
		e := entry("1-1")
		e.VoucherID, e.FirstSeq, e.Units = 7, 1001, 256
		verdicts, err := f.HoldEntry(f.ctx, e)
		require.NoError(f.t, err)
		require.Equal(f.t, all(256, orderstore.Ended), kinds(verdicts))
		f.books(7, 0, 556)

		// The ledger is told of every unit of the entry.
		require.Equal(f.t, orderstore.ResultCancelled, f.cancel(orderstore.DeadLetterID{Epoch: 1, EntryID: "1-1"}).Result)
		require.EqualValues(f.t, 256, f.number("SELECT COUNT(*) FROM ledger_updates"))
	})
}

// The driver says that the connection is bad, which is tried again for ever.
func TestStore_StatementLongerThanAPacketIsRecognised(t *testing.T) {
	f := packetFixture(t, 4096)
	for _, length := range []int{4082, 4096, 5000} {
		query := "DO ? + 1 + ? " + strings.Repeat(" ", length)
		_, err := f.sql.ExecContext(f.ctx, query, 1, strings.Repeat("2", 4096))
		require.ErrorIs(t, err, mysql.ErrPktTooLarge, "%d bytes", length)
	}
	require.NoError(t, f.Ping(f.ctx))
}
