package orderstore

import (
	"encoding/hex"
	"strconv"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
)

const (
	// The rows take the place of the question mark, as text: no reflection, and
	// nothing for the driver to convert. persisted_at is the database's.
	sqlInsertOrders = "INSERT INTO `orders` (voucher_id, epoch, seq, user_id, reference, admitted_at) VALUES ?"

	// datetime is a time as a literal.
	datetime = "'2006-01-02 15:04:05.000'"
	// orderRoom is about what a row without a reference takes, in bytes.
	orderRoom = 80
)

// insertOrders inserts orders, in as few statements as the packet allows. A row
// that is too long by itself is sent all the same, and refused for its size.
func insertOrders(tx *gorm.DB, orders []Order, picked []int) error {
	packet := packetOf(tx) - statementHead
	rows := rowWriter{text: make([]byte, 0, min(packet, orderRoom*len(picked)))}
	for _, i := range picked {
		before := len(rows.text)
		rows.add(&orders[i])
		if before > 0 && len(rows.text) > packet {
			if err := tx.Exec(sqlInsertOrders, rowText(rows.text[:before])).Error; err != nil {
				return err
			}
			rows.text = rows.text[:0]
			rows.add(&orders[i])
		}
	}
	if len(rows.text) == 0 {
		return nil
	}
	return tx.Exec(sqlInsertOrders, rowText(rows.text)).Error
}

// rowText is the rows of an INSERT as they are sent. They hold no question mark
// that anything would look at: the statement has no values besides.
type rowText []byte

// Build writes the rows into a statement.
func (t rowText) Build(b clause.Builder) {
	// Into memory, which does not fail.
	_, _ = b.WriteString(string(t))
}

// rowWriter writes rows of orders, and repeats what neighbours share: a batch
// is of few vouchers, and the orders of an entry were admitted at one time.
type rowWriter struct {
	text  []byte
	group group
	lead  []byte // "(voucher_id,epoch,", of group
	at    time.Time
	tail  []byte // ",admitted_at)", of at
}

func (w *rowWriter) add(o *Order) {
	if g := groupOf(o); w.lead == nil || g != w.group {
		w.group = g
		w.lead = strconv.AppendInt(append(w.lead[:0], '('), g.voucherID, 10)
		w.lead = strconv.AppendInt(append(w.lead, ','), g.epoch, 10)
		w.lead = append(w.lead, ',')
	}
	if w.tail == nil || o.AdmittedAt != w.at {
		w.at = o.AdmittedAt
		w.tail = o.AdmittedAt.UTC().AppendFormat(append(w.tail[:0], ','), datetime)
		w.tail = append(w.tail, ')')
	}
	if len(w.text) > 0 {
		w.text = append(w.text, ',')
	}
	w.text = append(w.text, w.lead...)
	w.text = strconv.AppendInt(w.text, o.Seq, 10)
	w.text = strconv.AppendInt(append(w.text, ','), o.UserID, 10)
	w.text = appendString(append(w.text, ','), o.Reference)
	w.text = append(w.text, w.tail...)
}

// appendString appends a string as a literal that every sql_mode reads the same
// way: between single quotes where nothing in it needs to be escaped, else in
// hexadecimal digits, as characters of utf8mb4.
func appendString(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c == '\'' || c == '\\' || c < ' ' || c == 0x7f {
			b = append(b, "_utf8mb4 X'"...)
			b = hex.AppendEncode(b, []byte(s))
			return append(b, '\'')
		}
	}
	b = append(b, '\'')
	b = append(b, s...)
	return append(b, '\'')
}
