package orderstore

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"gorm.io/gorm"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/orderid"
)

// Actions of operators.
const (
	ActionRequeue = "REQUEUE"
	ActionCancel  = "CANCEL"
)

const (
	// maxOperator is the width of the operator column in characters.
	maxOperator = 64
	// resolveTries bounds how often a decision runs that a writer got in the way
	// of: it lost a deadlock, or met a row that was not committed yet.
	resolveTries = 3
)

const (
	sqlOutcome = `
SELECT user_id, kind, reference, admitted_at, first_seen_at FROM order_outcomes
WHERE voucher_id = ? AND epoch = ? AND seq = ?`

	sqlDeleteHeld = `DELETE FROM order_outcomes WHERE voucher_id = ? AND epoch = ? AND seq = ? AND kind = 'HELD'`

	sqlHeldToConflict = `
UPDATE order_outcomes SET kind = 'CONFLICT', standing_epoch = ?, standing_seq = ?, reason = ?, applied_at = NULL
WHERE voucher_id = ? AND epoch = ? AND seq = ? AND kind = 'HELD'`

	sqlHeldToCancelled = `
UPDATE order_outcomes SET kind = 'CANCELLED', applied_at = NULL
WHERE voucher_id = ? AND epoch = ? AND seq = ? AND kind = 'HELD'`

	sqlEntryVoucher = `SELECT COALESCE(voucher_id, 0) FROM dead_entries WHERE partition_id = ? AND epoch = ? AND entry_id = ?`

	sqlEntryForUpdate = `
SELECT units, voucher_id, first_seq, state FROM dead_entries
WHERE partition_id = ? AND epoch = ? AND entry_id = ? FOR UPDATE`

	sqlEntryToCancelled = `
UPDATE dead_entries SET state = 'CANCELLED', resolved_at = CURRENT_TIMESTAMP(3)
WHERE partition_id = ? AND epoch = ? AND entry_id = ? AND state = 'HELD'`

	sqlHeldOfEntry = `
SELECT seq, user_id FROM order_outcomes
WHERE voucher_id = ? AND epoch = ? AND seq BETWEEN ? AND ? AND kind = 'HELD' AND of_entry = 1 AND entry_id = ?
ORDER BY seq`

	sqlHeldOfEntryToCancelled = `
UPDATE order_outcomes SET kind = 'CANCELLED', applied_at = NULL
WHERE voucher_id = ? AND epoch = ? AND seq BETWEEN ? AND ? AND kind = 'HELD' AND of_entry = 1 AND entry_id = ?`
)

// actionRow is a row of operator_actions as it is inserted.
type actionRow struct {
	Operator, Action, Reason, Target, Result, Detail string
}

// TableName is the table of an actionRow.
func (actionRow) TableName() string { return "operator_actions" }

// decision is one call of Requeue or Cancel.
type decision struct {
	id                       DeadLetterID
	action, operator, reason string
}

// Requeue writes a held order into orders, in the one transaction that closes the
// dead letter, takes its unit and records who decided it. Results:
//
//   - PERSISTED: the order is a row.
//   - CONFLICT: the user has another order for the voucher by now, which stands.
//   - HELD: it still cannot be stored, Detail says why. An entry that cannot be
//     read stays held: it can only be cancelled.
//
// A dead letter that is resolved already answers what it came to, and nothing is
// changed or recorded: of two operators at once one decides. ErrDeadLetterNotFound
// where there never was one. ErrTransient where the database could not decide;
// the same call again is right, also where its COMMIT went through.
func (s *Store) Requeue(ctx context.Context, id DeadLetterID, operator, reason string) (Resolution, error) {
	return s.resolve(ctx, decision{id, ActionRequeue, operator, reason}, requeueLocked)
}

