package admit

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
)

// batch is what one worker takes to the ledger.
type batch struct {
	lane     *lane
	since    time.Time // the oldest of its Grabs
	deadline time.Time // when the last of them is due
	taken    bool
	released bool // the lane no longer gathers behind it

	// What the script is called with, those that have no answer yet. Only the
	// worker touches it.
	grabs []ledger.Grab
	// Who waits for each of them; nil has left or was told that time is over.
	mu      sync.Mutex
	waiting []*Grab
	done    []*Grab // scratch: those that are handed back next
}

// batches are used again, with the room that they have grown to.
var batches = sync.Pool{New: func() any { return new(batch) }}

func newBatch(l *lane) *batch {
	b := batches.Get().(*batch)
	b.lane, b.since, b.deadline, b.taken, b.released = l, time.Time{}, time.Time{}, false, false
	return b
}

// take moves the oldest Grabs of the lane into the batch and tells whether there
// are any. Those whose receiver is gone take nothing.
func (b *batch) take() bool {
	l := b.lane
	gone := b.done[:0]
	l.shard.mu.Lock()
	b.mu.Lock()
	b.taken = true
	l.unsent--
	for l.queued > 0 && len(b.waiting) < l.admitter.cfg.MaxBatch {
		g := l.first
		l.unlink(g)
		if g.receiver.Gone() {
			gone = append(gone, g)
			continue
		}
		g.batch = b
		b.waiting = append(b.waiting, g)
		if g.due.After(b.deadline) {
			b.deadline = g.due
		}
	}
	if len(b.waiting) > 0 {
		b.since = b.waiting[0].since
		l.batches = append(l.batches, b)
	}
	b.mu.Unlock()
	l.shard.mu.Unlock()
	b.done = gone
	l.admitter.fail(gone, context.Canceled)
	b.encode()
	return len(b.grabs) > 0
}

// encode makes the records of those who wait. They share one piece of memory,
// which is never used again: where a call is given up, its bytes may still be on
// their way.
func (b *batch) encode() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting = slices.DeleteFunc(b.waiting, func(g *Grab) bool { return g == nil })
	size := 0
	for _, g := range b.waiting {
		size += recordRoom + len(g.Reference) + len(g.Traceparent)
	}
	records := make([]byte, 0, size)
	for _, g := range b.waiting {
		from := len(records)
		records = ledger.AppendRecord(records, g.UserID, g.Reference, g.Traceparent)
		b.grabs = append(b.grabs, ledger.Grab{UserID: g.UserID, Record: records[from:len(records):len(records)]})
	}
}

// recordRoom is what a record takes at most beside its texts: tags and lengths
// of itself and of each, and the user_id.
const recordRoom = 3 + 11 + 2*2

// part takes a Grab out for a caller that leaves and tells whether it was there.
func (b *batch) part(g *Grab) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.waiting, g)
	if i < 0 {
		return false
	}
	b.waiting[i] = nil
	return true
}

// sweep takes out those whose time is over and finds when the next one's is.
func (b *batch) sweep(now time.Time, late []*Grab, next time.Time) ([]*Grab, time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, g := range b.waiting {
		switch {
		case g == nil:
		case !g.due.After(now):
			b.waiting[i] = nil
			g.Err = errNoAnswer
			late = append(late, g)
		case next.IsZero() || g.due.Before(next):
			next = g.due
		}
	}
	return late, next
}

// attend drops Grabs that nobody waits for, and tells whether anybody is left.
// After a lost run too: what it took for them stands, and another run must not
// admit who was told that the outcome is unknown, and was perhaps refused since.
func (b *batch) attend() bool {
	b.mu.Lock()
	gone, present := b.done[:0], 0
	for i, g := range b.waiting {
		switch {
		case g == nil:
		case g.receiver.Gone():
			b.waiting[i] = nil
			gone = append(gone, g)
		default:
			present++
		}
	}
	if present < len(b.waiting) {
		b.keep(func(i int) bool { return b.waiting[i] != nil })
	}
	b.mu.Unlock()
	b.done = gone
	b.lane.admitter.fail(gone, context.Canceled)
	return present > 0
}

