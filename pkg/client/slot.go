package client

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

const (
	// firstWait and longestWait bound the pause between two tries to open a
	// stream. A gateway that restarts is back within seconds; one that ends every
	// stream at once costs it, and us, two a second at most.
	firstWait, longestWait = 20 * time.Millisecond, 500 * time.Millisecond
	// stallAvoid is how long a gateway that stalled is avoided. By then its
	// connections have been asked, and given up if it still hangs.
	stallAvoid = pingAfter + pingTimeout
)

// slot is a place for one stream at a time on one connection, or, where the
// server does not know GrabStream, for unary calls.
type slot struct {
	target  string
	gateway *gateway
	rpc     seckillv1.SeckillServiceClient

	// Of the dispatcher, under its lock.
	stream     *stream // that takes calls; nil while there is none
	unary      bool
	unaryCalls int
}

// gateway is what the slots of one address share. Those of a Target may lead
// anywhere, so each has one of its own.
type gateway struct {
	avoidUntil time.Time // under the lock of the dispatcher; zero is not at all
}

func (s *slot) load() int {
	if s.unary {
		return s.unaryCalls
	}
	return s.stream.outstanding
}

// room tells whether the slot can take a call. The window bounds unary calls,
// too; how many of them a connection carries at once is between grpc-go and the
// server.
func (s *slot) room() bool {
	return (s.unary || s.stream != nil) && s.load() < window
}

// run keeps a stream open until ctx ends. A stream of some age is replaced by a
// new one, which meets a gateway that was not there before.
func (c *Client) run(ctx context.Context, s *slot) {
	defer c.background.Done()
	waits := newBackOff(firstWait, longestWait)
	var st *stream
	for ctx.Err() == nil {
		if st == nil {
			var err *Error
			if st, err = c.open(ctx, s); err != nil {
				c.dispatcher.failed(err)
				pause(ctx, waits.NextBackOff())
				continue
			}
		}
		age := time.NewTimer(jittered(c.config.StreamAge))
		select {
		case <-st.ended:
			if st.answered || time.Since(st.opened) > longestWait {
				waits.Reset()
			}
			err := st.err
			st = nil
			switch {
			case err == nil: // ended by Close
				return
			case err.Code == codes.Unimplemented:
				c.serveUnary(ctx, s)
			default:
				c.dispatcher.failed(err)
				pause(ctx, waits.NextBackOff())
			}
		case <-age.C:
			// The new one first, so that there is always one. If it cannot be had,
			// the old one goes on.
			if next, err := c.open(ctx, s); err == nil {
				st = next
			}
		case <-ctx.Done():
		}
		age.Stop()
	}
}

// open opens a stream, which from then on takes the calls of the slot. The one
// before it, if any, sends what it has and ends when that is answered.
func (c *Client) open(ctx context.Context, s *slot) (*stream, *Error) {
	ctx, cancel := context.WithCancel(ctx)
	rpc, err := s.rpc.GrabStream(ctx, grpc.ForceCodecV2(newCodec()))
	if err != nil {
		cancel()
		return nil, errorOfStatus(err)
	}
	now := time.Now()
	st := &stream{
		slot: s, rpc: rpc, life: ctx, cancel: cancel, opened: now, progress: now,
		wakeup: make(chan struct{}, 1), ended: make(chan struct{}), free: make([]uint16, window),
	}
	for i := range st.free {
		st.free[i] = uint16(window - 1 - i)
	}
	d := &c.dispatcher
	d.mu.Lock()
	if old := s.stream; old != nil {
		old.retire()
	}
	s.stream = st
	d.streams[st] = struct{}{}
	d.feed(s, nil) // wakes nobody: who is given to a stream goes on waiting
	d.mu.Unlock()
	if c.config.Hooks.StreamOpened != nil {
		c.config.Hooks.StreamOpened(StreamOpened{Target: s.target})
	}
	c.background.Add(2)
	go func() { defer c.background.Done(); st.send(d) }()
	go func() { defer c.background.Done(); st.receive(d, &c.config.Hooks) }()
	return st, nil
}

// retire is called under the lock of the dispatcher.
func (st *stream) retire() {
	st.retiring, st.progress = true, time.Now()
	st.wakeSender()
}

// serveUnary lets the slot make unary calls until the server knows GrabStream.
func (c *Client) serveUnary(ctx context.Context, s *slot) {
	d := &c.dispatcher
	turn := func(unary bool) {
		d.mu.Lock()
		s.unary = unary
		woken := d.feed(s, nil)
		d.mu.Unlock()
		wake(woken)
	}
	turn(true)
	defer turn(false)
	for {
		pause(ctx, jittered(c.config.StreamRetry))
		if ctx.Err() != nil || s.knowsStreams(ctx, c.config.Timeout) {
			return
		}
	}
}

// knowsStreams asks by a stream without a Grab.
func (s *slot) knowsStreams(ctx context.Context, timeout time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	rpc, err := s.rpc.GrabStream(ctx)
	if err != nil {
		return false
	}
	_ = rpc.CloseSend() // never fails
	_, err = rpc.Recv()
	return err == nil || errors.Is(err, io.EOF)
}

// watch breaks streams that have stalled.
func (c *Client) watch(ctx context.Context) {
	defer c.background.Done()
	ticker := time.NewTicker(max(c.config.StallTimeout/8, time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			c.dispatcher.mu.Lock()
			for st := range c.dispatcher.streams {
				if st.stalled(now, c.config.StallTimeout) {
					st.giveUp(&Error{Code: codes.Unavailable, Message: "the server owes answers and is silent"})
					st.slot.gateway.avoid(now.Add(stallAvoid))
				}
			}
			c.dispatcher.mu.Unlock()
		}
	}
}

func newBackOff(first, longest time.Duration) *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval, b.Multiplier, b.RandomizationFactor = first, longest, 2, 0.5
	b.Reset()
	return b
}

// jittered is d, up to a quarter more or less: clients that started together do
// not do things together for ever.
func jittered(d time.Duration) time.Duration {
	return d - d/4 + rand.N(d/2+1)
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
