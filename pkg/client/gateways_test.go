package client_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// failing makes a server that answers every Grab with the same fault.
func failing(shared *book, code codes.Code, reason seckillv1.ErrorReason, retryAfter time.Duration) *server {
	return &server{book: shared, grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		return failed(g, code, reason, retryAfter)
	}}
}

func TestGrab_RepeatedGoesToAnotherGateway(t *testing.T) {
	shared := newBook()
	full := start(t, failing(shared, codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED, time.Millisecond))
	sound := start(t, &server{book: shared})
	var most atomic.Int64
	c := connect(t, client.Config{Hooks: client.Hooks{GrabDone: func(d client.GrabDone) {
		for n := most.Load(); int64(d.Attempts) > n && !most.CompareAndSwap(n, int64(d.Attempts)); n = most.Load() {
		}
	}}}, full, sound)
	streamsAt(t, full, sound)
	for range 5 {
		results, errs := crowd(within(t, patience), c, 1000)
		requireOwnOrders(t, shared, results, errs)
	}
	require.Positive(t, full.grabs.Load())
	require.Equal(t, int64(2), most.Load(), "the most attempts")
}

func TestGrab_LeavesAGatewayThatCannotReachRedisAtOnce(t *testing.T) {
	for _, reason := range []seckillv1.ErrorReason{
		seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE, seckillv1.ErrorReason_ERROR_REASON_SCRIPT_VERSION,
		seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN,
	} {
		shared := newBook()
		cut := start(t, failing(shared, codes.Unavailable, reason, time.Hour))
		sound := start(t, &server{book: shared})
		c := connect(t, client.Config{}, cut, sound)
		streamsAt(t, cut, sound)
		results, errs := crowd(within(t, patience), c, 1000)
		requireOwnOrders(t, shared, results, errs)
		asked := cut.grabs.Load()
		require.Positive(t, asked)
		results, errs = crowd(within(t, patience), c, 1000)
		requireOwnOrders(t, shared, results, errs)
		require.Equal(t, asked, cut.grabs.Load(), "it is avoided for as long as it asked for")
	}
}

// A gateway that hangs is not given Grabs again as soon as a new stream to it
// is open: to open one needs no answer.
func TestGrab_StalledGatewayIsAvoided(t *testing.T) {
	shared := newBook()
	silent := &server{book: shared}
	silent.stream = func(rpc grabStream) error {
		for {
			message, err := rpc.Recv()
			if err != nil {
				return err
			}
			silent.grabs.Add(int64(len(message.GetGrabs())))
		}
	}
	start(t, silent)
	sound := start(t, &server{book: shared})
	var mu sync.Mutex
	var ends []error
	const stall = 100 * time.Millisecond
	c := connect(t, client.Config{StallTimeout: stall, Hooks: client.Hooks{StreamEnded: func(e client.StreamEnded) {
		mu.Lock()
		defer mu.Unlock()
		if e.Target == silent.addr && e.Err != nil {
			ends = append(ends, e.Err)
		}
	}}}, silent, sound)
	streamsAt(t, silent, sound)
	results, errs := crowd(within(t, patience), c, 200)
	requireOwnOrders(t, shared, results, errs)
	given := silent.grabs.Load()
	require.Positive(t, given)
	for until := time.Now().Add(5 * stall); time.Now().Before(until); {
		results, errs := crowd(within(t, patience), c, 50)
		requireOwnOrders(t, shared, results, errs)
	}
	require.Equal(t, given, silent.grabs.Load())
	mu.Lock()
	defer mu.Unlock()
	require.NotEmpty(t, ends)
	for _, err := range ends {
		require.ErrorContains(t, err, "the server owes answers and is silent")
	}
}

// The hung gateway may still decide what it was sent, at any time: whoever was
// with it hears an order or that it is unknown, and no refusal.
func TestGrab_RefusalAfterASilentAttemptIsUnknown(t *testing.T) {
	shared := newBook()
	var mu sync.Mutex
	met := map[int64]bool{}
	silent := start(t, &server{book: shared, stream: func(rpc grabStream) error {
		for {
			message, err := rpc.Recv()
			if err != nil {
				return err
			}
			mu.Lock()
			for _, g := range message.GetGrabs() {
				met[g.GetUserId()] = true
			}
			mu.Unlock()
		}
	}})
	sold := start(t, &server{book: shared, grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		return refused(g, client.SoldOut)
	}})
	c := connect(t, client.Config{StallTimeout: 1500 * time.Millisecond}, silent, sold)
	streamsAt(t, silent, sold)
	ctx := within(t, patience)
	results, errs := crowd(ctx, c, 20)
	require.NoError(t, ctx.Err(), "nobody waits for what cannot be known in time")
	mu.Lock()
	defer mu.Unlock()
	require.NotEmpty(t, met)
	for user := 1; user < len(results); user++ {
		if met[int64(user)] {
			e := requireError(t, errs[user], client.ErrOutcomeUnknown, client.ErrUnavailable)
			require.Greater(t, e.RetryAfter, patience/2, "when a refusal can be believed")
		} else {
			require.NoError(t, errs[user])
			require.Equal(t, client.SoldOut, results[user].Outcome)
		}
	}
}

