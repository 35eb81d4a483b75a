package e2e

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// clientLoad is a crowd that grabs voucher 1 through one Client of every gateway,
// 256 users at a time.
type clientLoad struct {
	c       *client.Client
	results []client.Result // by user, from 1
	errs    []error
	done    atomic.Int64
	lost    atomic.Int64 // Grabs without an answer when their stream ended
	broken  atomic.Int64 // streams
	ended   chan struct{}
}

func startClientLoad(ctx context.Context, t *testing.T, s *stack.Stack, users int64) *clientLoad {
	t.Helper()
	l := &clientLoad{results: make([]client.Result, users+1), errs: make([]error, users+1), ended: make(chan struct{})}
	config := client.Config{
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
		Hooks: client.Hooks{StreamEnded: func(e client.StreamEnded) {
			l.lost.Add(int64(e.Lost))
			if e.Err != nil {
				l.broken.Add(1)
			}
		}},
	}
	for _, g := range s.Gateways() {
		config.Addresses = append(config.Addresses, g.Addr)
	}
	var err error
	l.c, err = client.New(config)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, l.c.Close(ctx))
	})
	var next atomic.Int64
	var callers sync.WaitGroup
	for range 256 {
		callers.Go(func() {
			for user := next.Add(1); user <= users; user = next.Add(1) {
				bounded, cancel := context.WithTimeout(ctx, patience)
				l.results[user], l.errs[user] = l.c.Grab(bounded, user, 1)
				cancel()
				l.done.Add(1)
			}
		})
	}
	go func() { callers.Wait(); close(l.ended) }()
	return l
}

// requireEveryoneHasOneOrder requires every caller to have been told an order,
// and the ledger and the database to hold just these.
func (l *clientLoad) requireEveryoneHasOneOrder(ctx context.Context, t *testing.T, s *stack.Stack) {
	t.Helper()
	users := int64(len(l.results) - 1)
	byID := map[string]int64{}
	for user := int64(1); user <= users; user++ {
		require.NoError(t, l.errs[user], "user %d", user)
		require.Equal(t, client.Admitted, l.results[user].Outcome, "user %d", user)
		require.Equal(t, user, l.results[user].Order.UserID)
		byID[l.results[user].Order.ID] = user
	}
	require.Len(t, byID, int(users))
	proven(ctx, t, s, 1, users)
	rows, err := s.Orders(ctx, 1)
	require.NoError(t, err)
	require.Len(t, rows, int(users))
	for _, row := range rows {
		require.Equal(t, row.UserID, byID[s.OrderIDs().Encode(row.Position)])
	}
	for user := int64(1); user <= users; user += 7 {
		order, err := l.c.GetOrder(ctx, user, 1)
		require.NoError(t, err)
		require.Equal(t, l.results[user].Order.ID, order.ID)
		require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, order.State)
	}
}

// A gateway is killed by SIGKILL under load: all its callers are answered by the
// other one, and who had an order without knowing hears of that very order.
func TestClient_GatewayKilledUnderLoadCallersAreAnsweredByAnother(t *testing.T) {
	ctx := testContext(t)
	const users = 20_000
	s := stack.Test(t, stack.Options{Gateways: 2})
	s.MustOpenVoucher(t, 1, 2*users)
	l := startClientLoad(ctx, t, s, users)
	require.Eventually(t, func() bool { return l.done.Load() > users/4 }, patience, time.Millisecond)
	s.Gateway(0).Kill()
	<-l.ended
	require.Positive(t, l.lost.Load(), "some were without an answer")
	l.requireEveryoneHasOneOrder(ctx, t, s)
}

// A gateway stops under load: no caller sees an error, and no Grab was decided
// without its caller hearing of it.
func TestClient_GatewayStoppedUnderLoadNoCallerSeesAnError(t *testing.T) {
	ctx := testContext(t)
	const users = 20_000
	s := stack.Test(t, stack.Options{Gateways: 2})
	s.MustOpenVoucher(t, 1, 2*users)
	l := startClientLoad(ctx, t, s, users)
	require.Eventually(t, func() bool { return l.done.Load() > users/4 }, patience, time.Millisecond)
	require.NoError(t, s.Gateway(0).Stop(patience))
	require.Less(t, l.done.Load(), int64(users), "the load ended too soon")
	<-l.ended
	require.Positive(t, l.broken.Load())
	l.requireEveryoneHasOneOrder(ctx, t, s)
	for user := int64(1); user <= users; user++ {
		require.False(t, l.results[user].Replayed, "user %d had an order and was not told", user)
	}
}

// A gateway hangs: its streams are given up, its callers go elsewhere; and when
// it wakes up, nothing it still does makes a second order.
func TestClient_GatewayPausedUnderLoadCallersAreAnsweredByAnother(t *testing.T) {
	ctx := testContext(t)
	const users = 20_000
	s := stack.Test(t, stack.Options{Gateways: 2})
	s.MustOpenVoucher(t, 1, 2*users)
	l := startClientLoad(ctx, t, s, users)
	require.Eventually(t, func() bool { return l.done.Load() > users/4 }, patience, time.Millisecond)
	require.NoError(t, s.Gateway(0).Pause())
	<-l.ended
	require.NoError(t, s.Gateway(0).Resume())
	require.Positive(t, l.lost.Load(), "some were without an answer")
	l.requireEveryoneHasOneOrder(ctx, t, s)
}

// Half of the crowd is refused while a gateway is killed: who is told "sold out"
// has no order, and who has an order is told which.
func TestClient_GatewayKilledInASaleThatSellsOutNobodyIsToldWrong(t *testing.T) {
	ctx := testContext(t)
	const users, units = 20_000, 10_000
	s := stack.Test(t, stack.Options{Gateways: 2})
	s.MustOpenVoucher(t, 1, units)
	l := startClientLoad(ctx, t, s, users)
	// Just before the last unit: many of those that are lost are refused elsewhere.
	require.Eventually(t, func() bool { return l.done.Load() > units-1000 }, patience, time.Millisecond)
	s.Gateway(0).Kill()
	<-l.ended
	require.Positive(t, l.lost.Load(), "some were without an answer")
	proven(ctx, t, s, 1, units)
	rows, err := s.Orders(ctx, 1)
	require.NoError(t, err)
	require.Len(t, rows, units)
	orders := map[int64]string{}
	for _, row := range rows {
		orders[row.UserID] = s.OrderIDs().Encode(row.Position)
	}
	for user := int64(1); user <= users; user++ {
		require.NoError(t, l.errs[user], "user %d", user)
		want := client.SoldOut
		if orders[user] != "" {
			want = client.Admitted
		}
		require.Equal(t, want, l.results[user].Outcome, "user %d", user)
		require.Equal(t, orders[user], l.results[user].Order.ID, "user %d", user)
	}
}
