package ledger

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seckill/seckill/pkg/orderid"
)

// shop is what the admission must be, said in the plainest way: it serves one
// user after another.
type shop struct {
	voucherID         int64
	state             VoucherState
	begin, end, now   time.Time
	stock, seq, bound int64
	orders            map[int64]int64 // user -> seq
}

func (s *shop) serve(user int64) Answer {
	switch seq, known := s.orders[user]; {
	case known:
		return Answer{Decision: DecisionReplayed, Order: orderid.Position{VoucherID: s.voucherID, Epoch: epoch, Seq: seq}, State: MarkAdmitted}
	case s.state == VoucherPaused:
		return Answer{Decision: DecisionPaused}
	case s.state == VoucherClosed, !s.now.Before(s.end):
		return Answer{Decision: DecisionEnded}
	case s.now.Before(s.begin):
		return Answer{Decision: DecisionNotStarted}
	case s.stock == 0:
		return Answer{Decision: DecisionSoldOut}
	case s.seq >= s.bound:
		return Answer{Decision: DecisionBusy}
	}
	s.stock--
	s.seq++
	s.orders[user] = s.seq
	return Answer{Decision: DecisionAdmitted, Order: orderid.Position{VoucherID: s.voucherID, Epoch: epoch, Seq: s.seq}, State: MarkAdmitted}
}

// The same users in the same order get the same answers whether each is a call
// of his own or they are split into batches in any way, whatever the stock, the
// bound, the state and the clock are: those of a shop that serves one after
// another.
func TestAdmit_AnySplitAnswersLikeOneAtATime(t *testing.T) {
	client := sharedClient(t)
	rapid.Check(t, func(rt *rapid.T) {
		// Numbers that lie near each other, so that stock and bound are met, and passed.
		opening := rapid.SampledFrom([]int64{0, 1, 4, 12, 60}).Draw(rt, "opening")
		books := []*book{newEmptyBook(t, client), newEmptyBook(t, client)} // one at a time, split
		models := make([]*shop, len(books))
		for i, b := range books {
			require.NoError(rt, CreatePartition(b.ctx, client, b.partition, epoch, 1_000_000))
			require.NoError(rt, OpenPartition(b.ctx, client, b.partition, epoch, 1_000_000, DurabilityStrict, testRunID))
			require.NoError(rt, LoadAdmit(b.ctx, client, b.partition, epoch))
			b.voucher.Opening, b.voucher.Begin, b.voucher.End = opening, books[0].voucher.Begin, books[0].voucher.End
			require.NoError(rt, CreateVoucher(b.ctx, client, b.voucher))
			b.apply(VoucherOpen)
			models[i] = &shop{
				state: VoucherOpen, begin: b.voucher.Begin, end: b.voucher.End, now: b.voucher.Begin,
				stock: opening, bound: 1_000_000, orders: map[int64]int64{}, voucherID: b.voucher.VoucherID,
			}
		}
		begin, end := books[0].voucher.Begin, books[0].voucher.End
		for range rapid.IntRange(1, 6).Draw(rt, "phases") {
			state := rapid.SampledFrom([]VoucherState{VoucherOpen, VoucherOpen, VoucherOpen, VoucherPaused, VoucherClosed}).Draw(rt, "state")
			now := rapid.SampledFrom([]time.Time{
				begin, begin, begin.Add(time.Minute), end.Add(-time.Millisecond), begin.Add(-time.Millisecond), end,
			}).Draw(rt, "now").UTC()
			bound := rapid.SampledFrom([]int64{1_000_000, 1_000_000, 1, 5, 20, 50}).Draw(rt, "bound")
			more := rapid.SampledFrom([]int64{0, 0, 0, 1, 10}).Draw(rt, "more")
			calls := rapid.SampledFrom([]int{0, 3, 10, 30, 120}).Draw(rt, "calls")
			users := rapid.SliceOfN(rapid.Int64Range(1, 80), calls, calls).Draw(rt, "users")
			split := rapid.SliceOfN(rapid.IntRange(1, 40), len(users), len(users)).Draw(rt, "split")
			var answers [2][]Answer
			for i, b := range books {
				b.voucher.Opening += more
				b.apply(state)
				require.NoError(rt, TunePartition(b.ctx, client, b.partition, epoch, bound, DurabilityStrict))
				m := models[i]
				m.state, m.now, m.bound, m.stock = state, now, bound, m.stock+more
				sizes := split
				for rest := users; len(rest) > 0; sizes = sizes[1:] {
					n := 1
					if i == 1 {
						n = min(sizes[0], len(rest))
					}
					reply := b.admitAt(now, rest[:n]...)
					for j, user := range rest[:n] {
						require.Equal(rt, m.serve(user), reply.Answers[j], "user %d", user)
					}
					answers[i] = append(answers[i], reply.Answers...)
					rest = rest[n:]
				}
			}
			for j := range users {
				if answers[1][j].Order.VoucherID != 0 {
					answers[1][j].Order.VoucherID = books[0].voucher.VoucherID
				}
				require.Equal(rt, answers[0][j], answers[1][j], "user %d", users[j])
			}
		}
		for i, b := range books {
			m, found := models[i], b.books()
			require.Equal(rt, m.stock, found.Stock)
			require.Equal(rt, m.seq, found.Seq)
			require.Equal(rt, int64(len(m.orders)), found.Buyers)
			seq := int64(0)
			for _, entry := range b.entries() {
				for _, order := range entry.Orders {
					seq++
					require.NoError(rt, order.Err)
					require.Equal(rt, seq, order.Seq)
					require.Equal(rt, m.orders[order.UserID], order.Seq)
				}
			}
			require.Equal(rt, m.seq, seq)
			k := b.keys()
			b.must("DEL", k["meta"], k["voucher"], k["buyers"], k["outcomes"], k["orders"])
		}
	})
}
