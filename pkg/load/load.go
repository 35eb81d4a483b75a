// Package load is a load generator for Grabs, and what it measured as text,
// JSON and a page.
//
// Run offers Grabs to a target as a Plan says: an open loop sends them at times
// that do not depend on the answers, and counts latency from those times, so a
// server that stalls shows all of its stall; a closed loop keeps so many
// outstanding. Everything that is offered is accounted for: answered by outcome,
// failed by reason, dropped since too many were outstanding, or left without an
// answer.
//
// A target is a Caller, which answers one Grab at a time (NewUnary: plain
// calls), or Pipes, which carry many at once (NewStreams: GrabStreams, at a
// fraction of a microsecond a Grab). Package report draws the page.
//
//	target, err := load.NewStreams([]*grpc.ClientConn{conn}, load.StreamOptions{})
//	result, err := load.Run(ctx, target, load.Plan{VoucherID: 7, Rate: 50_000, Duration: 10 * time.Second})
//	fmt.Print(result.Summary())
//
// Read in this order: load.go (the plan), schedule.go (when, and who), call.go
// and pipe.go (the loops), record.go (what is counted), result.go; unary.go,
// stream.go and wire.go are the targets, histogram.go and page.go show.
package load

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Outcome is what a Grab came to.
type Outcome uint8

// The outcomes. Failed is any answer but a decision; its reason is counted apart.
const (
	Admitted Outcome = iota
	Replayed
	SoldOut
	NotStarted
	Ended
	Paused
	Failed
	outcomeCount
)

var outcomeNames = [outcomeCount]string{"admitted", "replayed", "sold_out", "not_started", "ended", "paused", "failed"}

// String is the name in summaries and JSON, as "sold_out".
func (o Outcome) String() string {
	if o < outcomeCount {
		return outcomeNames[o]
	}
	return "unknown"
}

// Outcomes are all of them, in the order in which they are shown.
func Outcomes() []Outcome {
	return []Outcome{Admitted, Replayed, SoldOut, NotStarted, Ended, Paused, Failed}
}

// Target is where Grabs go: a Caller or Pipes.
type Target any

// Caller answers one Grab at a time. It is called by as many goroutines as Grabs
// are outstanding.
type Caller interface {
	// Grab returns an outcome, or an error, which counts as Failed with Reason(err).
	// It bounds its own time.
	Grab(ctx context.Context, userID, voucherID int64) (Outcome, error)
}

// Pipes is a target whose answers come later.
type Pipes interface {
	// Count is how many pipes to open, at least 1.
	Count() int
	// Window is how many Grabs a pipe may have without their answers.
	Window() int
	// Open opens a pipe, 0 to Count-1; again, where the one before broke. The pipe
	// ends with ctx.
	Open(ctx context.Context, pipe int) (Pipe, error)
}

// Pipe carries Grabs whose answers come in any order. One goroutine sends, another
// one receives.
type Pipe interface {
	// Send starts a batch of 1 to MaxBatch Grabs; it does not keep the slice.
	Send(batch []Grab) error
	// Receive waits for answers and appends them. After Close it ends with io.EOF
	// behind the last one. Any other error says that the pipe broke: whatever has no
	// answer is Failed with Reason(err).
	Receive(into []Answer) ([]Answer, error)
	// Close says that no Grab follows.
	Close() error
}

// MaxBatch is the most Grabs of one Send, the most in one message of GrabStream.
const MaxBatch = 256

// Grab is one Grab of a pipe.
type Grab struct {
	ID                uint64 // comes back with the answer
	UserID, VoucherID int64
}

// Answer is the answer to one Grab of a pipe.
type Answer struct {
	ID      uint64
	Outcome Outcome
	Reason  string // with Failed
}

