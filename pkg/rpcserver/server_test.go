package rpcserver

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

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
