package orderstore

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"gorm.io/gorm"

	"github.com/seckill/seckill/pkg/orderid"
)

const (
	// maxEntryUnits is how many orders an entry holds at most.
	maxEntryUnits = 256
	// maxReason is the width of the reason columns in characters.
	maxReason = 255
)

var entryID = regexp.MustCompile(`^[0-9]{1,20}-[0-9]{1,20}$`)

// deadEntryRow is a row of dead_entries. Columns that the database fills are
// read only.
type deadEntryRow struct {
	PartitionID int    `gorm:"primaryKey;autoIncrement:false"`
	Epoch       int64  `gorm:"primaryKey;autoIncrement:false"`
	EntryID     string `gorm:"primaryKey"`
	Units       int64
	VoucherID   *int64
	FirstSeq    *int64
	Raw         []byte
	Reason      string
	FirstSeenAt time.Time `gorm:"->"`
	LastSeenAt  time.Time `gorm:"->"`
	Tries       int       `gorm:"->"`
	State       string    `gorm:"->"`
}

// TableName is the table of a deadEntryRow.
func (deadEntryRow) TableName() string { return "dead_entries" }

// insertOutcomes inserts rows in statements of at most outcomeChunk rows and
// about limit bytes of raw, and of no more than fits into a packet.
func insertOutcomes(tx *gorm.DB, rows []outcomeInsert, limit int) error {
	for len(rows) > 0 {
		n, size := 1, len(rows[0].Raw)
		for n < len(rows) && n < outcomeChunk && size+len(rows[n].Raw) <= limit {
			size += len(rows[n].Raw)
			n++
		}
		if err := insertRows(tx, rows[:n]); err != nil {
			return fmt.Errorf("inserting outcomes: %w", err)
		}
		rows = rows[n:]
	}
	return nil
}

// newHeld bends what the columns refuse: the truth is in raw.
func newHeld(h *Held, limit int) outcomeInsert {
	raw, reason := cutRaw(h.Raw, limit, h.Reason)
	row := outcomeInsert{
		VoucherID: h.VoucherID, Epoch: h.Epoch, Seq: h.Seq, UserID: max(h.UserID, 0),
		Kind: OutcomeHeld, Reference: clip(h.Reference, maxReference), Reason: reason,
		EntryID: h.EntryID, Raw: raw, Tries: 1,
	}
	if !entryID.MatchString(row.EntryID) {
		row.EntryID = ""
	}
	if storable(h.AdmittedAt) {
		at := h.AdmittedAt.UTC().Truncate(time.Millisecond)
		row.AdmittedAt = &at
	}
	return row
}

func newDeadEntry(e DeadEntry, limit int) *deadEntryRow {
	raw, reason := cutRaw(e.Raw, limit, e.Reason)
	row := &deadEntryRow{
		PartitionID: e.PartitionID, Epoch: e.Epoch, EntryID: e.EntryID, Raw: raw, Reason: reason, Units: e.Units,
	}
	if e.Units > 0 {
		row.VoucherID, row.FirstSeq = &e.VoucherID, &e.FirstSeq
	}
	return row
}

// cutRaw cuts raw to limit bytes and says so in the reason.
func cutRaw(raw []byte, limit int, reason string) ([]byte, string) {
	if len(raw) <= limit {
		return raw, clip(reason, maxReason)
	}
	note := fmt.Sprintf(" (the first %d of %d bytes are kept)", limit, len(raw))
	return raw[:limit], clip(reason, maxReason-len(note)) + note
}

// clip makes text one that a column of n characters takes.
func clip(text string, n int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if utf8.RuneCountInString(text) <= n {
		return text
	}
	return string([]rune(text)[:n])
}

func checkPosition(p orderid.Position) error {
	if p.VoucherID <= 0 || p.Epoch <= 0 || p.Epoch > orderid.MaxEpoch || p.Seq <= 0 || p.Seq > orderid.MaxSeq {
		return fmt.Errorf("position (%d, %d, %d) is out of range", p.VoucherID, p.Epoch, p.Seq)
	}
	return nil
}

func checkEntry(e DeadEntry) error {
	switch {
	case e.PartitionID < 0, e.PartitionID >= maxPartitions, e.Epoch <= 0, e.Epoch > orderid.MaxEpoch:
		return fmt.Errorf("partition %d or epoch %d is out of range", e.PartitionID, e.Epoch)
	case !entryID.MatchString(e.EntryID):
		return errors.New("this is no id of a stream entry")
	case e.Units < 0, e.Units > maxEntryUnits:
		return fmt.Errorf("%d units are out of range", e.Units)
	case e.Units == 0:
		return nil
	}
	if err := checkPosition(orderid.Position{VoucherID: e.VoucherID, Epoch: e.Epoch, Seq: e.FirstSeq}); err != nil {
		return err
	}
	return checkPosition(orderid.Position{VoucherID: e.VoucherID, Epoch: e.Epoch, Seq: e.FirstSeq + e.Units - 1})
}
