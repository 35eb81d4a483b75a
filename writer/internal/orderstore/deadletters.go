package orderstore

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/seckill/pkg/orderid"
)

// Held is an order that cannot be stored as it is.
type Held struct {
	Order
	// Raw is what the stream carried for it.
	Raw []byte
	// Reason is why it cannot be stored, for a person.
	Reason string
}

// DeadEntry is a stream entry that cannot be read as a whole.
type DeadEntry struct {
	PartitionID int
	Epoch       int64
	EntryID     string
	// Raw is the entry as it was.
	Raw    []byte
	Reason string
	// VoucherID, FirstSeq and Units are the positions that it stands for, FirstSeq
	// to FirstSeq+Units-1 in Epoch, where they are sound; else all are 0.
	VoucherID, FirstSeq, Units int64
	// FirstSeen, LastSeen and Tries are answers: how often writers met it.
	FirstSeen, LastSeen time.Time
	Tries               int
}

// DeadLetterID names a dead letter: an order by its position, or an entry by
// partition, epoch and entry id. It is comparable.
type DeadLetterID struct {
	// FirstSeen is its place in the list, in Unix milliseconds; it is no part of
	// its identity.
	FirstSeen int64
	// Position is the order's; the zero value for an entry.
	Position orderid.Position
	// PartitionID, Epoch and EntryID are the entry's; zero for an order.
	PartitionID int
	Epoch       int64
	EntryID     string
}

// DeadLetter is what waits for an operator.
type DeadLetter struct {
	ID DeadLetterID
	// Order is the zero value but for EntryID where Entry is set. Its UserID is 0
	// where it could not be read.
	Order
	// Entry is set for an entry that could not be read as a whole.
	Entry               *DeadEntry
	PartitionID         int
	Reason              string
	Raw                 []byte
	FirstSeen, LastSeen time.Time
	Tries               int
	// Units is 1 for an order, Entry.Units for an entry.
	Units int64
}

// DeadLetterFilter names dead letters; a zero field names all.
type DeadLetterFilter struct {
	VoucherID, UserID int64
	ReasonPrefix      string
	// SeenBefore names those first seen before it.
	SeenBefore time.Time
}

// Results of Requeue and Cancel.
const (
	ResultPersisted = "PERSISTED"
	ResultConflict  = "CONFLICT"
	ResultCancelled = "CANCELLED"
	ResultHeld      = "HELD"
)

// Resolution is what a dead letter came to.
type Resolution struct {
	// Result is one of the Result constants.
	Result string
	// Detail says more, for a person.
	Detail string
	// Position and UserID are the order's; zero for an entry.
	Position orderid.Position
	UserID   int64
}

// String is a stable text of the id, which ParseDeadLetterID reads.
func (id DeadLetterID) String() string {
	if id.EntryID != "" {
		return fmt.Sprintf("e.%d.%d.%s.%d", id.PartitionID, id.Epoch, id.EntryID, id.FirstSeen)
	}
	return fmt.Sprintf("o.%d.%d.%d.%d", id.Position.VoucherID, id.Position.Epoch, id.Position.Seq, id.FirstSeen)
}

// ParseDeadLetterID reads what String wrote. Anything else is
// ErrDeadLetterNotFound. Another FirstSeen than the dead letter's is read all the
// same and names the same one: once it is requeued, nothing knows that time.
func ParseDeadLetterID(text string) (DeadLetterID, error) {
	var id DeadLetterID
	spaced := strings.ReplaceAll(text, ".", " ")
	if strings.HasPrefix(text, "e.") {
		_, _ = fmt.Sscanf(spaced, "e %d %d %s %d", &id.PartitionID, &id.Epoch, &id.EntryID, &id.FirstSeen)
	} else {
		_, _ = fmt.Sscanf(spaced, "o %d %d %d %d", &id.Position.VoucherID, &id.Position.Epoch, &id.Position.Seq, &id.FirstSeen)
	}
	// What is not read as it was written is refused, whatever went wrong.
	sound := id.String() == text && id.FirstSeen >= 0 && storable(time.UnixMilli(id.FirstSeen))
	if id.EntryID != "" {
		sound = sound && entryID.MatchString(id.EntryID) && id.PartitionID >= 0 && id.Epoch >= 0
	} else {
		sound = sound && checkPosition(id.Position) == nil
	}
	if !sound {
		return DeadLetterID{}, ErrDeadLetterNotFound
	}
	return id, nil
}

// target is how the audit names it.
func (id DeadLetterID) target() string {
	if id.EntryID != "" {
		return fmt.Sprintf("entry %d/%d/%s", id.PartitionID, id.Epoch, id.EntryID)
	}
	return fmt.Sprintf("order %d/%d/%d", id.Position.VoucherID, id.Position.Epoch, id.Position.Seq)
}

