package rpc

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
)

// settle gives the only entry of a voucher's partition its verdict.
func (e *edge) settle(t *testing.T, v ledger.Voucher, order ledger.Settled) {
	t.Helper()
	ctx := context.Background()
	entries, err := ledger.Scan(ctx, e.client, v.Partition, 1, "-", 10)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	results := ledger.Settle(ctx, e.client, []ledger.Settlement{{
		Partition: v.Partition, EntryID: entries[0].ID, Epoch: 1, VoucherID: v.VoucherID, Orders: []ledger.Settled{order},
	}})
	require.NoError(t, results[0].Err)
	require.True(t, results[0].Settled)
}

func (e *edge) requireOrder(t *testing.T, request *seckillv1.GetOrderRequest, id string, state seckillv1.OrderState) {
	t.Helper()
	found, err := e.GetOrder(t.Context(), request)
	require.NoError(t, err)
	require.Equal(t, id, found.Order.OrderId)
	require.Equal(t, state, found.Order.State)
	require.Equal(t, request.UserId, found.Order.UserId)
	require.Nil(t, found.Order.AdmittedAt)
	require.Nil(t, found.Order.PersistedAt)
}

func TestGetOrder_ByBothKeysFromPendingToPersisted(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 2)
	id := e.grab(t, 1, 7).Order.OrderId
	e.requireOrder(t, byVoucher(1, 7), id, seckillv1.OrderState_ORDER_STATE_PENDING)
	e.requireOrder(t, byID(1, id), id, seckillv1.OrderState_ORDER_STATE_PENDING)
	e.settle(t, v, ledger.Settled{UserID: 1, Seq: 1, Verdict: ledger.VerdictPersisted})
	e.requireOrder(t, byVoucher(1, 7), id, seckillv1.OrderState_ORDER_STATE_PERSISTED)
	e.requireOrder(t, byID(1, id), id, seckillv1.OrderState_ORDER_STATE_PERSISTED)
	again := e.grab(t, 1, 7)
	require.Equal(t, id, again.Order.OrderId)
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, again.Order.State)
}

func TestGetOrder_OfOutcomes(t *testing.T) {
	standing := orderid.Position{VoucherID: 7, Epoch: 1, Seq: 900}
	for name, c := range map[string]struct {
		verdict ledger.Verdict
		state   seckillv1.OrderState
	}{
		"held":      {ledger.VerdictHeld, seckillv1.OrderState_ORDER_STATE_HELD},
		"rejected":  {ledger.VerdictRejected, seckillv1.OrderState_ORDER_STATE_REJECTED},
		"cancelled": {ledger.VerdictCancelled, seckillv1.OrderState_ORDER_STATE_CANCELLED},
		"conflict":  {ledger.VerdictConflict, seckillv1.OrderState_ORDER_STATE_PERSISTED},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t)
			v := e.sell(t, 7, 2)
			id := e.grab(t, 1, 7).Order.OrderId
			settled := ledger.Settled{UserID: 1, Seq: 1, Verdict: c.verdict}
			want := id
			if c.verdict == ledger.VerdictConflict {
				settled.Standing = standing
				want = e.ids.Encode(standing)
			}
			e.settle(t, v, settled)
			e.requireOrder(t, byID(1, id), want, c.state)
			_, err := e.GetOrder(t.Context(), byID(2, id))
			requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND)
		})
	}
}

// After an operator's decision about a held order: by voucher there is an order
// or none, by order_id there is what it came to.
func TestGetOrder_OfHeldOrdersThatWereDecided(t *testing.T) {
	standing := orderid.Position{VoucherID: 7, Epoch: 1, Seq: 900}
	for name, c := range map[string]struct {
		verdict   ledger.Verdict
		state     seckillv1.OrderState
		byVoucher bool
	}{
		"requeued":  {ledger.VerdictPersisted, seckillv1.OrderState_ORDER_STATE_PERSISTED, true},
		"cancelled": {ledger.VerdictCancelled, seckillv1.OrderState_ORDER_STATE_CANCELLED, false},
		"conflict":  {ledger.VerdictConflict, seckillv1.OrderState_ORDER_STATE_PERSISTED, true},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t)
			v := e.sell(t, 7, 2)
			id := e.grab(t, 1, 7).Order.OrderId
			e.settle(t, v, ledger.Settled{UserID: 1, Seq: 1, Verdict: ledger.VerdictHeld})
			e.requireOrder(t, byVoucher(1, 7), id, seckillv1.OrderState_ORDER_STATE_HELD)
			again := e.grab(t, 1, 7)
			require.True(t, again.Replayed)
			require.Equal(t, seckillv1.OrderState_ORDER_STATE_HELD, again.Order.State)

			r := ledger.Resolution{Partition: v.Partition, Position: orderid.Position{VoucherID: 7, Epoch: 1, Seq: 1}, UserID: 1, Verdict: c.verdict}
			want := id
			if c.verdict == ledger.VerdictConflict {
				r.Standing, want = standing, e.ids.Encode(standing)
			}
			done, err := ledger.Resolve(context.Background(), e.client, r)
			require.NoError(t, err)
			require.True(t, done)
			e.requireOrder(t, byID(1, id), want, c.state)
			if c.byVoucher {
				e.requireOrder(t, byVoucher(1, 7), want, c.state)
				return
			}
			_, err = e.GetOrder(t.Context(), byVoucher(1, 7))
			requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND)
			require.False(t, e.grab(t, 1, 7).Replayed, "the right to buy came back")
		})
	}
}

