//go:build fleet

package e2e

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

func operators(s *stack.Stack, writer int) seckillv1.WriterServiceClient {
	return seckillv1.NewWriterServiceClient(s.Writer(writer).Conn())
}

// deadLetters lists all that wait for an operator.
func deadLetters(ctx context.Context, t *testing.T, s *stack.Stack, writer int, filter *seckillv1.DeadLetterFilter) (all []*seckillv1.DeadLetter) {
	t.Helper()
	request := &seckillv1.ListDeadLettersRequest{Filter: filter, PageSize: 300}
	for {
		page, err := operators(s, writer).ListDeadLetters(ctx, request)
		require.NoError(t, err)
		all = append(all, page.GetDeadLetters()...)
		if request.PageToken = page.GetNextPageToken(); request.PageToken == "" {
			return all
		}
	}
}

// resolve resolves one dead letter and answers what came of it.
func resolve(ctx context.Context, s *stack.Stack, writer int, id string, action seckillv1.DeadLetterAction) (*seckillv1.ResolveDeadLetterResponse, error) {
	return resolveAt(ctx, operators(s, writer), id, action)
}

func resolveAt(ctx context.Context, client seckillv1.WriterServiceClient, id string, action seckillv1.DeadLetterAction) (*seckillv1.ResolveDeadLetterResponse, error) {
	stream, err := client.ResolveDeadLetter(ctx, &seckillv1.ResolveDeadLetterRequest{
		Which:  &seckillv1.ResolveDeadLetterRequest_DeadLetterId{DeadLetterId: id},
		Action: action, Operator: "tester", Reason: "a test",
	})
	if err != nil {
		return nil, err
	}
	answer, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return nil, errors.Join(errors.New("more than one answer"), err)
	}
	return answer, nil
}

const (
	actRequeue = seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE
	actCancel  = seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL
)

// unstorable is a Grab of a known user that the database refuses while narrow
// holds.
func unstorable(user int64) ledger.Grab {
	return ledger.Grab{UserID: user, Record: ledger.EncodeRecord(user, "longer than the column", "")}
}

// truncated is a Grab that makes the whole entry unreadable: an element that is
// longer than what follows. The entry still tells which positions it stands for.
func truncated(user int64) ledger.Grab {
	return ledger.Grab{UserID: user, Record: []byte{0x0a, 0x7f, 0x08}}
}

// narrow makes the database refuse references of more than 4 characters.
func narrow(ctx context.Context, t *testing.T, s *stack.Stack) {
	t.Helper()
	exec(ctx, t, s, "ALTER TABLE orders MODIFY reference VARCHAR(4) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT ''")
}

func widen(ctx context.Context, t *testing.T, s *stack.Stack) {
	t.Helper()
	exec(ctx, t, s, "ALTER TABLE orders MODIFY reference VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT ''")
}

// state is what GetOrder says of a user's order.
func state(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, user int64) seckillv1.OrderState {
	t.Helper()
	found, err := s.Seckill(0).GetOrder(ctx, &seckillv1.GetOrderRequest{UserId: user, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: voucherID}})
	require.NoError(t, err)
	return found.GetOrder().GetState()
}

// One bad row among a thousand costs that row alone.
func TestDeadLetter_OneBadRowAmongAThousand(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 2000)
	narrow(ctx, t, s)
	require.NoError(t, s.Writer(0).Pause())
	unblocked(ctx, t, s)
	for first := int64(1); first <= 1000; first += 250 {
		var grabs []ledger.Grab
		for user := first; user < first+250; user++ {
			if user == 618 {
				grabs = append(grabs, unstorable(user))
			} else {
				grabs = append(grabs, buy(user))
			}
		}
		admit(ctx, t, s, 1, grabs...)
	}
	require.NoError(t, s.Writer(0).Resume())
	settled(ctx, t, s, 1)
	balanced(ctx, t, s, 1, 999, 1000)
	require.Equal(t, map[string]int{"HELD": 1}, outcomes(ctx, t, s, 1))
	require.Equal(t, "1.618h", mark(ctx, t, s, 1, 618))
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_HELD, state(ctx, t, s, 1, 618))
	all := deadLetters(ctx, t, s, 0, nil)
	require.Len(t, all, 1)
	require.EqualValues(t, 618, all[0].GetOrder().GetUserId())
	require.EqualValues(t, 1, all[0].GetUnits())
	require.NotEmpty(t, all[0].GetReason())
	require.NotEmpty(t, all[0].GetRaw())
	require.NotEmpty(t, all[0].GetEntryId())
}

