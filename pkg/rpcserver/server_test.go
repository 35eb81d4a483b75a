package rpcserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// service is the handler under the server; a nil function answers OK.
type service struct {
	testpb.UnimplementedTestServiceServer
	unary  func(context.Context) error
	stream func(testpb.TestService_FullDuplexCallServer) error
}

func (s *service) EmptyCall(ctx context.Context, _ *testpb.Empty) (*testpb.Empty, error) {
	if s.unary != nil {
		if err := s.unary(ctx); err != nil {
			return nil, err
		}
	}
	return &testpb.Empty{}, nil
}

func (s *service) UnaryCall(context.Context, *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
	return &testpb.SimpleResponse{}, nil
}

func (s *service) FullDuplexCall(ss testpb.TestService_FullDuplexCallServer) error {
	return s.stream(ss)
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// running is a server with the service on it.
type running struct {
	*Server
	t      *testing.T
	log    *lockedBuffer
	cancel context.CancelFunc
	done   chan error
}

func start(t *testing.T, o Options, svc *service) *running {
	t.Helper()
	r := &running{t: t, log: &lockedBuffer{}, done: make(chan error, 1)}
	o.Addr = "127.0.0.1:0"
	o.Logger = slog.New(slog.NewTextHandler(r.log, nil))
	var err error
	r.Server, err = New(o)
	require.NoError(t, err)
	testpb.RegisterTestServiceServer(r.GRPC(), svc)
	require.NoError(t, r.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() { r.done <- r.Run(ctx) }()
	t.Cleanup(func() { r.stop() })
	return r
}

// stop ends the server and returns what Run returned; later calls too.
func (r *running) stop() error {
	r.cancel()
	select {
	case err := <-r.done:
		r.done <- err
		return err
	case <-time.After(30 * time.Second):
		r.t.Error("Run did not return")
		return errors.New("Run did not return")
	}
}

func (r *running) dial(creds credentials.TransportCredentials) *grpc.ClientConn {
	r.t.Helper()
	if creds == nil {
		creds = insecure.NewCredentials()
	}
	conn, err := grpc.NewClient(r.Addr(), grpc.WithTransportCredentials(creds))
	require.NoError(r.t, err)
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

func (r *running) client() testpb.TestServiceClient {
	r.t.Helper()
	return testpb.NewTestServiceClient(r.dial(nil))
}

func TestDeadline_IsSetWhereTheCallerHasNone(t *testing.T) {
	var left time.Duration
	r := start(t, Options{DefaultDeadline: 7 * time.Second}, &service{unary: func(ctx context.Context) error {
		deadline, ok := ctx.Deadline()
		if !ok {
			return errors.New("no deadline")
		}
		left = time.Until(deadline)
		return nil
	}})
	_, err := r.client().EmptyCall(context.Background(), &testpb.Empty{})
	require.NoError(t, err)
	require.LessOrEqual(t, left, 7*time.Second)
	require.Greater(t, left, 3*time.Second)
}

func TestDeadline_EndsACallWithATypedAnswer(t *testing.T) {
	r := start(t, Options{DefaultDeadline: 50 * time.Millisecond}, &service{unary: func(ctx context.Context) error {
		<-ctx.Done()
		return fmt.Errorf("asking 10.1.2.3: %w", ctx.Err())
	}})
	_, err := r.client().EmptyCall(context.Background(), &testpb.Empty{})
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	require.NotContains(t, err.Error(), "10.1.2.3")
}

func TestDeadline_IsCappedAndAShorterOneKept(t *testing.T) {
	var left time.Duration
	r := start(t, Options{DefaultDeadline: time.Second, MaxDeadline: 20 * time.Second}, &service{unary: func(ctx context.Context) error {
		deadline, _ := ctx.Deadline()
		left = time.Until(deadline)
		return nil
	}})
	for asked, most := range map[time.Duration]time.Duration{time.Hour: 20 * time.Second, 15 * time.Second: 15 * time.Second} {
		ctx, cancel := context.WithTimeout(context.Background(), asked)
		_, err := r.client().EmptyCall(ctx, &testpb.Empty{})
		cancel()
		require.NoError(t, err)
		require.LessOrEqual(t, left, most)
		require.Greater(t, left, most-5*time.Second)
	}
}

// A client of grpc-go does not even send such a call, so the interceptors are
// called as a server would that read the call late.
func TestDeadline_InThePastNeverReachesTheHandler(t *testing.T) {
	s, err := New(Options{})
	require.NoError(t, err)
	past, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	cancelled, cancel2 := context.WithCancel(context.Background())
	cancel2()
	for want, ctx := range map[codes.Code]context.Context{codes.DeadlineExceeded: past, codes.Canceled: cancelled} {
		_, err = s.deadlineUnary(ctx, nil, &grpc.UnaryServerInfo{}, func(context.Context, any) (any, error) {
			t.Error("handler called")
			return nil, nil
		})
		require.Equal(t, want, status.Code(err))
		err = s.deadlineStream(nil, contextStream{ctx: ctx}, &grpc.StreamServerInfo{}, func(any, grpc.ServerStream) error {
			t.Error("handler called")
			return nil
		})
		require.Equal(t, want, status.Code(err))
	}
}

type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s contextStream) Context() context.Context { return s.ctx }

func TestDeadline_OfAStreamIsItsOwnersUnlessCapped(t *testing.T) {
	deadlines := make(chan bool, 1)
	svc := &service{stream: func(ss testpb.TestService_FullDuplexCallServer) error {
		_, ok := ss.Context().Deadline()
		deadlines <- ok
		return nil
	}}
	for most, want := range map[time.Duration]bool{0: false, time.Hour: true} {
		r := start(t, Options{DefaultDeadline: time.Second, MaxDeadline: time.Second, MaxStreamDeadline: most}, svc)
		ss, err := r.client().FullDuplexCall(context.Background())
		require.NoError(t, err)
		_, err = ss.Recv()
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, want, <-deadlines)
	}
}

func TestRecovery_APanicEndsOneCallAndIsLoggedOnce(t *testing.T) {
	var calls atomic.Int32
	r := start(t, Options{}, &service{
		unary: func(context.Context) error {
			if calls.Add(1) == 1 {
				panic("password is hunter2")
			}
			return nil
		},
		stream: func(testpb.TestService_FullDuplexCallServer) error { panic("in a stream") },
	})
	c := r.client()
	_, err := c.EmptyCall(context.Background(), &testpb.Empty{})
	requireInternal(t, err)
	require.NotContains(t, err.Error(), "hunter2")
	require.Equal(t, 1, strings.Count(r.log.String(), "hunter2"))
	require.Contains(t, r.log.String(), "method=/grpc.testing.TestService/EmptyCall")
	require.Contains(t, r.log.String(), "server_test.go", "the stack")

	ss, err := c.FullDuplexCall(context.Background())
	require.NoError(t, err)
	_, err = ss.Recv()
	requireInternal(t, err)
	_, err = c.EmptyCall(context.Background(), &testpb.Empty{})
	require.NoError(t, err, "the process lives on")
}

func requireInternal(t *testing.T, err error) {
	t.Helper()
	require.Equal(t, codes.Internal, status.Code(err))
	require.Equal(t, "internal error", status.Convert(err).Message())
	reason, ok := Reason(err)
	require.True(t, ok)
	require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_INTERNAL, reason)
}

