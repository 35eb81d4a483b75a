package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// commitLoop takes what is in hand, up to a batch, and brings it through. No
// timer: a lone entry is committed at once, and under load a batch gathers
// while the committers are busy. stopping ends retries of what cannot be
// written now; work ends everything.
func (p *Pipeline) commitLoop(work, stopping context.Context) {
	for first := range p.entries {
		batch := []ledger.Entry{first}
		for rows := len(first.Orders); rows < p.BatchMax; {
			select {
			case entry, ok := <-p.entries:
				if !ok {
					rows = p.BatchMax
					continue
				}
				batch = append(batch, entry)
				rows += len(entry.Orders)
				continue
			default:
			}
			break
		}
		p.commit(work, stopping, batch)
		for _, entry := range batch {
			p.readers[entry.Partition].drop(entry)
		}
	}
}

// commit persists a batch and settles its entries. Whatever it does not bring
// to an end stays pending.
func (p *Pipeline) commit(work, stopping context.Context, batch []ledger.Entry) {
	orders := make([]orderstore.Order, 0, p.BatchMax+ledger.MaxBatch)
	for _, entry := range batch {
		for _, order := range entry.Orders {
			orders = append(orders, orderstore.Order{
				Position: order.Position, UserID: order.UserID, Reference: order.Reference,
				AdmittedAt: entry.AdmittedAt, EntryID: entry.ID,
			})
		}
	}
	faultpoint.Reach(faultpoint.WriterBeforeCommit)
	verdicts, err := p.persist(work, stopping, orders)
	if err != nil {
		p.Logger.Warn("batch left pending", telemetry.KeyOrders, len(orders), telemetry.KeyErr, err)
		return
	}
	faultpoint.Reach(faultpoint.WriterAfterCommit)

	now := time.Now()
	settlements := make([]ledger.Settlement, 0, len(batch))
	for _, entry := range batch {
		settlement, ok := p.judge(entry, verdicts[:len(entry.Orders)])
		verdicts = verdicts[len(entry.Orders):]
		if ok {
			settlements = append(settlements, settlement)
			p.metrics.admitToPersist.Observe(now.Sub(entry.AdmittedAt).Seconds())
		}
	}
	p.settle(work, settlements)
}

// persist runs a batch until the database has decided, however long that takes:
// an outage is not the orders' fault. Each run has BatchTimeout. It gives up
// when the process stops.
func (p *Pipeline) persist(work, stopping context.Context, orders []orderstore.Order) ([]orderstore.Verdict, error) {
	retry := newBackOff()
	for {
		runCtx, cancel := context.WithTimeout(work, p.BatchTimeout)
		began := time.Now()
		verdicts, err := p.Store.Persist(runCtx, orders)
		cancel()
		if err == nil && len(verdicts) != len(orders) {
			err = fmt.Errorf("%d verdicts for %d orders", len(verdicts), len(orders))
		}
		if err == nil {
			p.metrics.transaction.Observe(time.Since(began).Seconds())
			p.metrics.batch.Observe(float64(len(orders)))
			p.database.set(nil)
			return verdicts, nil
		}
		p.metrics.transient.Inc()
		// One lost deadlock is no outage: readers stop only when it goes on.
		if p.database.set(err) {
			p.Logger.Warn("the database cannot decide, trying on", telemetry.KeyErr, err)
		}
		if work.Err() != nil {
			return nil, err
		}
		if wait(stopping, retry.NextBackOff()) != nil {
			// Stopping: one more run at once, then it is others' turn.
			runCtx, cancel := context.WithTimeout(work, p.BatchTimeout)
			defer cancel()
			if verdicts, err := p.Store.Persist(runCtx, orders); err == nil {
				return verdicts, nil
			}
			return nil, err
		}
	}
}

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
		settled := ledger.Settled{UserID: order.UserID, Seq: order.Seq, Standing: verdict.Standing}
		switch verdict.Kind {
		case orderstore.Persisted:
			settled.Verdict = ledger.VerdictPersisted
		case orderstore.Conflict:
			settled.Verdict = ledger.VerdictConflict
		case orderstore.Rejected:
			settled.Verdict = ledger.VerdictRejected
			p.Alarm.VoucherFault(order.VoucherID, "the database had fewer units than were admitted")
		case orderstore.Ended:
			known, ok := outcomes[verdict.Outcome]
			complete = complete && ok
			settled.Verdict = known
		case orderstore.SamePosition:
			complete = false
			p.Alarm.PartitionFault(entry.Partition, fmt.Sprintf("voucher %d epoch %d seq %d is another user's order already",
				order.VoucherID, order.Epoch, order.Seq))
		case orderstore.NoVoucher:
			complete = false
			p.Alarm.VoucherFault(order.VoucherID, "orders were admitted of a voucher that the database does not have")
		default:
			// Stale: of an epoch that is over. Unstorable: the database refuses this
			// very row. Neither may be acknowledged.
			complete = false
			p.Logger.Error("order left pending", telemetry.KeyVoucherID, order.VoucherID, telemetry.KeyEpoch, order.Epoch,
				telemetry.KeySeq, order.Seq, telemetry.KeyEntryID, entry.ID, telemetry.KeyReason, verdict.Kind.String(), telemetry.KeyErr, verdict.Err)
		}
		p.metrics.verdicts.WithLabelValues(verdict.Kind.String()).Inc()
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
func (p *Pipeline) settle(work context.Context, settlements []ledger.Settlement) {
	retry := newBackOff()
	for try := 1; len(settlements) > 0; try++ {
		callCtx, cancel := context.WithTimeout(work, readMargin)
		results := ledger.Settle(callCtx, p.Client, settlements)
		cancel()
		var again []ledger.Settlement
		for i, result := range results {
			s := settlements[i]
			switch {
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
		if len(again) == 0 || try == settleTries || wait(work, retry.NextBackOff()) != nil {
			return
		}
	}
}

// database is what the last runs said of it.
type database struct {
	mu     sync.Mutex
	failed int
	err    error
}

// outage is the number of failed runs in a row from which on the database
// counts as unavailable.
const outage = 3

// set notes a run and tells whether this one began an outage.
func (d *database) set(err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.failed, d.err = 0, nil
		return false
	}
	d.failed++
	d.err = err
	return d.failed == outage
}

func (d *database) up() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed < outage
}

func (d *database) part() telemetry.Part {
	if d.up() {
		return telemetry.Part{Name: "database", Serving: true, State: "available"}
	}
	return telemetry.Part{Name: "database", State: "unavailable", Reason: "batches cannot be written; they stay pending and are tried on"}
}
