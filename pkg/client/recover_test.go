package client_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

type grabStream = grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]

// decideAndBreak decides every Grab of the first message, keeps the answers to
// itself and ends the stream with an error.
func decideAndBreak(s *server, why error) func(grabStream) error {
	return func(rpc grabStream) error {
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		for _, g := range message.GetGrabs() {
			s.admit(g)
		}
		return why
	}
}

// streamsAt waits until every server has a stream: the next Grabs go to all.
func streamsAt(t testing.TB, servers ...*server) {
	t.Helper()
	for _, s := range servers {
		require.Eventually(t, func() bool { return s.streams.Load() > 0 }, patience, time.Millisecond)
	}
}

func TestGrab_BrokenStreamIsRepeatedElsewhereAndGetsTheSameOrder(t *testing.T) {
	shared := newBook()
	breaking := &server{book: shared}
	breaking.stream = decideAndBreak(breaking, status.Error(codes.Internal, "broken"))
	start(t, breaking)
	sound := start(t, &server{book: shared})
	c := connect(t, client.Config{}, breaking, sound)
	streamsAt(t, breaking, sound)
	results, errs := crowd(within(t, patience), c, 1000)
	requireOwnOrders(t, shared, results, errs)
	replayed := 0
	for _, r := range results {
		if r.Replayed {
			replayed++
		}
	}
	require.Positive(t, replayed, "the first server has decided some")
	require.Len(t, shared.orders, 1000)
}

func TestGrab_LostConnectionsUnderLoadLoseNoCaller(t *testing.T) {
	shared := newBook()
	var servers []*server
	for range 2 {
		s := &server{book: shared}
		s.stream = shuffle(s)
		servers = append(servers, start(t, s))
	}
	c := connect(t, client.Config{}, servers...)
	stop := make(chan struct{})
	var breaker sync.WaitGroup
	breaker.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(rand.N(40 * time.Millisecond)):
				servers[i%2].breakConns()
			}
		}
	})
	for range 10 {
		results, errs := crowd(within(t, patience), c, 1000)
		requireOwnOrders(t, shared, results, errs)
	}
	close(stop)
	breaker.Wait()
	require.Len(t, shared.orders, 1000)
}

// What is read of a server that shuts down is answered; the rest goes elsewhere
// and is not of unknown outcome.
func TestGrab_ShuttingDownIsNoError(t *testing.T) {
	shared := newBook()
	leaving := &server{book: shared}
	leaving.stream = func(rpc grabStream) error {
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		answers := &seckillv1.GrabStreamResponse{}
		for i, g := range message.GetGrabs() {
			if i%2 == 0 {
				answers.Answers = append(answers.Answers, leaving.admit(g))
			}
		}
		_ = rpc.Send(answers)
		return fault(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN, 100*time.Millisecond)
	}
	start(t, leaving)
	sold := start(t, &server{book: shared, grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		if id := shared.order(g.GetUserId(), 1); id != "" {
			return decided(g, shared.decide(g.GetUserId(), 1, ""))
		}
		return refused(g, client.SoldOut)
	}})
	c := connect(t, client.Config{}, leaving, sold)
	streamsAt(t, leaving, sold)
	results, errs := crowd(within(t, patience), c, 500)
	soldOut := 0
	for user := 1; user < len(results); user++ {
		require.NoError(t, errs[user])
		if results[user].Outcome == client.SoldOut {
			soldOut++
			continue
		}
		require.Equal(t, shared.order(int64(user), 1), results[user].Order.ID)
	}
	require.Equal(t, 500-len(shared.orders), soldOut)
}

// A refusal right after a lost attempt may be followed by that attempt's order:
// it is not told before that can no more be.
func TestGrab_RefusalAfterALostAttemptIsAskedForAgain(t *testing.T) {
	shared := newBook()
	losing := start(t, &server{book: shared, stream: func(rpc grabStream) error {
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		for _, g := range message.GetGrabs() { // decided only after the refusal elsewhere
			time.AfterFunc(300*time.Millisecond, func() { shared.decide(g.GetUserId(), g.GetVoucherId(), "") })
		}
		return status.Error(codes.Unavailable, "gone")
	}})
	refusals := atomic.Int64{}
	sold := start(t, &server{book: shared, grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		if shared.order(g.GetUserId(), 1) != "" {
			return decided(g, shared.decide(g.GetUserId(), 1, ""))
		}
		refusals.Add(1)
		return refused(g, client.SoldOut)
	}})
	c := connect(t, client.Config{Connections: 1, Streams: 1}, losing, sold)
	streamsAt(t, losing, sold)
	// Who did not pass by the losing server is sold out; who did has the order.
	results, errs := crowd(within(t, patience), c, 20)
	for user := 1; user < len(results); user++ {
		require.NoError(t, errs[user])
		if shared.order(int64(user), 1) != "" {
			require.True(t, results[user].Admitted(), "user %d has an order", user)
		} else {
			require.Equal(t, client.SoldOut, results[user].Outcome)
		}
	}
	require.NotEmpty(t, shared.orders)
	require.Greater(t, refusals.Load(), int64(20-len(shared.orders)), "some were refused at first")
}

