package e2e

import (
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

func TestSale_OneUnitFor500Users(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Gateways: 2, Writers: 1, Partitions: partitions})
		s.MustOpenVoucher(t, 1, 1)
		answers, errs := crowd(ctx, t, s, 1, 1, 500)
		require.Empty(t, errs)
		require.Equal(t, int64(1), count(answers, seckillv1.Outcome_OUTCOME_ADMITTED))
		require.Equal(t, int64(499), count(answers, seckillv1.Outcome_OUTCOME_SOLD_OUT))
		proven(ctx, t, s, 1, 1)
		persisted(ctx, t, s, 1, answers)
	})
}

func TestSale_HundredUnitsFor1000UsersOver3GatewaysAnd3Writers(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Gateways: 3, Writers: 3, Partitions: partitions})
		s.MustOpenVoucher(t, 1, 100)
		answers, errs := crowd(ctx, t, s, 1, 1, 1000)
		require.Empty(t, errs)
		require.Equal(t, int64(100), count(answers, seckillv1.Outcome_OUTCOME_ADMITTED))
		require.Equal(t, int64(900), count(answers, seckillv1.Outcome_OUTCOME_SOLD_OUT))
		ids := map[string]bool{}
		for _, answer := range answers {
			if answer.GetOutcome() == seckillv1.Outcome_OUTCOME_ADMITTED {
				require.False(t, ids[answer.GetOrder().GetOrderId()])
				ids[answer.GetOrder().GetOrderId()] = true
				require.Equal(t, seckillv1.Durability_DURABILITY_STRICT, answer.GetDurability())
			}
		}
		proven(ctx, t, s, 1, 100)
		persisted(ctx, t, s, 1, answers)
	})
}

// The same user over two gateways at once, and again when the stock is gone,
// while the voucher is paused, when the window is over and when it is closed:
// always the same order.
func TestSale_RetriesGetTheSameOrderWhateverTheState(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: 2, Writers: 1})
	end := time.Now().Add(6 * time.Second)
	window(ctx, t, s, 1, 2, time.Now().Add(-time.Second), end)

	const user = int64(7)
	ids := map[string]int{}
	fresh := 0
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			answer, err := grab(ctx, s.Seckill(i%2), user, 1)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				ids["error: "+err.Error()]++
				return
			}
			ids[answer.GetOrder().GetOrderId()]++
			if !answer.GetReplayed() {
				fresh++
			}
		})
	}
	all.Wait()
	require.Len(t, ids, 1, "%v", ids)
	require.Equal(t, 1, fresh)
	var id string
	for id = range ids {
	}
	require.Equal(t, 200, ids[id])
	require.Len(t, id, 26)

	again := func(when string, stranger seckillv1.Outcome, strangerID int64) {
		t.Helper()
		for gateway := range 2 {
			answer, err := grab(ctx, s.Seckill(gateway), user, 1)
			require.NoError(t, err, when)
			require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, answer.GetOutcome(), when)
			require.True(t, answer.GetReplayed(), when)
			require.Equal(t, id, answer.GetOrder().GetOrderId(), when)
			refused, err := grab(ctx, s.Seckill(gateway), strangerID, 1)
			require.NoError(t, err, when)
			require.Equal(t, stranger, refused.GetOutcome(), when)
		}
	}
	_, err := s.Vouchers(0).PauseVoucher(ctx, &seckillv1.PauseVoucherRequest{VoucherId: 1})
	require.NoError(t, err)
	again("paused", seckillv1.Outcome_OUTCOME_PAUSED, 1001)
	_, err = s.Vouchers(0).ResumeVoucher(ctx, &seckillv1.ResumeVoucherRequest{VoucherId: 1})
	require.NoError(t, err)
	last, err := grab(ctx, s.Seckill(0), 8, 1)
	require.NoError(t, err)
	require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, last.GetOutcome())
	again("sold out", seckillv1.Outcome_OUTCOME_SOLD_OUT, 1002)
	require.Eventually(t, func() bool {
		answer, err := grab(ctx, s.Seckill(0), 1003, 1)
		return err == nil && answer.GetOutcome() == seckillv1.Outcome_OUTCOME_ENDED
	}, patience, 20*time.Millisecond)
	again("ended", seckillv1.Outcome_OUTCOME_ENDED, 1003)
	_, err = s.Vouchers(0).CloseVoucher(ctx, &seckillv1.CloseVoucherRequest{VoucherId: 1})
	require.NoError(t, err)
	again("closed", seckillv1.Outcome_OUTCOME_ENDED, 1004)
	proven(ctx, t, s, 1, 2)

	_, err = s.Vouchers(0).ArchiveVoucher(ctx, &seckillv1.ArchiveVoucherRequest{VoucherId: 1})
	require.NoError(t, err)
	_, err = grab(ctx, s.Seckill(0), user, 1)
	require.Equal(t, codes.NotFound, status.Code(err))
	requireReason(t, err, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_ARCHIVED)
}