// What an operator may decide of a held order of a known user, and what then
// holds in both stores.
func TestDeadLetter_RequeueCancelAndConflict(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 2, Partitions: 1})
	s.MustOpenVoucher(t, 1, 10)
	narrow(ctx, t, s)
	admit(ctx, t, s, 1, unstorable(11), unstorable(12), unstorable(13), buy(14))
	settled(ctx, t, s, 1)
	balanced(ctx, t, s, 1, 1, 6)
	byUser := map[int64]string{}
	for _, letter := range deadLetters(ctx, t, s, 0, &seckillv1.DeadLetterFilter{VoucherId: 1}) {
		byUser[letter.GetOrder().GetUserId()] = letter.GetDeadLetterId()
	}
	require.Len(t, byUser, 3)
	// The user's retry still answers the order, and no second one is sold.
	answer, err := grab(ctx, s.Seckill(0), 11, 1)
	require.NoError(t, err)
	require.True(t, answer.GetReplayed())

	still, err := resolve(ctx, s, 0, byUser[11], actRequeue)
	require.NoError(t, err)
	require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_STILL_HELD, still.GetResult())
	require.NotEmpty(t, still.GetDetail())
	require.Equal(t, "1.1h", mark(ctx, t, s, 1, 11))
	widen(ctx, t, s)

	for range 2 { // the second time changes nothing
		done, err := resolve(ctx, s, 0, byUser[11], actRequeue)
		require.NoError(t, err)
		require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED, done.GetResult(), done.GetDetail())
		balanced(ctx, t, s, 1, 2, 6)
	}
	require.Eventually(t, func() bool { return mark(ctx, t, s, 1, 11) == "1.1p" }, patience, 20*time.Millisecond)
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, state(ctx, t, s, 1, 11))

	for range 2 {
		done, err := resolve(ctx, s, 1, byUser[12], actCancel)
		require.NoError(t, err)
		require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED, done.GetResult(), done.GetDetail())
		require.Eventually(t, func() bool { return mark(ctx, t, s, 1, 12) == "" }, patience, 20*time.Millisecond)
		balanced(ctx, t, s, 1, 2, 7)
	}
	again, err := grab(ctx, s.Seckill(0), 12, 1) // the right to buy is back
	require.NoError(t, err)
	require.False(t, again.GetReplayed())
	settled(ctx, t, s, 1)
	balanced(ctx, t, s, 1, 3, 6)

	// User 13 has bought again before the requeue.
	forget(ctx, t, s, 1, 13)
	second, err := grab(ctx, s.Seckill(0), 13, 1)
	require.NoError(t, err)
	require.False(t, second.GetReplayed())
	settled(ctx, t, s, 1)
	conflict, err := resolve(ctx, s, 0, byUser[13], actRequeue)
	require.NoError(t, err)
	require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CONFLICT, conflict.GetResult(), conflict.GetDetail())
	require.Empty(t, deadLetters(ctx, t, s, 0, nil))
	require.Equal(t, map[string]int{"CANCELLED": 1, "CONFLICT": 1}, outcomes(ctx, t, s, 1))
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, state(ctx, t, s, 1, 13))
	require.EqualValues(t, 4, whole(ctx, t, s, "SELECT COUNT(*) FROM operator_actions"), "who decided what is kept")
	balanced(ctx, t, s, 1, 4, 6)
}