func TestGrab_RefusalAfterALostAttemptIsUnknownWhereTimeIsShort(t *testing.T) {
	s := &server{}
	s.stream = func(rpc grabStream) error {
		if s.streams.Load() == 1 {
			_, _ = rpc.Recv()
			return status.Error(codes.Unavailable, "gone")
		}
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		return rpc.Send(&seckillv1.GrabStreamResponse{Answers: []*seckillv1.StreamedAnswer{refused(message.GetGrabs()[0], client.SoldOut)}})
	}
	start(t, s)
	_, err := connect(t, client.Config{Connections: 1, Streams: 1}, s).Grab(within(t, 500*time.Millisecond), 1, 1)
	requireError(t, err, client.ErrOutcomeUnknown)
}

func TestGrab_StalledServerIsGivenUp(t *testing.T) {
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
	c := connect(t, client.Config{StallTimeout: 200 * time.Millisecond}, silent, sound)
	streamsAt(t, silent, sound)
	results, errs := crowd(within(t, patience), c, 200)
	requireOwnOrders(t, shared, results, errs)
	require.Positive(t, silent.grabs.Load())
}

func TestGrab_OldServerGetsUnaryCallsUntilItKnowsStreams(t *testing.T) {
	s := &server{}
	var knows atomic.Bool
	s.stream = func(rpc grabStream) error {
		if !knows.Load() {
			return status.Error(codes.Unimplemented, "unknown method GrabStream")
		}
		return shuffle(s)(rpc)
	}
	start(t, s)
	c := connect(t, client.Config{StreamRetry: 50 * time.Millisecond}, s)
	results, errs := crowd(within(t, patience), c, 2000)
	requireOwnOrders(t, s.book, results, errs)
	require.Equal(t, int64(2000), s.unaries.Load())
	knows.Store(true)
	require.Eventually(t, func() bool {
		before := s.unaries.Load()
		results, errs := crowd(within(t, patience), c, 100)
		requireOwnOrders(t, s.book, results, errs)
		return s.unaries.Load() == before
	}, patience, 10*time.Millisecond)
}

func TestGrab_UnaryCallsAreRepeatedAsWell(t *testing.T) {
	s := &server{stream: func(grabStream) error { return status.Error(codes.Unimplemented, "unknown method GrabStream") }}
	s.unary = func(r *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
		switch {
		case r.GetVoucherId() == 2:
			return nil, fault(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, 0)
		case s.unaries.Load() == 1:
			return nil, fault(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, 10*time.Millisecond)
		}
		return s.decide(r.GetUserId(), r.GetVoucherId(), r.GetReference()), nil
	}
	start(t, s)
	c := connect(t, client.Config{}, s)
	result, err := c.Grab(t.Context(), 1, 1, client.WithReference("r"))
	require.NoError(t, err)
	require.True(t, result.Admitted())
	require.Equal(t, "r", result.Order.Reference)
	_, err = c.Grab(t.Context(), 1, 2)
	requireError(t, err, client.ErrVoucherNotFound)
	require.Equal(t, int64(3), s.unaries.Load())
}

func TestGetOrder_IsRepeated(t *testing.T) {
	shared := newBook()
	shared.decide(1, 1, "")
	var asked atomic.Int64
	s := &server{book: shared}
	s.look = func(r *seckillv1.GetOrderRequest) (*seckillv1.GetOrderResponse, error) {
		if asked.Add(1) < 3 {
			return nil, fault(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, 10*time.Millisecond)
		}
		return &seckillv1.GetOrderResponse{Order: &seckillv1.Order{OrderId: shared.order(1, 1), UserId: r.GetUserId()}}, nil
	}
	start(t, s)
	order, err := connect(t, client.Config{}, s).GetOrderByID(within(t, patience), 1, shared.order(1, 1))
	require.NoError(t, err)
	require.Equal(t, shared.order(1, 1), order.ID)
	require.Equal(t, int64(3), asked.Load())
}