func TestLastGate_NoForeignTextLeaves(t *testing.T) {
	foreign := errors.New("dial tcp 10.1.2.3:3306: refused")
	for name, cause := range map[string]error{
		"plain":                   foreign,
		"made a status":           status.Convert(foreign).Err(),
		"wrapped UNKNOWN":         fmt.Errorf("x: %w", status.Convert(foreign).Err()),
		"someone else's deadline": fmt.Errorf("10.1.2.3: %w", context.DeadlineExceeded),
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, Options{}, &service{
				unary:  func(context.Context) error { return cause },
				stream: func(testpb.TestService_FullDuplexCallServer) error { return cause },
			})
			_, err := r.client().EmptyCall(context.Background(), &testpb.Empty{})
			requireInternal(t, err)
			require.Equal(t, 1, strings.Count(r.log.String(), "10.1.2.3"), "the cause is in the log")
			ss, err := r.client().FullDuplexCall(context.Background())
			require.NoError(t, err)
			_, err = ss.Recv()
			requireInternal(t, err)
		})
	}
}

// A fault is not hidden by the deadline that passed meanwhile.
func TestLastGate_AFaultAfterTheDeadlineIsStillLogged(t *testing.T) {
	var log lockedBuffer
	s, err := New(Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	requireInternal(t, s.lastGate(ended, "/x/Y", errors.New("table is full")))
	require.Contains(t, log.String(), "table is full")
	require.Equal(t, codes.Canceled, status.Code(s.lastGate(ended, "/x/Y", fmt.Errorf("x: %w", context.Canceled))))
}

func TestLastGate_AStatusPassesWithoutTheTextAroundIt(t *testing.T) {
	answer := Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, "no such voucher")
	r := start(t, Options{}, &service{unary: func(context.Context) error {
		return fmt.Errorf("select from 10.1.2.3: %w", answer)
	}})
	_, err := r.client().EmptyCall(context.Background(), &testpb.Empty{})
	require.Equal(t, codes.NotFound, status.Code(err))
	require.Equal(t, "no such voucher", status.Convert(err).Message())
	reason, _ := Reason(err)
	require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, reason)
}

