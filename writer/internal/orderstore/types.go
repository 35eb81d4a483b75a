package orderstore

import (
	"time"

	"github.com/seckill/seckill/pkg/orderid"
)

// States of a voucher, in the order of its life. DRAFT -> OPEN <-> PAUSED ->
// CLOSED -> ARCHIVED and OPEN -> CLOSED; there is no way back.
const (
	StateDraft    = "DRAFT"
	StateOpen     = "OPEN"
	StatePaused   = "PAUSED"
	StateClosed   = "CLOSED"
	StateArchived = "ARCHIVED"
)

// Kinds of outcome: how an admitted order ended that is not a row of orders.
const (
	OutcomeConflict  = "CONFLICT"
	OutcomeRejected  = "REJECTED"
	OutcomeHeld      = "HELD"
	OutcomeCancelled = "CANCELLED"
	OutcomeLost      = "LOST"
)

// Partition is one row of partitions.
type Partition struct {
	ID int
	// Epoch fences stale gateways, writers and entries.
	Epoch int64
	// OpenEpoch is the last epoch that was open, 0 where none ever was.
	OpenEpoch int64
}

// Voucher is one row of vouchers. All times are UTC with millisecond precision.
type Voucher struct {
	ID          int64
	Title       string
	PartitionID int
	// Total is all units; Stock + Sold == Total at every moment.
	Total, Stock, Sold int64
	// Epoch is the partition's epoch, copied in the transaction that raises it.
	Epoch int64
	// LedgerEpoch is the epoch in which the voucher's ledger was created, 0 for
	// never. Equal to Epoch and yet no ledger means that it was lost.
	LedgerEpoch int64
	State       string
	// Rev counts the changes of state, window and total. The ledger takes over
	// only a greater one.
	Rev int64
	// AppliedAt is when the ledger had taken over Rev, the zero time until then.
	AppliedAt      time.Time
	BeginAt, EndAt time.Time
	CreatedAt      time.Time
	UpdatedAt      time.Time
}

// Applied tells whether the ledger has taken over Rev.
func (v Voucher) Applied() bool { return !v.AppliedAt.IsZero() }

// Order is an admitted order on its way into the database.
type Order struct {
	orderid.Position
	UserID int64
	// Reference is the caller's own, up to 64 bytes of UTF-8.
	Reference string
	// AdmittedAt is Redis time; stored with millisecond precision.
	AdmittedAt time.Time
	// EntryID is the stream entry that carried the order; kept with an outcome.
	EntryID string
}

// VerdictKind is what became of an order that Persist was given.
type VerdictKind int

// The verdicts. All but Undecided, Stale, SamePosition, NoVoucher and
// Unstorable are facts that were committed before Persist returned.
const (
	// Undecided: nothing is known; only together with an error of Persist.
	Undecided VerdictKind = iota
	// Persisted: the order is a row, be it by this call or by an earlier one.
	Persisted
	// Conflict: the user has another order for the voucher, Verdict.Standing; an
	// outcome row says so. One unit goes back to the ledger.
	Conflict
	// Rejected: the database had no stock left; an outcome row says so. No unit
	// goes back: close the voucher, alarm.
	Rejected
	// SamePosition: the position is another user's row or outcome. Close the partition,
	// alarm, never acknowledge.
	SamePosition
	// Stale: the voucher's epoch is not the order's. Leave it pending; the
	// guardian decides.
	Stale
	// NoVoucher: there is no such voucher.
	NoVoucher
	// Unstorable: the database refuses this very row, Verdict.Err says why.
	Unstorable
	// Ended: the position had an outcome already, Verdict.Outcome, which stands.
	// Where that is CONFLICT, Verdict.Standing is the order that stands.
	Ended
)

// Verdict is what became of one order.
type Verdict struct {
	Kind VerdictKind
	// Standing is the user's order that stands, with Conflict and with Ended
	// where Outcome is CONFLICT.
	Standing orderid.Position
	// Outcome is the kind of the outcome row, with Conflict, Rejected and Ended.
	Outcome string
	// Err is the cause, with Unstorable.
	Err error
	// Reason is the cause for operators, with Unstorable from Persist: which value
	// is wrong, or the kind of the server's error and its number, such as "check
	// constraint (error 4025)". No word of it is the driver's.
	Reason string
	// UserID is whose position it is, from Hold and HoldEntry where the order that
	// was given names no user and something stands already.
	UserID int64
}

// Found is an order, however it ended.
type Found struct {
	Order
	// PersistedAt is when the row of orders or of order_outcomes was written.
	PersistedAt time.Time
	// Outcome is empty for a row of orders, else the kind of outcome.
	Outcome string
	// Reason is why it is no row of orders.
	Reason string
	// Standing is the user's order that stands, where Outcome is CONFLICT.
	Standing orderid.Position
	// OfEntry tells that it was held, and decided, as a part of its entry, which
	// could not be read as a whole.
	OfEntry bool
}

// OperatorAction is what an operator decided about a dead letter.
type OperatorAction struct {
	Operator string
	// Action is ActionRequeue or ActionCancel.
	Action string
	Reason string
	At     time.Time
}

// Reading is the database's side of a voucher's books.
type Reading struct {
	Total, Stock, Sold int64
	// Orders and Outcomes are rows counted in the same snapshot as the three
	// above; 0 where no recount was asked for.
	Orders, Outcomes int64
	// OutcomeByKind is Outcomes by kind; nil where no recount was asked for.
	OutcomeByKind map[string]int64
	// Untold is how many decisions of operators the ledger has perhaps not been
	// told: so many units may be HELD there and not here. 0 where no recount was
	// asked for.
	Untold int64
}

var verdictNames = [...]string{
	Undecided: "undecided", Persisted: "persisted", Conflict: "conflict", Rejected: "rejected", SamePosition: "same_position",
	Stale: "stale", NoVoucher: "no_voucher", Unstorable: "unstorable", Ended: "ended",
}

// String is the verdict as logs and metrics show it.
func (k VerdictKind) String() string { return verdictNames[k] }
