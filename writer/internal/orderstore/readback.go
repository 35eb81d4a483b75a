package orderstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/orderid"
)

const (
	sqlOrdersByPosition = `
SELECT epoch, seq, user_id FROM orders
WHERE voucher_id = ? AND epoch = ? AND seq IN ?`

	// Without the hint, statistics from before the sale may choose the primary
	// key and read every order of the voucher.
	sqlOrdersByUser = `
SELECT epoch, seq, user_id FROM orders FORCE INDEX (orders_user_voucher)
WHERE user_id IN ? AND voucher_id = ?`
)

// storedOrder is what is read back of a row of orders.
type storedOrder struct{ Epoch, Seq, UserID int64 }

// readBack finds out what stands where the database said that a key clashed. It
// never looks at which key: with both clashing the server names only one. Orders
// of which nothing is found stay undecided; the row that clashed was gone again.
func (s *Store) readBack(ctx context.Context, b *batch, picked []int) error {
	keys, members := b.groups(picked)
	conflicts := make(map[group][]int)
	// A transaction of its own, which began after the one that clashed.
	err := s.inTx(ctx, func(tx *gorm.DB) error {
		for _, g := range keys {
			stood, err := readStanding(tx, b, g, members[g])
			if err != nil {
				return err
			}
			for _, i := range members[g] {
				switch st := stood.of(&b.orders[i]); st.kind {
				case Undecided:
				case Conflict:
					conflicts[g] = append(conflicts[g], i)
				default:
					b.verdicts[i] = Verdict{Kind: st.kind}
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("reading back: %w", err)
	}
	for _, g := range keys {
		if err := s.recordOutcomes(ctx, b, g, conflicts[g], OutcomeConflict); err != nil {
			return err
		}
	}
	return nil
}

// standing is what orders holds for the positions and users of a group.
type standing struct {
	group      group
	byPosition map[int64]storedOrder // by seq
	byUser     map[int64]storedOrder // by user_id
}

type standingOrder struct {
	kind     VerdictKind // Persisted, SamePosition, Conflict or Undecided
	position orderid.Position
}

func readStanding(tx *gorm.DB, b *batch, g group, picked []int) (standing, error) {
	st := standing{g, make(map[int64]storedOrder), make(map[int64]storedOrder)}
	for chunk := range slices.Chunk(b.seqs(picked), listLength(tx)) {
		var rows []storedOrder
		if err := tx.Raw(sqlOrdersByPosition, g.voucherID, g.epoch, chunk).Scan(&rows).Error; err != nil {
			return st, fmt.Errorf("reading orders by position: %w", err)
		}
		for _, row := range rows {
			st.byPosition[row.Seq] = row
		}
	}
	for chunk := range slices.Chunk(b.users(picked), listLength(tx)) {
		var rows []storedOrder
		if err := tx.Raw(sqlOrdersByUser, chunk, g.voucherID).Scan(&rows).Error; err != nil {
			return st, fmt.Errorf("reading orders by user: %w", err)
		}
		for _, row := range rows {
			st.byUser[row.UserID] = row
		}
	}
	return st, nil
}

// of judges one order by what stands, its position first.
func (st standing) of(o *Order) standingOrder {
	if row, ok := st.byPosition[o.Seq]; ok {
		if row.UserID == o.UserID {
			return standingOrder{Persisted, o.Position}
		}
		return standingOrder{SamePosition, o.Position}
	}
	row, ok := st.byUser[o.UserID]
	if !ok {
		return standingOrder{}
	}
	p := orderid.Position{VoucherID: o.VoucherID, Epoch: row.Epoch, Seq: row.Seq}
	if p == o.Position {
		// Committed between the two reads.
		return standingOrder{Persisted, p}
	}
	return standingOrder{Conflict, p}
}

// explainUnmatched finds out why the guarded UPDATE of a group matched no row.
// What it finds holds for all undecided orders of the group, not only for those
// of the wave.
func (s *Store) explainUnmatched(ctx context.Context, b *batch, u *unmatchedError) error {
	_, members := b.groups(b.undecided())
	picked := members[u.group]
	row, err := takeVoucher(s.read(ctx), u.group.voucherID)
	switch {
	case errors.Is(err, ErrVoucherNotFound):
		b.decide(picked, Verdict{Kind: NoVoucher})
		return nil
	case err != nil:
		return err
	case row.Epoch != u.group.epoch:
		b.decide(picked, Verdict{Kind: Stale})
		return nil
	case row.Stock >= int64(u.orders):
		return nil // there is enough by now: again
	case row.Stock > 0:
		b.short[u.group] = row.Stock
		return nil
	}
	return s.recordOutcomes(ctx, b, u.group, picked, OutcomeRejected)
}

// outcomeInsert is a row of order_outcomes as it is inserted. The database fills
// in when, and that the ledger knows: whoever asked for it settles it.
type outcomeInsert struct {
	VoucherID     int64 `gorm:"primaryKey;autoIncrement:false"`
	Epoch         int64 `gorm:"primaryKey;autoIncrement:false"`
	Seq           int64 `gorm:"primaryKey;autoIncrement:false"`
	UserID        int64
	Kind          string
	StandingEpoch *int64
	StandingSeq   *int64
	Reference     string
	Reason        string
	EntryID       string
	AdmittedAt    *time.Time
	Raw           []byte
	OfEntry       bool
	Tries         int
}

// TableName is the table of an outcomeInsert.
func (outcomeInsert) TableName() string { return "order_outcomes" }

// recordOutcomes writes CONFLICT or REJECTED for orders of one group, in a
// transaction that locks the voucher row first and then looks again at whether
// that is still true: what was read before may have changed, and a position must
// never be a row and an outcome. The first verdict wins. Orders for which it is
// not true any more stay undecided.
func (s *Store) recordOutcomes(ctx context.Context, b *batch, g group, picked []int, kind string) error {
	if len(picked) == 0 {
		return nil
	}
	var decided map[int]Verdict
	err := s.inTx(ctx, func(tx *gorm.DB) (err error) {
		decided, err = recordLocked(tx, b, g, picked, kind)
		return err
	})
	if err != nil {
		return fmt.Errorf("recording %s of voucher %d: %w", kind, g.voucherID, err)
	}
	faultpoint.Reach(faultpoint.WriterAfterOutcome)
	// Facts only now that they are committed.
	for i, v := range decided {
		b.verdicts[i] = v
	}
	return nil
}

func recordLocked(tx *gorm.DB, b *batch, g group, picked []int, kind string) (map[int]Verdict, error) {
	decided := make(map[int]Verdict, len(picked))
	all := func(v Verdict) map[int]Verdict {
		for _, i := range picked {
			decided[i] = v
		}
		return decided
	}
	row, err := takeVoucher(tx.Clauses(clause.Locking{Strength: "UPDATE"}), g.voucherID)
	if errors.Is(err, ErrVoucherNotFound) {
		return all(Verdict{Kind: NoVoucher}), nil
	}
	if err != nil {
		return nil, err
	}
	if row.Epoch != g.epoch {
		return all(Verdict{Kind: Stale}), nil
	}
	outcomes, err := readOutcomes(tx, g, b.seqs(picked))
	if err != nil {
		return nil, err
	}
	stood, err := readStanding(tx, b, g, picked)
	if err != nil {
		return nil, err
	}
	var inserts []outcomeInsert
	taken := make(map[int64]bool) // seqs of this very statement
	for _, i := range picked {
		o := &b.orders[i]
		if outcome, ok := outcomes[o.Seq]; ok {
			decided[i] = outcome.verdict(g, o.UserID)
			continue
		}
		if taken[o.Seq] {
			continue // two users claim one position: the next round finds the outcome
		}
		st := stood.of(o)
		v := Verdict{Outcome: kind}
		switch {
		case st.kind == Persisted, st.kind == SamePosition:
			decided[i] = Verdict{Kind: st.kind}
			continue
		case kind == OutcomeConflict && st.kind == Conflict:
			v.Kind, v.Standing = Conflict, st.position
		case kind == OutcomeRejected && st.kind == Undecided && row.Stock == 0:
			v.Kind = Rejected
		default:
			continue
		}
		taken[o.Seq] = true
		inserts = append(inserts, newOutcome(o, v))
		decided[i] = v
	}
	return decided, insertOutcomes(tx, inserts, 0)
}

// outcomeChunk bounds one INSERT of outcomes to some 10 KB besides raw, also where
// something in between takes less than the server says; see insertRows.
const outcomeChunk = 50

func newOutcome(o *Order, v Verdict) outcomeInsert {
	admitted := o.AdmittedAt.UTC().Truncate(time.Millisecond)
	row := outcomeInsert{
		VoucherID: o.VoucherID, Epoch: o.Epoch, Seq: o.Seq,
		UserID: o.UserID, Kind: v.Outcome, Reference: o.Reference, EntryID: o.EntryID,
		AdmittedAt: &admitted,
	}
	switch v.Kind {
	case Conflict:
		row.StandingEpoch, row.StandingSeq = &v.Standing.Epoch, &v.Standing.Seq
		row.Reason = "the user has another order for the voucher"
	case Rejected:
		row.Reason = "the database had no stock left"
	}
	return row
}