// Cancel gives a held order up: its outcome becomes CANCELLED, exactly once, and
// the ledger is to be told, so that the unit and the user's right to buy return.
// Of an entry, all positions that it holds. Answers and errors are as with Requeue.
func (s *Store) Cancel(ctx context.Context, id DeadLetterID, operator, reason string) (Resolution, error) {
	return s.resolve(ctx, decision{id, ActionCancel, operator, reason}, cancelLocked)
}

// resolve runs do on a held order whose voucher is locked, or decides about an
// entry. A transaction that fails leaves no trace.
func (s *Store) resolve(ctx context.Context, d decision, do func(*gorm.DB, lockedVoucher, heldRow) (Resolution, error)) (Resolution, error) {
	doing := fmt.Sprintf("resolving dead letter %s", d.id.target())
	if err := d.check(); err != nil {
		return Resolution{}, fmt.Errorf("%s: %w", doing, err)
	}
	var result Resolution
	for try := 1; ; try++ {
		err := s.inTx(ctx, func(tx *gorm.DB) (err error) {
			if d.id.EntryID != "" {
				result, err = d.resolveEntry(tx)
			} else {
				result, err = d.resolveOrder(tx, do)
			}
			if err == nil {
				faultpoint.Reach(faultpoint.OperatorBeforeCommit)
			}
			return err
		})
		var insert *insertError
		switch {
		case err == nil:
			faultpoint.Reach(faultpoint.OperatorAfterCommit)
			return result, nil
		case errors.Is(err, ErrDeadLetterNotFound), errors.Is(err, ErrNotMigrated):
			return Resolution{}, fmt.Errorf("%s: %w", doing, err)
		case errors.As(err, &insert) && classify(err) == data:
			// What the INSERT was rolled back for is recorded in a transaction of
			// its own, where the dead letter may be resolved by now.
			refusal := "the database refuses the order: " + refusal(err)
			do = func(_ *gorm.DB, _ lockedVoucher, held heldRow) (Resolution, error) { return held.stays(refusal), nil }
		case try >= resolveTries, !isServerError(err, errDeadlock) && !isServerError(err, errDuplicate):
			return Resolution{}, s.transientError(doing, err)
		}
	}
}

func (d decision) check() error {
	for _, text := range []struct {
		name, value string
		most        int
	}{{"operator", d.operator, maxOperator}, {"reason", d.reason, maxReason}} {
		if n := utf8.RuneCountInString(text.value); n < 1 || n > text.most || !utf8.ValidString(text.value) {
			return fmt.Errorf("the %s must have 1 to %d characters", text.name, text.most)
		}
	}
	if d.id.EntryID == "" && checkPosition(d.id.Position) != nil {
		return ErrDeadLetterNotFound
	}
	return nil
}

// record adds what came of a decision to the audit.
func (d decision) record(tx *gorm.DB, r Resolution) error {
	row := actionRow{d.operator, d.action, d.reason, d.id.target(), r.Result, clip(r.Detail, maxReason)}
	if err := tx.Create(&row).Error; err != nil {
		return fmt.Errorf("recording the decision: %w", err)
	}
	return nil
}

// heldRow is what a decision needs of the outcome of a held order.
type heldRow struct {
	UserID      int64
	Kind        string
	Reference   string
	AdmittedAt  *time.Time
	FirstSeenAt time.Time
	position    orderid.Position
}

func (r heldRow) result(result, detail string) Resolution {
	return Resolution{Result: result, Detail: detail, Position: r.position, UserID: r.UserID}
}

func (r heldRow) stays(detail string) Resolution { return r.result(ResultHeld, detail) }

func (r heldRow) group() group { return group{r.position.VoucherID, r.position.Epoch} }