// Plan says what is offered. Give a Rate for an open loop, or a Concurrency for a
// closed one; and a Duration, a Count, or both: whichever is reached first ends it.
type Plan struct {
	// VoucherID is what all Grabs are for.
	VoucherID int64 `json:"voucher_id"`

	// Rate is how many Grabs a second an open loop offers.
	Rate float64 `json:"rate"`
	// FromRate and Ramp: the rate rises (or falls) from FromRate in a straight line
	// and is Rate after Ramp.
	FromRate float64       `json:"from_rate"`
	Ramp     time.Duration `json:"ramp_ns"`
	// Poisson makes the arrivals a Poisson process, as of callers that know nothing of
	// each other, instead of evenly spaced.
	Poisson bool `json:"poisson"`
	// MaxOutstanding bounds the Grabs of an open loop that are due and have no answer
	// yet; what is due beyond it is dropped, and counted. Default DefaultOutstanding.
	MaxOutstanding int `json:"max_outstanding"`

	// Concurrency is how many Grabs a closed loop keeps outstanding.
	Concurrency int `json:"concurrency"`

	// WarmUp comes before Duration. Grabs that are due in it are offered like all
	// others and not measured.
	WarmUp time.Duration `json:"warm_up_ns"`
	// Duration is how long it measures.
	Duration time.Duration `json:"duration_ns"`
	// Count is how many Grabs are offered at most, those of the warm-up included.
	Count int64 `json:"count"`

	// FirstUser is the first user_id; each fresh user takes the next one. Default 1.
	FirstUser int64 `json:"first_user"`
	// RepeatShare is the share of Grabs, 0 to 1, that are repeated clicks: by one of
	// the users who clicked lately.
	RepeatShare float64 `json:"repeat_share"`

	// Drain is how long to wait for outstanding answers at the end. Default
	// DefaultDrain.
	Drain time.Duration `json:"drain_ns"`
	// Interval is the width of the time series. Default: DefaultInterval, or more
	// where there would be more than 3000 of them.
	Interval time.Duration `json:"interval_ns"`
	// Progress, if set, is told every second how it goes, one call at a time.
	Progress func(Progress) `json:"-"`
}

// Check reports what is wrong with a plan, as Run would.
func (p Plan) Check() error { return p.complete() }

// Defaults of a Plan.
const (
	DefaultOutstanding = 10_000
	// DefaultDrain is longer than any call lasts that has no deadline of its own (2 s).
	DefaultDrain    = 5 * time.Second
	DefaultInterval = 200 * time.Millisecond

	// maxIntervals bounds the length of a time series.
	maxIntervals = 3000
	// callPace and pace are the least rest, before plain calls and before Grabs of a
	// pipe, once all that was due is started: what becomes due meanwhile waits, which
	// is in its latency. Shorter rests would spend the CPU on waking up; a pipe has
	// messages to fill, too.
	callPace = 200 * time.Microsecond
	pace     = time.Millisecond
)

func (p *Plan) complete() error {
	if p.MaxOutstanding == 0 {
		p.MaxOutstanding = DefaultOutstanding
	}
	if p.FirstUser == 0 {
		p.FirstUser = 1
	}
	if p.Drain == 0 {
		p.Drain = DefaultDrain
	}
	if p.Interval == 0 {
		p.Interval = max(DefaultInterval, ((p.WarmUp + p.Duration) / maxIntervals).Round(time.Millisecond))
	}
	finite := func(rate float64) bool { return rate >= 0 && !math.IsInf(rate, 1) } // NaN is not >= 0
	switch {
	case p.VoucherID <= 0:
		return fmt.Errorf("voucher %d: must be more than 0", p.VoucherID)
	case (p.Rate != 0) == (p.Concurrency != 0):
		return errors.New("give a rate or a concurrency, one of them")
	case !finite(p.Rate) || !finite(p.FromRate):
		return fmt.Errorf("rate %g from %g: must be numbers of at least 0", p.Rate, p.FromRate)
	case p.Concurrency < 0 || p.MaxOutstanding < 0:
		return errors.New("concurrency and most outstanding: must be at least 1")
	case p.Ramp < 0 || p.WarmUp < 0 || p.Duration < 0 || p.Drain < 0 || p.Interval < 0 || p.Count < 0:
		return errors.New("times and count: must not be below 0")
	case p.Duration == 0 && p.Count == 0:
		return errors.New("give a duration or a count, else it never ends")
	case p.Rate == 0 && (p.Ramp != 0 || p.FromRate != 0 || p.Poisson):
		return errors.New("ramp and arrivals are of a rate, not of a concurrency")
	case p.Ramp == 0 && p.FromRate != 0:
		return errors.New("a rate to begin at needs a ramp")
	case !(p.RepeatShare >= 0 && p.RepeatShare <= 1):
		return fmt.Errorf("repeat share %g: must be between 0 and 1", p.RepeatShare)
	case p.FirstUser < 0:
		return fmt.Errorf("first user %d: must be at least 1", p.FirstUser)
	}
	return nil
}

