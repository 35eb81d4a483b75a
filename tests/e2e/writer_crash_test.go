package e2e

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/tests/internal/stack"
)

// ending is one way in which the orders of an entry end, and what is left then.
type ending struct {
	name string
	// known users bought before the entry came and were forgotten by the ledger.
	known []int64
	// grabs make the entry.
	grabs []ledger.Grab
	// rows in the database and units left in the ledger of 10.
	rows, left int64
	outcomes   map[string]int
	marks      map[int64]string
	// misses are points that are not on the way of such an entry.
	misses []faultpoint.Point
}

var endings = []ending{
	{
		name: "persisted", grabs: []ledger.Grab{buy(11), buy(12)},
		rows: 2, left: 8, outcomes: map[string]int{},
		marks:  map[int64]string{11: "1.1p", 12: "1.2p"},
		misses: []faultpoint.Point{faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold},
	},
	{
		name: "conflict", known: []int64{11}, grabs: []ledger.Grab{buy(11)},
		rows: 1, left: 9, outcomes: map[string]int{"CONFLICT": 1},
		marks:  map[int64]string{11: "1.1p"},
		misses: []faultpoint.Point{faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold},
	},
	{
		name: "held", grabs: []ledger.Grab{undecodable(11)},
		rows: 0, left: 9, outcomes: map[string]int{"HELD": 1},
		marks: map[int64]string{11: "1.1a"}, // nobody knows whose it is
	},
	{
		name: "unreadable entry", grabs: []ledger.Grab{buy(11), truncated(12)},
		rows: 0, left: 8, outcomes: map[string]int{"HELD": 2},
		marks:  map[int64]string{11: "1.1a", 12: "1.2a"},
		misses: []faultpoint.Point{faultpoint.WriterBeforeCommit, faultpoint.WriterAfterCommit},
	},
	{
		name: "mixed", known: []int64{11}, grabs: []ledger.Grab{buy(11), buy(12), undecodable(13), buy(14)},
		rows: 3, left: 6, outcomes: map[string]int{"CONFLICT": 1, "HELD": 1},
		marks: map[int64]string{11: "1.1p", 12: "1.3p", 13: "1.4a", 14: "1.5p"},
	},
}

func (e *ending) check(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64) {
	t.Helper()
	settled(ctx, t, s, voucherID)
	balanced(ctx, t, s, voucherID, e.rows, e.left)
	require.Equal(t, e.outcomes, outcomes(ctx, t, s, voucherID))
	for user, want := range e.marks {
		require.Equal(t, want, mark(ctx, t, s, voucherID, user), "user %d", user)
	}
	nothingPending(ctx, t, s, voucherID)
	both := whole(ctx, t, s, `SELECT COUNT(*) FROM orders JOIN order_outcomes USING (voucher_id, epoch, seq) WHERE voucher_id = ?`, voucherID)
	require.Zero(t, both, "positions that are an order and an outcome")
}