func (d decision) resolveOrder(tx *gorm.DB, do func(*gorm.DB, lockedVoucher, heldRow) (Resolution, error)) (Resolution, error) {
	p := d.id.Position
	locked, err := lockVoucher(tx, p.VoucherID)
	if err != nil {
		return Resolution{}, err
	}
	var rows []heldRow
	if err := tx.Raw(sqlOutcome, p.VoucherID, p.Epoch, p.Seq).Scan(&rows).Error; err != nil {
		return Resolution{}, fmt.Errorf("reading the outcome: %w", err)
	}
	if len(rows) == 0 {
		// Requeued, if it ever was a dead letter.
		var orders []storedOrder
		if err := tx.Raw(sqlOrdersByPosition, p.VoucherID, p.Epoch, []int64{p.Seq}).Scan(&orders).Error; err != nil {
			return Resolution{}, fmt.Errorf("reading the order: %w", err)
		}
		if len(orders) == 0 {
			return Resolution{}, ErrDeadLetterNotFound
		}
		return Resolution{Result: ResultPersisted, Detail: "it was stored before", Position: p, UserID: orders[0].UserID}, nil
	}
	held := rows[0]
	held.position = p
	switch held.Kind {
	case OutcomeHeld:
	case OutcomeConflict, OutcomeCancelled:
		return held.result(held.Kind, "it was resolved before"), nil
	default:
		return Resolution{}, ErrDeadLetterNotFound
	}
	r, err := do(tx, locked, held)
	if err != nil {
		return Resolution{}, err
	}
	return r, d.record(tx, r)
}

func requeueLocked(tx *gorm.DB, locked lockedVoucher, held heldRow) (Resolution, error) {
	p := held.position
	switch {
	case !locked.exists:
		return held.stays("there is no such voucher"), nil
	case held.UserID < 1:
		return held.stays("its user could not be read: it can only be cancelled"), nil
	}
	// All of the voucher's epochs count for the user.
	b := &batch{orders: []Order{{Position: p, UserID: held.UserID}}}
	stood, err := readStanding(tx, b, held.group(), []int{0})
	if err != nil {
		return Resolution{}, err
	}
	switch st := stood.of(&b.orders[0]); {
	case st.kind == Conflict:
		const why = "the user has another order for the voucher"
		err := changeOne(tx, sqlHeldToConflict, st.position.Epoch, st.position.Seq, why, p.VoucherID, p.Epoch, p.Seq)
		if err != nil {
			return Resolution{}, err
		}
		return held.result(ResultConflict, why), tellLater(tx, locked, held, ResultConflict, st.position)
	case st.kind != Undecided:
		return held.stays("its position is an order already: the books are wrong"), nil
	case locked.row.Stock < 1:
		return held.stays("the database has no stock left"), nil
	}
	if err := changeOne(tx, sqlDeleteHeld, p.VoucherID, p.Epoch, p.Seq); err != nil {
		return Resolution{}, err
	}
	admitted := held.FirstSeenAt
	if held.AdmittedAt != nil {
		admitted = *held.AdmittedAt
	}
	row := orderRow{
		VoucherID: p.VoucherID, Epoch: p.Epoch, Seq: p.Seq,
		UserID: held.UserID, Reference: held.Reference, AdmittedAt: admitted,
	}
	if err := tx.Create(&row).Error; err != nil {
		return Resolution{}, &insertError{err}
	}
	// The guard uses the current epoch, the row keeps its own.
	if err := changeOne(tx, sqlTakeStock, 1, 1, p.VoucherID, locked.row.Epoch, 1); err != nil {
		return Resolution{}, err
	}
	return held.result(ResultPersisted, ""), tellLater(tx, locked, held, ResultPersisted, orderid.Position{})
}

func cancelLocked(tx *gorm.DB, locked lockedVoucher, held heldRow) (Resolution, error) {
	p := held.position
	if err := changeOne(tx, sqlHeldToCancelled, p.VoucherID, p.Epoch, p.Seq); err != nil {
		return Resolution{}, err
	}
	return held.result(ResultCancelled, ""), tellLater(tx, locked, held, ResultCancelled, orderid.Position{})
}

// deadEntryState is what a decision needs of a dead entry.
type deadEntryState struct {
	Units     int64
	VoucherID *int64
	FirstSeq  *int64
	State     string
}

