package orderstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"gorm.io/gorm"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/orderid"
)

const (
	// maxIdleRounds bounds the rounds in a row that decide nothing, such as for a
	// duplicate that is never found. Since every other round decides an order, it
	// also bounds all rounds of a batch; nearly always there is one, and each
	// refusal of the database adds one or two.
	maxIdleRounds = 3
	// maxReference is the width of the column in characters; a reference has at
	// most 64 bytes, so it fits.
	maxReference = 64
	// inList bounds an IN list: MariaDB turns one of 1,000 and more into a join
	// with a temporary table, whose plan nobody has looked at. See listLength.
	inList = 500
)

const (
	// The guard: the epoch keeps stale writers out, the stock is never oversold.
	// Never joined with partitions; the epoch is copied for this.
	sqlTakeStock = `UPDATE vouchers SET stock = stock - ?, sold = sold + ? WHERE id = ? AND epoch = ? AND stock >= ?`

	sqlOutcomesBetween = `
SELECT seq, user_id, kind, standing_epoch, standing_seq FROM order_outcomes
WHERE voucher_id = ? AND epoch = ? AND seq BETWEEN ? AND ?`

	sqlOutcomesIn = `
SELECT seq, user_id, kind, standing_epoch, standing_seq FROM order_outcomes
WHERE voucher_id = ? AND epoch = ? AND seq IN ?`
)

// orderRow is a row of orders, where one alone is inserted; persisted_at is the
// database's.
type orderRow struct {
	VoucherID  int64 `gorm:"primaryKey;autoIncrement:false"`
	Epoch      int64 `gorm:"primaryKey;autoIncrement:false"`
	Seq        int64 `gorm:"primaryKey;autoIncrement:false"`
	UserID     int64
	Reference  string
	AdmittedAt time.Time
}

// TableName is the table of an orderRow.
func (orderRow) TableName() string { return "orders" }

// Persist gives each order its verdict, in the order of the input. An order that
// ends Persisted is a committed row whose unit was taken in the same
// transaction; Conflict, Rejected and Ended stand on a committed outcome row.
//
// An error is transient (errors.Is(err, ErrTransient)): the verdicts that are
// known are returned beside it, they are facts, and the others are Undecided.
// Running the same batch again, whole or just the undecided orders, after a
// back-off is always right, also where a COMMIT went through and its answer was
// lost: the rows are then found and the orders are Persisted.
//
// Any number of writers may run overlapping batches at once. The caller bounds
// the batch, about 1,000 orders, and the time, by ctx.
func (s *Store) Persist(ctx context.Context, orders []Order) ([]Verdict, error) {
	b := newBatch(orders)
	idle := 0
	for left := b.left(); left > 0; {
		if idle == maxIdleRounds {
			return b.verdicts, fmt.Errorf("persisting orders: %w: %d of %d stay undecided, others keep changing what is read back",
				ErrTransient, left, len(orders))
		}
		if err := s.persistWave(ctx, b, b.wave()); err != nil {
			return b.verdicts, s.transientError("persisting orders", err)
		}
		before := left
		if left = b.left(); left == before {
			idle++
		} else {
			idle = 0
		}
	}
	return b.verdicts, nil
}

// checkOrder refuses what the driver cannot send, or what would be refused row
// by row in a transaction each. Everything else is the database's to judge.
func checkOrder(o *Order) error {
	if err := checkPosition(o.Position); err != nil {
		return err
	}
	switch {
	case o.UserID <= 0:
		return fmt.Errorf("user_id %d is out of range", o.UserID)
	case !utf8.ValidString(o.Reference):
		return errors.New("the reference is not UTF-8")
	case utf8.RuneCountInString(o.Reference) > maxReference:
		return fmt.Errorf("the reference is longer than %d characters", maxReference)
	case !storable(o.AdmittedAt):
		return fmt.Errorf("admitted in the year %d, which cannot be stored", o.AdmittedAt.Year())
	default:
		return nil
	}
}

// persistWave runs one transaction over orders that share neither position nor
// buyer, and on a refusal finds out which verdicts follow. Orders that are still
// undecided afterwards are for the next wave. The error is transient.
func (s *Store) persistWave(ctx context.Context, b *batch, wave []int) error {
	if len(wave) == 0 {
		return nil
	}
	err := s.commitOrders(ctx, b, wave)
	if err != nil {
		faultpoint.Reach(faultpoint.WriterAfterRollback)
	}
	var insert *insertError
	var short *unmatchedError
	var ended *endedError
	switch {
	case err == nil:
		b.decide(wave, Verdict{Kind: Persisted})
		return nil
	case errors.As(err, &ended):
		for i, v := range ended.verdicts {
			b.verdicts[i] = v
		}
		return nil
	case errors.As(err, &short):
		return s.explainUnmatched(ctx, b, short)
	case !errors.As(err, &insert):
		// Only the INSERT carries values of orders: what another statement says
		// is never held against one.
		return err
	}
	switch classify(err) {
	case duplicate:
		return s.readBack(ctx, b, b.undecided())
	case data:
		if len(wave) == 1 {
			b.decide(wave, Verdict{Kind: Unstorable, Err: err, Reason: refusal(err)})
			return nil
		}
		return s.persistHalves(ctx, b, wave)
	case tooLarge:
		if len(wave) == 1 {
			return err // a fault of the server's settings, not of the order
		}
		return s.persistHalves(ctx, b, wave)
	default:
		return err
	}
}