// An entry that nobody could read is held for its positions, and its users are
// not known: whoever has a mark there hears what became of it, nobody else.
func TestGetOrder_OfAnEntryThatCouldNotBeRead(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 2)
	id := e.grab(t, 1, 7).Order.OrderId
	for _, request := range []*seckillv1.GetOrderRequest{byVoucher(1, 7), byID(1, id)} {
		e.requireOrder(t, request, id, seckillv1.OrderState_ORDER_STATE_PENDING)
	}
	e.settle(t, v, ledger.Settled{UserID: 0, Seq: 1, Verdict: ledger.VerdictHeld})
	for _, request := range []*seckillv1.GetOrderRequest{byVoucher(1, 7), byID(1, id)} {
		e.requireOrder(t, request, id, seckillv1.OrderState_ORDER_STATE_HELD)
	}
	done, err := ledger.Resolve(context.Background(), e.client, ledger.Resolution{
		Partition: v.Partition, Position: orderid.Position{VoucherID: 7, Epoch: 1, Seq: 1}, Verdict: ledger.VerdictCancelled,
	})
	require.NoError(t, err)
	require.True(t, done)
	for _, request := range []*seckillv1.GetOrderRequest{byVoucher(1, 7), byID(1, id)} {
		e.requireOrder(t, request, id, seckillv1.OrderState_ORDER_STATE_CANCELLED)
	}
	for _, request := range []*seckillv1.GetOrderRequest{byVoucher(2, 7), byID(2, id)} {
		_, err := e.GetOrder(t.Context(), request)
		requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND)
	}
}

func TestGetOrder_NotTheCallers(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 10)
	id := e.grab(t, 1, 7).Order.OrderId
	other := e.grab(t, 2, 7).Order.OrderId
	foreign, err := orderid.New(orderid.Key{Secret: [orderid.KeySize]byte{99}})
	require.NoError(t, err)
	for name, request := range map[string]*seckillv1.GetOrderRequest{
		"another user's id":             byID(2, id),
		"id of a user without an order": byID(3, id),
		"the other way round":           byID(1, other),
		"a user without an order":       byVoucher(3, 7),
		"an unknown voucher":            byVoucher(1, 8),
		"a position that is not there":  byID(1, e.ids.Encode(orderid.Position{VoucherID: 7, Epoch: 1, Seq: 999})),
		"another epoch":                 byID(1, e.ids.Encode(orderid.Position{VoucherID: 7, Epoch: 2, Seq: 1})),
		"made with another key":         byID(1, foreign.Encode(orderid.Position{VoucherID: 7, Epoch: 1, Seq: 1})),
		"stands for no position":        byID(1, "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"),
		"of a key that is not there":    byID(1, "ZZZZZZZZZZZZZZZZZZZZZZZZZZ"),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := e.GetOrder(t.Context(), request)
			requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND)
		})
	}
}

func TestGetOrder_ArchivedVoucher(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 2)
	id := e.grab(t, 1, 7).Order.OrderId
	e.settle(t, v, ledger.Settled{UserID: 1, Seq: 1, Verdict: ledger.VerdictPersisted})
	v.Rev, v.State = 2, ledger.VoucherClosed
	ledgertest.Apply(t, e.client, v)
	v.Rev, v.State = 3, ledger.VoucherArchived
	ledgertest.Apply(t, e.client, v)
	for _, request := range []*seckillv1.GetOrderRequest{byVoucher(1, 7), byID(1, id)} {
		_, err := e.GetOrder(t.Context(), request)
		requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_ARCHIVED)
	}
	_, err := e.Grab(t.Context(), &seckillv1.GrabRequest{UserId: 1, VoucherId: 7})
	requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_ARCHIVED)
}

func TestGetOrder_WhileClosed(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 2)
	id := e.grab(t, 1, 7).Order.OrderId
	require.NoError(t, ledger.ClosePartition(context.Background(), e.client, 7, 1, "closed"))
	e.requireOrder(t, byVoucher(1, 7), id, seckillv1.OrderState_ORDER_STATE_PENDING)
	e.requireOrder(t, byID(1, id), id, seckillv1.OrderState_ORDER_STATE_PENDING)
	for _, request := range []*seckillv1.GetOrderRequest{byVoucher(2, 7), byID(2, id)} {
		_, err := e.GetOrder(t.Context(), request)
		requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING)
		require.NotContains(t, err.Error(), "nothing was taken", "a look takes nothing")
	}
	require.NoError(t, e.client.Do(context.Background(), e.client.B().Del().Key(ledger.MetaKey(7)).Build()).Error())
	e.requireOrder(t, byVoucher(1, 7), id, seckillv1.OrderState_ORDER_STATE_PENDING)
	_, err := e.GetOrder(t.Context(), byVoucher(2, 7))
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING)
}

func TestGetOrder_PausedRedisEndsByTheDeadline(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 2)
	e.grab(t, 1, 7)
	require.NoError(t, e.redis.Pause())
	defer func() { require.NoError(t, e.redis.Resume()) }()
	started := time.Now()
	_, err := e.GetOrder(t.Context(), byVoucher(1, 7)) // the server's default of 2 s
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE)
	require.Less(t, time.Since(started), 10*time.Second)
}
