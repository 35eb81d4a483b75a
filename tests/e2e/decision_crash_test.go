//go:build fleet

package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// heldOrder is the id of the one order of a voucher that is held.
func heldOrder(ctx context.Context, t *testing.T, client seckillv1.WriterServiceClient, voucherID int64) string {
	t.Helper()
	page, err := client.ListDeadLetters(ctx, &seckillv1.ListDeadLettersRequest{Filter: &seckillv1.DeadLetterFilter{VoucherId: voucherID}})
	require.NoError(t, err)
	require.Len(t, page.GetDeadLetters(), 1)
	return page.GetDeadLetters()[0].GetDeadLetterId()
}

// A writer is killed by SIGKILL around the COMMIT of every kind of decision.
// Before it nothing is decided, and the operator asks again; after it the
// guardian tells the ledger though nobody asks again. The unit and the user's
// right to buy come back exactly once.
func TestDeadLetter_KilledAroundTheDecision(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{
		Gateways: -1, Writers: 1, Partitions: 1, WriterArgs: append(stack.FastTakeover(), "--guardian-interval=200ms"), BuildTags: []string{"faultpoint"},
	})
	peer := operators(s, 0)
	decisions := []struct {
		name string
		// entry of the voucher that is held, or an order of it; none: an entry that
		// stands for nothing.
		entry []ledger.Grab
		// twice: the user buys once more before the decision.
		twice  bool
		action seckillv1.DeadLetterAction
		result seckillv1.DeadLetterResult
		// what is left in the end, of 10 units.
		rows, left int64
		outcomes   map[string]int
		marks      map[int64]string
	}{
		{
			name: "cancel", entry: []ledger.Grab{unstorable(11)}, action: actCancel,
			result: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
			rows:   0, left: 10, outcomes: map[string]int{"CANCELLED": 1}, marks: map[int64]string{11: ""},
		},
		{
			name: "cancel of an order that cannot be read", entry: []ledger.Grab{undecodable(11)}, action: actCancel,
			result: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
			rows:   0, left: 10, outcomes: map[string]int{"CANCELLED": 1}, marks: map[int64]string{11: ""},
		},
		{
			name: "cancel of an entry", entry: []ledger.Grab{buy(11), truncated(12)}, action: actCancel,
			result: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
			rows:   0, left: 10, outcomes: map[string]int{"CANCELLED": 2}, marks: map[int64]string{11: "", 12: ""},
		},
		{
			name: "cancel of an entry that stands for nothing", action: actCancel,
			result: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
			rows:   0, left: 10, outcomes: map[string]int{},
		},
		{
			name: "requeue", entry: []ledger.Grab{unstorable(11)}, action: actRequeue,
			result: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED,
			rows:   1, left: 9, outcomes: map[string]int{}, marks: map[int64]string{11: "1.1p"},
		},
		{
			name: "requeue that is a conflict", entry: []ledger.Grab{unstorable(11)}, twice: true, action: actRequeue,
			result: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CONFLICT,
			rows:   1, left: 9, outcomes: map[string]int{"CONFLICT": 1}, marks: map[int64]string{11: "1.2p"},
		},
		{
			name: "requeue that cannot be", entry: []ledger.Grab{undecodable(11)}, action: actRequeue,
			result: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_STILL_HELD,
			rows:   0, left: 9, outcomes: map[string]int{"HELD": 1}, marks: map[int64]string{11: "1.1a"},
		},
	}
	points := []faultpoint.Point{faultpoint.OperatorBeforeCommit, faultpoint.OperatorAfterCommit}
	// All dead letters first: the database refuses what is unstorable only now.
	narrow(ctx, t, s)
	known := map[string]bool{}
	var ids []string // by voucher
	for range points {
		for i := range decisions {
			d := &decisions[i]
			voucher := int64(len(ids) + 1)
			s.MustOpenVoucher(t, voucher, 10)
			if len(d.entry) > 0 {
				admit(ctx, t, s, voucher, d.entry...)
			} else {
				do(ctx, t, s, "XADD", ledger.OrdersKey(0, 1), "*", "v", "1", "foo", "bar")
			}
			require.Eventually(t, func() bool {
				for _, letter := range deadLetters(ctx, t, s, 0, nil) {
					if id := letter.GetDeadLetterId(); !known[id] {
						known[id] = true
						ids = append(ids, id)
						return true
					}
				}
				return false
			}, patience, 20*time.Millisecond, "nothing is held")
			settled(ctx, t, s, voucher)
			if d.twice {
				forget(ctx, t, s, voucher, 11)
				admit(ctx, t, s, voucher, buy(11))
				settled(ctx, t, s, voucher)
			}
		}
	}
	widen(ctx, t, s)

	count := func(table string) int64 { return whole(ctx, t, s, "SELECT COUNT(*) FROM "+table) }
	listed := func(id string) bool {
		return slices.ContainsFunc(deadLetters(ctx, t, s, 0, nil), func(l *seckillv1.DeadLetter) bool { return l.GetDeadLetterId() == id })
	}
	for p, point := range points {
		for i := range decisions {
			d, voucher := &decisions[i], int64(p*len(decisions)+i+1)
			id, stays := ids[voucher-1], d.outcomes["HELD"] > 0
			t.Run(string(point)+"/"+d.name, func(t *testing.T) {
				recorded := count("operator_actions")
				dying, err := s.StartWriterEnv(ctx, []string{faultpoint.Variable + "=" + string(point)}, newOnly)
				require.NoError(t, err)
				_, err = resolveAt(ctx, seckillv1.NewWriterServiceClient(dying.Conn()), id, d.action)
				require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
				died(t, dying)
				check := func() {
					require.Eventually(t, func() bool { return count("ledger_updates") == 0 }, patience, 20*time.Millisecond, "the ledger is not told")
					balanced(ctx, t, s, voucher, d.rows, d.left)
					require.Equal(t, d.outcomes, outcomes(ctx, t, s, voucher))
					for user, want := range d.marks {
						require.Equal(t, want, mark(ctx, t, s, voucher, user), "user %d", user)
					}
					require.Equal(t, stays, listed(id), "it is listed")
				}
				if point == faultpoint.OperatorBeforeCommit {
					require.True(t, listed(id), "it is decided")
					require.Equal(t, recorded, count("operator_actions"), "a decision is recorded that was not made")
				} else {
					check()
					recorded++
					require.Equal(t, recorded, count("operator_actions"), "who decided what is kept")
				}
				// The operator has had no answer, and asks again.
				done, err := resolveAt(ctx, peer, id, d.action)
				require.NoError(t, err)
				require.Equal(t, d.result, done.GetResult(), done.GetDetail())
				check()
				if point == faultpoint.OperatorBeforeCommit || stays {
					recorded++
				}
				require.Equal(t, recorded, count("operator_actions"), "recorded once")
				if right, ok := d.marks[11]; ok && right == "" { // the right to buy is back
					admit(ctx, t, s, voucher, buy(11))
					settled(ctx, t, s, voucher)
					balanced(ctx, t, s, voucher, d.rows+1, d.left-1)
				}
			})
		}
	}
}