func TestStreams_AreRenewedWithoutAGap(t *testing.T) {
	s := &server{}
	s.stream = shuffle(s)
	start(t, s)
	var renewed, broken, lost atomic.Int64
	c := connect(t, client.Config{StreamAge: 10 * time.Millisecond, Hooks: client.Hooks{StreamEnded: func(e client.StreamEnded) {
		if e.Err != nil {
			broken.Add(1)
		}
		lost.Add(int64(e.Lost))
		renewed.Add(1)
	}}}, s)
	for renewed.Load() < 100 {
		results, errs := crowd(within(t, patience), c, 500)
		requireOwnOrders(t, s.book, results, errs)
	}
	require.Zero(t, broken.Load())
	require.Zero(t, lost.Load())
}

// A target with two addresses, as DNS would answer: both get streams, and those
// of one that goes away move.
func TestTarget_StreamsAreSpreadOverItsAddresses(t *testing.T) {
	shared := newBook()
	one, two := start(t, &server{book: shared}), start(t, &server{book: shared})
	addresses := manual.NewBuilderWithScheme("test")
	addresses.InitialState(resolver.State{Addresses: []resolver.Address{{Addr: one.addr}, {Addr: two.addr}}})
	c := connect(t, client.Config{
		Target: "test:///gateways", StreamAge: 50 * time.Millisecond, DialOptions: []grpc.DialOption{grpc.WithResolvers(addresses)},
	})
	require.Eventually(t, func() bool {
		results, errs := crowd(within(t, patience), c, 200)
		requireOwnOrders(t, shared, results, errs)
		return one.grabs.Load() > 0 && two.grabs.Load() > 0
	}, patience, time.Millisecond)
	one.grpc.Stop()
	before := two.grabs.Load()
	results, errs := crowd(within(t, patience), c, 200)
	requireOwnOrders(t, shared, results, errs)
	require.GreaterOrEqual(t, two.grabs.Load(), before+200-1)
}

// accepting counts connections and closes each at once.
func accepting(t *testing.T) (addr string, accepted *atomic.Int64) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	accepted = new(atomic.Int64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String(), accepted
}

func TestDial_DeadAddressIsTriedWithGrowingPauses(t *testing.T) {
	addr, accepted := accepting(t)
	sound := start(t, &server{})
	c := connect(t, client.Config{Addresses: []string{addr}, Connections: 1}, sound)
	ctx := within(t, 2*time.Second)
	for user := int64(1); ctx.Err() == nil; user++ {
		result, err := c.Grab(t.Context(), user, 1)
		require.NoError(t, err, "the other one answers")
		require.True(t, result.Admitted())
	}
	// 50 ms, then 1.6 times as long each time: about 7 in 2 s; without pauses thousands.
	require.Positive(t, accepted.Load())
	require.Less(t, accepted.Load(), int64(20))
}

// A server that ends every stream at once is not asked again and again.
func TestStreams_ThatEndAtOnceAreOpenedWithPauses(t *testing.T) {
	s := start(t, &server{stream: func(grabStream) error { return status.Error(codes.Internal, "no") }})
	c := connect(t, client.Config{Connections: 1, Streams: 1}, s)
	_, err := c.Grab(within(t, 2*time.Second), 1, 1)
	requireError(t, err, context.DeadlineExceeded)
	require.Less(t, s.streams.Load(), int64(40))
}

// A server that refuses the credentials says so to callers, at once.
func TestStreams_RefusedCredentialsAreTold(t *testing.T) {
	s := start(t, &server{stream: func(rpc grabStream) error { return status.Error(codes.Unauthenticated, "who are you") }})
	_, err := connect(t, client.Config{}, s).Grab(within(t, patience), 1, 1)
	e := requireError(t, err)
	require.Equal(t, codes.Unauthenticated, e.Code)
	require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
}

