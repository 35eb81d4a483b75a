package client

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// maxReference is the most bytes of a reference.
const maxReference = 64

// Client grabs. Make one for the whole process: its methods may be called by any
// number of goroutines at once, and the more there are the cheaper each Grab.
type Client struct {
	config     Config
	conns      []*grpc.ClientConn
	rpcs       []seckillv1.SeckillServiceClient // of conns
	next       atomic.Uint32                    // of rpcs, for GetOrder
	dispatcher dispatcher
	calls      sync.Pool

	life       context.Context // of streams and waits; ended by Close
	end        context.CancelFunc
	background sync.WaitGroup
	closing    sync.Once
	closed     chan struct{}
}

// New makes a Client. It does not wait for a connection: calls do, until their
// context ends.
func New(config Config) (*Client, error) {
	if err := config.complete(); err != nil {
		return nil, fmt.Errorf("configuring the seckill client: %w", err)
	}
	conns, targets, err := config.dial()
	if err != nil {
		return nil, fmt.Errorf("configuring the seckill client: %w", err)
	}
	c := &Client{config: config, conns: conns, closed: make(chan struct{})}
	c.calls.New = func() any { return newCall() }
	c.life, c.end = context.WithCancel(context.Background())
	d := &c.dispatcher
	d.maxWaiting, d.streams, d.idle = config.MaxWaiting, map[*stream]struct{}{}, make(chan struct{})
	for _, conn := range conns {
		c.rpcs = append(c.rpcs, seckillv1.NewSeckillServiceClient(conn))
	}
	if d.fewest = len(config.Addresses); config.Target != "" {
		d.fewest = config.Connections
	}
	gateways := map[string]*gateway{}
	for range config.Streams {
		for i, rpc := range c.rpcs {
			g := gateways[targets[i]]
			if g == nil || config.Target != "" {
				g = &gateway{}
				gateways[targets[i]] = g
			}
			d.slots = append(d.slots, &slot{target: targets[i], gateway: g, rpc: rpc})
		}
	}
	c.background.Add(len(d.slots) + 1)
	for _, s := range d.slots {
		go c.run(c.life, s)
	}
	go c.watch(c.life)
	return c, nil
}

// Close takes no more calls, waits until those that are under way have returned,
// and closes the connections. When ctx ends first, what is still under way
// returns ErrClosed, and Close returns the error of ctx. After Close nothing of
// the Client is left, no goroutine and no connection. Further calls of Close
// wait for the first and return nil.
func (c *Client) Close(ctx context.Context) (err error) {
	c.closing.Do(func() {
		err = c.close(ctx)
		close(c.closed)
	})
	<-c.closed
	return err
}

// closeStreams bounds how long Close waits for servers to end streams of which
// all answers are there.
const closeStreams = time.Second

func (c *Client) close(ctx context.Context) error {
	d := &c.dispatcher
	d.mu.Lock()
	d.closing = true
	if d.callers == 0 {
		close(d.idle)
	}
	d.mu.Unlock()
	var late error
	select {
	case <-d.idle:
		c.endStreams(ctx)
	case <-ctx.Done():
		select {
		case <-d.idle: // nobody was under way
		default:
			late = fmt.Errorf("closing the seckill client: %w", ctx.Err())
		}
	}
	d.kill()
	c.end()
	closeAll(c.conns) // which ends unary calls
	c.background.Wait()
	<-d.idle
	return late
}

