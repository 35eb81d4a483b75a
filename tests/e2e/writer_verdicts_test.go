//go:build fleet

package e2e

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// endings are the verdicts that settle an entry, or take it away, but the one
// that stands on an operator's decision. Stale entries, and positions of another
// user, settle nothing.
var endings = []ending{
	{
		name: "persisted", grabs: []ledger.Grab{buy(11), buy(12)},
		rows: 2, left: 8, outcomes: map[string]int{}, marks: map[int64]string{11: "1.1p", 12: "1.2p"},
		way: []faultpoint.Point{
			faultpoint.WriterBeforeCommit, faultpoint.WriterInTransaction, faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
		},
	},
	{
		name: "conflict", known: []int64{11}, grabs: []ledger.Grab{buy(11)},
		rows: 1, left: 9, outcomes: map[string]int{"CONFLICT": 1}, marks: map[int64]string{11: "1.1p"},
		way: []faultpoint.Point{
			faultpoint.WriterBeforeCommit, faultpoint.WriterAfterRollback, faultpoint.WriterAfterOutcome,
			faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
		},
	},
	{
		name: "rejected", spoil: "UPDATE vouchers SET stock = 2, sold = 8 WHERE id = ?", grabs: []ledger.Grab{buy(11), buy(12), buy(13)},
		closed: true, rows: 2, left: 7, outcomes: map[string]int{"REJECTED": 1}, // no unit comes back
		marks: map[int64]string{11: "1.1p", 12: "1.2p", 13: ""},
		way: []faultpoint.Point{
			faultpoint.WriterBeforeCommit, faultpoint.WriterAfterRollback, faultpoint.WriterInTransaction, faultpoint.WriterAfterOutcome,
			faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
		},
	},
	{
		name: "no voucher", spoil: "DELETE FROM vouchers WHERE id = ?", grabs: []ledger.Grab{buy(11), buy(12)},
		closed: true, rows: 0, left: 8, outcomes: map[string]int{"HELD": 2}, marks: map[int64]string{11: "1.1h", 12: "1.2h"},
		way: []faultpoint.Point{
			faultpoint.WriterBeforeCommit, faultpoint.WriterAfterRollback, faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold,
			faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
		},
	},
	{
		name: "refused by the database", grabs: []ledger.Grab{buy(11), unstorable(12), buy(13)},
		rows: 2, left: 7, outcomes: map[string]int{"HELD": 1}, marks: map[int64]string{11: "1.1p", 12: "1.2h", 13: "1.3p"},
		way: []faultpoint.Point{
			faultpoint.WriterBeforeCommit, faultpoint.WriterAfterRollback, faultpoint.WriterInTransaction,
			faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold, faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
		},
	},
	{
		name: "unreadable order", grabs: []ledger.Grab{undecodable(11)},
		rows: 0, left: 9, outcomes: map[string]int{"HELD": 1}, marks: map[int64]string{11: "1.1a"}, // nobody knows whose it is
		way: []faultpoint.Point{
			faultpoint.WriterBeforeCommit, faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold,
			faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
		},
	},
	{
		name: "unreadable entry", grabs: []ledger.Grab{buy(11), truncated(12)},
		rows: 0, left: 8, outcomes: map[string]int{"HELD": 2}, marks: map[int64]string{11: "1.1a", 12: "1.2a"}, letters: 1,
		way: []faultpoint.Point{faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold, faultpoint.WriterAfterSettle},
	},
	{
		name: "entry that stands for nothing", alone: true,
		rows: 0, left: 10, outcomes: map[string]int{}, letters: 1,
		way: []faultpoint.Point{faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold, faultpoint.WriterAfterDiscard},
	},
	mixed,
}

