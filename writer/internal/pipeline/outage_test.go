package pipeline_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// flaky fails as a database would that is down.
type flaky struct {
	store *orderstore.Store
	down  atomic.Bool
	tried atomic.Int64
}

func (s *flaky) Persist(ctx context.Context, orders []orderstore.Order) ([]orderstore.Verdict, error) {
	s.tried.Add(1)
	if s.down.Load() {
		return nil, fmt.Errorf("persisting: %w", orderstore.ErrTransient)
	}
	return s.store.Persist(ctx, orders)
}

func TestPipeline_OutageOfTheDatabaseLosesNothingAndStopsClaiming(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 500)
	store := &flaky{store: f.Store}
	store.down.Store(true)
	o := f.options("w1")
	o.Store, o.Ping = store, nil
	p := f.pipeline(o)
	f.Run(p)
	f.Admitted(7, writertest.Users(1, 100)...)
	require.Eventually(t, func() bool {
		for _, part := range p.Health() {
			if part.Name == "database" {
				return !part.Serving
			}
		}
		return false
	}, writertest.Patience, 10*time.Millisecond)
	// A dead writer's entries lie there for longer than min idle: nobody takes
	// over what cannot be written.
	for user := int64(101); user <= 300; user++ {
		f.Admitted(7, user)
	}
	taken, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead", 300, 0)
	require.NoError(t, err)
	require.NotEmpty(t, taken)
	require.Never(t, func() bool {
		ids, err := ledger.PendingIDs(f.Ctx, f.Client, 0, 1, "dead", 1000)
		return err != nil || len(ids) != len(taken)
	}, 2*o.MinIdle, 50*time.Millisecond)
	store.down.Store(false)
	f.settled(0)
	require.Equal(t, int64(300), f.rows(7))
	require.Zero(t, f.Number("SELECT COUNT(*) FROM order_outcomes"))
	f.proven(7)
	require.Greater(t, f.metric("seckill_writer_transient_errors_total"), 0.0)
}

func TestPipeline_RestartOfRedisLosesNothing(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 500)
	f.Admitted(7, writertest.Users(1, 200)...)
	p := f.pipeline(f.options("w1"))
	f.Redis.Kill()
	f.Run(p)
	require.NoError(t, f.Redis.Restart(f.Ctx))
	f.settled(0)
	require.Equal(t, int64(200), f.rows(7))
	f.proven(7)
}