func TestSale_LateOpenAfterCloseDoesNotOpenAgain(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{})
	s.MustOpenVoucher(t, 1, 10)
	_, err := s.Vouchers(0).CloseVoucher(ctx, &seckillv1.CloseVoucherRequest{VoucherId: 1})
	require.NoError(t, err)
	_, err = s.Vouchers(0).OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: 1})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	requireReason(t, err, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_STATE)
	answer, err := grab(ctx, s.Seckill(0), 1, 1)
	require.NoError(t, err)
	require.Equal(t, seckillv1.Outcome_OUTCOME_ENDED, answer.GetOutcome())
}

// Ids beyond what a double holds come back digit by digit, from every store.
func TestSale_LargestIDs(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{})
	for _, voucher := range []int64{1<<53 + 1, math.MaxInt64 - 1, math.MaxInt64} {
		s.MustOpenVoucher(t, voucher, 10)
		for _, user := range []int64{1, 1<<53 + 1, math.MaxInt64} {
			answer, err := grab(ctx, s.Seckill(0), user, voucher)
			require.NoError(t, err)
			require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, answer.GetOutcome())
			require.Equal(t, user, answer.GetOrder().GetUserId())
			require.Equal(t, voucher, answer.GetOrder().GetVoucherId())
			position, err := s.OrderIDs().Decode(answer.GetOrder().GetOrderId())
			require.NoError(t, err)
			require.Equal(t, voucher, position.VoucherID)
			found, err := s.Seckill(0).GetOrder(ctx, &seckillv1.GetOrderRequest{
				UserId: user, Key: &seckillv1.GetOrderRequest_OrderId{OrderId: answer.GetOrder().GetOrderId()},
			})
			require.NoError(t, err)
			require.Equal(t, answer.GetOrder().GetOrderId(), found.GetOrder().GetOrderId())
		}
		proven(ctx, t, s, voucher, 3)
		orders, err := s.Orders(ctx, voucher)
		require.NoError(t, err)
		users := map[int64]bool{}
		for _, o := range orders {
			users[o.UserID] = true
		}
		require.Equal(t, map[int64]bool{1: true, 1<<53 + 1: true, math.MaxInt64: true}, users)
	}
}

func TestSale_UnknownAndUnopenedVouchersAreNotFound(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{})
	_, err := s.Vouchers(0).CreateVoucher(ctx, createRequest(5, 10))
	require.NoError(t, err)
	for _, voucher := range []int64{5, 6, math.MaxInt64} {
		_, err := grab(ctx, s.Seckill(0), 1, voucher)
		require.Equal(t, codes.NotFound, status.Code(err))
		requireReason(t, err, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND)
	}
	for _, id := range []int64{0, -1, math.MinInt64} {
		_, err := grab(ctx, s.Seckill(0), id, 5)
		require.Equal(t, codes.InvalidArgument, status.Code(err))
		_, err = grab(ctx, s.Seckill(0), 1, id)
		require.Equal(t, codes.InvalidArgument, status.Code(err))
		requireReason(t, err, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD)
	}
}
