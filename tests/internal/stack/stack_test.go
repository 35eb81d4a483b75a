package stack_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestStack_GrabBecomesRow(t *testing.T) {
	s := stack.Test(t, stack.Options{Gateways: 2, Writers: 2, Partitions: 1})
	ctx := testContext(t)
	s.MustOpenVoucher(t, 1, 2)

	first, err := s.Seckill(0).Grab(ctx, &seckillv1.GrabRequest{UserId: 7, VoucherId: 1, Reference: "basket 12"})
	require.NoError(t, err)
	require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, first.GetOutcome())
	again, err := s.Seckill(1).Grab(ctx, &seckillv1.GrabRequest{UserId: 7, VoucherId: 1})
	require.NoError(t, err)
	require.True(t, again.GetReplayed())
	require.Equal(t, first.GetOrder().GetOrderId(), again.GetOrder().GetOrderId())

	require.NoError(t, s.AwaitSettled(ctx, 1))
	orders, err := s.Orders(ctx, 1)
	require.NoError(t, err)
	require.Len(t, orders, 1)
	require.EqualValues(t, 7, orders[0].UserID)
	require.Equal(t, "basket 12", orders[0].Reference)
	require.Equal(t, first.GetOrder().GetOrderId(), s.OrderIDs().Encode(orders[0].Position))

	rows, err := s.Rows(ctx, 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, rows)
	outcomes, err := s.Outcomes(ctx, 1)
	require.NoError(t, err)
	require.Zero(t, outcomes)
	total, stock, sold, err := s.Total(ctx, 1)
	require.NoError(t, err)
	require.Equal(t, []int64{2, 1, 1}, []int64{total, stock, sold})
	figures, err := s.Ledger(ctx, 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, figures.Stock)
	books, err := s.Books(ctx, 1)
	require.NoError(t, err)
	require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN, books.GetVerdict(), "%v", books.GetViolations())

	settled := 0.0
	for _, w := range s.Writers() {
		n, err := w.Metric(ctx, "seckill_writer_orders_settled_total")
		require.NoError(t, err)
		settled += n
	}
	require.EqualValues(t, 1, settled)
	_, err = s.Writer(0).Metric(ctx, "seckill_writer_no_such_metric")
	require.ErrorContains(t, err, "is not there")
}

// The count must see what the unique index is there to prevent.
func TestStack_CountsDuplicateBuyers(t *testing.T) {
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: -1})
	ctx := testContext(t)
	for _, statement := range []string{
		"ALTER TABLE orders DROP INDEX orders_user_voucher, ADD INDEX orders_user_voucher (user_id, voucher_id)",
		"INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (1, 1, 1, 7, NOW()), (1, 1, 2, 8, NOW()), (1, 1, 3, 7, NOW()), (2, 1, 1, 8, NOW())",
	} {
		_, err := s.DB().ExecContext(ctx, statement)
		require.NoError(t, err)
	}
	duplicates, err := s.DuplicateBuyers(ctx, 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, duplicates)
}

func TestStack_KilledWriterHoldsUntilAnotherTakesOver(t *testing.T) {
	s := stack.Test(t, stack.Options{Partitions: 1})
	ctx := testContext(t)
	s.MustOpenVoucher(t, 1, 1)
	release, err := s.HoldVoucherRow(ctx, 1)
	require.NoError(t, err)
	_, err = s.Seckill(0).Grab(ctx, &seckillv1.GrabRequest{UserId: 7, VoucherId: 1})
	require.NoError(t, err)
	victim := s.Writer(0)
	require.Eventually(t, func() bool {
		entries, orders, err := s.Held(ctx, 1, victim.Name)
		return err == nil && entries == 1 && orders == 1
	}, 10*time.Second, 5*time.Millisecond)
	victim.Kill()
	release()

	successor, err := s.StartWriter(ctx)
	require.NoError(t, err)
	require.NotEqual(t, victim.Name, successor.Name)
	require.NoError(t, s.AwaitSettled(ctx, 1))
	reclaimed, err := successor.Metric(ctx, "seckill_writer_orders_reclaimed_total")
	require.NoError(t, err)
	require.EqualValues(t, 1, reclaimed)
	rows, err := s.Rows(ctx, 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, rows)
}

func TestStack_CloseLeavesNothing(t *testing.T) {
	ctx := testContext(t)
	s, err := stack.Start(ctx, stack.Options{Partitions: 1, Binaries: devstack.TestBinaries(t)})
	require.NoError(t, err)
	addresses := []string{s.Redis.Addr(), s.Gateway(0).Addr, s.Gateway(0).Admin, s.Writer(0).Addr, s.Writer(0).Admin}
	folders := []string{s.Redis.Dir(), filepath.Dir(s.OrderKeyFile())}
	s.Close()
	s.Close()
	for _, addr := range addresses {
		_, err := net.DialTimeout("tcp", addr, time.Second)
		require.Error(t, err, addr)
	}
	for _, folder := range folders {
		require.NoDirExists(t, folder)
	}
}

func TestStart_TellsWhyAProcessEnded(t *testing.T) {
	_, err := stack.Start(testContext(t), stack.Options{
		Partitions: 1, Binaries: devstack.TestBinaries(t), WriterArgs: []string{"--min-idle=1s"},
	})
	require.ErrorContains(t, err, "writer-1 ended instead of starting")
	require.ErrorContains(t, err, "min-idle")
}
