package pipeline_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/pipeline"
	"github.com/seckill/seckill/writer/internal/writertest"
)

type stalled struct{}

func (stalled) Persist(ctx context.Context, _ []orderstore.Order) ([]orderstore.Verdict, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A writer starts upon a backlog of full entries.
func TestReader_StaysWithinSlots(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	const orders = 200 * ledger.MaxBatch
	f.Voucher(g, 7, orders)
	f.Admitted(7, writertest.Users(1, orders)...)
	o := f.options("w1")
	o.Store, o.SlotsMax, o.BatchTimeout, o.MinIdle = stalled{}, 1000+ledger.MaxBatch, 10*time.Second, time.Minute
	o.DrainTimeout = 100 * time.Millisecond
	f.Run(f.pipeline(o))
	held := func() (orders int64) {
		consumers, err := ledger.PendingByConsumer(f.Ctx, f.Client, 0, 1)
		if err != nil {
			return 0
		}
		for _, c := range consumers {
			orders += c.Entries * ledger.MaxBatch
		}
		return orders
	}
	require.Eventually(t, func() bool { return held() >= 1000 }, writertest.Patience, 10*time.Millisecond)
	require.Never(t, func() bool { return held() > int64(o.SlotsMax) }, time.Second, 10*time.Millisecond, "orders in hand; slots are %d", o.SlotsMax)
}

// Somebody's forgotten transaction holds the row of one voucher. The orders of
// other vouchers, of other partitions, must go on.
func TestPipeline_OneLockedVoucherDoesNotStopTheOthers(t *testing.T) {
	f := newFixture(t, 2)
	g := f.Guarded()
	f.Voucher(g, 2, 100)
	f.Voucher(g, 3, 100)
	tx, err := f.DB.BeginTx(f.Ctx, nil)
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec("SELECT id FROM vouchers WHERE id = 2 FOR UPDATE")
	require.NoError(t, err)
	f.Run(f.pipeline(f.options("w1")))
	held := make(chan struct{})
	defer func() { <-held }()
	ctx, stop := context.WithCancel(f.Ctx)
	defer stop()
	go func() { // a session that falls silent would be ended
		defer close(held)
		for ctx.Err() == nil {
			if _, err := tx.Exec("SELECT SLEEP(0.2)"); err != nil {
				return
			}
		}
	}()
	for user := int64(1); user <= 4; user++ {
		f.Admitted(2, user)
	}
	f.Admitted(3, writertest.Users(1, 10)...)
	require.Eventually(t, func() bool { return f.rows(3) == 10 }, writertest.Patience, 50*time.Millisecond,
		"no order of voucher 3, in another partition, is written while voucher 2 is locked")
}

// slow is a database that writes 1,000 rows a second.
type slow struct{ pipeline.Persister }

func (s slow) Persist(ctx context.Context, orders []orderstore.Order) ([]orderstore.Verdict, error) {
	select {
	case <-time.After(time.Duration(len(orders)) * time.Millisecond):
		return s.Persister.Persist(ctx, orders)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// A batch that takes longer than --batch-timeout must not be tried for ever as
// it is: then nothing is written any more, though the database works.
func TestPipeline_BatchThatIsTooSlowIsSplit(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	f.Admitted(7, writertest.Users(1, 1000)...)
	o := f.options("w1") // batch timeout 400 ms
	o.Store = slow{f.Store}
	f.Run(f.pipeline(o))
	require.Eventually(t, func() bool { return f.rows(7) == 1000 }, writertest.Patience, 50*time.Millisecond, "not all rows after 10 s")
}