// Two operators press at once, at two writers: every dead letter is decided
// once.
func TestDeadLetter_TwoOperatorsAtOnce(t *testing.T) {
	ctx := testContext(t)
	const n = 60
	s := stack.Test(t, stack.Options{Writers: 2, Partitions: 1})
	s.MustOpenVoucher(t, 1, n)
	narrow(ctx, t, s)
	for user := int64(1); user <= n; user++ {
		admit(ctx, t, s, 1, unstorable(user))
	}
	settled(ctx, t, s, 1)
	widen(ctx, t, s)
	all := deadLetters(ctx, t, s, 0, nil)
	require.Len(t, all, n)
	var mu sync.Mutex
	results := map[string][]seckillv1.DeadLetterResult{}
	var both sync.WaitGroup
	press := func(writer int, id string, action seckillv1.DeadLetterAction) {
		both.Go(func() {
			answer, err := resolve(ctx, s, writer, id, action)
			if err != nil {
				t.Errorf("%s: %v", id, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			results[id] = append(results[id], answer.GetResult())
		})
	}
	for i, letter := range all {
		press(0, letter.GetDeadLetterId(), actCancel)
		press(1, letter.GetDeadLetterId(), []seckillv1.DeadLetterAction{actCancel, actRequeue}[i%2])
	}
	both.Wait()
	cancelled := 0
	for id, pair := range results {
		require.Len(t, pair, 2)
		require.Equal(t, pair[0], pair[1], "%s: both hear the same", id)
		if pair[0] == seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED {
			cancelled++
		}
	}
	require.GreaterOrEqual(t, cancelled, n/2)
	balanced(ctx, t, s, 1, int64(n-cancelled), int64(cancelled))
	require.Empty(t, deadLetters(ctx, t, s, 0, nil))
}

// The writer that resolves thousands by a filter dies in the middle; the call is
// repeated at another: every unit comes back once.
func TestDeadLetter_KilledInTheMiddleOfAFilter(t *testing.T) {
	ctx := testContext(t)
	const n = 3000
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 2, Partitions: 1})
	s.MustOpenVoucher(t, 1, n)
	for user := int64(1); user <= n; {
		var grabs []ledger.Grab
		for ; user <= n && len(grabs) < ledger.MaxBatch; user++ {
			grabs = append(grabs, undecodable(user))
		}
		admit(ctx, t, s, 1, grabs...)
	}
	settled(ctx, t, s, 1)
	balanced(ctx, t, s, 1, 0, 0)
	require.Len(t, deadLetters(ctx, t, s, 0, nil), n)
	request := &seckillv1.ResolveDeadLetterRequest{
		Which:  &seckillv1.ResolveDeadLetterRequest_Filter{Filter: &seckillv1.DeadLetterFilter{VoucherId: 1}},
		Action: actCancel, Operator: "tester", Reason: "a test",
	}
	stream, err := operators(s, 0).ResolveDeadLetter(ctx, request)
	require.NoError(t, err)
	for range 200 {
		progress, err := stream.Recv()
		require.NoError(t, err)
		require.EqualValues(t, n, progress.GetTotal())
	}
	s.Writer(0).Kill()
	left := len(deadLetters(ctx, t, s, 1, nil))
	require.Less(t, left, n)
	require.Positive(t, left, "it was done before it died")
	stream, err = operators(s, 1).ResolveDeadLetter(ctx, request)
	require.NoError(t, err)
	var done int64
	for {
		progress, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		done++
		require.Equal(t, done, progress.GetDone())
	}
	require.LessOrEqual(t, done, int64(left))
	require.Empty(t, deadLetters(ctx, t, s, 1, nil))
	balanced(ctx, t, s, 1, 0, n)
	require.Equal(t, map[string]int{"CANCELLED": n}, outcomes(ctx, t, s, 1))
}

