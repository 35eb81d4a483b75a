package baseline

import (
	"context"
	"database/sql"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// In good weather each stage does what the tutorial says: as many orders as
// units, one a user, each a row.
func TestStages_SellEveryUnitOnceInGoodWeather(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	binaries := devstack.TestBinaries(t)
	redis, err := devstack.StartRedis(ctx, binaries, devstack.RedisOptions{})
	require.NoError(t, err)
	t.Cleanup(redis.Close)
	database, err := devstack.StartDatabase(ctx, binaries, devstack.DatabaseOptions{})
	require.NoError(t, err)
	t.Cleanup(database.Close)
	require.NoError(t, database.CreateDatabase(ctx, "tutorial"))
	db, err := sql.Open("mysql", database.DSN("tutorial"))
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{redis.Addr()}, DisableCache: true})
	require.NoError(t, err)
	t.Cleanup(client.Close)

	const units, users, clicks = 50, 80, 2
	for i, stage := range []Stage{StageSync, StageQueue, StageStream} {
		t.Run(string(stage), func(t *testing.T) {
			voucher := int64(i + 1)
			require.NoError(t, Prepare(ctx, db, voucher, units))
			require.NoError(t, Stock(ctx, client, voucher, units))
			s, err := New(stage, client, db, slog.New(slog.DiscardHandler))
			require.NoError(t, err)
			running, stop := context.WithCancel(ctx)
			ran := make(chan error, 1)
			go func() { ran <- s.Run(running) }()

			var admitted atomic.Int64
			var all sync.WaitGroup
			for user := range int64(users) {
				all.Go(func() {
					for range clicks {
						answer, err := s.Grab(ctx, &seckillv1.GrabRequest{UserId: user + 1, VoucherId: voucher})
						if err == nil && answer.GetOutcome() == seckillv1.Outcome_OUTCOME_ADMITTED {
							admitted.Add(1)
						}
					}
				})
			}
			all.Wait()
			require.EqualValues(t, units, admitted.Load())
			var rows, buyers int64
			require.Eventually(t, func() bool {
				err := db.QueryRowContext(ctx, "SELECT COUNT(*), COUNT(DISTINCT user_id) FROM tb_voucher_order WHERE voucher_id = ?", voucher).Scan(&rows, &buyers)
				return err == nil && rows == units
			}, 30*time.Second, 10*time.Millisecond, "%d rows", rows)
			require.EqualValues(t, units, buyers)
			stop()
			require.NoError(t, <-ran)
		})
	}
}
