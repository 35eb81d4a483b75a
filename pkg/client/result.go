package client

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// Outcome is the business answer to a Grab.
type Outcome = seckillv1.Outcome

// The outcomes of a Grab. All but Admitted are refusals; only Ended is final.
const (
	Admitted   = seckillv1.Outcome_OUTCOME_ADMITTED
	SoldOut    = seckillv1.Outcome_OUTCOME_SOLD_OUT
	NotStarted = seckillv1.Outcome_OUTCOME_NOT_STARTED
	Ended      = seckillv1.Outcome_OUTCOME_ENDED
	Paused     = seckillv1.Outcome_OUTCOME_PAUSED
)

// Durability names what an acknowledged Grab survives.
type Durability = seckillv1.Durability

// What an acknowledged Grab survives.
const (
	DurabilityStrict     = seckillv1.Durability_DURABILITY_STRICT
	DurabilityReplicated = seckillv1.Durability_DURABILITY_REPLICATED
	DurabilityCommitted  = seckillv1.Durability_DURABILITY_COMMITTED
	DurabilityFast       = seckillv1.Durability_DURABILITY_FAST
)

// OrderState tells how far an order is on its way into the database.
type OrderState = seckillv1.OrderState

// The states of an order.
const (
	OrderPending   = seckillv1.OrderState_ORDER_STATE_PENDING
	OrderPersisted = seckillv1.OrderState_ORDER_STATE_PERSISTED
	OrderHeld      = seckillv1.OrderState_ORDER_STATE_HELD
	OrderRejected  = seckillv1.OrderState_ORDER_STATE_REJECTED
	OrderCancelled = seckillv1.OrderState_ORDER_STATE_CANCELLED
)

// Result is the decision on a Grab.
type Result struct {
	// Outcome is what was decided.
	Outcome Outcome
	// Order is the user's order, with Admitted only.
	Order Order
	// Replayed is true when the order existed before the call that was answered:
	// a Grab that was repeated, by the caller or in here, gets the same order.
	Replayed bool
	// Durability is what the order survives, with Admitted only.
	Durability Durability
	// DecidedAt is when it was decided, by the clock of the ledger, to the ms.
	DecidedAt time.Time
}

// Admitted tells whether the user has an order.
func (r Result) Admitted() bool { return r.Outcome == Admitted }

// Order is one unit of a voucher that belongs to one user.
type Order struct {
	// ID has 26 characters, is opaque, unique and never changes.
	ID string
	// UserID and VoucherID say whose order of what it is.
	UserID, VoucherID int64
	// State tells how far it is on its way into the database.
	State OrderState
	// AdmittedAt is when it was admitted, by the clock of the ledger, to the ms.
	// Zero in a replay, and in the answer of GetOrder.
	AdmittedAt time.Time
	// Reference is what the Grab that was admitted carried. Empty where
	// AdmittedAt is zero.
	Reference string
}

func orderOf(o *seckillv1.Order) Order {
	if o == nil {
		return Order{}
	}
	return Order{
		ID: o.GetOrderId(), UserID: o.GetUserId(), VoucherID: o.GetVoucherId(), State: o.GetState(),
		AdmittedAt: timeOf(o.GetAdmittedAt()), Reference: o.GetReference(),
	}
}

func resultOf(r *seckillv1.GrabResponse) Result {
	return Result{
		Outcome: r.GetOutcome(), Order: orderOf(r.GetOrder()), Replayed: r.GetReplayed(),
		Durability: r.GetDurability(), DecidedAt: timeOf(r.GetDecidedAt()),
	}
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}
