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
	// spoil, if set, is done to the database right before the entry comes.
	spoil string
	// grabs make the entry; without any it is one that stands for no order.
	grabs []ledger.Grab
	// alone: the voucher needs a partition of its own. closed: so it does, for the
	// sale ends.
	alone, closed bool
	// rows in the database and units left in the ledger of 10.
	rows, left int64
	outcomes   map[string]int
	marks      map[int64]string
	// letters of entries, not of single orders.
	letters int64
	// way are the points that such an entry passes from its transaction on.
	way []faultpoint.Point
}

var mixed = ending{
	name: "mixed", known: []int64{11}, grabs: []ledger.Grab{buy(11), buy(12), undecodable(13), buy(14)},
	rows: 3, left: 6, outcomes: map[string]int{"CONFLICT": 1, "HELD": 1},
	marks: map[int64]string{11: "1.1p", 12: "1.3p", 13: "1.4a", 14: "1.5p"}, // nobody knows whose 1.4 is
	way: []faultpoint.Point{
		faultpoint.WriterBeforeCommit, faultpoint.WriterAfterRollback, faultpoint.WriterAfterOutcome, faultpoint.WriterInTransaction,
		faultpoint.WriterBeforeHold, faultpoint.WriterAfterHold, faultpoint.WriterAfterCommit, faultpoint.WriterAfterSettle,
	},
}

// check requires the end that there is when nobody dies.
func (e *ending) check(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64) {
	t.Helper()
	partition := ledger.Partition(voucherID, s.Partitions())
	settled(ctx, t, s, voucherID)
	require.Eventually(t, func() bool {
		left, err := do(ctx, t, s, "XLEN", ledger.OrdersKey(partition, 1)).AsInt64()
		return err == nil && left == 0
	}, patience, 20*time.Millisecond, "the stream is not empty")
	nothingPending(ctx, t, s, voucherID)
	if e.closed {
		// The writer that knew why may be dead: then the books find it out.
		require.Eventually(t, func() bool {
			meta, err := ledger.ReadMeta(ctx, s.Client(), partition)
			return err == nil && (!meta.Open || whole(ctx, t, s, "SELECT COUNT(*) FROM vouchers WHERE id = ? AND state = 'CLOSED'", voucherID) == 1)
		}, patience, 20*time.Millisecond, "the sale is closed")
		rows, err := s.Rows(ctx, voucherID)
		require.NoError(t, err)
		require.Equal(t, e.rows, rows)
		figures, err := s.Ledger(ctx, voucherID)
		require.NoError(t, err)
		require.Equal(t, e.left, figures.Stock)
	} else {
		balanced(ctx, t, s, voucherID, e.rows, e.left)
	}
	require.Equal(t, e.outcomes, outcomes(ctx, t, s, voucherID))
	for user, want := range e.marks {
		require.Equal(t, want, mark(ctx, t, s, voucherID, user), "user %d", user)
	}
	both := whole(ctx, t, s, `SELECT COUNT(*) FROM orders JOIN order_outcomes USING (voucher_id, epoch, seq) WHERE voucher_id = ?`, voucherID)
	require.Zero(t, both, "positions that are an order and an outcome")
	letters := whole(ctx, t, s, `SELECT COUNT(*) FROM dead_entries WHERE voucher_id = ? OR (partition_id = ? AND units = 0)`, voucherID, partition)
	require.Equal(t, e.letters, letters, "dead letters of entries")
}

// crashes lets writers die while the first one, their peer, stands still.
type crashes struct {
	*stack.Stack
	peer *stack.Process
	// vouchers that share partition 0, and that have one of their own.
	shared, own int64
}

func newCrashes(t *testing.T, partitions int) *crashes {
	s := stack.Test(t, stack.Options{Gateways: -1, Partitions: partitions, BuildTags: []string{"faultpoint"}})
	return &crashes{Stack: s, peer: s.Writer(0)}
}

// prepare opens a voucher for an entry of this ending.
func (c *crashes) prepare(ctx context.Context, t *testing.T, e *ending) (id int64) {
	t.Helper()
	if e.alone || e.closed {
		c.own++
		id = c.own
		require.Less(t, id, int64(c.Partitions()), "too few partitions for this test")
	} else {
		c.shared++
		id = c.shared * int64(c.Partitions())
	}
	c.MustOpenVoucher(t, id, 10)
	for _, user := range e.known {
		admit(ctx, t, c.Stack, id, buy(user))
	}
	settled(ctx, t, c.Stack, id)
	for _, user := range e.known {
		forget(ctx, t, c.Stack, id, user)
	}
	return id
}

// enter brings the entry into the stream.
func (c *crashes) enter(ctx context.Context, t *testing.T, e *ending, id int64) {
	t.Helper()
	if e.spoil != "" {
		exec(ctx, t, c.Stack, e.spoil, id)
	}
	if len(e.grabs) > 0 {
		admit(ctx, t, c.Stack, id, e.grabs...)
		return
	}
	do(ctx, t, c.Stack, "XADD", ledger.OrdersKey(ledger.Partition(id, c.Partitions()), 1), "*", "v", "1", "foo", "bar")
}

// newOnly keeps a writer from taking over what others died with.
const newOnly = "--min-idle=60s"

// kill lets a writer die at a point that an entry of the voucher brings it to.
func (c *crashes) kill(ctx context.Context, t *testing.T, point faultpoint.Point, id int64, args ...string) {
	t.Helper()
	dying, err := c.LaunchWriter(ctx, []string{faultpoint.Variable + "=" + string(point)}, args...)
	require.NoError(t, err)
	died(t, dying)
	held := int64(0)
	pending, err := c.Pending(ctx, id)
	require.NoError(t, err)
	for _, p := range pending {
		if p.Consumer == dying.Name {
			held = p.Entries
		}
	}
	if point == faultpoint.WriterAfterSettle || point == faultpoint.WriterAfterDiscard {
		require.Zero(t, held, "entries in the dead writer's name")
	} else {
		require.EqualValues(t, 1, held, "entries in the dead writer's name")
	}
}

// run kills a writer at every point of the way of an ending, each with an entry
// of its own, and lets the peer finish.
func (c *crashes) run(ctx context.Context, t *testing.T, e *ending) {
	const nobody = faultpoint.Point("nobody dies")
	points := slices.Concat([]faultpoint.Point{faultpoint.WriterAfterClaim, faultpoint.WriterAfterRead}, e.way, []faultpoint.Point{nobody})
	ids := map[faultpoint.Point]int64{}
	for _, point := range points {
		ids[point] = c.prepare(ctx, t, e)
	}
	require.NoError(t, c.peer.Pause())
	unblocked(ctx, t, c.Stack)
	for _, point := range points {
		id := ids[point]
		c.enter(ctx, t, e, id)
		switch point {
		case nobody:
		case faultpoint.WriterAfterClaim: // comes first: there is nothing else to take over
			c.kill(ctx, t, faultpoint.WriterAfterRead, id, newOnly)
			c.kill(ctx, t, point, id)
		default:
			c.kill(ctx, t, point, id, newOnly)
		}
	}
	require.NoError(t, c.peer.Resume())
	for _, point := range points {
		t.Run(string(point), func(t *testing.T) { e.check(ctx, t, c.Stack, ids[point]) })
	}
}

// A writer is killed by SIGKILL at every point of the way of an entry whose
// orders end in different ways, and a peer finishes: the same end as if nothing
// had happened.
func TestWriter_KilledAtEveryPoint(t *testing.T) {
	newCrashes(t, 1).run(testContext(t), t, &mixed)
}
