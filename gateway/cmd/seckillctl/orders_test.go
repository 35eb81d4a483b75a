package main

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func TestOrderFind_NamesTheOperatorAndTheReason(t *testing.T) {
	var asked *seckillv1.FindOrderRequest
	w := &writer{find: func(r *seckillv1.FindOrderRequest) (*seckillv1.FindOrderResponse, error) {
		asked = r
		return &seckillv1.FindOrderResponse{
			Order:  &seckillv1.Order{OrderId: "X", State: seckillv1.OrderState_ORDER_STATE_CANCELLED},
			Reason: "an operator cancelled it after it was held: cannot be decoded",
			OperatorAction: &seckillv1.OperatorAction{
				Operator: "ann", Action: seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL, Reason: "sale was annulled", ActionTime: timestamppb.New(time.Unix(0, 0)),
			},
		}, nil
	}}
	addr := serve(t, w)
	code, out, errs := run("--writer", addr, "order", "find", "--user", "42", "--voucher", "7")
	require.Zero(t, code, errs)
	require.EqualValues(t, 42, asked.GetUserVoucher().GetUserId())
	require.EqualValues(t, 7, asked.GetUserVoucher().GetVoucherId())
	for _, line := range []string{`order\.state +CANCELLED`, `operator_action\.operator +ann`, `operator_action\.action +CANCEL`, `operator_action\.reason +sale was annulled`, `operator_action\.action_time +1970-01-01T00:00:00\.000Z`} {
		require.Regexp(t, `(?m)^`+line+`$`, out)
	}
}

// pages answers n orders by pages of two.
func pages(n int) func(*seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
	return func(r *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
		from := 0
		if r.GetPageToken() != "" {
			fmt.Sscan(r.GetPageToken(), &from)
		}
		resp := &seckillv1.ListOrdersResponse{}
		for i := from; i < min(from+2, n); i++ {
			resp.Orders = append(resp.Orders, &seckillv1.Order{OrderId: fmt.Sprint("order ", i), UserId: 1<<62 + int64(i), VoucherId: r.GetVoucherId(), AdmittedAt: timestamppb.New(time.Unix(0, 1e6))})
		}
		if from+2 < n {
			resp.NextPageToken = fmt.Sprint(from + 2)
		}
		return resp, nil
	}
}

func TestOrders_AreOneLineEachOverAllPages(t *testing.T) {
	w := &writer{orders: pages(5)}
	addr := serve(t, w)
	code, out, errs := run("--writer", addr, "orders", "--voucher", "7")
	require.Zero(t, code, errs)
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	require.Len(t, lines, 5)
	require.Equal(t, `{"order_id":"order 4","user_id":"4611686018427387908","voucher_id":"7","state":"ORDER_STATE_UNSPECIFIED","admitted_at":"1970-01-01T00:00:00.001Z","reference":""}`, lines[4])
	require.Equal(t, "5 orders\n", errs)
}

func TestOrders_PageThatFailsForAMomentIsAskedForAgain(t *testing.T) {
	var failures atomic.Int32
	failures.Store(2)
	answer := pages(5)
	w := &writer{orders: func(r *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
		if r.GetPageToken() == "2" && failures.Add(-1) >= 0 {
			return nil, status.Error(codes.Unavailable, "away")
		}
		return answer(r)
	}}
	code, out, errs := run("--writer", serve(t, w), "orders", "--user", "7")
	require.Zero(t, code, errs)
	require.Equal(t, 5, strings.Count(out, "\n"))
}

func TestOrders_SayWhereTheyAreNotAll(t *testing.T) {
	answer := pages(5)
	w := &writer{orders: func(r *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
		if r.GetPageToken() == "2" {
			return nil, status.Error(codes.Internal, "broken")
		}
		return answer(r)
	}}
	addr := serve(t, w)
	code, out, errs := run("--writer", addr, "orders", "--voucher", "7")
	require.Equal(t, 1, code)
	require.Equal(t, 2, strings.Count(out, "\n"))
	require.Contains(t, errs, "after 2 orders, which are not all; --page-token 2 goes on with the others: ")

	w.orders = answer
	_, whole, _ := run("--writer", addr, "orders", "--voucher", "7")
	code, rest, errs := run("--writer", addr, "orders", "--voucher", "7", "--page-token", "2")
	require.Zero(t, code, errs)
	require.Equal(t, whole, out+rest, "each once")
}

func TestLists_EndWithinTheTimeoutHoweverOftenAPageIsAskedFor(t *testing.T) {
	var tries atomic.Int32
	away := func() error { tries.Add(1); return status.Error(codes.Unavailable, "away") }
	w := &writer{
		orders: func(*seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) { return nil, away() },
		letters: func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
			return nil, away()
		},
	}
	addr := serve(t, w)
	for _, args := range [][]string{{"dead-letters", "list"}, {"orders", "--voucher", "7"}} {
		tries.Store(0)
		code, _, errs := run(append([]string{"--writer", addr, "--timeout", "100ms"}, args...)...)
		require.Equal(t, 1, code)
		require.Contains(t, errs, "UNAVAILABLE: away", "what the server said, not that a wait ended")
		require.EqualValues(t, 1, tries.Load(), "the wait before the second try is longer than the time")
	}

	// One that answers nothing at all has no more time for its pages than for one.
	ended := make(chan struct{})
	t.Cleanup(func() { close(ended) })
	w.letters = func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
		if tries.Add(1) == 1 {
			return nil, status.Error(codes.Unavailable, "away")
		}
		<-ended
		return nil, nil
	}
	tries.Store(0)
	code, _, errs := run("--writer", addr, "--timeout", "1s", "dead-letters", "list")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "DEADLINE_EXCEEDED")
	require.EqualValues(t, 2, tries.Load())
}
