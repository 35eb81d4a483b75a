package admit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Grab is one user's wish for a unit. From Submit until its receiver has it
// back, with Result or Err, it belongs to the Admitter; then it may be used
// again.
type Grab struct {
	UserID, VoucherID int64 // greater than 0
	Reference         string
	Traceparent       string
	// Deadline is when its caller wants the answer; zero is Config.Deadline from
	// when it is submitted.
	Deadline time.Time
	// CorrelationID is the receiver's own and means nothing here.
	CorrelationID uint64

	// Result is the answer where Err is nil.
	Result Result
	Err    error

	receiver Receiver
	since    time.Time
	due      time.Time // when it is answered at the latest, somewhat before Deadline

	// Under the lock of the shard.
	lane       *lane
	queued     bool
	prev, next *Grab
	batch      *batch // the one it left with
}

// Receiver gets Grabs back.
type Receiver interface {
	// Answered hands back Grabs of the receiver, each exactly once and by its
	// deadline. It is called from any goroutine, also from within Submit; it must
	// not wait for anything. The slice is the caller's.
	Answered([]*Grab)
	// Gone tells whether nobody wants the answers any more. Grabs that have not
	// left for the ledger then do not, and come back as context.Canceled.
	Gone() bool
}

var (
	errNoAnswer   = fmt.Errorf("%w: no answer by the deadline", ErrOutcomeUnknown)
	errWaited     = fmt.Errorf("%w: it waited until its deadline", ErrOverloaded)
	errSilence    = fmt.Errorf("%w: it answered nothing while the grab waited", ErrRedisUnreachable)
	errLostAnswer = fmt.Errorf("%w: an answer was lost and no later one settled it", ErrOutcomeUnknown)
	errLostMark   = fmt.Errorf("%w: an answer was lost and the user's mark cannot be read", ErrOutcomeUnknown)
)

// Submit hands in Grabs and waits for nothing: each comes back to the receiver
// by its deadline. The caller validates: ids greater than 0, references of at
// most 64 bytes. Grabs of one voucher stay in their order, and those that stand
// together cost one lock together.
func (a *Admitter) Submit(r Receiver, grabs []*Grab) {
	if len(grabs) == 0 {
		return
	}
	now := time.Now()
	for _, g := range grabs {
		g.receiver, g.since, g.lane, g.batch = r, now, nil, nil
		if g.Deadline.IsZero() {
			g.Deadline = now.Add(a.cfg.Deadline)
		}
		g.due = g.Deadline.Add(-min(answerMargin, g.Deadline.Sub(now)/10))
	}
	if over := a.waiting.Add(int64(len(grabs))) - int64(a.cfg.MaxWaiting); over > 0 {
		taken := len(grabs) - int(min(over, int64(len(grabs))))
		defer a.fail(grabs[taken:], ErrOverloaded)
		grabs = grabs[:taken]
	}
	for len(grabs) > 0 {
		n := 1
		for n < len(grabs) && grabs[n].VoucherID == grabs[0].VoucherID {
			n++
		}
		if !a.enqueue(grabs[:n], now) {
			a.fail(grabs[:n], ErrClosing)
		}
		grabs = grabs[n:]
	}
}

// fail hands Grabs back that end with the same error.
func (a *Admitter) fail(grabs []*Grab, err error) {
	if len(grabs) == 0 {
		return
	}
	a.metrics.failed(err, len(grabs))
	for _, g := range grabs {
		g.Err = err
	}
	a.handBack(grabs)
}

// handBack gives Grabs that have their answers to their receivers, those of one
// that stand together at once. No lock may be held.
func (a *Admitter) handBack(grabs []*Grab) {
	a.waiting.Add(-int64(len(grabs)))
	now := time.Now()
	for _, g := range grabs {
		a.metrics.grabTime.Observe(now.Sub(g.since).Seconds())
	}
	for len(grabs) > 0 {
		r, n := grabs[0].receiver, 1
		for n < len(grabs) && grabs[n].receiver == r {
			n++
		}
		r.Answered(grabs[:n])
		grabs = grabs[n:]
	}
}

// caller is the receiver that waits inside Grab.
type caller struct {
	grab     Grab
	one      [1]*Grab
	answered chan struct{} // holds one, so that nobody waits to answer it
}

// callers are used again: a Grab is with one of its two owners only, so once its
// caller leaves nobody else knows of it.
var callers = sync.Pool{New: func() any {
	c := &caller{answered: make(chan struct{}, 1)}
	c.one[0] = &c.grab
	return c
}}

func (c *caller) Answered([]*Grab) { c.answered <- struct{}{} }
func (c *caller) Gone() bool       { return false } // it takes its Grab back itself

// Grab asks for one unit of a voucher and answers by the deadline of ctx. The
// caller validates: userID and voucherID > 0, reference at most 64 bytes.
//
// A caller that leaves before its batch has left takes nothing; after that, its
// Grab still ends as whatever the ledger decides.
func (a *Admitter) Grab(ctx context.Context, userID, voucherID int64, reference, traceparent string) (Result, error) {
	deadline, _ := ctx.Deadline()
	err := ctx.Err()
	if err == nil && !deadline.IsZero() && !time.Now().Before(deadline) {
		err = context.DeadlineExceeded
	}
	if err != nil {
		a.metrics.failed(err, 1)
		return Result{}, err
	}
	c := callers.Get().(*caller)
	c.grab = Grab{UserID: userID, VoucherID: voucherID, Reference: reference, Traceparent: traceparent, Deadline: deadline}
	a.Submit(c, c.one[:])
	select {
	case <-c.answered:
	case <-ctx.Done():
		if err := a.takeBack(&c.grab, ctx.Err()); err != nil {
			callers.Put(c)
			return Result{}, err
		}
		<-c.answered // it came in the same moment
	}
	result, err := c.grab.Result, c.grab.Err
	callers.Put(c)
	return result, err
}

// takeBack takes a Grab back for a caller that leaves, and says what he may be
// told. It is nil where the Grab has its answer.
func (a *Admitter) takeBack(g *Grab, cause error) error {
	l := g.lane
	if l == nil { // it was refused
		return nil
	}
	err := l.takeBack(g, cause)
	if err != nil {
		a.waiting.Add(-1)
		a.metrics.failed(err, 1)
		a.metrics.grabTime.Observe(time.Since(g.since).Seconds())
	}
	return err
}

func (l *lane) takeBack(g *Grab, cause error) error {
	l.shard.mu.Lock()
	defer l.shard.mu.Unlock()
	switch {
	case g.queued:
		l.unlink(g)
		if errors.Is(cause, context.Canceled) {
			return cause
		}
		return l.partition.tooLate(g.since)
	case g.batch != nil && g.batch.part(g):
		return errNoAnswer
	}
	return nil // it was answered in the same moment
}