// keep drops all that are not to be kept. The lock is held.
func (b *batch) keep(wanted func(i int) bool) {
	kept := 0
	for i := range b.waiting {
		if wanted(i) {
			b.waiting[kept], b.grabs[kept] = b.waiting[i], b.grabs[i]
			kept++
		}
	}
	clear(b.waiting[kept:])
	b.waiting, b.grabs = b.waiting[:kept], b.grabs[:kept]
}

// answer answers all whom the reply settles and keeps the others.
func (b *batch) answer(u *unknown, reply *ledger.AdmitReply) {
	a := b.lane.admitter
	refuses := !u.open() || u.settles(reply.Now)
	var counts answerCounts
	done := b.done[:0]
	b.mu.Lock()
	b.keep(func(i int) bool {
		var result Result
		var err error
		switch answer := &reply.Answers[i]; answer.Decision {
		case ledger.DecisionAdmitted, ledger.DecisionReplayed:
			result = Result{
				Decision: ledger.DecisionAdmitted, Replayed: answer.Decision == ledger.DecisionReplayed,
				Order: answer.Order, State: answer.State, Durability: reply.Durability, DecidedAt: reply.Now,
			}
		case ledger.DecisionLate:
			return true
		case ledger.DecisionFault:
			// Running again would read the same. Where a run was lost, an order may
			// lie behind the mark that cannot be read.
			err = fmt.Errorf("%w: what it holds of user %d is no mark", ErrLedgerFault, b.grabs[i].UserID)
			a.fault("fault", b.lane, err)
			if u.open() {
				err = errLostMark
			}
		case ledger.DecisionBusy:
			if !refuses {
				return true
			}
			err = ErrBusy
		default:
			if !refuses {
				return true
			}
			result = Result{Decision: answer.Decision, DecidedAt: reply.Now}
		}
		if g := b.waiting[i]; g != nil {
			g.Result, g.Err = result, err
			counts.add(a.metrics, &result, err)
			done = append(done, g)
		}
		return false
	})
	b.mu.Unlock()
	b.done = done
	a.metrics.decided(&counts)
	a.handBack(done)
}

// giveUp answers all who are left: with err only if nothing was taken.
func (b *batch) giveUp(u *unknown, err error) {
	if u.open() {
		err = errLostAnswer
	}
	done := b.done[:0]
	b.mu.Lock()
	for _, g := range b.waiting {
		if g != nil {
			done = append(done, g)
		}
	}
	b.keep(func(int) bool { return false })
	b.mu.Unlock()
	b.done = done
	b.lane.admitter.fail(done, err)
}

// release lets the lane go on while this batch finds out what became of it:
// that may take until its deadline.
func (b *batch) release() {
	l := b.lane
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	if !b.released {
		b.released = true
		l.fresh--
		l.start()
	}
}

// finish ends a worker; the last one takes an idle lane with it.
func (b *batch) finish() {
	l := b.lane
	l.shard.mu.Lock()
	l.workers--
	if !b.taken {
		l.unsent--
	}
	if !b.released {
		l.fresh--
	}
	l.batches = slices.DeleteFunc(l.batches, func(other *batch) bool { return other == b })
	l.start()
	if l.workers == 0 && l.queued == 0 {
		if l.sweeper != nil {
			l.sweeper.Stop()
		}
		delete(l.shard.lanes, l.voucherID)
	}
	l.shard.mu.Unlock()

	b.mu.Lock()
	clear(b.grabs[:cap(b.grabs)])
	clear(b.done[:cap(b.done)])
	b.lane, b.waiting, b.grabs, b.done = nil, b.waiting[:0], b.grabs[:0], b.done[:0]
	b.mu.Unlock()
	batches.Put(b)
}
