package deploy_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// holdAndResolve has the writer hold what it cannot store, and an operator
// decide about it, with no other rights than those that are deployed: orders
// that name nobody, of which one is requeued in vain, and an entry that cannot
// be read. In the end all units are back.
func holdAndResolve(ctx context.Context, t *testing.T, gateway rueidis.Client, vouchers seckillv1.VoucherServiceClient, operators seckillv1.WriterServiceClient) {
	t.Helper()
	created, err := vouchers.CreateVoucher(ctx, &seckillv1.CreateVoucherRequest{
		Title: "held", Total: 5, BeginTime: timestamppb.New(time.Now().Add(-time.Hour)), EndTime: timestamppb.New(time.Now().Add(time.Hour)),
	})
	require.NoError(t, err)
	id := created.GetVoucher().GetVoucherId()
	_, err = vouchers.OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: id})
	require.NoError(t, err)
	partition := ledger.Partition(id, 2)
	long := strings.Repeat("x", 300)
	for _, grabs := range [][]ledger.Grab{
		{{UserID: 21, Record: ledger.EncodeRecord(21, long, "")}, {UserID: 22, Record: ledger.EncodeRecord(22, long, "")}},
		{{UserID: 23, Record: []byte{0x0a, 0x7f, 0x08}}}, // longer than what follows
	} {
		reply, err := ledger.Admit(ctx, gateway, ledger.AdmitCall{
			Partition: partition, Epoch: 1, SHA: ledger.AdmitSHA(partition, 1), VoucherID: id,
			NotAfter: time.Now().Add(patience), Grabs: grabs,
		})
		require.NoError(t, err)
		require.Equal(t, ledger.AdmitOK, reply.Status)
	}
	var held []*seckillv1.DeadLetter
	require.Eventually(t, func() bool {
		page, err := operators.ListDeadLetters(ctx, &seckillv1.ListDeadLettersRequest{})
		if err != nil {
			return false
		}
		held = page.GetDeadLetters()
		return len(held) == 3
	}, patience, 50*time.Millisecond, "held: %v", held)

	resolve := func(letter *seckillv1.DeadLetter, action seckillv1.DeadLetterAction, want seckillv1.DeadLetterResult) {
		t.Helper()
		stream, err := operators.ResolveDeadLetter(ctx, &seckillv1.ResolveDeadLetterRequest{
			Which:  &seckillv1.ResolveDeadLetterRequest_DeadLetterId{DeadLetterId: letter.GetDeadLetterId()},
			Action: action, Operator: "somebody", Reason: "tried",
		})
		require.NoError(t, err)
		progress, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, want, progress.GetResult(), "%s: %s", letter.GetReason(), progress.GetDetail())
		_, err = stream.Recv()
		require.True(t, errors.Is(err, io.EOF), "%v", err)
	}
	for _, letter := range held {
		if letter.GetOrder().GetOrderId() != "" {
			resolve(letter, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_STILL_HELD)
		}
		resolve(letter, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED)
		// Again is harmless.
		resolve(letter, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED)
	}
	// The ledger is told, and all of it fits.
	require.Eventually(t, func() bool {
		answer, err := vouchers.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: id})
		books := answer.GetBooks()
		return err == nil && books.GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN &&
			books.GetDatabase().GetOrders() == 0 && books.GetLedger().GetStock() == 5
	}, patience, 50*time.Millisecond)
	backlog, err := operators.GetBacklog(ctx, &seckillv1.GetBacklogRequest{})
	require.NoError(t, err)
	require.Len(t, backlog.GetPartitions(), 2)
	require.Zero(t, backlog.GetDeadLetters())
}