// endStreams closes the client's side of each stream and waits for the server's.
func (c *Client) endStreams(ctx context.Context) {
	d := &c.dispatcher
	d.mu.Lock()
	var streams []*stream
	for st := range d.streams {
		st.retire()
		streams = append(streams, st)
	}
	d.mu.Unlock()
	enough := time.NewTimer(closeStreams)
	defer enough.Stop()
	for _, st := range streams {
		select {
		case <-st.ended:
		case <-enough.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// GrabOption adds to a Grab.
type GrabOption struct{ reference, traceparent string }

// WithReference has the caller's own reference stored with the order, 0 to 64
// bytes of UTF-8. If the order exists already it keeps the first one.
func WithReference(reference string) GrabOption { return GrabOption{reference: reference} }

// WithTraceparent sends a W3C trace context with the Grab, instead of what
// Config.Traceparent says.
func WithTraceparent(traceparent string) GrabOption { return GrabOption{traceparent: traceparent} }

// Grab asks for one unit of a voucher for a user.
//
// It is safe to repeat, also elsewhere and much later: the same user and voucher
// always get the same order. For that reason Grab itself repeats what failed on
// the way, until ctx ends: a broken stream, a gateway that shuts down, an
// unavailable ledger, an outcome that the server does not know. It gives up
// early where the server asks for a longer delay than there is time.
//
// The caller leaves at once when ctx ends; the time it has travels with the Grab.
// A ctx without a deadline is bounded by Config.Timeout.
//
// Being refused is no error: see Result.Outcome. An error is an *Error. With
// ErrOutcomeUnknown the order may exist; with any other nothing was taken.
func (c *Client) Grab(ctx context.Context, userID, voucherID int64, options ...GrabOption) (Result, error) {
	began := time.Now()
	call := c.calls.Get().(*call)
	call.userID, call.voucherID = userID, voucherID
	for _, o := range options {
		if o.reference != "" {
			call.reference = o.reference
		}
		if o.traceparent != "" {
			call.traceparent = o.traceparent
		}
	}
	if call.traceparent == "" && c.config.Traceparent != nil {
		call.traceparent = c.config.Traceparent(ctx)
	}
	if !traceparentForm(call.traceparent) {
		call.traceparent = ""
	}

	var result Result
	var attempts int
	failed := checkReference(call.reference)
	switch {
	case failed != nil:
	case ctx.Err() != nil:
		failed = errorOfContext(ctx.Err())
	case !c.dispatcher.enter():
		failed = errorOfClosed()
	default:
		result, attempts, failed = c.grab(ctx, call, began)
		c.dispatcher.exit()
	}
	call.reset()
	c.calls.Put(call)

	var err error
	if failed != nil {
		err = failed
	}
	if done := c.config.Hooks.GrabDone; done != nil {
		done(GrabDone{
			VoucherID: voucherID, Outcome: result.Outcome, Replayed: result.Replayed, Err: err,
			Attempts: attempts, Latency: time.Since(began),
		})
	}
	return result, err
}

// checkReference finds here what would spoil the message for others in it. All
// else is for the server to judge.
func checkReference(reference string) *Error {
	description := ""
	switch {
	case len(reference) > maxReference:
		description = fmt.Sprintf("must be at most %d bytes, has %d", maxReference, len(reference))
	case !utf8.ValidString(reference):
		description = "must be valid UTF-8"
	default:
		return nil
	}
	return errorOfInvalid(Violation{"reference", description})
}

// traceparentForm tells whether s is as long as a trace context of version 00
// and plain; the server looks closer.
func traceparentForm(s string) bool {
	const length = 55
	if len(s) != length {
		return false
	}
	for i := range len(s) {
		if s[i] < '-' || s[i] > 'f' {
			return false
		}
	}
	return true
}

// attempt submits a call once and waits for what comes of it.
func (c *Client) attempt(ctx context.Context, call *call, expired <-chan time.Time) (Result, *Error) {
	done, failed := c.dispatcher.submit(call)
	if failed != nil {
		return Result{}, failed
	}
	if !done {
		var cause error
		select {
		case <-call.ready:
		case <-ctx.Done():
			cause = ctx.Err()
		case <-expired:
			cause = context.DeadlineExceeded
		}
		if cause != nil {
			left, sent := c.dispatcher.leave(call)
			if left {
				failed := errorOfContext(cause)
				failed.OutcomeUnknown = sent
				if !sent {
					c.explain(failed)
				}
				return Result{}, failed
			}
			<-call.ready // it was answered in this very moment
		}
	}
	call.state = stateIdle
	switch {
	case call.unary:
		return c.unary(ctx, call)
	case call.failed != nil:
		return Result{}, call.failed
	}
	return call.result, nil
}

// explain says of a call that waited in vain what it waited for.
func (c *Client) explain(failed *Error) {
	unreached, err := c.dispatcher.unreached()
	if !unreached {
		return
	}
	failed.unreached = true
	failed.Message += ": no gateway can be reached"
	if err != nil {
		failed.Message += ": " + err.Error()
	}
}

// unary makes a Grab as a unary call, by the turn that the call has on its slot.
func (c *Client) unary(ctx context.Context, call *call) (Result, *Error) {
	defer c.dispatcher.release(call.slot)
	bounded, cancel := context.WithDeadline(ctx, call.deadline)
	defer cancel()
	if call.traceparent != "" {
		bounded = metadata.AppendToOutgoingContext(bounded, "traceparent", call.traceparent)
	}
	response, err := call.slot.rpc.Grab(bounded, &seckillv1.GrabRequest{
		UserId: call.userID, VoucherId: call.voucherID, Reference: call.reference,
	})
	switch {
	case err != nil:
		return Result{}, c.errorOfUnary(bounded, err)
	case response.GetOutcome() == 0:
		return Result{}, errorOfAnswer(nil)
	}
	return resultOf(response), nil
}

func (c *Client) errorOfUnary(ctx context.Context, err error) *Error {
	switch {
	case ctx.Err() != nil:
		failed := errorOfContext(ctx.Err())
		failed.OutcomeUnknown = true
		return failed
	case c.life.Err() != nil:
		failed := errorOfClosed()
		failed.OutcomeUnknown = true
		return failed
	}
	return errorOfStatus(err)
}
