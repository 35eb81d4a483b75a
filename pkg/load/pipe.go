package load

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

const (
	// reopenAfter is the pause before a pipe that broke, or could not be opened, is
	// opened again.
	reopenAfter = 100 * time.Millisecond
	// idle is after how long a lane of a closed loop whose places are all taken looks
	// whether the others have used up the count. An answer wakes it before.
	idle = 100 * time.Millisecond
)

// pipe drives n pipes of a target until all is answered.
func (r *run) pipe(ctx context.Context, target Pipes, n int) {
	var lanes sync.WaitGroup
	for i := range n {
		l := &lane{
			run: r, target: target, index: i, shard: r.rec.shards[i],
			who: newUsers(&r.nextUser, r.plan.RepeatShare, i), freed: make(chan struct{}, 1), rest: newRest(),
		}
		places := target.Window()
		if r.plan.Concurrency > 0 {
			places = min(places, shareOf(r.plan.Concurrency, i, n))
		} else {
			l.arrivals = newSchedule(&r.plan, i, n)
			l.most = shareOf(r.plan.MaxOutstanding, i, n)
		}
		l.places = make([]place, places)
		for p := range places {
			l.free = append(l.free, places-1-p)
		}
		lanes.Go(func() { l.drive(ctx) })
	}
	lanes.Wait()
}

// shareOf divides a number as evenly as it goes, the first ones having more.
func shareOf(total, i, n int) int { return (total - i + n - 1) / n }

// lane drives one pipe: it sends what is due, in batches of what has gathered,
// and takes the answers.
type lane struct {
	*run
	target Pipes
	index  int
	who    *users
	rest   rest
	freed  chan struct{} // a place became free
	ended  bool          // nothing more becomes due

	// Of an open loop; nil in a closed one, where something is always due.
	arrivals *schedule
	waiting  []time.Duration // when those are due that are not sent
	most     int             // bound on waiting and sent together

	// Under the lock of the shard, which the receiver takes once for a message.
	shard  *shard
	places []place // the index is the ID of the Grab
	free   []int
	batch  []Grab // what the sender sends; its own between take and take
}

type place struct {
	due  time.Duration
	busy bool // sent and not answered
}

func (l *lane) drive(ctx context.Context) {
	for {
		pipe, err := l.target.Open(ctx, l.index)
		if err == nil {
			err = l.carry(pipe)
		} else {
			l.fail(Reason(err)) // what is due meanwhile
		}
		if err != nil {
			l.lose(Reason(err))
		}
		if l.ended && len(l.waiting) == 0 {
			return
		}
		l.rest.until(reopenAfter, nil, nil, nil)
	}
}

// carry uses a pipe until it breaks or everything is answered.
func (l *lane) carry(pipe Pipe) error {
	var failure error
	over := make(chan struct{})
	go func() {
		defer close(over)
		failure = l.receive(pipe)
	}()
	l.send(pipe, over)
	closing := pipe.Close()
	<-over
	return errors.Join(failure, closing)
}

// send sends what is due until all is sent or the pipe is over.
func (l *lane) send(pipe Pipe, over <-chan struct{}) {
	for {
		select {
		case <-over:
			return
		default:
		}
		next := l.arrive()
		if l.take() {
			if pipe.Send(l.batch) != nil {
				return // receiving tells why
			}
			continue
		}
		if l.ended && len(l.waiting) == 0 {
			return
		}
		// What is due waits for a place; where nothing is, the next one for its time.
		stop, freed := l.stop, l.freed
		if l.ended {
			stop = nil
		}
		if l.arrivals != nil && len(l.waiting) == 0 {
			freed = nil
		}
		l.rest.until(next, stop, freed, over)
	}
}

// arrive lets become due what is due in an open loop, and returns how long to
// rest until the next.
func (l *lane) arrive() time.Duration {
	now, stopped := l.due()
	if l.arrivals == nil {
		l.end(stopped || l.left.Load() <= 0)
		return idle
	}
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	sent := len(l.places) - len(l.free)
	at, more := l.arrivals.peek()
	before := len(l.waiting)
	for ; more && at <= now; at, more = l.arrivals.peek() {
		l.arrivals.pop()
		full := sent+len(l.waiting) >= l.most
		l.shard.arrived(at, full)
		if !full {
			l.waiting = append(l.waiting, at)
		}
	}
	l.outstanding.Add(int64(len(l.waiting) - before))
	l.end(stopped || l.arrivals.left <= 0)
	return max(at-now, pace)
}

// end notes that this lane offers no more.
func (l *lane) end(is bool) {
	if is && !l.ended {
		l.ended = true
		l.offering.Done()
	}
}

// take makes a batch of what is due and has a place; false if that is nothing.
func (l *lane) take() bool {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	l.batch = l.batch[:0]
	n := min(len(l.free), MaxBatch)
	if l.arrivals != nil {
		n = min(n, len(l.waiting))
		for _, due := range l.waiting[:n] {
			l.put(due)
		}
		l.waiting = l.waiting[:copy(l.waiting, l.waiting[n:])]
		return n > 0
	}
	if l.ended || n == 0 {
		return false
	}
	if left := l.left.Add(-int64(n)); left <= 0 {
		l.end(true)
		n = max(n+int(left), 0)
	}
	now := l.since()
	for range n {
		l.shard.arrived(now, false)
		l.put(now)
	}
	l.outstanding.Add(int64(n))
	return n > 0
}

func (l *lane) put(due time.Duration) {
	id := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	l.places[id] = place{due, true}
	l.batch = append(l.batch, Grab{ID: uint64(id), UserID: l.who.user(), VoucherID: l.plan.VoucherID})
}

// receive takes answers until the pipe ends.
func (l *lane) receive(pipe Pipe) error {
	var answers []Answer
	for {
		var err error
		if answers, err = pipe.Receive(answers[:0]); err != nil {
			if !errors.Is(err, io.EOF) {
				return err
			}
			if l.owed() > 0 {
				return reasonError("STREAM_ENDED") // by the server
			}
			return nil
		}
		if !l.answer(answers) {
			return reasonError("STRAY_ANSWER") // to no Grab that waits for one
		}
		select {
		case l.freed <- struct{}{}:
		default:
		}
	}
}

func (l *lane) answer(answers []Answer) bool {
	now := l.since()
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	for _, a := range answers {
		if a.ID >= uint64(len(l.places)) || !l.places[a.ID].busy {
			return false
		}
		l.finish(int(a.ID), now, a.Outcome, a.Reason)
	}
	return true
}

// finish frees the place of a Grab that has its answer. Under the lock.
func (l *lane) finish(id int, now time.Duration, outcome Outcome, reason string) {
	l.shard.answered(l.places[id].due, now, outcome, reason)
	l.places[id].busy = false
	l.free = append(l.free, id)
	l.outstanding.Add(-1)
}

func (l *lane) owed() int {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	return len(l.places) - len(l.free)
}

// lose fails all that is sent and not answered.
func (l *lane) lose(reason string) {
	now := l.since()
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	for id := range l.places {
		if l.places[id].busy {
			l.finish(id, now, Failed, reason)
		}
	}
}

// fail fails all that is due, where there is no pipe.
func (l *lane) fail(reason string) {
	l.arrive()
	for {
		for l.take() {
		}
		l.lose(reason)
		if len(l.waiting) == 0 {
			return
		}
	}
}