// most is the most Grabs that are ever outstanding.
func (p *Plan) most() int {
	if p.Concurrency > 0 {
		return p.Concurrency
	}
	return p.MaxOutstanding
}

// run is one run.
type run struct {
	plan     Plan
	start    time.Time
	nextUser atomic.Int64
	rec      *recorder
	left     atomic.Int64 // Grabs yet to start in a closed loop

	outstanding atomic.Int64   // due and without an answer
	stop        chan struct{}  // closed when nothing more is to be offered
	offering    sync.WaitGroup // those that offer
}

// since is the time since the start of the run; all times of a run are so.
func (r *run) since() time.Duration { return time.Since(r.start) }

// Run runs a plan and returns what came of it. The end of ctx ends it early:
// nothing more is offered, answers are awaited, the result is of what was done.
// An error means that nothing was offered at all.
func Run(ctx context.Context, target Target, plan Plan) (*Result, error) {
	if err := plan.complete(); err != nil {
		return nil, err
	}
	r := &run{plan: plan, stop: make(chan struct{})}
	r.nextUser.Store(plan.FirstUser)
	r.left.Store(math.MaxInt64)
	if plan.Count > 0 {
		r.left.Store(plan.Count)
	}
	var loop func(ctx context.Context) // offers, and returns when all is answered
	switch t := target.(type) {
	case Pipes:
		if t.Count() < 1 || t.Window() < 1 {
			return nil, fmt.Errorf("%d pipes with a window of %d: must be at least 1 each", t.Count(), t.Window())
		}
		// No pipe is opened that could never be used.
		pipes := min(t.Count(), plan.most())
		r.rec = newRecorder(r, pipes)
		r.offering.Add(pipes)
		loop = func(ctx context.Context) { r.pipe(ctx, t, pipes) }
	case Caller:
		r.rec = newRecorder(r, 2*runtime.GOMAXPROCS(0))
		if plan.Concurrency > 0 {
			r.offering.Add(plan.Concurrency)
			loop = func(ctx context.Context) { r.callClosed(ctx, t) }
		} else {
			r.offering.Add(1)
			loop = func(ctx context.Context) { r.callOpen(ctx, t) }
		}
	default:
		return nil, fmt.Errorf("target %T is neither a Caller nor Pipes", target)
	}

	// Grabs outlive ctx: what was started is owed its answer, until the drain ends.
	calls, hangUp := context.WithCancel(context.WithoutCancel(ctx))
	defer hangUp()
	r.start = time.Now()
	answered, offered := make(chan struct{}), make(chan struct{})
	go func() { defer close(answered); loop(calls) }()
	go func() { defer close(offered); r.offering.Wait() }()
	recorded := make(chan struct{})
	go func() { defer close(recorded); r.rec.collect(answered) }()

	r.awaitEnd(ctx, offered)
	r.rec.closeWindow()
	close(r.stop)
	drained := time.NewTimer(plan.Drain)
	defer drained.Stop()
	select {
	case <-answered:
	case <-drained.C:
		r.rec.abandon()
		hangUp()
		<-answered
	}
	<-recorded
	return r.rec.result(ctx.Err() != nil), nil
}

// awaitEnd waits until the time is over, ctx ends, or the count is reached.
func (r *run) awaitEnd(ctx context.Context, offered <-chan struct{}) {
	if r.plan.Duration > 0 {
		bounded, cancel := context.WithDeadline(ctx, r.start.Add(r.plan.WarmUp+r.plan.Duration))
		defer cancel()
		ctx = bounded
	}
	select {
	case <-ctx.Done():
	case <-offered:
	}
}

// stopped tells whether nothing more is to be offered.
func (r *run) stopped() bool {
	select {
	case <-r.stop:
		return true
	default:
		return false
	}
}

// due is the time up to which Grabs are due: now, or when it was stopped. Those
// that were due by then are accounted for also by a lane that comes late, since
// its target let it wait.
func (r *run) due() (now time.Duration, stopped bool) {
	if r.stopped() {
		return time.Duration(r.rec.windowEnd.Load()), true
	}
	return r.since(), false
}
