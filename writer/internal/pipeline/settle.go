package pipeline

import (
	"context"
	"errors"
	"fmt"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// judge turns the database's verdicts into what the ledger is told. It is false
// where an order has none that may be acknowledged: the whole entry stays
// pending then.
func (p *Pipeline) judge(entry ledger.Entry, verdicts []orderstore.Verdict) (ledger.Settlement, bool) {
	settlement := ledger.Settlement{
		Partition: entry.Partition, EntryID: entry.ID, Epoch: entry.Epoch, VoucherID: entry.VoucherID,
		Orders: make([]ledger.Settled, len(entry.Orders)),
	}
	complete := true
	for i, order := range entry.Orders {
		verdict := verdicts[i]
		// Where the order names no user, what stands already may.
		settled := ledger.Settled{UserID: max(order.UserID, verdict.UserID), Seq: order.Seq, Standing: verdict.Standing}
		switch verdict.Kind {
		case orderstore.Persisted:
			settled.Verdict = ledger.VerdictPersisted
		case orderstore.Conflict:
			settled.Verdict = ledger.VerdictConflict
		case orderstore.Rejected:
			settled.Verdict = ledger.VerdictRejected
			p.Alarm.VoucherFault(order.VoucherID, "the database had fewer units than were admitted")
		case orderstore.Ended:
			if verdict.Outcome == orderstore.OutcomeRejected {
				// Whoever rejected it may have died before it told.
				p.Alarm.VoucherFault(order.VoucherID, "the database had fewer units than were admitted")
			}
			known, ok := outcomes[verdict.Outcome]
			complete = complete && ok
			settled.Verdict = known
		case orderstore.SamePosition:
			complete = false
			p.Alarm.PartitionFault(entry.Partition, fmt.Sprintf("voucher %d epoch %d seq %d is another user's order already",
				order.VoucherID, order.Epoch, order.Seq))
		default:
			// Stale: of an epoch that is over. Whatever else is left has no verdict
			// that may be acknowledged either.
			complete = false
			p.Logger.Error("order left pending", telemetry.KeyVoucherID, order.VoucherID, telemetry.KeyEpoch, order.Epoch,
				telemetry.KeySeq, order.Seq, telemetry.KeyEntryID, entry.ID, telemetry.KeyReason, verdict.Kind.String(), telemetry.KeyErr, verdict.Err)
		}
		p.metrics.verdicts[verdict.Kind].Inc()
		settlement.Orders[i] = settled
	}
	return settlement, complete
}

// outcomes are the verdicts that outcome rows stand for.
var outcomes = map[string]ledger.Verdict{
	orderstore.OutcomeConflict:  ledger.VerdictConflict,
	orderstore.OutcomeRejected:  ledger.VerdictRejected,
	orderstore.OutcomeHeld:      ledger.VerdictHeld,
	orderstore.OutcomeCancelled: ledger.VerdictCancelled,
}

// settleTries bounds how often one settlement is repeated. What is still not
// settled then is redelivered, finds its rows and comes here again.
const settleTries = 4

// settle acknowledges entries whose orders all have a committed verdict: the
// one place that does.
func (p *Pipeline) settle(working context.Context, settlements []ledger.Settlement) {
	retry := newBackOff()
	for try := 1; len(settlements) > 0; try++ {
		callCtx, cancel := context.WithTimeout(working, readMargin)
		results := ledger.Settle(callCtx, p.Client, settlements)
		cancel()
		var again []ledger.Settlement
		for i, result := range results {
			s := settlements[i]
			switch {
			case result.Stranger:
				p.metrics.strangers.Inc()
				p.Logger.Error("entry acknowledged but not counted in full: somebody added one that was never admitted",
					telemetry.KeyPartition, s.Partition, telemetry.KeyVoucherID, s.VoucherID, telemetry.KeyEntryID, s.EntryID)
			case result.Err == nil && result.Settled:
				p.metrics.settled.Add(float64(len(s.Orders)))
			case result.Err == nil:
				p.metrics.noToken.Inc()
			case errors.Is(result.Err, ledger.ErrUnknown), errors.Is(result.Err, ledger.ErrRefused):
				again = append(again, s)
				if try == settleTries {
					p.Logger.Warn("entry written but not settled; it will be redelivered", telemetry.KeyEntryID, s.EntryID, telemetry.KeyErr, result.Err)
				}
			default:
				p.metrics.settleFaults.Inc()
				p.Logger.Error("entry written but not settled", telemetry.KeyPartition, s.Partition, telemetry.KeyEntryID, s.EntryID, telemetry.KeyErr, result.Err)
			}
		}
		faultpoint.Reach(faultpoint.WriterAfterSettle)
		settlements = again
		if len(again) == 0 || try == settleTries || wait(working, retry.NextBackOff()) != nil {
			return
		}
	}
}

// discard acknowledges an entry that stands for no order.
func (p *Pipeline) discard(working context.Context, entry ledger.Entry) {
	retry := newBackOff()
	for try := 1; ; try++ {
		callCtx, cancel := context.WithTimeout(working, readMargin)
		_, err := ledger.Discard(callCtx, p.Client, entry.Partition, entry.Epoch, entry.ID)
		cancel()
		if err == nil {
			faultpoint.Reach(faultpoint.WriterAfterDiscard)
			return
		}
		again := errors.Is(err, ledger.ErrUnknown) || errors.Is(err, ledger.ErrRefused)
		if !again || try == settleTries || wait(working, retry.NextBackOff()) != nil {
			p.metrics.settleFaults.Inc()
			p.Logger.Error("entry held but not settled", telemetry.KeyPartition, entry.Partition, telemetry.KeyEntryID, entry.ID, telemetry.KeyErr, err)
			return
		}
	}
}
