package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
)

// The delays after which a caller may try again. Short where the next call may
// well succeed; longer where something must be repaired first, and where the
// same callers coming back at once would keep the trouble going.
const (
	retrySoon  = 100 * time.Millisecond
	retryLater = time.Second
	retryFixed = 5 * time.Second
)

// fault is what a caller is told of a fault: after a Grab also that nothing was
// taken, which is no matter to one who only looks.
type fault struct {
	grab, look error
	encoded    []byte // grab, as a stream has it: a GrabError
}

// nothingTaken makes a fault after which a Grab has taken nothing.
func nothingTaken(code codes.Code, reason seckillv1.ErrorReason, text string, retry time.Duration) fault {
	f := both(rpcserver.Error(code, reason, text+"; nothing was taken", rpcserver.WithRetryAfter(retry)))
	f.look = rpcserver.Error(code, reason, text, rpcserver.WithRetryAfter(retry))
	return f
}

func both(err error) fault { return fault{err, err, encodeError(streamedError(err))} }

// Every status is made once: in bad moments thousands of callers get the same.
var (
	statusVoucherArchived = rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_ARCHIVED,
		"the voucher's sale is over and archived")
	statusOrderNotFound = rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND,
		"the user has no such order")
	statusTooManyGrabs = rpcserver.InvalidField("grabs", fmt.Sprintf("must be at most %d", maxMessage))
	statusInternal     = rpcserver.Error(codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL, "internal error")
)

// errStarting: there is no backend yet.
var errStarting = errors.New("gateway is starting")

// faults in the order in which they are looked for. An unknown outcome comes
// first: whatever else went wrong, the caller must hear of that.
var faults = []struct {
	err error
	fault
}{
	{admit.ErrOutcomeUnknown, both(rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN,
		"the order may exist: repeat the grab, or ask GetOrder", rpcserver.WithRetryAfter(retrySoon)))},
	{admit.ErrOverloaded, nothingTaken(codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED,
		"too many grabs are waiting", retrySoon)},
	{admit.ErrBusy, nothingTaken(codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED,
		"too many orders are in flight", retryLater)},
	{admit.ErrVoucherNotFound, both(rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND,
		"no such voucher, or it was never opened"))},
	{admit.ErrVoucherArchived, both(statusVoucherArchived)},
	{admit.ErrClosed, nothingTaken(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING,
		"the voucher's partition is closed until its ledger is proven", retryLater)},
	{admit.ErrScriptVersion, nothingTaken(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SCRIPT_VERSION,
		"the writers have not loaded the script of this gateway's version", retryFixed)},
	{admit.ErrRedisUnreachable, nothingTaken(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE,
		"redis cannot be reached or refused the call", retryLater)},
	{admit.ErrLedgerFault, nothingTaken(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_LEDGER_FAULT,
		"the ledger answered something that it never should", retryFixed)},
	{errStarting, nothingTaken(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE,
		"the gateway has not found redis and its layout yet", retryLater)},
	{admit.ErrClosing, nothingTaken(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN,
		"the gateway is shutting down", retrySoon)},
}

// grabError is the status of an error of the backend in a Grab. One that is not
// in the list becomes INTERNAL further out.
func grabError(err error) error {
	if f := faultOf(err); f != nil {
		return f.grab
	}
	return ownStatus(err)
}

// lookError is the same for a call that takes nothing.
func lookError(err error) error {
	if f := faultOf(err); f != nil {
		return f.look
	}
	return ownStatus(err)
}

func faultOf(err error) *fault {
	for i := range faults {
		if errors.Is(err, faults[i].err) {
			return &faults[i].fault
		}
	}
	return nil
}

func ownStatus(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(err).Err()
	}
	return err
}

// streamedError is a status in the form that one Grab of a stream has it. An
// error that is no status is INTERNAL, and its text stays here.
func streamedError(err error) *seckillv1.GrabError {
	st, ok := status.FromError(err)
	if !ok || st.Code() == codes.OK || st.Code() == codes.Unknown {
		st = status.Convert(statusInternal)
	}
	e := &seckillv1.GrabError{Code: int32(st.Code()), Message: st.Message()}
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.ErrorInfo:
			e.Reason = seckillv1.ErrorReason(seckillv1.ErrorReason_value[d.GetReason()])
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay()
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				e.FieldViolations = append(e.FieldViolations, &seckillv1.FieldViolation{Field: v.GetField(), Description: v.GetDescription()})
			}
		}
	}
	return e
}