// A writer is killed by SIGKILL at every point of the way of every kind of
// entry, and a peer finishes: the same end as if nothing had happened.
func TestWriter_KilledAtEveryPointWithEveryVerdict(t *testing.T) {
	ctx := testContext(t)
	// The first writer stands still while others die: it is the peer.
	s := stack.Test(t, stack.Options{Gateways: -1, Partitions: 1, BuildTags: []string{"faultpoint"}})
	peer := s.Writer(0)
	voucher := int64(0)
	prepare := func(t *testing.T, e *ending) int64 {
		voucher++
		s.MustOpenVoucher(t, voucher, 10)
		for _, user := range e.known {
			admit(ctx, t, s, voucher, buy(user))
		}
		settled(ctx, t, s, voucher)
		for _, user := range e.known {
			forget(ctx, t, s, voucher, user)
		}
		return voucher
	}
	arm := func(t *testing.T, point faultpoint.Point) *stack.Process {
		p, err := s.LaunchWriter(ctx, []string{faultpoint.Variable + "=" + string(point)})
		require.NoError(t, err)
		return p
	}

	t.Run("nobody dies", func(t *testing.T) {
		for i := range endings {
			e := &endings[i]
			id := prepare(t, e)
			admit(ctx, t, s, id, e.grabs...)
			e.check(ctx, t, s, id)
		}
	})
	for _, point := range []faultpoint.Point{
		faultpoint.WriterAfterRead, faultpoint.WriterAfterClaim, faultpoint.WriterBeforeCommit, faultpoint.WriterAfterCommit,
		faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold, faultpoint.WriterAfterSettle,
	} {
		t.Run(string(point), func(t *testing.T) {
			ids := map[string]int64{}
			for i := range endings {
				if e := &endings[i]; !slices.Contains(e.misses, point) {
					ids[e.name] = prepare(t, e)
				}
			}
			require.NoError(t, peer.Pause())
			unblocked(ctx, t, s)
			for i := range endings {
				e := &endings[i]
				id, ok := ids[e.name]
				if !ok {
					continue
				}
				first := point
				if point == faultpoint.WriterAfterClaim {
					first = faultpoint.WriterAfterRead
				}
				dying := arm(t, first)
				admit(ctx, t, s, id, e.grabs...)
				died(t, dying)
			}
			if point == faultpoint.WriterAfterClaim {
				died(t, arm(t, point))
			}
			require.NoError(t, peer.Resume())
			for i := range endings {
				if id, ok := ids[endings[i].name]; ok {
					t.Run(endings[i].name, func(t *testing.T) { endings[i].check(ctx, t, s, id) })
				}
			}
		})
	}
}

// The database has fewer units than were admitted: what is left goes in order
// of seq, the rest is rejected and no unit comes back, wherever a writer dies.
func TestWriter_KilledWhileItRejects(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Partitions: 8, BuildTags: []string{"faultpoint"}})
	for i, point := range []faultpoint.Point{faultpoint.WriterBeforeCommit, faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle} {
		t.Run(string(point), func(t *testing.T) {
			voucher := int64(i + 1) // each in a partition of its own: the sale closes
			s.MustOpenVoucher(t, voucher, 10)
			require.NoError(t, s.Writer(0).Pause())
			unblocked(ctx, t, s)
			dying, err := s.LaunchWriter(ctx, []string{faultpoint.Variable + "=" + string(point)})
			require.NoError(t, err)
			exec(ctx, t, s, "UPDATE vouchers SET stock = 2, sold = 8 WHERE id = ?", voucher)
			admit(ctx, t, s, voucher, buy(11), buy(12), buy(13))
			died(t, dying)
			require.NoError(t, s.Writer(0).Resume())
			settled(ctx, t, s, voucher)
			rows, err := s.Rows(ctx, voucher)
			require.NoError(t, err)
			require.EqualValues(t, 2, rows)
			require.Equal(t, map[string]int{"REJECTED": 1}, outcomes(ctx, t, s, voucher))
			require.Equal(t, "1.1p", mark(ctx, t, s, voucher, 11))
			require.Equal(t, "1.2p", mark(ctx, t, s, voucher, 12))
			require.Empty(t, mark(ctx, t, s, voucher, 13))
			figures, err := s.Ledger(ctx, voucher)
			require.NoError(t, err)
			require.EqualValues(t, 7, figures.Stock, "no unit came back")
			nothingPending(ctx, t, s, voucher)
			// The writer that knew it may be dead: then the books find it out.
			require.Eventually(t, func() bool {
				var state string
				err := s.DB().QueryRowContext(ctx, "SELECT state FROM vouchers WHERE id = ?", voucher).Scan(&state)
				meta, metaErr := ledger.ReadMeta(ctx, s.Client(), ledger.Partition(voucher, s.Partitions()))
				return err == nil && metaErr == nil && (state == "CLOSED" || !meta.Open)
			}, patience, 20*time.Millisecond, "the sale is closed")
		})
	}
}
