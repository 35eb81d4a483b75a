package main

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
)

// SIGTERM under load, with calls in hand whose orders are in the ledger already
// and whose answers are still to come when new calls are refused: each of them
// is answered, what was admitted is exactly what was acknowledged, and the
// process ends within its drain time.
func TestGateway_SIGTERMUnderLoad(t *testing.T) {
	key, codec := keyFile(t)
	redis := devstack.TestRedis(t)
	client := ledgertest.Client(t, redis.Addr())
	layOut(t, redis, codec, 1)
	ledgertest.Open(t, client, 1)
	v := ledgertest.Voucher(1, 1, 10_000_000)
	ledgertest.Sell(t, client, v)
	proxy := devstack.TestProxy(t, redis.Addr())
	p := start(t, proxy.Addr(), key, "--drain-delay", "2s")
	p.becomes(t, healthpb.HealthCheckResponse_SERVING)
	// A watch is told of every change, however late it looks.
	watching, stopWatching := context.WithTimeout(t.Context(), patience)
	defer stopWatching()
	watch, err := healthpb.NewHealthClient(p.conn).Watch(watching, &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	state, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, state.GetStatus())

	var user, acknowledged atomic.Int64
	var callers sync.WaitGroup
	var mu sync.Mutex
	orders := map[int64]string{}
	failures := make(chan error, 50)
	for range cap(failures) {
		callers.Go(func() {
			for {
				id := user.Add(1)
				response, err := p.grab(id, 1)
				if err != nil {
					failures <- err
					return
				}
				acknowledged.Add(1)
				mu.Lock()
				orders[id] = response.Order.OrderId
				mu.Unlock()
			}
		})
	}
	require.Eventually(t, func() bool { return acknowledged.Load() > 500 }, patience, time.Millisecond)
	require.NoError(t, p.Signal(syscall.SIGTERM))
	signalled := time.Now()
	// Health tells before calls are refused.
	state, err = watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, state.GetStatus())
	stopWatching() // or the drain would wait for the watch
	before := acknowledged.Load()
	require.Eventually(t, func() bool { return acknowledged.Load() > before }, patience, time.Millisecond, "calls are taken during the drain delay")
	proxy.SwallowReplies()
	require.Eventually(t, func() bool {
		before := acknowledged.Load()
		return ledgertest.Books(t, client, v).Seq > before && acknowledged.Load() == before
	}, patience, time.Millisecond, "calls are admitted and not answered")
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", p.addr)
		if err == nil {
			conn.Close()
		}
		return err != nil
	}, patience, time.Millisecond, "new calls are refused")
	proxy.Pass()
	select {
	case <-p.Done():
	case <-time.After(patience):
		require.FailNow(t, "it did not end")
	}
	require.Less(t, time.Since(signalled), 17*time.Second)
	require.Equal(t, 0, p.ExitCode())
	callers.Wait()
	close(failures)
	for err := range failures {
		// Refused before it was taken, since the port is closed.
		require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
		require.ErrorContains(t, err, "connection refused")
	}
	require.Equal(t, acknowledged.Load(), ledgertest.Books(t, client, v).Seq, "every call that took a unit had its answer")
	for id, order := range orders {
		position, err := codec.Decode(order)
		require.NoError(t, err)
		lookup, err := ledger.FindOrder(context.Background(), client, 0, 1, 1, id, 0)
		require.NoError(t, err)
		require.Equal(t, position, lookup.Mark.Position(1))
	}
}

// Streams of a gateway that is told to stop: no unit is taken of which the caller
// does not hear, and each stream ends with the reason.
func TestGateway_SIGTERMUnderStreams(t *testing.T) {
	key, codec := keyFile(t)
	redis := devstack.TestRedis(t)
	client := ledgertest.Client(t, redis.Addr())
	layOut(t, redis, codec, 1)
	ledgertest.Open(t, client, 1)
	v := ledgertest.Voucher(1, 1, 10_000_000)
	ledgertest.Sell(t, client, v)
	p := start(t, redis.Addr(), key)
	p.becomes(t, healthpb.HealthCheckResponse_SERVING)

	var user, admitted atomic.Int64
	ends := make(chan error, 8)
	for range cap(ends) {
		stream, err := seckillv1.NewSeckillServiceClient(p.conn).GrabStream(t.Context())
		require.NoError(t, err)
		go func() { // ends when the stream does
			for {
				message := &seckillv1.GrabStreamRequest{}
				for range 32 {
					message.Grabs = append(message.Grabs, &seckillv1.StreamedGrab{UserId: user.Add(1), VoucherId: 1})
				}
				if stream.Send(message) != nil {
					return
				}
			}
		}()
		go func() {
			for {
				message, err := stream.Recv()
				if err != nil {
					ends <- err
					return
				}
				for _, answer := range message.GetAnswers() {
					if answer.GetResponse().GetOutcome() == seckillv1.Outcome_OUTCOME_ADMITTED {
						admitted.Add(1)
					}
				}
			}
		}()
	}
	require.Eventually(t, func() bool { return admitted.Load() > 2000 }, patience, time.Millisecond)
	require.NoError(t, p.Signal(syscall.SIGTERM))
	for range cap(ends) {
		err := <-ends
		require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
		require.ErrorContains(t, err, "shutting down")
	}
	select {
	case <-p.Done():
	case <-time.After(patience):
		require.FailNow(t, "it did not end")
	}
	require.Equal(t, 0, p.ExitCode())
	require.Equal(t, admitted.Load(), ledgertest.Books(t, client, v).Seq)
}
