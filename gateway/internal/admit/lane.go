package admit

import (
	"runtime"
	"sync"
	"time"
)

const (
	// shards spreads vouchers over locks.
	shards = 64
	// maxSeen bounds the vouchers a shard remembers a seq of, 65,536 in all, each
	// of which had an order: an unknown voucher_id leaves nothing behind.
	maxSeen = 1024
	// workerPatience is how long a worker waits for a place among the calls in
	// flight before it looks whether anybody is still waiting for it.
	workerPatience = time.Second
)

// shard holds the lanes of some vouchers. A lane is there only while somebody
// waits or a call is in flight.
type shard struct {
	mu     sync.Mutex
	closed bool
	lanes  map[int64]*lane
	seen   map[int64]seen
}

// seen is the highest seq of a voucher that this gateway has seen.
type seen struct{ epoch, seq int64 }

func (s *shard) init() {
	s.lanes, s.seen = make(map[int64]*lane), make(map[int64]seen)
}

func (s *shard) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

// lane is where the Grabs of one voucher gather. Fields below shard are under
// the lock of the shard.
type lane struct {
	voucherID int64
	partition *partition
	admitter  *Admitter
	shard     *shard

	first, last *Grab // the queue, oldest first
	queued      int
	batches     []*batch // that have left and are not finished
	workers     int      // batches that gather, wait for a place or are in flight
	unsent      int      // workers that have not taken their batch yet
	fresh       int      // workers whose outcome is not unknown: the next batch gathers behind these

	sweeper *time.Timer // runs sweep
	sweepAt time.Time   // when it does; zero for not at all
}

// enqueue puts Grabs of one voucher into its queue, unless no more are taken.
func (a *Admitter) enqueue(grabs []*Grab, now time.Time) bool {
	voucherID := grabs[0].VoucherID
	s := &a.shards[uint64(voucherID)%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	l := s.lanes[voucherID]
	if l == nil {
		l = &lane{voucherID: voucherID, partition: a.partitionOf(voucherID), admitter: a, shard: s}
		s.lanes[voucherID] = l
	}
	for _, g := range grabs {
		g.lane, g.queued, g.prev = l, true, l.last
		if l.last != nil {
			l.last.next = g
		} else {
			l.first = g
		}
		l.last = g
		l.sweepBy(g.due, now)
	}
	l.queued += len(grabs)
	l.start()
	return true
}

// sweepBy has the lane swept at a time, or before.
func (l *lane) sweepBy(due, now time.Time) {
	if !l.sweepAt.IsZero() && !due.Before(l.sweepAt) {
		return
	}
	l.sweepAt = due
	wait := max(sweepLeast, due.Sub(now))
	if l.sweeper == nil {
		l.sweeper = time.AfterFunc(wait, l.sweep)
	} else {
		l.sweeper.Reset(wait)
	}
}

// sweep answers those whose time is over, in the queue and in the batches that
// have left. One timer for a lane does: nearly all are answered long before it.
func (l *lane) sweep() {
	now := time.Now()
	var late []*Grab
	var next time.Time
	l.shard.mu.Lock()
	for g := l.first; g != nil; {
		after := g.next
		if !g.due.After(now) {
			l.unlink(g)
			g.Err = l.partition.tooLate(g.since)
			late = append(late, g)
		} else if next.IsZero() || g.due.Before(next) {
			next = g.due
		}
		g = after
	}
	for _, b := range l.batches {
		late, next = b.sweep(now, late, next)
	}
	if l.sweepAt = next; !next.IsZero() {
		l.sweeper.Reset(max(sweepLeast, next.Sub(now)))
	}
	l.shard.mu.Unlock()
	for _, g := range late {
		l.admitter.metrics.failed(g.Err, 1)
	}
	l.admitter.handBack(late)
}

// start starts workers: one where none is under way, so that an idle voucher
// waits for nothing; while one is, the next batch gathers until it is full.
func (l *lane) start() {
	for l.workers < maxLaneBatches && l.queued > 0 &&
		(l.fresh == 0 || l.queued >= l.admitter.cfg.MaxBatch*(l.unsent+1)) {
		l.workers++
		l.unsent++
		l.fresh++
		l.admitter.running.Go(func() { l.work() })
	}
}

// work takes one batch and runs it. The batch is formed only when there is a
// place for its call, so until then callers may come and leave. Those that are
// about to run go first: that costs nothing where there are none, and where the
// processors are busy it doubles the batches, which are cheaper the larger they
// are.
func (l *lane) work() {
	a := l.admitter
	b := newBatch(l)
	defer b.finish()
	if !l.place() {
		return
	}
	defer func() { <-a.inFlight }()
	runtime.Gosched()
	if b.take() {
		a.run(b)
	}
}

// place waits for a place among the calls in flight, for as long as anybody
// waits for it.
func (l *lane) place() bool {
	a := l.admitter
	select {
	case a.inFlight <- struct{}{}:
		return true
	default:
	}
	timer := time.NewTimer(workerPatience)
	defer timer.Stop()
	for {
		select {
		case a.inFlight <- struct{}{}:
			return true
		case <-timer.C:
			if l.deserted() {
				return false
			}
			timer.Reset(workerPatience)
		}
	}
}

func (l *lane) deserted() bool {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	return l.queued == 0
}

func (l *lane) unlink(g *Grab) {
	if g.prev != nil {
		g.prev.next = g.next
	} else {
		l.first = g.next
	}
	if g.next != nil {
		g.next.prev = g.prev
	} else {
		l.last = g.prev
	}
	g.queued, g.prev, g.next = false, nil, nil
	l.queued--
}

// seenSeq is the highest seq seen of the voucher in an epoch, 0 for none.
func (l *lane) seenSeq(epoch int64) int64 {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	if s := l.shard.seen[l.voucherID]; s.epoch == epoch {
		return s.seq
	}
	return 0
}

// saw remembers a seq. Where there is no room for another voucher, one is
// forgotten: that only weakens the check for a ledger that went backwards.
func (l *lane) saw(epoch, seq int64) {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	old, known := l.shard.seen[l.voucherID]
	if seq == 0 || old.epoch > epoch || (old.epoch == epoch && old.seq >= seq) {
		return
	}
	if !known && len(l.shard.seen) >= maxSeen {
		for other := range l.shard.seen {
			delete(l.shard.seen, other)
			break
		}
	}
	l.shard.seen[l.voucherID] = seen{epoch: epoch, seq: seq}
}