var (
	outcomes = [...]seckillv1.Outcome{
		ledger.DecisionAdmitted:   seckillv1.Outcome_OUTCOME_ADMITTED,
		ledger.DecisionSoldOut:    seckillv1.Outcome_OUTCOME_SOLD_OUT,
		ledger.DecisionNotStarted: seckillv1.Outcome_OUTCOME_NOT_STARTED,
		ledger.DecisionEnded:      seckillv1.Outcome_OUTCOME_ENDED,
		ledger.DecisionPaused:     seckillv1.Outcome_OUTCOME_PAUSED,
	}
	durabilities = map[ledger.Durability]seckillv1.Durability{
		ledger.DurabilityStrict: seckillv1.Durability_DURABILITY_STRICT,
		ledger.DurabilityFast:   seckillv1.Durability_DURABILITY_FAST,
	}
	markStates = [256]seckillv1.OrderState{
		ledger.MarkAdmitted:  seckillv1.OrderState_ORDER_STATE_PENDING,
		ledger.MarkPersisted: seckillv1.OrderState_ORDER_STATE_PERSISTED,
		ledger.MarkHeld:      seckillv1.OrderState_ORDER_STATE_HELD,
	}
	// A conflict is answered by the order that stands.
	outcomeStates = map[ledger.Verdict]seckillv1.OrderState{
		ledger.VerdictHeld:      seckillv1.OrderState_ORDER_STATE_HELD,
		ledger.VerdictRejected:  seckillv1.OrderState_ORDER_STATE_REJECTED,
		ledger.VerdictCancelled: seckillv1.OrderState_ORDER_STATE_CANCELLED,
	}
)

func (s *Service) answerGrab(userID int64, reference string, result *admit.Result) *seckillv1.GrabResponse {
	if result.Decision != ledger.DecisionAdmitted {
		return s.cache.refusal(outcomes[result.Decision], result.DecidedAt)
	}
	// One piece of memory for all of it.
	a := &struct {
		response seckillv1.GrabResponse
		order    seckillv1.Order
		at       timestamppb.Timestamp
	}{}
	a.at.Seconds, a.at.Nanos = result.DecidedAt.Unix(), int32(result.DecidedAt.Nanosecond())
	o, r := &a.order, &a.response
	o.OrderId, o.UserId, o.VoucherId = s.ids.Encode(result.Order), userID, result.Order.VoucherID
	o.State = markStates[result.State]
	if !result.Replayed {
		o.AdmittedAt, o.Reference = &a.at, reference
	}
	r.Outcome, r.Order, r.Replayed = seckillv1.Outcome_OUTCOME_ADMITTED, o, result.Replayed
	r.Durability, r.DecidedAt = durabilities[result.Durability], &a.at
	return r
}

// refusalCache keeps the last refusal of each outcome. Nearly all Grabs of a
// sale are refused, those of one batch at the same millisecond: they share one
// message, which nobody changes.
type refusalCache [seckillv1.Outcome_OUTCOME_PAUSED + 1]atomic.Pointer[refusal]

type refusal struct {
	at       time.Time
	response *seckillv1.GrabResponse
}

func (c *refusalCache) refusal(outcome seckillv1.Outcome, at time.Time) *seckillv1.GrabResponse {
	last := c[outcome].Load()
	if last == nil || !last.at.Equal(at) {
		last = &refusal{at, &seckillv1.GrabResponse{Outcome: outcome, DecidedAt: timestamppb.New(at)}}
		c[outcome].Store(last)
	}
	return last.response
}

// answerGetOrder says what was found of a user's order: by its voucher where
// at.Seq is 0, else of the position that an order_id decoded to, which counts
// only if the mark or the outcome there is this user's.
func (s *Service) answerGetOrder(userID int64, at orderid.Position, found admit.Found) (*seckillv1.GetOrderResponse, error) {
	order := func(at orderid.Position, state seckillv1.OrderState) (*seckillv1.GetOrderResponse, error) {
		return &seckillv1.GetOrderResponse{Order: &seckillv1.Order{
			OrderId: s.ids.Encode(at), UserId: userID, VoucherId: at.VoucherID, State: state,
		}}, nil
	}
	// Outcomes are kept by seq within the epoch of the ledger.
	ended := func(at orderid.Position, userID int64) (orderid.Position, seckillv1.OrderState, bool) {
		if at.Seq == 0 || at.Seq != found.OutcomeSeq || at.Epoch != found.Epoch || found.Outcome.UserID != userID {
			return at, 0, false
		}
		if found.Outcome.Verdict == ledger.VerdictConflict {
			return found.Outcome.Standing, seckillv1.OrderState_ORDER_STATE_PERSISTED, true
		}
		state, known := outcomeStates[found.Outcome.Verdict]
		return at, state, known
	}
	if mark := found.Mark; mark != nil && (at.Seq == 0 || mark.Position(at.VoucherID) == at) {
		at = mark.Position(at.VoucherID)
		if mark.State == ledger.MarkAdmitted {
			// Of an entry that could not be read nobody knows the users: its orders
			// ended as those of user 0, and the marks are left as they were.
			if at, state, ok := ended(at, 0); ok {
				return order(at, state)
			}
		}
		return order(at, markStates[mark.State])
	}
	if at, state, ok := ended(at, userID); ok {
		return order(at, state)
	}
	switch {
	case found.Refusal != nil:
		return nil, lookError(found.Refusal)
	case found.Voucher == ledger.VoucherArchived:
		return nil, statusVoucherArchived
	}
	return nil, statusOrderNotFound
}