// Strange entries in the stream: the sale goes on, and what is held is listed.
func TestEntries_ForeignAndFuture(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 2, Partitions: 8, WriterArgs: append(stack.FastTakeover(), "--guardian-interval=200ms")})
	goesOn := func(t *testing.T, voucher int64) {
		answer, err := grab(ctx, s.Seckill(0), 1_000_000, voucher)
		require.NoError(t, err, "the sale does not go on")
		require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, answer.GetOutcome())
		require.Eventually(t, func() bool { return state(ctx, t, s, voucher, 1_000_000) == seckillv1.OrderState_ORDER_STATE_PERSISTED }, patience, 20*time.Millisecond)
	}
	unknown := func() float64 { return sum(ctx, t, s, "seckill_writer_entries_unknown_version_total") }

	t.Run("1 and 256 orders", func(t *testing.T) {
		s.MustOpenVoucher(t, 8, 1000)
		admitMany(ctx, t, s, 8, 1, 1)
		admitMany(ctx, t, s, 8, 11, 256)
		proven(ctx, t, s, 8, 257)
		goesOn(t, 8)
	})

	// Entries that were admitted and cannot be read: they stand for their orders.
	for i, torn := range []struct {
		name, orders string
	}{
		{"garbage bytes", "\xff\xfe\x00\x01 this is no batch"},
		{"truncated batch", string(ledger.EncodeRecord(11, "", "")) + string(ledger.EncodeRecord(12, "", ""))[:2]},
		{"empty batch", ""},
		{"too many orders", strings.Repeat(string(ledger.EncodeRecord(11, "", "")), 3)},
	} {
		t.Run(torn.name, func(t *testing.T) {
			voucher := int64(i + 1)
			s.MustOpenVoucher(t, voucher, 10)
			admittedAs(ctx, t, s, voucher, map[string]string{"orders": torn.orders}, 11, 12)
			settled(ctx, t, s, voucher)
			balanced(ctx, t, s, voucher, 0, 8)
			require.Equal(t, map[string]int{"HELD": 2}, outcomes(ctx, t, s, voucher))
			all := deadLetters(ctx, t, s, 0, &seckillv1.DeadLetterFilter{VoucherId: voucher})
			require.Len(t, all, 1)
			require.EqualValues(t, 2, all[0].GetUnits())
			require.NotEmpty(t, all[0].GetRaw())
			require.Equal(t, seckillv1.OrderState_ORDER_STATE_HELD, state(ctx, t, s, voucher, 12))
			goesOn(t, voucher)
			done, err := resolve(ctx, s, 1, all[0].GetDeadLetterId(), actCancel)
			require.NoError(t, err)
			require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED, done.GetResult(), done.GetDetail())
			balanced(ctx, t, s, voucher, 1, 9)
		})
	}

	// Entries that nobody admitted: they stand for nothing.
	s.MustOpenVoucher(t, 5, 100)
	for _, foreign := range []struct {
		name   string
		fields []string
	}{
		{"no order at all", []string{"v", "1", "foo", "bar"}},
		{"voucher of another partition", []string{"v", "1", "voucher", "6", "epoch", "1", "first", "1", "n", "1", "at", "1", "orders", string(ledger.EncodeRecord(11, "", ""))}},
		{"another epoch", []string{"v", "1", "voucher", "5", "epoch", "7", "first", "1", "n", "1", "at", "1", "orders", string(ledger.EncodeRecord(11, "", ""))}},
	} {
		t.Run(foreign.name, func(t *testing.T) {
			before := len(deadLetters(ctx, t, s, 0, nil))
			id, err := do(ctx, t, s, append([]string{"XADD", ledger.OrdersKey(5, 1), "*"}, foreign.fields...)...).ToString()
			require.NoError(t, err)
			require.Eventually(t, func() bool { return len(deadLetters(ctx, t, s, 0, nil)) == before+1 }, patience, 20*time.Millisecond)
			settled(ctx, t, s, 5)
			all := deadLetters(ctx, t, s, 0, nil)
			last := all[len(all)-1]
			require.Equal(t, id, last.GetEntryId())
			require.Zero(t, last.GetUnits())
			require.EqualValues(t, 5, last.GetPartition())
			_, err = grab(ctx, s.Seckill(0), time.Now().UnixNano(), 5)
			require.NoError(t, err, "the sale does not go on")
			settled(ctx, t, s, 5)
			books, err := s.Books(ctx, 5)
			require.NoError(t, err)
			require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN, books.GetVerdict(), "%v", books.GetViolations())
			require.Empty(t, outcomes(ctx, t, s, 5))
		})
	}

	t.Run("a version that is not known yet", func(t *testing.T) {
		s.MustOpenVoucher(t, 6, 100)
		before, held := unknown(), len(deadLetters(ctx, t, s, 0, nil))
		admittedAs(ctx, t, s, 6, map[string]string{"v": "2"}, 11, 12)
		require.Eventually(t, func() bool { return unknown() > before }, patience, 20*time.Millisecond, "no alarm")
		goesOn(t, 6)
		// Longer than a takeover takes.
		require.Never(t, func() bool {
			figures, err := s.Ledger(ctx, 6)
			return err != nil || figures.InFlight() != 2 || figures.Entries != 1
		}, 7*time.Second, 200*time.Millisecond, "somebody took it")
		require.Empty(t, outcomes(ctx, t, s, 6))
		require.Len(t, deadLetters(ctx, t, s, 0, nil), held)
		var pending int64
		all, err := s.Pending(ctx, 6)
		require.NoError(t, err)
		for _, p := range all {
			pending += p.Entries
		}
		require.EqualValues(t, 1, pending)
		require.Less(t, unknown(), before+20, "a hot loop")
		goesOn(t, 6)
	})

	t.Run("a seq that another user has", func(t *testing.T) {
		s.MustOpenVoucher(t, 7, 100)
		admit(ctx, t, s, 7, buy(11))
		settled(ctx, t, s, 7)
		do(ctx, t, s, "XADD", ledger.OrdersKey(7, 1), "*", "v", "1", "voucher", "7", "epoch", "1", "first", "1", "n", "1", "at", "1",
			"orders", string(ledger.EncodeRecord(99, "", "")))
		require.Eventually(t, func() bool {
			meta, err := ledger.ReadMeta(ctx, s.Client(), 7)
			return err == nil && !meta.Open && strings.Contains(meta.Reason, "voucher 7 epoch 1 seq 1")
		}, patience, 20*time.Millisecond, "the partition is closed and says why")
		rows, err := s.Orders(ctx, 7)
		require.NoError(t, err)
		require.Len(t, rows, 1)
		require.EqualValues(t, 11, rows[0].UserID)
		length, err := do(ctx, t, s, "XLEN", ledger.OrdersKey(7, 1)).AsInt64()
		require.NoError(t, err)
		require.EqualValues(t, 1, length, "it was acknowledged")
	})
}