// compare orders dead letters as they are listed: oldest first, and of one
// millisecond orders first.
func (id DeadLetterID) compare(other DeadLetterID) int {
	return cmp.Or(
		cmp.Compare(id.FirstSeen, other.FirstSeen),
		cmp.Compare(min(len(id.EntryID), 1), min(len(other.EntryID), 1)),
		cmp.Compare(id.Position.VoucherID, other.Position.VoucherID),
		cmp.Compare(id.Position.Epoch, other.Position.Epoch),
		cmp.Compare(id.Position.Seq, other.Position.Seq),
		cmp.Compare(id.PartitionID, other.PartitionID),
		cmp.Compare(id.Epoch, other.Epoch),
		cmp.Compare(id.EntryID, other.EntryID),
	)
}

const (
	heldOrders  = ` FROM order_outcomes FORCE INDEX (order_outcomes_held) WHERE kind = 'HELD' AND of_entry = 0`
	heldEntries = ` FROM dead_entries FORCE INDEX (dead_entries_held) WHERE state = 'HELD'`

	sqlHeldOrders = `
SELECT voucher_id, epoch, seq, user_id, reference, reason, entry_id, admitted_at, raw, first_seen_at, last_seen_at, tries` + heldOrders
	sqlHeldOrdersEnd = ` ORDER BY first_seen_at, voucher_id, epoch, seq LIMIT ?`

	sqlHeldEntries = `
SELECT partition_id, epoch, entry_id, units, voucher_id, first_seq, raw, reason, first_seen_at, last_seen_at, tries, state` + heldEntries
	sqlHeldEntriesEnd = ` ORDER BY first_seen_at, partition_id, epoch, entry_id LIMIT ?`

	// Ranges of the index, each behind the other, so that a page costs its rows
	// however many were first seen in one millisecond.
	afterOrder = ` AND (first_seen_at > ?
  OR (first_seen_at = ? AND voucher_id > ?)
  OR (first_seen_at = ? AND voucher_id = ? AND epoch > ?)
  OR (first_seen_at = ? AND voucher_id = ? AND epoch = ? AND seq > ?))`
	afterEntry = ` AND (first_seen_at > ?
  OR (first_seen_at = ? AND partition_id > ?)
  OR (first_seen_at = ? AND partition_id = ? AND epoch > ?)
  OR (first_seen_at = ? AND partition_id = ? AND epoch = ? AND entry_id > ?))`
)

// heldOrderRow is what is listed of a held order.
type heldOrderRow struct {
	VoucherID, Epoch, Seq, UserID int64
	Reference, Reason, EntryID    string
	AdmittedAt                    *time.Time
	Raw                           []byte
	FirstSeenAt, LastSeenAt       time.Time
	Tries                         int
}

// clauses is a statement that grows, with its arguments.
type clauses struct {
	text string
	args []any
}

func (c *clauses) add(text string, args ...any) {
	c.text += text
	c.args = append(c.args, args...)
}

// where adds the conditions that both tables have columns for.
func (f DeadLetterFilter) where(c *clauses) {
	if f.VoucherID != 0 {
		c.add(" AND voucher_id = ?", f.VoucherID)
	}
	if f.ReasonPrefix != "" {
		c.add(" AND reason LIKE ? ESCAPE '|'", strings.NewReplacer("|", "||", "%", "|%", "_", "|_").Replace(f.ReasonPrefix)+"%")
	}
	if !f.SeenBefore.IsZero() {
		c.add(" AND first_seen_at < ?", f.SeenBefore.UTC())
	}
}

func (f DeadLetterFilter) check() error {
	if !f.SeenBefore.IsZero() && !storable(f.SeenBefore) {
		return fmt.Errorf("the year %d cannot be compared", f.SeenBefore.UTC().Year())
	}
	return nil
}

// DeadLetters returns up to limit dead letters behind after, oldest first: the
// last one's id is the after of the next page, the zero value asks for the first.
// What becomes a dead letter meanwhile does not move what is listed. The limit is
// at most 1,000. A filter by user names no entries.
func (s *Store) DeadLetters(ctx context.Context, f DeadLetterFilter, after DeadLetterID, limit int) ([]DeadLetter, error) {
	limit = max(1, min(limit, maxPage))
	if err := f.check(); err != nil {
		return nil, fmt.Errorf("listing dead letters: %w", err)
	}
	n, err := partitions(s.read(ctx))
	if err != nil {
		return nil, err
	}
	letters, err := s.heldOrders(ctx, f, after, limit, n)
	if err != nil {
		return nil, fmt.Errorf("listing held orders: %w", err)
	}
	if f.UserID == 0 {
		entries, err := s.heldEntries(ctx, f, after, limit)
		if err != nil {
			return nil, fmt.Errorf("listing dead entries: %w", err)
		}
		letters = append(letters, entries...)
	}
	slices.SortFunc(letters, func(x, y DeadLetter) int { return x.ID.compare(y.ID) })
	return letters[:min(len(letters), limit)], nil
}

