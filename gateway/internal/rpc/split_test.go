package rpc

import (
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/ledger"
)

// said is what a caller is told, without what must differ from voucher to
// voucher and from one moment to the next.
func (e *edge) said(t require.TestingT, response *seckillv1.GrabResponse, err *seckillv1.GrabError) string {
	if err != nil {
		return err.String()
	}
	require.NotNil(t, response.GetDecidedAt())
	plain := proto.Clone(response).(*seckillv1.GrabResponse)
	plain.DecidedAt = nil
	text := ""
	if order := plain.GetOrder(); order != nil {
		at, err := e.ids.Decode(order.GetOrderId())
		require.NoError(t, err)
		require.Equal(t, order.GetVoucherId(), at.VoucherID)
		text = fmt.Sprintf("%d.%d user %d %s %q admitted at a time: %v", at.Epoch, at.Seq, order.GetUserId(), order.GetState(), order.GetReference(), order.GetAdmittedAt() != nil)
		plain.Order = nil
	}
	return plain.String() + text
}

// The same Grabs in the same order are answered alike, whether each is a unary
// call or they come over a stream in messages of any size.
func TestGrabStream_AnswersAnySequenceAsUnaryDoes(t *testing.T) {
	e := newEdge(t)
	stream := openStream(t, t.Context(), e)
	voucher := int64(0)
	rapid.Check(t, func(rt *rapid.T) {
		voucher += partitions
		stock := rapid.SampledFrom([]int64{0, 1, 4, 12, 40}).Draw(rt, "stock")
		// In partitions of their own, since the bound is the partition's.
		unary, streamed := ledgertest.Voucher(partitions, voucher, stock), ledgertest.Voucher(partitions, voucher+1, stock)
		ledgertest.Sell(t, e.client, unary)
		ledgertest.Sell(t, e.client, streamed)
		for range rapid.IntRange(1, 4).Draw(rt, "phases") {
			state := rapid.SampledFrom([]ledger.VoucherState{ledger.VoucherOpen, ledger.VoucherOpen, ledger.VoucherPaused}).Draw(rt, "state")
			room := rapid.SampledFrom([]int64{1_000_000, 1_000_000, 3, 10, -2}).Draw(rt, "room")
			for _, v := range []*ledger.Voucher{&unary, &streamed} {
				v.State, v.Rev = state, v.Rev+1
				ledgertest.Apply(t, e.client, *v)
				in := ledgertest.Books(t, e.client, *v).Meta.InFlight()
				require.NoError(rt, ledger.TunePartition(context.Background(), e.client, v.Partition, 1, max(1, in+room), ledger.DurabilityStrict))
			}
			type wish struct {
				user      int64
				reference string
				missing   bool
			}
			n := rapid.SampledFrom([]int{0, 3, 20, 60}).Draw(rt, "n")
			wishes := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) wish {
				return wish{
					user:      rapid.Int64Range(0, 30).Draw(rt, "user"), // 0 is invalid
					reference: rapid.SampledFrom([]string{"", "a", "b"}).Draw(rt, "reference"),
					missing:   rapid.IntRange(0, 9).Draw(rt, "missing") == 0,
				}
			}), n, n).Draw(rt, "wishes")
			grab := func(v ledger.Voucher, w wish) *seckillv1.StreamedGrab {
				id := v.VoucherID
				if w.missing {
					id += 1_000_000 * partitions
				}
				return &seckillv1.StreamedGrab{UserId: w.user, VoucherId: id, Reference: w.reference, TimeoutMs: 20_000}
			}
			var want []string
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			for _, w := range wishes {
				g := grab(unary, w)
				response, err := e.Grab(ctx, &seckillv1.GrabRequest{UserId: g.UserId, VoucherId: g.VoucherId, Reference: g.Reference})
				var fault *seckillv1.GrabError
				if status.Code(err) != codes.OK {
					fault = streamedError(err)
				}
				want = append(want, e.said(rt, response, fault))
			}
			cancel()
			for i := 0; i < len(wishes); {
				n := min(rapid.IntRange(1, 30).Draw(rt, "size"), len(wishes)-i)
				message := &seckillv1.GrabStreamRequest{}
				for j := range n {
					g := grab(streamed, wishes[i+j])
					g.CorrelationId = uint64(i + j)
					message.Grabs = append(message.Grabs, g)
				}
				require.NoError(rt, stream.Send(message))
				i += n
			}
			for id, answer := range receive(t, stream, len(wishes)) {
				require.Equal(rt, want[id], e.said(rt, answer.GetResponse(), answer.GetError()), "%+v", wishes[id])
			}
		}
		require.Equal(rt, ledgertest.Books(t, e.client, unary).Seq, ledgertest.Books(t, e.client, streamed).Seq)
	})
	require.NoError(t, stream.CloseSend())
	_, err := stream.Recv()
	require.ErrorIs(t, err, io.EOF)
}
