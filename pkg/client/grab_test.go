package client_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

// crowd lets users 1..n grab at once.
func crowd(ctx context.Context, c *client.Client, n int, options ...client.GrabOption) (results []client.Result, errs []error) {
	results, errs = make([]client.Result, n+1), make([]error, n+1)
	var callers sync.WaitGroup
	for user := 1; user <= n; user++ {
		callers.Go(func() { results[user], errs[user] = c.Grab(ctx, int64(user), 1, options...) })
	}
	callers.Wait()
	return results, errs
}

// requireOwnOrders requires each user to have the order that the book has.
func requireOwnOrders(t testing.TB, b *book, results []client.Result, errs []error) {
	t.Helper()
	ids := map[string]bool{}
	for user := 1; user < len(results); user++ {
		require.NoError(t, errs[user], "user %d", user)
		require.True(t, results[user].Admitted())
		order := results[user].Order
		require.Equal(t, int64(user), order.UserID)
		require.Equal(t, b.order(int64(user), 1), order.ID)
		require.False(t, ids[order.ID])
		ids[order.ID] = true
	}
}

func TestGrab_AnswerHasAllFields(t *testing.T) {
	var got atomic.Pointer[seckillv1.StreamedGrab]
	s := &server{}
	s.grab = func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer { got.Store(g); return s.admit(g) }
	start(t, s)
	c := connect(t, client.Config{Traceparent: func(context.Context) string { return traceparent }}, s)
	first, err := c.Grab(within(t, patience), 7, 3, client.WithReference("cart-é"))
	require.NoError(t, err)
	require.Equal(t, client.Order{
		ID: s.order(7, 3), UserID: 7, VoucherID: 3, State: seckillv1.OrderState_ORDER_STATE_PENDING,
		AdmittedAt: first.DecidedAt, Reference: "cart-é",
	}, first.Order)
	require.True(t, first.Admitted())
	require.False(t, first.Replayed)
	require.False(t, first.DecidedAt.IsZero())
	require.Equal(t, seckillv1.Durability_DURABILITY_STRICT, first.Durability)
	require.Equal(t, traceparent, got.Load().GetTraceparent())
	require.Greater(t, got.Load().GetTimeoutMs(), uint32(1000))
	require.LessOrEqual(t, got.Load().GetTimeoutMs(), uint32(patience.Milliseconds()+1))

	again, err := c.Grab(t.Context(), 7, 3, client.WithTraceparent("nonsense"))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Order.ID, again.Order.ID)
	require.Empty(t, got.Load().GetTraceparent())
	require.LessOrEqual(t, got.Load().GetTimeoutMs(), uint32(2001), "the default where ctx has no deadline")

	order, err := c.GetOrder(t.Context(), 7, 3)
	require.NoError(t, err)
	require.Equal(t, first.Order.ID, order.ID)
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, order.State)
	_, err = c.GetOrder(t.Context(), 8, 3)
	requireError(t, err, client.ErrOrderNotFound)
	require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
}

func TestGrab_RefusalsAreNoErrors(t *testing.T) {
	outcomes := []client.Outcome{client.SoldOut, client.NotStarted, client.Ended, client.Paused}
	s := start(t, &server{grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		return refused(g, outcomes[g.GetUserId()-1])
	}})
	c := connect(t, client.Config{}, s)
	for i, want := range outcomes {
		result, err := c.Grab(within(t, patience), int64(i+1), 1)
		require.NoError(t, err)
		require.Equal(t, want, result.Outcome)
		require.False(t, result.Admitted())
		require.Zero(t, result.Order)
	}
}

// shuffle answers what has come in any order, some of it much later, in
// messages of any size, each twice, and now and then with ids that nobody sent.
func shuffle(s *server) func(grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
	return func(rpc grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
		var mu sync.Mutex
		var owed []*seckillv1.StreamedAnswer
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			for {
				message, err := rpc.Recv()
				if err != nil {
					return
				}
				mu.Lock()
				for _, g := range message.GetGrabs() {
					owed = append(owed, s.admit(g))
				}
				mu.Unlock()
			}
		}()
		for {
			mu.Lock()
			rand.Shuffle(len(owed), func(i, j int) { owed[i], owed[j] = owed[j], owed[i] })
			n := rand.IntN(len(owed) + 1)
			var send []*seckillv1.StreamedAnswer
			for _, a := range owed[:n] {
				stranger := refused(&seckillv1.StreamedGrab{CorrelationId: a.GetCorrelationId() + rand.Uint64N(1<<40)<<16 + 1<<16}, client.SoldOut)
				send = append(send, stranger, a, a)
			}
			owed = owed[n:]
			mu.Unlock()
			if err := rpc.Send(&seckillv1.GrabStreamResponse{Answers: send}); err != nil {
				<-closed
				return err
			}
			select {
			case <-closed:
				if mu.Lock(); len(owed) == 0 {
					return nil
				}
				mu.Unlock()
			case <-time.After(time.Millisecond):
			}
		}
	}
}