func TestMetrics_SeeTheFinalCodeAndAreThereBeforeTheFirstCall(t *testing.T) {
	reg := prometheus.NewRegistry()
	r := start(t, Options{Registerer: reg}, &service{unary: func(context.Context) error { panic("x") }})
	_, err := r.client().EmptyCall(context.Background(), &testpb.Empty{})
	require.Error(t, err)
	require.Equal(t, 1.0, counter(t, reg, "grpc_server_handled_total", "EmptyCall", "Internal"))
	require.Equal(t, 0.0, counter(t, reg, "grpc_server_handled_total", "UnaryCall", "OK"))

	_, err = New(Options{Registerer: reg})
	require.ErrorContains(t, err, "metrics")
}

func counter(t *testing.T, reg *prometheus.Registry, name, method, code string) float64 {
	t.Helper()
	families, err := reg.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if f.GetName() == name && labels["grpc_method"] == method && labels["grpc_code"] == code {
				return m.GetCounter().GetValue()
			}
		}
	}
	t.Fatalf("no %s of %s %s", name, method, code)
	return 0
}

func TestInterceptors_OfTheBinaryRunInsideTheGate(t *testing.T) {
	r := start(t, Options{UnaryInterceptors: []grpc.UnaryServerInterceptor{
		func(context.Context, any, *grpc.UnaryServerInfo, grpc.UnaryHandler) (any, error) {
			return nil, errors.New("token of bob")
		},
	}}, &service{})
	_, err := r.client().EmptyCall(context.Background(), &testpb.Empty{})
	requireInternal(t, err)
}

func TestServer_RefusesAMessageBeyondItsBound(t *testing.T) {
	r := start(t, Options{}, &service{})
	request := func(n int) error {
		_, err := r.client().UnaryCall(context.Background(), &testpb.SimpleRequest{Payload: &testpb.Payload{Body: make([]byte, n)}})
		return err
	}
	require.NoError(t, request(DefaultMaxRecvBytes-100))
	require.Equal(t, codes.ResourceExhausted, status.Code(request(DefaultMaxRecvBytes)))
}

func TestReflection_ListsServicesUnlessSwitchedOff(t *testing.T) {
	list := func(on bool) (*reflectionpb.ServerReflectionResponse, error) {
		r := start(t, Options{Settings: Settings{Reflection: on}}, &service{})
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		ss, err := reflectionpb.NewServerReflectionClient(r.dial(nil)).ServerReflectionInfo(ctx)
		require.NoError(t, err)
		ask := &reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}
		_ = ss.Send(ask) // where it is off, Recv has the reason
		return ss.Recv()
	}
	answer, err := list(true)
	require.NoError(t, err)
	var names []string
	for _, s := range answer.GetListServicesResponse().GetService() {
		names = append(names, s.GetName())
	}
	require.Contains(t, names, "grpc.testing.TestService")
	require.Contains(t, names, "grpc.health.v1.Health")

	_, err = list(false)
	require.Equal(t, codes.Unimplemented, status.Code(err))
}

func TestHealth_BeginsAsNotServing(t *testing.T) {
	r := start(t, Options{}, &service{})
	h := healthpb.NewHealthClient(r.dial(nil))
	check := func() healthpb.HealthCheckResponse_ServingStatus {
		resp, err := h.Check(context.Background(), &healthpb.HealthCheckRequest{})
		require.NoError(t, err)
		return resp.GetStatus()
	}
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, check())
	r.Health().SetServingStatus("", healthpb.HealthCheckResponse_SERVING)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, check())
}

