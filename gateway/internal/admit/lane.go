package admit

import (
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

	first, last *waiter // the queue, oldest first
	queued      int
	workers     int // batches that gather, wait for a place or are in flight
	unsent      int // workers that have not taken their batch yet
	fresh       int // workers whose outcome is not unknown: the next batch gathers behind these
}

// enqueue puts a caller into the queue of its voucher.
func (a *Admitter) enqueue(voucherID int64, w *waiter) (*lane, error) {
	s := &a.shards[uint64(voucherID)%shards]
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosing
	}
	l := s.lanes[voucherID]
	if l == nil {
		l = &lane{voucherID: voucherID, partition: a.partitionOf(voucherID), admitter: a, shard: s}
		s.lanes[voucherID] = l
	}
	w.queued, w.prev = true, l.last
	if l.last != nil {
		l.last.next = w
	} else {
		l.first = w
	}
	l.last = w
	l.queued++
	l.start()
	return l, nil
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
// place for its call, so until then callers may come and leave.
func (l *lane) work() {
	a := l.admitter
	b := &batch{lane: l}
	timer := time.NewTimer(workerPatience)
	defer timer.Stop()
	for placed := false; !placed; {
		select {
		case a.inFlight <- struct{}{}:
			placed = true
		case <-timer.C:
			if l.deserted() {
				b.finish()
				return
			}
			timer.Reset(workerPatience)
		}
	}
	defer func() { <-a.inFlight }()
	if b.take(); len(b.grabs) > 0 {
		a.run(b)
	}
	b.finish()
}

func (l *lane) deserted() bool {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	return l.queued == 0
}

// drop takes a caller out of the queue and tells whether it was still there.
func (l *lane) drop(w *waiter) bool {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	if !w.queued {
		return false
	}
	l.unlink(w)
	return true
}

func (l *lane) unlink(w *waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		l.first = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		l.last = w.prev
	}
	w.queued, w.prev, w.next = false, nil, nil
	l.queued--
}

// batch is what one worker takes to the ledger.
type batch struct {
	lane     *lane
	grabs    []*waiter // those that have no answer yet
	deadline time.Time // the latest of its callers
	taken    bool
	released bool // the lane no longer gathers behind it
}

// take moves the oldest callers of the lane into the batch.
func (b *batch) take() {
	l := b.lane
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	b.taken = true
	l.unsent--
	n := min(l.queued, l.admitter.cfg.MaxBatch)
	b.grabs = make([]*waiter, 0, n)
	for range n {
		w := l.first
		l.unlink(w)
		b.grabs = append(b.grabs, w)
		if w.deadline.After(b.deadline) {
			b.deadline = w.deadline
		}
	}
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
	defer l.shard.mu.Unlock()
	l.workers--
	if !b.taken {
		l.unsent--
	}
	if !b.released {
		l.fresh--
	}
	l.start()
	if l.workers == 0 && l.queued == 0 {
		delete(l.shard.lanes, l.voucherID)
	}
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