func (d decision) resolveEntry(tx *gorm.DB) (Resolution, error) {
	id := d.id
	// Which voucher never changes; it is locked before the entry.
	var vouchers []int64
	if err := tx.Raw(sqlEntryVoucher, id.PartitionID, id.Epoch, id.EntryID).Scan(&vouchers).Error; err != nil {
		return Resolution{}, fmt.Errorf("reading the dead entry: %w", err)
	}
	if len(vouchers) == 0 {
		return Resolution{}, ErrDeadLetterNotFound
	}
	var locked lockedVoucher
	if vouchers[0] > 0 {
		var err error
		if locked, err = lockVoucher(tx, vouchers[0]); err != nil {
			return Resolution{}, err
		}
	}
	var rows []deadEntryState
	if err := tx.Raw(sqlEntryForUpdate, id.PartitionID, id.Epoch, id.EntryID).Scan(&rows).Error; err != nil {
		return Resolution{}, fmt.Errorf("reading the dead entry: %w", err)
	}
	var r Resolution
	switch {
	case len(rows) == 0:
		return Resolution{}, ErrDeadLetterNotFound
	case rows[0].State != OutcomeHeld:
		return Resolution{Result: rows[0].State, Detail: "it was resolved before"}, nil
	case d.action == ActionRequeue:
		r = Resolution{Result: ResultHeld, Detail: "an entry that cannot be read has no orders to store: it can only be cancelled"}
	default:
		n, err := cancelEntry(tx, id, locked, rows[0])
		if err != nil {
			return Resolution{}, err
		}
		r = Resolution{Result: ResultCancelled, Detail: fmt.Sprintf("%d units", n)}
	}
	return r, d.record(tx, r)
}

// cancelEntry cancels the entry and the positions that it holds, and returns how
// many these were.
func cancelEntry(tx *gorm.DB, id DeadLetterID, locked lockedVoucher, row deadEntryState) (int, error) {
	if err := changeOne(tx, sqlEntryToCancelled, id.PartitionID, id.Epoch, id.EntryID); err != nil {
		return 0, err
	}
	if row.Units == 0 || row.VoucherID == nil || row.FirstSeq == nil {
		return 0, nil
	}
	voucher, first, last := *row.VoucherID, *row.FirstSeq, *row.FirstSeq+row.Units-1
	var held []outcomeRow
	if err := tx.Raw(sqlHeldOfEntry, voucher, id.Epoch, first, last, id.EntryID).Scan(&held).Error; err != nil {
		return 0, fmt.Errorf("reading what the entry holds: %w", err)
	}
	if len(held) == 0 {
		return 0, nil
	}
	res := tx.Exec(sqlHeldOfEntryToCancelled, voucher, id.Epoch, first, last, id.EntryID)
	if res.Error != nil {
		return 0, fmt.Errorf("cancelling what the entry holds: %w", res.Error)
	}
	if int(res.RowsAffected) != len(held) {
		return 0, fmt.Errorf("cancelling what the entry holds: %d rows matched instead of %d", res.RowsAffected, len(held))
	}
	updates := make([]updateRow, len(held))
	for i, h := range held {
		updates[i] = updateRow{
			VoucherID: voucher, Epoch: id.Epoch, Seq: h.Seq,
			PartitionID: locked.partition, UserID: h.UserID, Verdict: ResultCancelled,
		}
	}
	if err := insertRows(tx, updates); err != nil {
		return 0, fmt.Errorf("recording what the ledger must be told: %w", err)
	}
	return len(held), nil
}

// changeOne runs a statement that must match exactly one row; what it would match
// is locked.
func changeOne(tx *gorm.DB, query string, args ...any) error {
	res := tx.Exec(query, args...)
	if res.Error != nil {
		return fmt.Errorf("changing the dead letter: %w", res.Error)
	}
	if res.RowsAffected != 1 {
		return fmt.Errorf("changing the dead letter: %d rows matched instead of one", res.RowsAffected)
	}
	return nil
}
