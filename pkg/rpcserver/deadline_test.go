package rpcserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

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