func (s *Store) heldOrders(ctx context.Context, f DeadLetterFilter, after DeadLetterID, limit, partitions int) ([]DeadLetter, error) {
	var c clauses
	c.add(sqlHeldOrders)
	f.where(&c)
	if f.UserID != 0 {
		c.add(" AND user_id = ?", f.UserID)
	}
	at := time.UnixMilli(after.FirstSeen).UTC()
	switch {
	case after == DeadLetterID{}:
	case after.EntryID != "":
		c.add(" AND first_seen_at > ?", at)
	default:
		p := after.Position
		c.add(afterOrder, at, at, p.VoucherID, at, p.VoucherID, p.Epoch, at, p.VoucherID, p.Epoch, p.Seq)
	}
	c.add(sqlHeldOrdersEnd, limit)
	var rows []heldOrderRow
	if err := s.read(ctx).Raw(c.text, c.args...).Scan(&rows).Error; err != nil {
		return nil, err
	}
	list := make([]DeadLetter, len(rows))
	for i, row := range rows {
		p := orderid.Position{VoucherID: row.VoucherID, Epoch: row.Epoch, Seq: row.Seq}
		list[i] = DeadLetter{
			ID:          DeadLetterID{FirstSeen: row.FirstSeenAt.UnixMilli(), Position: p},
			Order:       Order{Position: p, UserID: row.UserID, Reference: row.Reference, EntryID: row.EntryID},
			PartitionID: int(row.VoucherID % int64(partitions)), Reason: row.Reason, Raw: row.Raw,
			FirstSeen: row.FirstSeenAt, LastSeen: row.LastSeenAt, Tries: row.Tries, Units: 1,
		}
		if row.AdmittedAt != nil {
			list[i].AdmittedAt = *row.AdmittedAt
		}
	}
	return list, nil
}

func (s *Store) heldEntries(ctx context.Context, f DeadLetterFilter, after DeadLetterID, limit int) ([]DeadLetter, error) {
	var c clauses
	c.add(sqlHeldEntries)
	f.where(&c)
	at := time.UnixMilli(after.FirstSeen).UTC()
	switch {
	case after == DeadLetterID{}:
	case after.EntryID == "":
		c.add(" AND first_seen_at >= ?", at)
	default:
		c.add(afterEntry, at, at, after.PartitionID, at, after.PartitionID, after.Epoch, at, after.PartitionID, after.Epoch, after.EntryID)
	}
	c.add(sqlHeldEntriesEnd, limit)
	var rows []deadEntryRow
	if err := s.read(ctx).Raw(c.text, c.args...).Scan(&rows).Error; err != nil {
		return nil, err
	}
	list := make([]DeadLetter, len(rows))
	for i, row := range rows {
		e := DeadEntry{
			PartitionID: row.PartitionID, Epoch: row.Epoch, EntryID: row.EntryID, Raw: row.Raw, Reason: row.Reason, Units: row.Units,
			FirstSeen: row.FirstSeenAt, LastSeen: row.LastSeenAt, Tries: row.Tries,
		}
		if row.VoucherID != nil && row.FirstSeq != nil {
			e.VoucherID, e.FirstSeq = *row.VoucherID, *row.FirstSeq
		}
		list[i] = DeadLetter{
			ID:    DeadLetterID{FirstSeen: row.FirstSeenAt.UnixMilli(), PartitionID: e.PartitionID, Epoch: e.Epoch, EntryID: e.EntryID},
			Order: Order{EntryID: e.EntryID}, Entry: &e,
			PartitionID: e.PartitionID, Reason: e.Reason, Raw: e.Raw,
			FirstSeen: e.FirstSeen, LastSeen: e.LastSeen, Tries: e.Tries, Units: e.Units,
		}
	}
	return list, nil
}

// CountDeadLetters counts the dead letters that the filter names.
func (s *Store) CountDeadLetters(ctx context.Context, f DeadLetterFilter) (int64, error) {
	if err := f.check(); err != nil {
		return 0, fmt.Errorf("counting dead letters: %w", err)
	}
	var c clauses
	c.add("SELECT (SELECT COUNT(*)" + heldOrders)
	f.where(&c)
	if f.UserID != 0 {
		c.add(" AND user_id = ?)", f.UserID)
	} else {
		c.add(") + (SELECT COUNT(*)" + heldEntries)
		f.where(&c)
		c.add(")")
	}
	n, err := number(s.read(ctx).Raw(c.text, c.args...))
	if err != nil {
		return 0, fmt.Errorf("counting dead letters: %w", err)
	}
	return n, nil
}
