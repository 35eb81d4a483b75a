package rpc

import (
	"cmp"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// A conflict is answered by the order that stands, and so is not here. A lost
// order has no state: there is none to tell a caller, its reason says so.
var orderStates = map[string]seckillv1.OrderState{
	"":                          seckillv1.OrderState_ORDER_STATE_PERSISTED,
	orderstore.OutcomeHeld:      seckillv1.OrderState_ORDER_STATE_HELD,
	orderstore.OutcomeRejected:  seckillv1.OrderState_ORDER_STATE_REJECTED,
	orderstore.OutcomeCancelled: seckillv1.OrderState_ORDER_STATE_CANCELLED,
}

var deadLetterResults = map[string]seckillv1.DeadLetterResult{
	orderstore.ResultPersisted: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED,
	orderstore.ResultConflict:  seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CONFLICT,
	orderstore.ResultCancelled: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
	orderstore.ResultHeld:      seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_STILL_HELD,
}

// outcomeReasons are for outcomes that were stored without a reason.
var outcomeReasons = map[string]string{
	orderstore.OutcomeHeld:      "it is held as a dead letter",
	orderstore.OutcomeRejected:  "the database had no unit left for it",
	orderstore.OutcomeCancelled: "an operator cancelled it after it was held",
	orderstore.OutcomeLost:      "it was lost with the ledger",
}

func whyNoRow(f orderstore.Found) string {
	why := outcomeReasons[f.Outcome]
	if f.Reason != "" && f.Outcome != "" {
		return cmp.Or(why, f.Outcome) + ": " + f.Reason
	}
	return why
}

func (s *WriterService) shapeOrder(o orderstore.Order, state seckillv1.OrderState) *seckillv1.Order {
	return &seckillv1.Order{
		OrderId: s.orderIDs.Encode(o.Position), UserId: o.UserID, VoucherId: o.VoucherID, State: state,
		AdmittedAt: timestamp(o.AdmittedAt), Reference: o.Reference,
	}
}

func (s *WriterService) shapeFound(f orderstore.Found) *seckillv1.Order {
	order := s.shapeOrder(f.Order, orderStates[f.Outcome])
	if f.Outcome == "" {
		order.PersistedAt = timestamp(f.PersistedAt)
	}
	return order
}

var deadLetterActions = map[string]seckillv1.DeadLetterAction{
	orderstore.ActionRequeue: seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE,
	orderstore.ActionCancel:  seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL,
}

func shapeAction(a *orderstore.OperatorAction) *seckillv1.OperatorAction {
	if a == nil {
		return nil
	}
	return &seckillv1.OperatorAction{Operator: a.Operator, Action: deadLetterActions[a.Action], Reason: a.Reason, ActionTime: timestamp(a.At)}
}

func (s *WriterService) shapeDeadLetter(d orderstore.DeadLetter) *seckillv1.DeadLetter {
	shaped := &seckillv1.DeadLetter{
		DeadLetterId: d.ID.String(), Partition: int32(d.PartitionID), EntryId: d.EntryID, Units: d.Units,
		Reason: d.Reason, Raw: d.Raw, FirstSeen: timestamp(d.FirstSeen), LastSeen: timestamp(d.LastSeen), Tries: int32(d.Tries),
	}
	if d.Entry != nil {
		shaped.Epoch = d.Entry.Epoch
		return shaped
	}
	shaped.Epoch = d.Order.Epoch
	shaped.Order = s.shapeOrder(d.Order, seckillv1.OrderState_ORDER_STATE_HELD)
	return shaped
}

// timestamp leaves a time unset that is not known.
func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