func TestGrab_ThousandCallersAnsweredInAnyOrder(t *testing.T) {
	s := &server{}
	s.stream = shuffle(s)
	start(t, s)
	c := connect(t, client.Config{}, s)
	for range 3 {
		results, errs := crowd(within(t, patience), c, 1000)
		requireOwnOrders(t, s.book, results, errs)
	}
}

// Grabs that come while a message is sent travel together.
func TestGrab_ConcurrentCallersShareMessages(t *testing.T) {
	s := start(t, &server{})
	c := connect(t, client.Config{Connections: 1, Streams: 1}, s)
	for range 5 {
		results, errs := crowd(within(t, patience), c, 2000)
		requireOwnOrders(t, s.book, results, errs)
	}
	require.Equal(t, int64(10_000), s.grabs.Load())
	require.Less(t, s.messages.Load(), s.grabs.Load()/2)
}

// A full message of the largest Grabs is within what a server takes.
func TestGrab_LargestMessageFits(t *testing.T) {
	s := &server{}
	hold := make(chan struct{})
	var largest atomic.Int64
	s.stream = func(rpc grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
		<-hold
		for {
			message, err := rpc.Recv()
			if err != nil {
				return err
			}
			largest.Store(max(largest.Load(), int64(len(message.GetGrabs()))))
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
	c := connect(t, client.Config{Connections: 1, Streams: 1}, s)
	ctx := within(t, patience)
	var callers sync.WaitGroup
	for user := range 3000 {
		callers.Go(func() {
			_, err := c.Grab(ctx, 1<<62+int64(user), 1<<62, client.WithReference(strings.Repeat("é", 32)), client.WithTraceparent(traceparent))
			require.NoError(t, err)
		})
	}
	time.AfterFunc(200*time.Millisecond, func() { close(hold) }) // lets them gather; nothing depends on it but the size
	callers.Wait()
	require.Greater(t, largest.Load(), int64(100))
	require.LessOrEqual(t, largest.Load(), int64(256))
}

// The answers to callers that have left come late, when their places are taken
// by others.
func TestGrab_CallerLeavesAndItsLateAnswerMeetsNobody(t *testing.T) {
	s := &server{}
	var hold sync.Mutex
	s.grab = func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		hold.Lock()
		defer hold.Unlock()
		return s.admit(g)
	}
	start(t, s)
	c := connect(t, client.Config{Connections: 1, Streams: 1}, s)
	hold.Lock()
	ctx, cancel := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	for user := range 500 {
		callers.Go(func() {
			_, err := c.Grab(ctx, int64(10_000+user), 1)
			requireError(t, err, context.Canceled)
		})
	}
	_, err := c.Grab(within(t, 50*time.Millisecond), 20_000, 1)
	e := requireError(t, err, context.DeadlineExceeded, client.ErrOutcomeUnknown)
	require.Equal(t, codes.DeadlineExceeded, e.Code)
	cancel()
	callers.Wait()
	time.AfterFunc(50*time.Millisecond, hold.Unlock)
	results, errs := crowd(within(t, patience), c, 1000)
	requireOwnOrders(t, s.book, results, errs)
}

func TestGrab_ContextThatHasEndedSendsNothing(t *testing.T) {
	s := start(t, &server{})
	c := connect(t, client.Config{}, s)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.Grab(ctx, 1, 1)
	requireError(t, err, context.Canceled)
	require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
	require.Zero(t, s.grabs.Load())
}

// The server is owed no more than its bound, whoever waits.
func TestGrab_InFlightOfAStreamIsBounded(t *testing.T) {
	release := make(chan struct{})
	var inFlight, most atomic.Int64
	s := &server{}
	s.stream = func(rpc grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
		var sending sync.Mutex
		var all sync.WaitGroup
		defer all.Wait()
		for {
			message, err := rpc.Recv()
			if err != nil {
				return nil
			}
			n := inFlight.Add(int64(len(message.GetGrabs())))
			most.Store(max(n, most.Load()))
			for _, g := range message.GetGrabs() {
				all.Go(func() {
					<-release
					inFlight.Add(-1)
					sending.Lock()
					defer sending.Unlock()
					_ = rpc.Send(&seckillv1.GrabStreamResponse{Answers: []*seckillv1.StreamedAnswer{s.admit(g)}})
				})
			}
		}
	}
	start(t, s)
	c := connect(t, client.Config{Connections: 1, Streams: 1}, s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		results, errs := crowd(within(t, patience), c, 2000)
		requireOwnOrders(t, s.book, results, errs)
	}()
	require.Eventually(t, func() bool { return inFlight.Load() == 768 }, patience, time.Millisecond)
	close(release)
	<-done
	require.Equal(t, int64(768), most.Load())
}

func TestGrab_WaitingIsBounded(t *testing.T) {
	const bound = 10
	c, err := client.New(client.Config{
		Addresses: []string{"127.0.0.1:1"}, MaxWaiting: bound, // nobody listens there
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	require.NoError(t, err)
	defer c.Close(t.Context())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	refusals := make(chan error, 2*bound)
	var callers sync.WaitGroup
	for user := range 2 * bound {
		callers.Go(func() {
			_, err := c.Grab(ctx, int64(user+1), 1)
			refusals <- err
		})
	}
	for range bound {
		e := requireError(t, <-refusals, client.ErrOverloaded)
		require.NotErrorIs(t, e, client.ErrOutcomeUnknown)
	}
	cancel()
	callers.Wait()
	for range bound {
		requireError(t, <-refusals, context.Canceled)
	}
	// Who left has made room.
	_, err = c.Grab(within(t, 100*time.Millisecond), 1, 1)
	requireError(t, err, context.DeadlineExceeded, client.ErrUnavailable)
	require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
	require.ErrorContains(t, err, "no gateway can be reached")
	require.ErrorContains(t, err, "connection refused")
}

func TestGrab_TellsTheHook(t *testing.T) {
	var mu sync.Mutex
	var grabs []client.GrabDone
	s := &server{}
	s.grab = func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		if s.grabs.Load() == 1 {
			return failed(g, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, time.Millisecond)
		}
		return s.admit(g)
	}
	start(t, s)
	var opened, ended atomic.Int64
	c := connect(t, client.Config{Hooks: client.Hooks{
		GrabDone:     func(d client.GrabDone) { mu.Lock(); defer mu.Unlock(); grabs = append(grabs, d) },
		StreamOpened: func(o client.StreamOpened) { require.Equal(t, s.addr, o.Target); opened.Add(1) },
		StreamEnded:  func(e client.StreamEnded) { require.NoError(t, e.Err); ended.Add(1) },
	}}, s)
	_, err := c.Grab(within(t, patience), 7, 3)
	require.NoError(t, err)
	_, err = c.Grab(within(t, patience), 7, 3, client.WithReference("\xff"))
	require.Error(t, err)
	require.Len(t, grabs, 2)
	require.Positive(t, grabs[0].Latency)
	grabs[0].Latency = 0
	require.Equal(t, client.GrabDone{VoucherID: 3, Outcome: client.Admitted, Attempts: 2}, grabs[0])
	require.ErrorIs(t, grabs[1].Err, client.ErrInvalid)
	require.NoError(t, c.Close(within(t, patience)))
	require.Positive(t, opened.Load())
	require.Equal(t, opened.Load(), ended.Load())
}

func TestNew_RefusesContradictions(t *testing.T) {
	plain := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	for _, config := range []client.Config{
		{DialOptions: plain},
		{DialOptions: plain, Target: "a:1", Addresses: []string{"b:1"}},
		{DialOptions: plain, Addresses: []string{"b:1", ""}},
		{DialOptions: plain, Target: "a:1", Streams: -1},
		{DialOptions: plain, Target: "a:1", Timeout: -1},
		{Target: "a:1"},
	} {
		_, err := client.New(config)
		require.Error(t, err, fmt.Sprintf("%+v", config))
	}
}

func TestError_IsWhatItSays(t *testing.T) {
	e := &client.Error{Code: codes.Unavailable, Reason: seckillv1.ErrorReason_ERROR_REASON_REBUILDING, Message: "closed", Attempts: 3, OutcomeUnknown: true}
	wrapped := fmt.Errorf("grabbing: %w", e)
	for _, is := range []error{client.ErrRebuilding, client.ErrUnavailable, client.ErrOutcomeUnknown} {
		require.ErrorIs(t, wrapped, is)
	}
	for _, not := range []error{client.ErrOverloaded, client.ErrClosed, client.ErrInvalid, context.DeadlineExceeded, errors.ErrUnsupported} {
		require.NotErrorIs(t, wrapped, not)
	}
	require.Equal(t, "seckill: Unavailable REBUILDING after 3 attempts: closed (the order may exist)", e.Error())
}
