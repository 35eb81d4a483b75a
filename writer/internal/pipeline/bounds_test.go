package pipeline_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/pipeline"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// hangs is a database that never answers for one voucher's orders.
type hangs struct {
	pipeline.Persister
	voucherID int64
}

func (h hangs) Persist(ctx context.Context, orders []orderstore.Order) ([]orderstore.Verdict, error) {
	for _, order := range orders {
		if order.VoucherID == h.voucherID {
			<-ctx.Done()
			return nil, ctx.Err()
		}
	}
	return h.Persister.Persist(ctx, orders)
}

// The only committer meets a transaction that never ends: it is given up, and
// the orders of others go on.
func TestPipeline_BatchIsGivenUpAtItsTimeout(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 2, 100)
	f.Voucher(g, 3, 100)
	o := f.options("w1")
	o.Store, o.Committers = hangs{f.Store, 2}, 1
	require.Greater(t, 100*o.BatchTimeout, writertest.Patience, "else this test cannot fail")
	f.Run(f.pipeline(o))
	f.Admitted(2, 1)
	f.Admitted(3, writertest.Users(1, 10)...)
	require.Eventually(t, func() bool { return f.rows(3) == 10 }, writertest.Patience, 10*time.Millisecond)
	require.Zero(t, f.rows(2))
}

// What is in hand and comes to no end is given up when the drain is over.
func TestPipeline_StopGivesUpWhatOutlastsTheDrain(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2)
	o := f.options("w1")
	o.Store, o.DrainTimeout, o.BatchTimeout, o.MinIdle = stalled{}, time.Second, 4*writertest.Patience, time.Hour
	require.Greater(t, 100*o.DrainTimeout, writertest.Patience, "else this test cannot fail")
	stop := f.Run(f.pipeline(o))
	require.Eventually(t, func() bool {
		ids, err := ledger.PendingIDs(f.Ctx, f.Client, 0, 1, "w1", 10)
		return err == nil && len(ids) == 1
	}, writertest.Patience, 10*time.Millisecond)
	ended(t, stop)
	require.Equal(t, 1.0, f.metric("seckill_writer_entries_released_total"))
}

// ended waits for the end of a stop, which must not take for ever.
func ended(t *testing.T, stop func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		stop()
	}()
	select {
	case <-done:
	case <-time.After(writertest.Patience):
		require.FailNow(t, "the stop does not end")
	}
}

// refuses is a Redis that some settlements do not reach.
type refuses struct {
	rueidis.Client
	left atomic.Int64
}

func (r *refuses) DoMulti(ctx context.Context, commands ...rueidis.Completed) []rueidis.RedisResult {
	if r.left.Add(-1) >= 0 {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		ctx = ended
	}
	return r.Client.DoMulti(ctx, commands...)
}

// A settlement that does not reach Redis is repeated at once: nobody takes the
// entry over here.
func TestPipeline_SettlementIsTriedAgain(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2)
	o := f.options("w1")
	client := &refuses{Client: f.Client}
	client.left.Store(3)
	o.Client, o.MinIdle = client, time.Hour
	f.Run(f.pipeline(o))
	f.settled(0)
	require.Equal(t, int64(2), f.rows(7))
	require.Equal(t, 2.0, f.metric("seckill_writer_orders_settled_total"))
	f.proven(7)
}

// One that cannot be brought through comes again, and finds its rows.
func TestPipeline_EntryThatIsNotSettledIsRedelivered(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2)
	o := f.options("w1")
	client := &refuses{Client: f.Client}
	client.left.Store(6)
	o.Client = client
	f.Run(f.pipeline(o))
	f.settled(0)
	require.Equal(t, int64(2), f.rows(7))
	require.Equal(t, 2.0, f.metric("seckill_writer_orders_reclaimed_total"))
	f.proven(7)
}

// Parked orders leave the reader the slots that it needs, also with the fewest
// that are allowed.
func TestParking_LeavesSlotsForOthers(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 2, 1000)
	f.Voucher(g, 3, 1000)
	f.HoldRow(lock, 2)
	o := f.options("w1")
	o.BatchMax, o.MinIdle = 50, time.Hour
	o.SlotsMax = o.BatchMax + ledger.MaxBatch
	for user := int64(1); user <= 2*int64(o.SlotsMax); user++ {
		f.Admitted(2, user)
	}
	f.Run(f.pipeline(o))
	f.Admitted(3, writertest.Users(1, 10)...)
	require.Eventually(t, func() bool { return f.rows(3) == 10 }, writertest.Patience, 50*time.Millisecond,
		"what is parked takes the slots that the reader needs")
}