// Guardians die around the telling of every decision, one after the other: the
// next one goes on, and each counts once.
func TestDeadLetter_LedgerIsToldAfterTheWriterDied(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{
		Gateways: -1, Writers: 1, Partitions: 1, WriterArgs: append(stack.FastTakeover(), "--guardian-interval=20s"), BuildTags: []string{"faultpoint"},
	})
	s.MustOpenVoucher(t, 1, 20)
	narrow(ctx, t, s)
	admit(ctx, t, s, 1, unstorable(11), unstorable(12), unstorable(13), undecodable(14))
	settled(ctx, t, s, 1) // so that what is known comes first in all that follows
	admit(ctx, t, s, 1, buy(15), truncated(16))
	settled(ctx, t, s, 1)
	widen(ctx, t, s)
	forget(ctx, t, s, 1, 13)
	admit(ctx, t, s, 1, buy(13))
	settled(ctx, t, s, 1)
	for _, letter := range deadLetters(ctx, t, s, 0, nil) {
		action := actCancel
		if user := letter.GetOrder().GetUserId(); user == 11 || user == 13 {
			action = actRequeue
		}
		_, err := resolve(ctx, s, 0, letter.GetDeadLetterId(), action)
		require.NoError(t, err)
	}
	s.Writer(0).Kill()
	untold := func() int64 { return whole(ctx, t, s, "SELECT COUNT(*) FROM ledger_updates") }
	require.EqualValues(t, 6, untold(), "the ledger was told too soon for this test")
	require.Equal(t, "1.1h", mark(ctx, t, s, 1, 11))
	require.Equal(t, "1.2h", mark(ctx, t, s, 1, 12))
	launch := func(point faultpoint.Point, n int) *stack.Process {
		p, err := s.LaunchWriter(ctx, []string{fmt.Sprintf("%s=%s:%d", faultpoint.Variable, point, n)}, "--guardian-interval=200ms")
		require.NoError(t, err)
		return p
	}
	// Of 11, 12 and 13 each is told and not noted, told again and noted: then the
	// next one dies.
	for told, n := range []int{1, 2, 2} {
		died(t, launch(faultpoint.GuardianBeforeTell, n))
		require.EqualValues(t, 6-told, untold())
		died(t, launch(faultpoint.GuardianAfterTell, 1))
		require.EqualValues(t, 6-told, untold())
	}
	// Of the others the ledger is told first that the unit is back, and then, when
	// the mark is found, whose it was.
	deaths := 0
	for n := 1; untold() > 0; n++ {
		for _, point := range []faultpoint.Point{faultpoint.GuardianBeforeTell, faultpoint.GuardianAfterTell} {
			p := launch(point, n)
			require.Eventually(t, func() bool {
				select {
				case <-p.Done():
					return true
				default:
					return untold() == 0
				}
			}, patience, 10*time.Millisecond)
			if untold() == 0 {
				p.Kill()
				break
			}
			deaths++
		}
	}
	require.GreaterOrEqual(t, deaths, 8)
	_, err := s.StartWriter(ctx, "--guardian-interval=200ms")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return untold() == 0 }, patience, 20*time.Millisecond)
	require.Equal(t, "1.1p", mark(ctx, t, s, 1, 11))
	require.Empty(t, mark(ctx, t, s, 1, 12))
	require.Equal(t, "1.7p", mark(ctx, t, s, 1, 13))
	balanced(ctx, t, s, 1, 2, 18)
	require.Equal(t, map[string]int{"CANCELLED": 4, "CONFLICT": 1}, outcomes(ctx, t, s, 1))
	for _, user := range []int64{14, 15, 16} {
		require.Empty(t, mark(ctx, t, s, 1, user), "user %d", user)
	}
	admit(ctx, t, s, 1, buy(12), buy(14), buy(15), buy(16)) // the right to buy is back
	settled(ctx, t, s, 1)
	balanced(ctx, t, s, 1, 6, 14)
}