// Some fault lets one Grab break every stream that it travels on. It takes
// others with it: so it must not come back at once for as long as its caller waits.
func TestGrab_ThatBreaksItsStreamsIsRepeatedWithPauses(t *testing.T) {
	const poison = 666_666
	s := &server{}
	var broken atomic.Int64
	s.stream = func(rpc grabStream) error {
		for {
			message, err := rpc.Recv()
			if err != nil {
				return err
			}
			answers := &seckillv1.GrabStreamResponse{}
			for _, g := range message.GetGrabs() {
				if g.GetUserId() == poison {
					broken.Add(1)
					return status.Error(codes.Internal, "internal error")
				}
				answers.Answers = append(answers.Answers, s.admit(g))
			}
			if err := rpc.Send(answers); err != nil {
				return err
			}
		}
	}
	start(t, s)
	c := connect(t, client.Config{Connections: 4, Streams: 4}, s)
	require.Eventually(t, func() bool { return s.streams.Load() >= 16 }, patience, time.Millisecond)
	done := make(chan error, 1)
	ctx := within(t, time.Second)
	go func() {
		_, err := c.Grab(ctx, poison, 1)
		done <- err
	}()
	for ctx.Err() == nil {
		results, errs := crowd(within(t, patience), c, 100)
		requireOwnOrders(t, s.book, results, errs)
	}
	requireError(t, <-done, client.ErrOutcomeUnknown)
	require.Positive(t, broken.Load())
	require.Less(t, broken.Load(), int64(15))
}

// The bound on waiting is for those who come, not for those who were on their
// way when their stream broke.
func TestGrab_LostWithItsStreamWaitsBeyondTheBound(t *testing.T) {
	const callers = 300
	s := &server{}
	s.stream = func(rpc grabStream) error {
		first := s.streams.Load() == 1
		for read := 0; ; {
			message, err := rpc.Recv()
			if err != nil {
				return err
			}
			if read += len(message.GetGrabs()); first && read < callers {
				continue
			} else if first {
				return status.Error(codes.Internal, "broken")
			}
			answers := &seckillv1.GrabStreamResponse{}
			for _, g := range message.GetGrabs() {
				answers.Answers = append(answers.Answers, s.admit(g))
			}
			if err := rpc.Send(answers); err != nil {
				return err
			}
		}
	}
	start(t, s)
	opened := make(chan struct{}, 100)
	c := connect(t, client.Config{Connections: 1, Streams: 1, MaxWaiting: 1, Hooks: client.Hooks{
		StreamOpened: func(client.StreamOpened) { opened <- struct{}{} },
	}}, s)
	<-opened
	results, errs := crowd(within(t, patience), c, callers)
	requireOwnOrders(t, s.book, results, errs)
	require.Greater(t, s.streams.Load(), int64(1))
}

// streamsUsed starts a server that counts how many of its streams got Grabs. It
// answers while hold is not locked.
func streamsUsed(t testing.TB, shared *book, hold *sync.RWMutex) (s *server, used *atomic.Int64) {
	s, used = &server{book: shared}, new(atomic.Int64)
	s.stream = func(rpc grabStream) error {
		fresh := true
		for {
			message, err := rpc.Recv()
			if err != nil {
				return nil
			}
			if fresh {
				used.Add(1)
				fresh = false
			}
			answers := &seckillv1.GrabStreamResponse{}
			hold.RLock()
			for _, g := range message.GetGrabs() {
				answers.Answers = append(answers.Answers, s.admit(g))
			}
			hold.RUnlock()
			if err := rpc.Send(answers); err != nil {
				return err
			}
		}
	}
	return start(t, s), used
}

func TestGrab_FewCallersUseOneStreamToEachGateway(t *testing.T) {
	shared := newBook()
	var hold sync.RWMutex
	one, usedOfOne := streamsUsed(t, shared, &hold)
	two, usedOfTwo := streamsUsed(t, shared, &hold)
	var opened atomic.Int64
	c := connect(t, client.Config{Connections: 2, Streams: 2, Hooks: client.Hooks{
		StreamOpened: func(client.StreamOpened) { opened.Add(1) },
	}}, one, two)
	require.Eventually(t, func() bool { return opened.Load() == 8 }, patience, time.Millisecond)
	for range 20 {
		results, errs := crowd(within(t, patience), c, 16)
		requireOwnOrders(t, shared, results, errs)
	}
	require.Equal(t, int64(1), usedOfOne.Load())
	require.Equal(t, int64(1), usedOfTwo.Load())
	hold.Lock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		results, errs := crowd(within(t, patience), c, 3000)
		requireOwnOrders(t, shared, results, errs)
	}()
	require.Eventually(t, func() bool { return usedOfOne.Load() == 4 && usedOfTwo.Load() == 4 }, patience, time.Millisecond, "a crowd uses all")
	hold.Unlock()
	<-done
}
