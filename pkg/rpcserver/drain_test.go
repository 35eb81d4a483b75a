package rpcserver

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

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