// All points and all verdicts: a writer is killed by SIGKILL at every point of
// the way of every kind of entry, and a peer finishes: the same end as if
// nothing had happened.
func TestWriter_KilledAtEveryPointWithEveryVerdict(t *testing.T) {
	c := newCrashes(t, 32)
	narrow(testContext(t), t, c.Stack)
	for i := range endings {
		t.Run(endings[i].name, func(t *testing.T) { c.run(testContext(t), t, &endings[i]) })
	}
	// What an operator cancelled before whoever held it had told the ledger: one
	// entry, and one writer after the other dies with it.
	t.Run("cancelled", func(t *testing.T) {
		ctx := testContext(t)
		id := c.prepare(ctx, t, &ending{})
		require.NoError(t, c.peer.Pause())
		unblocked(ctx, t, c.Stack)
		admit(ctx, t, c.Stack, id, unstorable(11))
		c.kill(ctx, t, faultpoint.WriterAfterHold, id, newOnly)
		operated, err := c.StartWriter(ctx, newOnly)
		require.NoError(t, err)
		client := seckillv1.NewWriterServiceClient(operated.Conn())
		done, err := resolveAt(ctx, client, heldOrder(ctx, t, client, id), actCancel)
		require.NoError(t, err)
		require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED, done.GetResult(), done.GetDetail())
		operated.Kill()
		widen(ctx, t, c.Stack) // from now on it could be stored: it must not be
		for _, point := range []faultpoint.Point{
			faultpoint.WriterAfterClaim, faultpoint.WriterBeforeCommit, faultpoint.WriterAfterRollback, faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
		} {
			c.kill(ctx, t, point, id)
		}
		require.NoError(t, c.peer.Resume())
		cancelled := ending{rows: 0, left: 10, outcomes: map[string]int{"CANCELLED": 1}, marks: map[int64]string{11: ""}}
		cancelled.check(ctx, t, c.Stack, id)
		require.Eventually(t, func() bool {
			return whole(ctx, t, c.Stack, "SELECT COUNT(*) FROM ledger_updates WHERE voucher_id = ?", id) == 0
		}, patience, 20*time.Millisecond, "the guardian tells it for ever")
		admit(ctx, t, c.Stack, id, buy(11)) // the right to buy is back
		bought := ending{rows: 1, left: 9, outcomes: map[string]int{"CANCELLED": 1}, marks: map[int64]string{11: "1.2p"}}
		bought.check(ctx, t, c.Stack, id)
	})
}

// A writer that stops is killed on its way out, with an entry that it could not
// finish: a peer finishes, and no consumer of the dead stays.
func TestWriter_KilledWhileItHandsBack(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{
		Gateways: -1, Partitions: 1, BuildTags: []string{"faultpoint"},
		WriterArgs: append(stack.FastTakeover(), "--drain-timeout=6s", "--consumer-idle=4s", "--guardian-interval=200ms"),
	})
	c := &crashes{Stack: s, peer: s.Writer(0)}
	for _, at := range []struct {
		point faultpoint.Point
		// holder of the entry in that moment, empty for the one that dies.
		holder string
		gone   bool // its consumer is
	}{
		{faultpoint.WriterBeforeRelease, "", false},
		{faultpoint.WriterAfterRelease, ledger.ReleasedConsumer, false},
		{faultpoint.WriterBeforeRemoval, ledger.ReleasedConsumer, false},
		{faultpoint.WriterAfterRemoval, ledger.ReleasedConsumer, true},
	} {
		t.Run(string(at.point), func(t *testing.T) {
			id := c.prepare(ctx, t, &mixed)
			require.NoError(t, c.peer.Pause())
			unblocked(ctx, t, s)
			free, err := s.HoldVoucherRow(ctx, id)
			require.NoError(t, err)
			defer free()
			c.enter(ctx, t, &mixed, id)
			dying, err := s.StartWriterEnv(ctx, []string{faultpoint.Variable + "=" + string(at.point)})
			require.NoError(t, err)
			holds := func(consumer string) bool {
				entries, _, err := s.Held(ctx, id, consumer)
				return err == nil && entries == 1
			}
			require.Eventually(t, func() bool { return holds(dying.Name) }, patience, 5*time.Millisecond)
			require.NoError(t, dying.Signal(syscall.SIGTERM))
			died(t, dying)
			if at.holder == "" {
				at.holder = dying.Name
			}
			require.True(t, holds(at.holder), "the entry is not where it should be")
			consumer := func() bool {
				pending, err := s.Pending(ctx, id)
				require.NoError(t, err)
				return slices.ContainsFunc(pending, func(p ledger.Pending) bool { return p.Consumer == dying.Name })
			}
			require.Equal(t, !at.gone, consumer(), "its consumer")
			free()
			require.NoError(t, c.peer.Resume())
			mixed.check(ctx, t, s, id)
			require.Eventually(t, func() bool { return !consumer() }, patience, 50*time.Millisecond, "the dead one's consumer stays")
		})
	}
}