func TestClose_WaitsForCallersAndRefusesNewOnes(t *testing.T) {
	release := make(chan struct{})
	s := &server{}
	s.grab = func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer { <-release; return s.admit(g) }
	start(t, s)
	c := connect(t, client.Config{Timeout: patience}, s)
	var results []client.Result
	var errs []error
	done := make(chan struct{})
	go func() { defer close(done); results, errs = crowd(t.Context(), c, 300) }()
	require.Eventually(t, func() bool { return s.grabs.Load() > 0 }, patience, time.Millisecond)
	closed := make(chan error, 1)
	ctx := within(t, patience)
	go func() { closed <- c.Close(ctx) }()
	require.Eventually(t, func() bool {
		_, err := c.Grab(within(t, time.Millisecond), 1, 1)
		return errors.Is(err, client.ErrClosed)
	}, patience, time.Millisecond)
	select {
	case <-closed:
		require.Fail(t, "callers are waiting")
	default:
	}
	close(release)
	require.NoError(t, <-closed)
	<-done
	for user := 1; user <= 300; user++ { // a few may have come too late
		if errs[user] != nil {
			requireError(t, errs[user], client.ErrClosed)
			require.NotErrorIs(t, errs[user], client.ErrOutcomeUnknown)
		} else {
			require.Equal(t, s.order(int64(user), 1), results[user].Order.ID)
		}
	}
	_, err := c.GetOrder(t.Context(), 1, 1)
	requireError(t, err, client.ErrClosed)
}

func TestClose_FailsCallersWhenItsTimeIsOver(t *testing.T) {
	for name, s := range map[string]*server{
		"sent":    {stream: func(rpc grabStream) error { <-rpc.Context().Done(); return nil }},
		"unary":   {stream: func(grabStream) error { return status.Error(codes.Unimplemented, "") }},
		"waiting": nil,
	} {
		t.Run(name, func(t *testing.T) {
			var came atomic.Int64
			config := client.Config{Timeout: time.Hour, StallTimeout: time.Hour, Traceparent: func(context.Context) string {
				came.Add(1)
				return ""
			}}
			end := make(chan struct{})
			if s == nil {
				config.Addresses = []string{"127.0.0.1:1"}
			} else {
				s.unary = func(*seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) { <-end; return nil, io.EOF }
				config.Addresses = []string{start(t, s).addr}
			}
			config.DialOptions = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
			before := goleak.IgnoreCurrent()
			c, err := client.New(config)
			require.NoError(t, err)
			var errs []error
			done := make(chan struct{})
			go func() { defer close(done); _, errs = crowd(t.Context(), c, 1000) }()
			require.Eventually(t, func() bool { return came.Load() == 1000 }, patience, time.Millisecond)
			require.ErrorIs(t, c.Close(within(t, 200*time.Millisecond)), context.DeadlineExceeded)
			<-done
			for user := 1; user <= 1000; user++ {
				requireError(t, errs[user], client.ErrClosed)
			}
			require.NoError(t, c.Close(t.Context()), "again")
			if close(end); s != nil {
				s.breakConns()
			}
			goleak.VerifyNone(t, before)
		})
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestStreams_ThousandReconnectsLeaveNothing(t *testing.T) {
	s := &server{}
	s.stream = shuffle(s)
	start(t, s)
	const streams = 32
	var opened, ended atomic.Int64
	c := connect(t, client.Config{Connections: streams / 2, Streams: 2, Hooks: client.Hooks{
		StreamOpened: func(client.StreamOpened) { opened.Add(1) },
		StreamEnded:  func(client.StreamEnded) { ended.Add(1) },
	}}, s)
	reconnect := func(until int64) {
		for ended.Load() < until {
			require.Eventually(t, func() bool { return opened.Load()-ended.Load() == streams }, patience, time.Millisecond)
			results, errs := crowd(within(t, patience), c, 200)
			requireOwnOrders(t, s.book, results, errs)
			s.breakConns()
		}
	}
	quiet := func() (goroutines int, bytes uint64) {
		results, errs := crowd(within(t, patience), c, 200)
		requireOwnOrders(t, s.book, results, errs)
		for range 40 { // streams and their connections come and go for a moment
			time.Sleep(10 * time.Millisecond)
			goroutines = max(goroutines, runtime.NumGoroutine())
		}
		return goroutines, heap()
	}
	reconnect(100)
	goroutinesBefore, before := quiet()
	reconnect(1100)
	require.Eventually(t, func() bool {
		goroutines, after := quiet()
		// 1,000 streams hold 20 KB each, with their buffers far more.
		return goroutines <= goroutinesBefore+20 && after < before+4<<20
	}, patience, time.Millisecond)
}

// The package is for other services: it brings nothing but the API and gRPC.
func TestPackage_DependsOnTheAPIAndGRPCOnly(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	require.NoError(t, err)
	for path := range strings.FieldsSeq(string(out)) {
		allowed := false
		for _, prefix := range []string{
			"github.com/seckill/seckill/proto/", "github.com/seckill/seckill/pkg/client", "google.golang.org/",
			"golang.org/x/", "github.com/cenkalti/backoff/",
		} {
			allowed = allowed || strings.HasPrefix(path, prefix)
		}
		require.True(t, allowed, path)
	}
}
