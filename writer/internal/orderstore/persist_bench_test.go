package orderstore_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// An operation is a batch of 1,000 orders, persisted for the first time; three
// are in flight at once, as in a writer.
func BenchmarkPersist(tb *testing.B) {
	const size, inFlight = 1000, 3
	ctx := context.Background()
	s, err := orderstore.Open(ctx, orderstore.Options{DSN: devstack.TestDatabase(tb)})
	require.NoError(tb, err)
	defer s.Close()
	require.NoError(tb, migrations.Up(ctx, s.DB(), quiet))
	require.NoError(tb, s.InitPartitions(ctx, 1))
	_, err = s.CreateVoucher(ctx, orderstore.Voucher{ID: 7, Total: 1 << 39, BeginAt: begin, EndAt: begin.Add(time.Hour)})
	require.NoError(tb, err)
	var next, done atomic.Int64
	tb.ReportAllocs()
	tb.ResetTimer()
	finished := make(chan error, inFlight)
	for range inFlight {
		go func() {
			finished <- func() error {
				for done.Add(1) <= int64(tb.N) {
					first := next.Add(size) - size + 1
					orders := make([]orderstore.Order, size)
					for i := range orders {
						seq := first + int64(i)
						orders[i] = orderstore.Order{
							Position: at(7, 1, seq), UserID: seq ^ 5, AdmittedAt: begin.Add(time.Duration(i/200) * time.Millisecond), EntryID: "1-1",
						}
					}
					if _, err := s.Persist(ctx, orders); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range inFlight {
		require.NoError(tb, <-finished)
	}
	tb.ReportMetric(float64(tb.N*size)/tb.Elapsed().Seconds(), "rows/s")
}
