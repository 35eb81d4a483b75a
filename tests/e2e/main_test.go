// Package e2e proves the promises of the whole system: real binaries, a real
// Redis, a real database, callers over gRPC. Each test names what it breaks;
// all end on the same check, the books.
package e2e

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/devstack"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

// patience bounds every wait for something that must come true.
const patience = 60 * time.Second

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// grab grabs with a deadline and answers what came.
func grab(ctx context.Context, client seckillv1.SeckillServiceClient, userID, voucherID int64) (*seckillv1.GrabResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return client.Grab(ctx, &seckillv1.GrabRequest{UserId: userID, VoucherId: voucherID})
}

// crowd lets users first..first+n-1 grab at once, spread over the gateways, up
// to 256 at a time, and collects what each was told.
func crowd(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, first, n int64) (answers map[int64]*seckillv1.GrabResponse, errs map[int64]error) {
	t.Helper()
	answers, errs = map[int64]*seckillv1.GrabResponse{}, map[int64]error{}
	gateways := len(s.Gateways())
	var mu sync.Mutex
	var all sync.WaitGroup
	places := make(chan struct{}, 256)
	for user := first; user < first+n; user++ {
		places <- struct{}{}
		all.Go(func() {
			defer func() { <-places }()
			answer, err := grab(ctx, s.Seckill(int(user)%gateways), user, voucherID)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs[user] = err
				return
			}
			answers[user] = answer
		})
	}
	all.Wait()
	return answers, errs
}

func count(answers map[int64]*seckillv1.GrabResponse, outcome seckillv1.Outcome) (n int64) {
	for _, answer := range answers {
		if answer.GetOutcome() == outcome {
			n++
		}
	}
	return n
}

// settled waits until nothing of a voucher is in flight.
func settled(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	require.NoError(t, s.AwaitSettled(ctx, voucherID))
}

// proven waits until nothing is in flight and requires the books to hold, with
// exactly so many orders.
func proven(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, orders int64) {
	t.Helper()
	settled(ctx, t, s, voucherID)
	books, err := s.Books(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN, books.GetVerdict(), "%v", books.GetViolations())
	require.Equal(t, orders, books.GetDatabase().GetOrders())
	rows, err := s.Rows(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, orders, rows)
	total, stock, sold, err := s.Total(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, orders, sold)
	require.Equal(t, total-orders, stock)
	duplicates, err := s.DuplicateBuyers(ctx, voucherID)
	require.NoError(t, err)
	require.Zero(t, duplicates)
	pending, err := s.Pending(ctx, voucherID)
	require.NoError(t, err)
	for _, p := range pending {
		require.Zero(t, p.Entries, "consumer %s", p.Consumer)
	}
}

// persisted requires every acknowledged order to be the user's row, by GetOrder.
func persisted(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64, answers map[int64]*seckillv1.GrabResponse) {
	t.Helper()
	for user, answer := range answers {
		if answer.GetOutcome() != seckillv1.Outcome_OUTCOME_ADMITTED {
			continue
		}
		found, err := s.Seckill(0).GetOrder(ctx, &seckillv1.GetOrderRequest{
			UserId: user, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: voucherID},
		})
		require.NoError(t, err)
		require.Equal(t, answer.GetOrder().GetOrderId(), found.GetOrder().GetOrderId())
		require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, found.GetOrder().GetState())
	}
}

// window creates and opens a voucher with a window of its own.
func window(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, total int64, begin, end time.Time) {
	t.Helper()
	_, err := s.Vouchers(0).CreateVoucher(ctx, &seckillv1.CreateVoucherRequest{
		VoucherId: voucherID, Total: total, BeginTime: timestamppb.New(begin), EndTime: timestamppb.New(end),
	})
	require.NoError(t, err)
	_, err = s.Vouchers(0).OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: voucherID})
	require.NoError(t, err)
}

// reason is the reason in the ErrorInfo of a status, and whether a RetryInfo is
// with it.
func reason(err error) (name string, retry bool) {
	for _, detail := range status.Convert(err).Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			name = d.GetReason()
		case *errdetails.RetryInfo:
			retry = true
		}
	}
	return name, retry
}

func requireReason(t *testing.T, err error, want seckillv1.ErrorReason) {
	t.Helper()
	require.Error(t, err)
	name, _ := reason(err)
	require.Equal(t, want.String(), name, "%v", err)
}

func each(t *testing.T, partitions []int, do func(t *testing.T, partitions int)) {
	t.Helper()
	for _, p := range partitions {
		t.Run(fmt.Sprintf("P=%d", p), func(t *testing.T) { do(t, p) })
	}
}
