package e2e

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

const guardianMetric = "seckill_partition_guardian"

// The guardian hangs and keeps its connections: the database takes the lock from
// it when its session is silent for too long, and another writer becomes the
// guardian. What the first one believes when it wakes up does no harm.
func TestGuardian_ThatHangsIsReplacedAndDoesNoHarmWhenItWakes(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 2, Partitions: 1})
	s.MustOpenVoucher(t, 1, 1000)
	guards := func(w *stack.Process) bool {
		n, err := w.Metric(ctx, guardianMetric)
		return err == nil && n == 1
	}
	hung, other := s.Writer(0), s.Writer(1)
	require.Eventually(t, func() bool { return guards(hung) || guards(other) }, patience, 20*time.Millisecond)
	if guards(other) {
		hung, other = other, hung
	}
	vouchers := seckillv1.NewVoucherServiceClient(other.Conn())
	first, errs := crowd(ctx, t, s, 1, 1, 200)
	require.Empty(t, errs)

	require.NoError(t, hung.Pause())
	// The sale does not wait for a guardian.
	second, errs := crowd(ctx, t, s, 1, 201, 200)
	require.Empty(t, errs)
	require.Eventually(t, func() bool { return guards(other) }, patience, 100*time.Millisecond, "another becomes the guardian")
	// What happens behind the back of the one that hangs.
	for _, step := range []func() error{
		func() error {
			_, err := vouchers.PauseVoucher(ctx, &seckillv1.PauseVoucherRequest{VoucherId: 1})
			return err
		},
		func() error {
			_, err := vouchers.ResumeVoucher(ctx, &seckillv1.ResumeVoucherRequest{VoucherId: 1})
			return err
		},
		func() error {
			_, err := vouchers.PauseVoucher(ctx, &seckillv1.PauseVoucherRequest{VoucherId: 1})
			return err
		},
	} {
		require.NoError(t, step())
	}

	require.NoError(t, hung.Resume())
	require.Eventually(t, func() bool {
		n, err := hung.Metric(ctx, guardianMetric)
		return err == nil && n == 0
	}, patience, 20*time.Millisecond, "it knows that it is not the guardian any more")
	require.NoError(t, hung.AwaitServing(ctx, "", "seckill.partition.0"))
	require.True(t, guards(other))
	answer, err := grab(ctx, s.Seckill(0), 9999, 1)
	require.NoError(t, err)
	require.Equal(t, seckillv1.Outcome_OUTCOME_PAUSED, answer.GetOutcome(), "the pause holds")
	_, err = vouchers.ResumeVoucher(ctx, &seckillv1.ResumeVoucherRequest{VoucherId: 1})
	require.NoError(t, err)
	third, errs := crowd(ctx, t, s, 1, 401, 200)
	require.Empty(t, errs)
	proven(ctx, t, s, 1, 600)
	for _, answers := range []map[int64]*seckillv1.GrabResponse{first, second, third} {
		require.Equal(t, int64(200), count(answers, seckillv1.Outcome_OUTCOME_ADMITTED))
		persisted(ctx, t, s, 1, answers)
	}
	books, err := s.Ledger(ctx, 1)
	require.NoError(t, err)
	require.Equal(t, int64(600), books.Seq)
}
