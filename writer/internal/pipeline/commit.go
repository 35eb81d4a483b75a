package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// commitLoop takes what is in hand, up to a batch, and brings it through. No
// timer: a lone entry is committed at once, and under load a batch gathers
// while the committers are busy. stopping ends retries of what cannot be
// written now; working ends everything.
func (p *Pipeline) commitLoop(working, stopping context.Context) {
	for first := range p.entries {
		var batch []work
		for rows, w, ok := 0, first, true; ok; {
			if !p.parking.takes(w) {
				batch = append(batch, w)
				rows += w.size()
			}
			if rows >= p.limit.now() {
				break
			}
			select {
			case w, ok = <-p.entries:
			default:
				ok = false
			}
		}
		p.commit(working, stopping, batch)
	}
}

// commit brings a batch through. Whatever it does not bring to an end stays
// pending, or is parked.
func (p *Pipeline) commit(working, stopping context.Context, batch []work) {
	var readable, dead []work
	for _, w := range batch {
		if w.dead != nil {
			dead = append(dead, w)
			continue
		}
		readable = append(readable, w)
	}
	p.bring(working, stopping, readable)
	for _, w := range dead {
		if errors.Is(p.bury(working, stopping, w), errSlow) {
			p.parking.park([]work{w})
			continue
		}
		p.drop(w)
	}
}

// bring gives every order of some entries its verdict in the database and
// settles the entries. Where a row is locked, or the database too slow for so
// many, each voucher is tried for itself, and one that stands in the way is
// parked: it must not hold up the others.
func (p *Pipeline) bring(working, stopping context.Context, batch []work) {
	if len(batch) == 0 {
		return
	}
	entries := make([]ledger.Entry, len(batch))
	byVoucher := map[int64][]work{}
	for i, w := range batch {
		entries[i] = w.entry
		byVoucher[w.entry.VoucherID] = append(byVoucher[w.entry.VoucherID], w)
	}
	err := p.bringAll(working, stopping, entries)
	if errors.Is(err, errSlow) && len(byVoucher) > 1 {
		for _, of := range byVoucher {
			p.bring(working, stopping, of)
		}
		return
	}
	if errors.Is(err, errSlow) {
		p.parking.park(batch)
		return
	}
	if err != nil {
		p.Logger.Warn("batch left pending", telemetry.KeyEntries, len(entries), telemetry.KeyErr, err)
	}
	for _, w := range batch {
		p.drop(w)
	}
}

func (p *Pipeline) bringAll(working, stopping context.Context, entries []ledger.Entry) error {
	faultpoint.Reach(faultpoint.WriterBeforeCommit)
	verdicts, err := p.persist(working, stopping, entries)
	if err != nil {
		return err
	}
	faultpoint.Reach(faultpoint.WriterAfterCommit)

	now := time.Now()
	settlements := make([]ledger.Settlement, 0, len(entries))
	for _, entry := range entries {
		settlement, ok := p.judge(entry, verdicts[:len(entry.Orders)])
		verdicts = verdicts[len(entry.Orders):]
		if ok {
			settlements = append(settlements, settlement)
			p.metrics.admitToPersist.Observe(now.Sub(entry.AdmittedAt).Seconds())
		}
	}
	p.settle(working, settlements)
	return nil
}

// drop ends the holding of a work.
func (p *Pipeline) drop(w work) { p.readers[w.entry.Partition].drop(w) }

