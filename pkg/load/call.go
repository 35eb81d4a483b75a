package load

import (
	"context"
	"sync"
	"time"
)

// callClosed lets as many callers as the plan says Grab one after the other.
func (r *run) callClosed(ctx context.Context, target Caller) {
	var callers sync.WaitGroup
	for i := range r.plan.Concurrency {
		callers.Go(func() {
			who := newUsers(&r.nextUser, r.plan.RepeatShare, i)
			s := r.rec.shards[i%len(r.rec.shards)]
			for !r.stopped() && r.left.Add(-1) >= 0 {
				due := r.since()
				s.mu.Lock()
				s.arrived(due, false)
				s.mu.Unlock()
				r.outstanding.Add(1)
				r.call(ctx, target, s, click{due, who.user()})
			}
			r.offering.Done()
		})
	}
	callers.Wait()
}

// click is a Grab that is due.
type click struct {
	due  time.Duration
	user int64
}

// call is one Grab; it counts as outstanding until it returns.
func (r *run) call(ctx context.Context, target Caller, s *shard, c click) {
	outcome, err := target.Grab(ctx, c.user, r.plan.VoucherID)
	reason := ""
	if err != nil {
		outcome, reason = Failed, Reason(err)
	}
	r.outstanding.Add(-1)
	now := r.since()
	s.mu.Lock()
	s.answered(c.due, now, outcome, reason)
	s.mu.Unlock()
}

// callOpen starts a Grab when it is due. Callers are started where all others
// are at work, up to the bound on outstanding Grabs, and stay for the next ones.
func (r *run) callOpen(ctx context.Context, target Caller) {
	var callers sync.WaitGroup
	due := make(chan click, r.plan.MaxOutstanding) // holds all that are outstanding
	started := 0
	arrivals := newSchedule(&r.plan, 0, 1)
	who := newUsers(&r.nextUser, r.plan.RepeatShare, 0)
	s := r.rec.shards[0]
	rest := newRest()
	for {
		now, stopped := r.due()
		s.mu.Lock()
		at, more := arrivals.peek()
		for ; more && at <= now; at, more = arrivals.peek() {
			arrivals.pop()
			full := r.outstanding.Load() >= int64(r.plan.MaxOutstanding)
			s.arrived(at, full)
			if full {
				continue
			}
			if outstanding := r.outstanding.Add(1); outstanding > int64(started) {
				shard := r.rec.shards[started%len(r.rec.shards)]
				callers.Go(func() {
					for c := range due {
						r.call(ctx, target, shard, c)
					}
				})
				started++
			}
			due <- click{at, who.user()}
		}
		s.mu.Unlock()
		if stopped || arrivals.left <= 0 {
			break
		}
		rest.until(max(at-now, callPace), r.stop, nil, nil)
	}
	r.offering.Done()
	close(due)
	callers.Wait()
}

// rest is a pause of a lane, on one timer.
type rest struct{ timer *time.Timer }

func newRest() rest {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return rest{t}
}

// until waits for a time or for one of the signals; nil is no signal.
func (w rest) until(d time.Duration, a, b, c <-chan struct{}) {
	w.timer.Reset(d)
	select {
	case <-w.timer.C:
	case <-a:
	case <-b:
	case <-c:
	}
	w.timer.Stop()
}
