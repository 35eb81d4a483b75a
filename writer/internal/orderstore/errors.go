package orderstore

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/go-sql-driver/mysql"
)

// What callers branch on, by errors.Is.
var (
	// ErrTransient means that the database could not decide: nothing is wrong
	// with what it was given. Back off and try the same again.
	ErrTransient = errors.New("the database cannot decide now")
	// ErrNotMigrated means that the schema, or what migrate writes, is missing.
	ErrNotMigrated = errors.New("the database is not migrated: run writer migrate")
	// ErrVoucherNotFound means that there is no voucher of this id.
	ErrVoucherNotFound = errors.New("no such voucher")
	// ErrVoucherExists means that the id is taken by a voucher of other content.
	ErrVoucherExists = errors.New("the voucher exists with other content")
	// ErrInvalidVoucher means that the database refuses the voucher's values.
	ErrInvalidVoucher = errors.New("the database refuses this voucher")
	// ErrEpochMoved means that the epoch is another one than the caller's.
	ErrEpochMoved = errors.New("the epoch is another one by now")
	// ErrRevMoved means that the voucher was changed since the caller read it.
	ErrRevMoved = errors.New("the voucher was changed meanwhile")
	// ErrOrderNotFound means that there is neither a row nor an outcome.
	ErrOrderNotFound = errors.New("no such order")
	// ErrDeadLetterNotFound means that this never was a dead letter.
	ErrDeadLetterNotFound = errors.New("no such dead letter")
	// ErrLockLost means that the caller is not the holder of the lock any more.
	ErrLockLost = errors.New("the lock is no longer held")
)

// StateError says that a voucher cannot go from where it is to where it was told.
type StateError struct {
	// State is where the voucher is.
	State string
	// To is where it was told to go.
	To string
}

// Error names both states.
func (e *StateError) Error() string {
	return fmt.Sprintf("a voucher that is %s cannot become %s", e.State, e.To)
}

// Numbers of server errors that this package branches on. MySQL and MariaDB
// agree on them except where said.
const (
	errDuplicate        = 1062
	errNoSuchTable      = 1146
	errPacketTooLarge   = 1153
	errDeadlock         = 1213
	errTooManyVariables = 1390
)

// class is what an error of a statement means for the rows it carried.
type class int

const (
	// transient: the same again later. Also every error that is not known: an
	// order is never dead-lettered by guess.
	transient class = iota
	// duplicate: a unique key clashed. Which one is found by reading back.
	duplicate
	// data: a value of some row is refused. Bisect.
	data
	// tooLarge: the statement is refused for its size. Split.
	tooLarge
)

// dataErrors blame a value of a row, and would blame it again. Errors that blame
// the schema or the grants are not here: they would condemn every order.
var dataErrors = map[uint16]string{
	1048: "column cannot be null",
	1264: "out of range",
	1265: "data truncated",
	1292: "incorrect value, such as a date",
	1300: "invalid character string",
	1366: "incorrect value for the column",
	1406: "data too long",
	1411: "incorrect value for a function",
	3819: "check constraint",
	3854: "cannot convert a string",
	4025: "check constraint",
}

// refusal says why the database refuses a value, for an operator: what kind of
// error it was and its number. The server's own words stay out, which may quote
// values of callers.
func refusal(err error) string {
	number, _ := serverError(err)
	return fmt.Sprintf("%s (error %d)", dataErrors[number], number)
}

// transientErrors are known to pass. They are named so that an unknown number
// can be told apart in the log; both are treated alike.
var transientErrors = map[uint16]string{
	1020: "record has changed since last read",
	1021: "disk full",
	1040: "too many connections",
	1053: "server shutdown in progress",
	1114: "table is full",
	1158: "network read error",
	1159: "network read timeout",
	1160: "network write error",
	1161: "network write timeout",
	1180: "error during commit",
	1203: "too many connections of this user",
	1205: "lock wait timeout",
	1213: "deadlock",
	1226: "resource limit of this user",
	1290: "server option, such as read_only",
	1317: "query interrupted",
	1792: "read-only transaction",
	1836: "read-only mode",
	1927: "connection killed, MariaDB",
	2006: "server has gone away",
	2013: "lost connection",
	3024: "execution time exceeded",
	3168: "server is not available",
}

// classify judges an error of a statement that carries rows. What is no error of
// the server at all is transient: driver.ErrBadConn, mysql.ErrInvalidConn, a
// network error, a context that ended.
func classify(err error) class {
	if errors.Is(err, mysql.ErrPktTooLarge) {
		return tooLarge
	}
	number, ok := serverError(err)
	switch {
	case !ok:
		return transient
	case number == errDuplicate:
		return duplicate
	case number == errPacketTooLarge, number == errTooManyVariables:
		return tooLarge
	case dataErrors[number] != "":
		return data
	default:
		return transient
	}
}

// serverError returns the number of the server error in err, if there is one.
func serverError(err error) (number uint16, ok bool) {
	var e *mysql.MySQLError
	if errors.As(err, &e) {
		return e.Number, true
	}
	return 0, false
}

func isServerError(err error, number uint16) bool {
	n, ok := serverError(err)
	return ok && n == number
}

// transientError makes err one that errors.Is finds to be ErrTransient. A server
// error that is neither known to pass nor known for anything else is logged, so
// that an order which never gets its verdict has a visible reason.
func (s *Store) transientError(doing string, err error) error {
	if number, ok := serverError(err); ok && transientErrors[number] == "" {
		s.log.Warn("unknown database error, treated as transient",
			slog.Int("mysql_error", int(number)), slog.String("doing", doing), slog.Any("err", err))
	}
	return fmt.Errorf("%s: %w: %w", doing, ErrTransient, err)
}
