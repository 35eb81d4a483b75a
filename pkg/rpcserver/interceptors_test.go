package rpcserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

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

func TestMetrics_MethodThatCountsItselfHasNone(t *testing.T) {
	reg := prometheus.NewRegistry()
	r := start(t, Options{Registerer: reg, Uncounted: []string{"/grpc.testing.TestService/EmptyCall"}}, &service{})
	_, err := r.client().EmptyCall(context.Background(), &testpb.Empty{})
	require.NoError(t, err)
	_, err = r.client().UnaryCall(context.Background(), &testpb.SimpleRequest{})
	require.NoError(t, err)
	require.Equal(t, 0.0, counter(t, reg, "grpc_server_handled_total", "EmptyCall", "OK"))
	require.Equal(t, 1.0, counter(t, reg, "grpc_server_handled_total", "UnaryCall", "OK"))
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