// persistHalves runs a wave in two transactions. Down to single orders it is as
// deep as the wave's length has bits.
func (s *Store) persistHalves(ctx context.Context, b *batch, wave []int) error {
	half := len(wave) / 2
	if err := s.persistWave(ctx, b, wave[:half]); err != nil {
		return err
	}
	// The first half may have decided orders of the second by reading back.
	rest := slices.DeleteFunc(slices.Clone(wave[half:]), func(i int) bool { return b.verdicts[i].Kind != Undecided })
	return s.persistWave(ctx, b, rest)
}

// insertError is an error of the INSERT into orders.
type insertError struct{ err error }

func (e *insertError) Error() string { return "inserting orders: " + e.err.Error() }
func (e *insertError) Unwrap() error { return e.err }

// unmatchedError says that the guarded UPDATE of a group matched no row.
type unmatchedError struct {
	group  group
	orders int
}

func (e *unmatchedError) Error() string {
	return fmt.Sprintf("taking %d units of voucher %d in epoch %d: no row matched", e.orders, e.group.voucherID, e.group.epoch)
}

// endedError says that some positions have an outcome already.
type endedError struct{ verdicts map[int]Verdict }

func (e *endedError) Error() string {
	return fmt.Sprintf("%d positions have an outcome", len(e.verdicts))
}

// commitOrders inserts the orders and takes their units, all or nothing.
func (s *Store) commitOrders(ctx context.Context, b *batch, wave []int) error {
	return s.inTx(ctx, func(tx *gorm.DB) error {
		// No IGNORE and no upsert: both hide a clash of the other key, and the
		// order would be acknowledged with nothing stored.
		if err := insertOrders(tx, b.orders, wave); err != nil {
			return &insertError{err}
		}
		keys, members := b.groups(wave)
		for _, g := range keys {
			n := len(members[g])
			res := tx.Exec(sqlTakeStock, n, n, g.voucherID, g.epoch, n)
			if res.Error != nil {
				return fmt.Errorf("taking stock of voucher %d: %w", g.voucherID, res.Error)
			}
			if res.RowsAffected != 1 {
				return &unmatchedError{g, n}
			}
		}
		// The voucher rows are locked from here on, and whoever writes an outcome
		// locks them first: what this finds is all there is until COMMIT.
		ended := make(map[int]Verdict)
		for _, g := range keys {
			outcomes, err := readOutcomes(tx, g, b.seqs(members[g]))
			if err != nil {
				return err
			}
			if len(outcomes) == 0 {
				continue
			}
			for _, i := range members[g] {
				if o, ok := outcomes[b.orders[i].Seq]; ok {
					ended[i] = o.verdict(g, b.orders[i].UserID)
				}
			}
		}
		if len(ended) > 0 {
			return &endedError{ended}
		}
		return s.beforeCommit()
	})
}

// beforeCommit is a fault point of its own function: a compiler that inlines the
// one above with all that is in it keeps the point's name in a release.
func (s *Store) beforeCommit() error {
	faultpoint.Reach(faultpoint.WriterInTransaction)
	return nil
}

// outcomeRow is what is read of a row of order_outcomes.
type outcomeRow struct {
	Seq           int64
	UserID        int64
	Kind          string
	StandingEpoch *int64
	StandingSeq   *int64
}

// verdict is what the outcome means for a user's order at its position. A user
// below 1, on either side, could not be read, and is taken to be the same.
func (r outcomeRow) verdict(g group, userID int64) Verdict {
	if r.UserID > 0 && userID > 0 && r.UserID != userID {
		return Verdict{Kind: SamePosition}
	}
	v := Verdict{Kind: Ended, Outcome: r.Kind}
	if r.StandingEpoch != nil && r.StandingSeq != nil {
		v.Standing = orderid.Position{VoucherID: g.voucherID, Epoch: *r.StandingEpoch, Seq: *r.StandingSeq}
	}
	return v
}

// readOutcomes returns the outcomes at the given positions of a group, by seq.
func readOutcomes(db *gorm.DB, g group, seqs []int64) (map[int64]outcomeRow, error) {
	found := make(map[int64]outcomeRow)
	add := func(rows []outcomeRow) {
		for _, row := range rows {
			found[row.Seq] = row
		}
	}
	// A batch is mostly a run of seqs: one look into a range that is empty.
	first, last := slices.Min(seqs), slices.Max(seqs)
	if last-first < 2*int64(len(seqs)) {
		var rows []outcomeRow
		if err := db.Raw(sqlOutcomesBetween, g.voucherID, g.epoch, first, last).Scan(&rows).Error; err != nil {
			return nil, fmt.Errorf("reading outcomes of voucher %d: %w", g.voucherID, err)
		}
		add(rows)
		return found, nil
	}
	for chunk := range slices.Chunk(seqs, listLength(db)) {
		var rows []outcomeRow
		if err := db.Raw(sqlOutcomesIn, g.voucherID, g.epoch, chunk).Scan(&rows).Error; err != nil {
			return nil, fmt.Errorf("reading outcomes of voucher %d: %w", g.voucherID, err)
		}
		add(rows)
	}
	return found, nil
}