// The order of a drain, seen by a watcher, a running call and a new one.
func TestDrain_NotServingFirstThenRunningCallsFinish(t *testing.T) {
	entered, release := make(chan struct{}, 1), make(chan struct{})
	r := start(t, Options{DrainDelay: time.Second, DrainTimeout: 20 * time.Second, DefaultDeadline: 25 * time.Second},
		&service{unary: func(ctx context.Context) error {
			select {
			case entered <- struct{}{}:
			default:
				return nil // a later call
			}
			select {
			case <-release:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}})
	r.Health().SetServingStatus("", healthpb.HealthCheckResponse_SERVING)
	watch, err := healthpb.NewHealthClient(r.dial(nil)).Watch(context.Background(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	seen, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, seen.GetStatus())

	c := r.client()
	finished := make(chan error, 1)
	go func() {
		_, err := c.EmptyCall(context.Background(), &testpb.Empty{})
		finished <- err
	}()
	<-entered
	entered <- struct{}{} // later calls answer at once

	r.cancel()
	seen, err = watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, seen.GetStatus())
	select {
	case <-r.Draining():
		t.Log("the delay was over before the check; nothing to see")
	default:
		_, err = c.EmptyCall(context.Background(), &testpb.Empty{})
		require.NoError(t, err, "calls are still taken during the delay")
	}

	<-r.Draining()
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", r.Addr())
		if err == nil {
			conn.Close()
		}
		return err != nil
	}, 10*time.Second, 10*time.Millisecond, "new connections are refused")
	select {
	case err := <-finished:
		t.Fatalf("the running call ended early: %v", err)
	case err := <-r.done:
		t.Fatalf("Run returned over a running call: %v", err)
	default:
	}
	close(release)
	require.NoError(t, <-finished)
	require.NoError(t, r.stop())
	require.Contains(t, r.log.String(), "rpc drained")
	require.NotContains(t, r.log.String(), "timed out", "the open watch held up the drain")
}

func TestDrain_IsBoundedForACallThatIsStuck(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	r := start(t, Options{DrainTimeout: 200 * time.Millisecond, DefaultDeadline: 30 * time.Second},
		&service{unary: func(context.Context) error {
			close(entered)
			<-release // deaf to its context
			return nil
		}})
	c := r.client()
	finished := make(chan error, 1)
	go func() {
		_, err := c.EmptyCall(context.Background(), &testpb.Empty{})
		finished <- err
	}()
	<-entered
	require.NoError(t, r.stop())
	require.Contains(t, r.log.String(), "timed out")
	require.Equal(t, codes.Unavailable, status.Code(<-finished))
	close(release)
}

// grpc-go waits for connections that are still in their handshake.
func TestDrain_IsBoundedForAConnectionThatSaysNothing(t *testing.T) {
	r := start(t, Options{DrainTimeout: 200 * time.Millisecond}, &service{})
	conn, err := net.Dial("tcp", r.Addr())
	require.NoError(t, err)
	defer conn.Close()
	_, err = r.client().EmptyCall(context.Background(), &testpb.Empty{}) // by then it is accepted
	require.NoError(t, err)
	begin := time.Now()
	require.NoError(t, r.stop())
	require.Less(t, time.Since(begin), 4*time.Second, "not the time that a handshake may take")
}

func TestDrain_TellsLongStreamsToEnd(t *testing.T) {
	var r *running
	ready := make(chan struct{})
	r = start(t, Options{DrainTimeout: 20 * time.Second}, &service{stream: func(ss testpb.TestService_FullDuplexCallServer) error {
		close(ready)
		select {
		case <-r.Draining():
			return nil
		case <-ss.Context().Done():
			return ss.Context().Err()
		}
	}})
	ss, err := r.client().FullDuplexCall(context.Background())
	require.NoError(t, err)
	<-ready
	require.NoError(t, r.stop())
	_, err = ss.Recv()
	require.ErrorIs(t, err, io.EOF)
	require.NotContains(t, r.log.String(), "timed out")
}

func TestRun_FailsWhereThePortIsInUse(t *testing.T) {
	r := start(t, Options{}, &service{})
	s, err := New(Options{Addr: r.Addr()})
	require.NoError(t, err)
	require.ErrorContains(t, s.Run(context.Background()), r.Addr())
}

func TestRun_FailsWhereTheListenerDies(t *testing.T) {
	s, err := New(Options{Addr: "127.0.0.1:0"})
	require.NoError(t, err)
	require.NoError(t, s.Listen())
	require.NoError(t, s.listener.Close())
	require.Error(t, s.Run(context.Background()))
}

func TestNew_RefusesOptionsThatContradict(t *testing.T) {
	for name, o := range map[string]Options{
		"default above max": {DefaultDeadline: time.Minute, MaxDeadline: time.Second},
		"negative":          {DrainTimeout: -1},
		"cert without key":  {Settings: Settings{TLSCertFile: "x"}},
		"CA without cert":   {Settings: Settings{TLSClientCAFile: "x"}},
		"no such cert":      {Settings: Settings{TLSCertFile: "absent", TLSKeyFile: "absent"}},
	} {
		_, err := New(o)
		require.Error(t, err, name)
	}
	_, err := New(Options{DefaultDeadline: time.Hour})
	require.NoError(t, err, "a default deadline alone raises the cap")
}
