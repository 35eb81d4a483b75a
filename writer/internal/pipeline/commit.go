package pipeline

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// committer brings batches through, one after the other. A batch is settled
// while the next one is written: one at a time, so that a committer has two
// batches in hand at most.
type committer struct {
	*Pipeline
	settling sync.WaitGroup
}

// commitLoop takes what is in hand, up to a batch, and brings it through. No
// timer: a lone entry is committed at once, and under load a batch gathers
// while the committers are busy. stopping ends retries of what cannot be
// written now; working ends everything.
func (p *Pipeline) commitLoop(working, stopping context.Context) {
	c := &committer{Pipeline: p}
	defer c.settling.Wait()
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
		c.commit(working, stopping, batch)
	}
}

// commit brings a batch through. Whatever it does not bring to an end stays
// pending, or is parked.
func (c *committer) commit(working, stopping context.Context, batch []work) {
	var readable, dead []work
	for _, w := range batch {
		if w.dead != nil {
			dead = append(dead, w)
			continue
		}
		readable = append(readable, w)
	}
	c.bring(working, stopping, readable)
	for _, w := range dead {
		if errors.Is(c.bury(working, stopping, w), errSlow) {
			c.parking.park([]work{w})
			continue
		}
		c.drop(w)
	}
}

// bring gives every order of some entries its verdict in the database and
// settles the entries. Where a row is locked, or the database too slow for so
// many, each voucher is tried for itself, and one that stands in the way is
// parked: it must not hold up the others.
func (c *committer) bring(working, stopping context.Context, batch []work) {
	if len(batch) == 0 {
		return
	}
	entries := make([]ledger.Entry, len(batch))
	for i, w := range batch {
		entries[i] = w.entry
	}
	settlements, err := c.write(working, stopping, entries)
	if errors.Is(err, errSlow) {
		byVoucher := map[int64][]work{}
		for _, w := range batch {
			byVoucher[w.entry.VoucherID] = append(byVoucher[w.entry.VoucherID], w)
		}
		if len(byVoucher) == 1 {
			c.parking.park(batch)
			return
		}
		for _, of := range byVoucher {
			c.bring(working, stopping, of)
		}
		return
	}
	if err != nil {
		c.Logger.Warn("batch left pending", telemetry.KeyEntries, len(entries), telemetry.KeyErr, err)
	}
	c.settling.Wait()
	c.settling.Go(func() {
		c.settle(working, settlements)
		for _, w := range batch {
			c.drop(w)
		}
	})
}

// write gives every order of some entries its verdict in the database, and
// returns what the ledger is to be told of them.
func (p *Pipeline) write(working, stopping context.Context, entries []ledger.Entry) ([]ledger.Settlement, error) {
	faultpoint.Reach(faultpoint.WriterBeforeCommit)
	verdicts, err := p.persist(working, stopping, entries)
	if err != nil {
		return nil, err
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
	return settlements, nil
}

// drop ends the holding of a work.
func (p *Pipeline) drop(w work) { p.readers[w.entry.Partition].drop(w) }

// persist gives every order of some entries a verdict, in their order: first
// the batch as a whole, then what the database refuses or nobody can read as
// dead letters, each by itself.
func (p *Pipeline) persist(working, stopping context.Context, entries []ledger.Entry) ([]orderstore.Verdict, error) {
	orders := make([]orderstore.Order, 0, p.BatchMax+ledger.MaxBatch)
	var verdicts []orderstore.Verdict
	at := make([]int, 0, cap(orders)) // where the verdict of each order that is written belongs
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
