package orderstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/go-sql-driver/mysql"
	"gorm.io/gorm"
)

const (
	sqlPacket = `SELECT @@max_allowed_packet`

	// minPacket is the smallest max_allowed_packet that a server can be set to, in
	// bytes.
	minPacket = 1024
	// statementHead bounds what a statement has besides its rows or its list, in
	// bytes: the longest, an INSERT of outcomes, has some 200.
	statementHead = 400
	// numberLength bounds a number in a row or a list: 19 digits, a sign, a comma.
	numberLength = 21
)

// driverConn is what a connection of the driver can do, all of which the pool
// must still see.
type driverConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.NamedValueChecker
	driver.Pinger
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

// session is a connection that knows its max_allowed_packet, which never changes
// while it lasts: setting the global value is for new sessions only.
type session struct {
	driverConn
	packet int // bytes
}

func newSession(ctx context.Context, conn driverConn) (session, error) {
	rows, err := conn.QueryContext(ctx, sqlPacket, nil)
	if err != nil {
		return session{}, fmt.Errorf("reading max_allowed_packet: %w", err)
	}
	value := make([]driver.Value, 1)
	if err := errors.Join(rows.Next(value), rows.Close()); err != nil {
		return session{}, fmt.Errorf("reading max_allowed_packet: %w", err)
	}
	var packet sql.Null[int]
	if err := packet.Scan(value[0]); err != nil {
		return session{}, fmt.Errorf("reading max_allowed_packet: %w", err)
	}
	return session{conn, packet.V}, nil
}

// PrepareContext is where a statement with values ends up that does not fit into
// a packet. If it does not even without them, the driver would say that the
// connection is bad, and the same statement would be tried for ever.
func (s session) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	// One byte is the command; the driver wants to stay below the packet.
	if len(query)+1 >= s.packet {
		return nil, mysql.ErrPktTooLarge
	}
	return s.driverConn.PrepareContext(ctx, query)
}

// txConn is the connection of a transaction, with the packet of its session.
type txConn struct {
	*sql.Conn
	packet int
}

func newTxConn(conn *sql.Conn) (txConn, error) {
	tx := txConn{Conn: conn}
	err := conn.Raw(func(c any) error {
		s, ok := c.(session)
		if !ok {
			return fmt.Errorf("the connection is a %T", c)
		}
		tx.packet = s.packet
		return nil
	})
	return tx, err
}

// packetOf returns the max_allowed_packet of a transaction, in bytes.
func packetOf(tx *gorm.DB) int {
	if c, ok := tx.Statement.ConnPool.(txConn); ok {
		return c.packet
	}
	return minPacket
}

// listLength is how many numbers one IN list may have.
func listLength(tx *gorm.DB) int {
	return max(1, min(inList, (packetOf(tx)-statementHead)/numberLength))
}

// insertRows inserts rows, in as few statements as the packet allows. A row that
// is too long by itself is sent all the same, and refused for its size.
func insertRows[R interface{ maxLength() int }](tx *gorm.DB, rows []R) error {
	packet := packetOf(tx)
	for len(rows) > 0 {
		n, size := 1, statementHead+rows[0].maxLength()
		for n < len(rows) && size+rows[n].maxLength() <= packet {
			size += rows[n].maxLength()
			n++
		}
		chunk := rows[:n]
		if err := tx.Create(&chunk).Error; err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

// rowLength bounds a row in an INSERT, in bytes: so many numbers, times and the
// like, and texts, any byte of which may have to be escaped.
func rowLength(numbers int, texts ...int) int {
	const around = 12 // _binary'',
	// A time, quoted, is longer than a number.
	size := (numbers + 1) * (numberLength + 6)
	for _, n := range texts {
		size += 2*n + around
	}
	return size
}

func (r updateRow) maxLength() int { return rowLength(7, len(r.Verdict)) }

func (r outcomeInsert) maxLength() int {
	return rowLength(9, len(r.Kind), len(r.Reference), len(r.Reason), len(r.EntryID), len(r.Raw))
}