// persist gives every order of some entries a verdict, in their order: first
// the batch as a whole, then what the database refuses or nobody can read as
// dead letters, each by itself.
func (p *Pipeline) persist(working, stopping context.Context, entries []ledger.Entry) ([]orderstore.Verdict, error) {
	orders := make([]orderstore.Order, 0, p.BatchMax+ledger.MaxBatch)
	var verdicts []orderstore.Verdict
	var at []int // where the verdict of each order that is written belongs
	var held []orderstore.Held
	var heldAt []int
	raw := make([][]byte, 0, cap(orders))
	for _, entry := range entries {
		for _, o := range entry.Orders {
			order := orderstore.Order{
				Position: o.Position, UserID: o.UserID, Reference: o.Reference, AdmittedAt: entry.AdmittedAt, EntryID: entry.ID,
			}
			if o.Err != nil {
				held = append(held, orderstore.Held{Order: order, Raw: o.Raw, Reason: o.Err.Error()})
				heldAt = append(heldAt, len(raw))
			} else {
				orders = append(orders, order)
				at = append(at, len(raw))
			}
			raw = append(raw, o.Raw)
		}
	}
	verdicts = make([]orderstore.Verdict, len(raw))
	if len(orders) > 0 {
		var decided []orderstore.Verdict
		err := p.decide(working, stopping, func(ctx context.Context) (err error) {
			began := time.Now()
			if decided, err = p.Store.Persist(ctx, orders); err == nil {
				p.metrics.transaction.Observe(time.Since(began).Seconds())
				p.metrics.batch.Observe(float64(len(orders)))
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		for i, verdict := range decided {
			verdicts[at[i]] = verdict
			reason := ""
			switch verdict.Kind {
			case orderstore.NoVoucher:
				p.Alarm.VoucherFault(orders[i].VoucherID, "orders were admitted of a voucher that the database does not have")
				reason = "the database has no such voucher"
			case orderstore.Unstorable:
				// The driver's words are for the log: the reason is shown to callers.
				reason = "the database refuses it: " + verdict.Reason
				p.Logger.Error("the database refuses an order", telemetry.KeyVoucherID, orders[i].VoucherID, telemetry.KeyEpoch, orders[i].Epoch,
					telemetry.KeySeq, orders[i].Seq, telemetry.KeyErr, verdict.Err)
			default:
				continue
			}
			held = append(held, orderstore.Held{Order: orders[i], Raw: raw[at[i]], Reason: reason})
			heldAt = append(heldAt, at[i])
		}
	}
	if len(held) > 0 {
		faultpoint.Reach(faultpoint.WriterBeforeHold)
		var decided []orderstore.Verdict
		err := p.decide(working, stopping, func(ctx context.Context) (err error) {
			decided, err = p.Holder.Hold(ctx, held)
			return err
		})
		if err != nil {
			return nil, err
		}
		faultpoint.Reach(faultpoint.WriterAfterHold)
		for i, verdict := range decided {
			verdicts[heldAt[i]] = verdict
			if verdict.Kind == orderstore.Ended && verdict.Outcome == orderstore.OutcomeHeld {
				p.metrics.held.Inc()
				p.Logger.Error("order held as a dead letter", telemetry.KeyVoucherID, held[i].VoucherID, telemetry.KeyEpoch, held[i].Epoch,
					telemetry.KeySeq, held[i].Seq, telemetry.KeyEntryID, held[i].EntryID, telemetry.KeyReason, held[i].Reason)
			}
		}
	}
	return verdicts, nil
}

// bury makes a dead letter of an entry that cannot be read, and settles it: the
// positions that it stands for if it says so soundly, else none.
func (p *Pipeline) bury(working, stopping context.Context, w work) error {
	faultpoint.Reach(faultpoint.WriterBeforeHold)
	var verdicts []orderstore.Verdict
	err := p.decide(working, stopping, func(ctx context.Context) (err error) {
		verdicts, err = p.Holder.HoldEntry(ctx, *w.dead)
		return err
	})
	if errors.Is(err, errSlow) {
		return err
	}
	if err != nil {
		p.Logger.Warn("entry left pending", telemetry.KeyEntryID, w.entry.ID, telemetry.KeyErr, err)
		return nil
	}
	faultpoint.Reach(faultpoint.WriterAfterHold)
	p.metrics.held.Inc()
	p.Logger.Error("entry held as a dead letter", telemetry.KeyPartition, w.entry.Partition, telemetry.KeyEpoch, w.entry.Epoch,
		telemetry.KeyEntryID, w.entry.ID, telemetry.KeyOrders, w.dead.Units, telemetry.KeyReason, w.dead.Reason)
	if w.dead.Units == 0 {
		p.discard(working, w.entry)
		return nil
	}
	entry := w.entry
	entry.VoucherID = w.dead.VoucherID
	for i := range w.dead.Units {
		entry.Orders = append(entry.Orders, ledger.Order{
			Position: orderid.Position{VoucherID: w.dead.VoucherID, Epoch: entry.Epoch, Seq: w.dead.FirstSeq + i},
		})
	}
	if settlement, ok := p.judge(entry, verdicts); ok {
		p.settle(working, []ledger.Settlement{settlement})
	}
	return nil
}

// errSlow means that the database works and yet could not do this in the time
// of a batch: somebody holds a row, or it is too much for it.
var errSlow = errors.New("not done within the batch timeout")

// decide runs something in the database until it has decided, however long that
// takes: an outage is not the orders' fault. Each run has BatchTimeout. It gives
// up when the process stops, after one more run at once, where waiting would
// not help, and with errSlow where others need not wait for it.
func (p *Pipeline) decide(working, stopping context.Context, run func(context.Context) error) error {
	retry := newBackOff()
	for last := false; ; {
		runCtx, cancel := context.WithTimeout(working, p.BatchTimeout)
		err := run(runCtx)
		late := runCtx.Err() != nil && working.Err() == nil
		cancel()
		if err == nil {
			p.database.set(nil)
			p.limit.grow()
			return nil
		}
		if errors.Is(err, orderstore.ErrEpochMoved) {
			p.database.set(nil)
			return err
		}
		p.metrics.transient.Inc()
		if late {
			p.limit.shrink()
		}
		if (late || orderstore.Locked(err)) && p.answers(working) {
			p.database.set(nil)
			return fmt.Errorf("%w: %w", errSlow, err)
		}
		// One lost deadlock is no outage: readers stop only when it goes on.
		if p.database.set(err) {
			p.Logger.Warn("the database cannot decide, trying on", telemetry.KeyErr, err)
		}
		if last || working.Err() != nil {
			return err
		}
		last = wait(stopping, retry.NextBackOff()) != nil
	}
}

// answers tells whether the database does, within a moment.
func (p *Pipeline) answers(ctx context.Context) bool {
	if p.Ping == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return p.Ping(ctx) == nil
}

// pingTimeout is far above the time of a ping to a database that works.
const pingTimeout = time.Second

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

// database is what the last runs said of it.
type database struct {
	mu     sync.Mutex
	failed int
	err    error
	gauge  prometheus.Gauge
}

func (d *database) show(available bool) {
	if available {
		d.gauge.Set(1)
		return
	}
	d.gauge.Set(0)
}

// outage is the number of failed runs in a row from which on the database
// counts as unavailable.
const outage = 3

// set notes a run and tells whether this one began an outage.
func (d *database) set(err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer func() { d.show(d.failed < outage) }()
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
