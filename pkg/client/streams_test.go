package client_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os/exec"
	"runtime"
	"strings"
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
	requireError(t, err, client.ErrOutcomeUnknown)
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

// Nobody is under way, so that there is nothing to wait for, nor to fail.
func TestClose_WithoutCallersNeedsNoTime(t *testing.T) {
	s := start(t, &server{})
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for range 20 {
		var opened, failures atomic.Int64
		c := connect(t, client.Config{Hooks: client.Hooks{
			StreamOpened: func(client.StreamOpened) { opened.Add(1) },
			StreamEnded: func(e client.StreamEnded) {
				if e.Err != nil {
					failures.Add(1)
				}
			},
		}}, s)
		require.Eventually(t, func() bool { return opened.Load() == 4 }, patience, time.Millisecond)
		require.NoError(t, c.Close(over))
		require.Zero(t, failures.Load(), "the client itself has ended them")
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
