//go:build fleet

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// Eight writers work on four vouchers while a foreign transaction takes the
// vouchers' rows in the opposite order, and has so much to undo that the
// database rather rolls a writer back.
func TestFleet_DeadlocksWithAStrangerAreRetried(t *testing.T) {
	const vouchers, users = 4, 5000
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: 2, Writers: 8, Partitions: 2, WriterArgs: append(stack.FastTakeover(), "--committers=1")})
	for v := int64(1); v <= vouchers; v++ {
		s.MustOpenVoucher(t, v, users)
	}
	exec(ctx, t, s, "CREATE TABLE stranger (id INT PRIMARY KEY, n INT NOT NULL) ENGINE = InnoDB")
	for from := 0; from < 20_000; from += 2000 {
		rows := make([]string, 2000)
		for i := range rows {
			rows[i] = fmt.Sprintf("(%d, 0)", from+i)
		}
		exec(ctx, t, s, "INSERT INTO stranger VALUES "+strings.Join(rows, ","))
	}

	stop := make(chan struct{})
	var stranger sync.WaitGroup
	var own atomic.Int64 // deadlocks that the stranger lost
	stranger.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := backwards(ctx, s, vouchers); err != nil {
				var refused *mysql.MySQLError
				if errors.As(err, &refused) && refused.Number == 1213 {
					own.Add(1)
				} else if refused == nil || refused.Number != 1205 {
					t.Errorf("the stranger: %v", err)
					return
				}
			}
		}
	})
	var buying sync.WaitGroup
	answers := make([]map[int64]*seckillv1.GrabResponse, vouchers)
	failed := make([]map[int64]error, vouchers)
	for v := range vouchers {
		buying.Go(func() { answers[v], failed[v] = crowd(ctx, t, s, int64(v+1), 1, users) })
	}
	buying.Wait()
	require.Eventually(t, func() bool { return sum(ctx, t, s, "seckill_writer_transient_errors_total") > 0 }, patience, 50*time.Millisecond,
		"no writer ran into the stranger")
	for v := int64(1); v <= vouchers; v++ {
		settled(ctx, t, s, v)
	}
	close(stop)
	stranger.Wait()
	retried := sum(ctx, t, s, "seckill_writer_transient_errors_total")
	deadlocks := whole(ctx, t, s, "SELECT COUNT FROM information_schema.INNODB_METRICS WHERE NAME = 'lock_deadlocks'")
	t.Logf("%d deadlocks, %d lost by the stranger, %.0f transactions of writers ran again", deadlocks, own.Load(), retried)
	require.Greater(t, deadlocks, own.Load(), "no writer lost a deadlock")
	require.GreaterOrEqual(t, int64(retried), deadlocks-own.Load())
	for v := range vouchers {
		require.Empty(t, failed[v])
		proven(ctx, t, s, int64(v+1), users)
		stored(ctx, t, s, int64(v+1), answers[v])
		require.Empty(t, outcomes(ctx, t, s, int64(v+1)))
	}
}

// backwards locks the rows of vouchers from the last to the first, in a
// transaction that is heavier than any writer's.
func backwards(ctx context.Context, s *stack.Stack, vouchers int64) error {
	tx, err := s.DB().BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "UPDATE stranger SET n = n + 1"); err != nil {
		return err
	}
	for v := vouchers; v >= 1; v-- {
		var id int64
		if err := tx.QueryRowContext(ctx, "SELECT id FROM vouchers WHERE id = ? FOR UPDATE", v).Scan(&id); err != nil {
			return err
		}
		time.Sleep(5 * time.Millisecond) // writers get in between
	}
	return nil
}

// A writer is stopped by SIGSTOP in the middle of its transaction, with a
// voucher's row locked: the row is free again in time, a peer finishes, and the
// writer that wakes up does no harm.
func TestFleet_PausedInTheMiddleOfATransaction(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 1000)
	paused := s.Writer(0)
	release, err := s.HoldVoucherRow(ctx, 1)
	require.NoError(t, err)
	admitMany(ctx, t, s, 1, 1, 200)
	// The insert is done, the update waits for the row. The table is a copy that
	// is only made anew when nobody has read it for 100 ms.
	require.Eventually(t, func() bool {
		return whole(ctx, t, s, "SELECT COUNT(*) FROM information_schema.INNODB_TRX WHERE trx_state = 'LOCK WAIT' AND trx_rows_modified > 0") > 0
	}, patience, 150*time.Millisecond)
	require.NoError(t, paused.Pause())
	release() // the server gives the row to the writer that stands still
	_, err = s.StartWriter(ctx)
	require.NoError(t, err)
	settled(ctx, t, s, 1)
	rows, err := s.Rows(ctx, 1)
	require.NoError(t, err)
	require.EqualValues(t, 200, rows)
	require.NoError(t, paused.Resume())
	require.NoError(t, paused.AwaitServing(ctx, ""))
	admitMany(ctx, t, s, 1, 1001, 100)
	proven(ctx, t, s, 1, 300)
	require.Empty(t, outcomes(ctx, t, s, 1))
}

// A writer is stopped by SIGSTOP after its commit was sent, beyond min idle: a
// peer settles its entries, and its own late settling finds no token.
func TestFleet_LateSettleFindsNoToken(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 1000)
	proxy := newCommitProxy(t, s.Database.Addr())
	flag, _ := dsnOf(t, s, proxy.addr(), "root")
	paused := replaceWriter(ctx, t, s, flag)
	proxy.arm()
	admitMany(ctx, t, s, 1, 1, 100)
	commit := proxy.await()
	require.NoError(t, paused.Pause())
	commit.answer()
	rows, err := s.Rows(ctx, 1)
	require.NoError(t, err)
	require.EqualValues(t, 100, rows)
	peer, err := s.StartWriter(ctx)
	require.NoError(t, err)
	settled(ctx, t, s, 1)
	reclaimed, err := peer.Metric(ctx, "seckill_writer_orders_reclaimed_total")
	require.NoError(t, err)
	require.EqualValues(t, 100, reclaimed)
	require.NoError(t, paused.Resume())
	require.Eventually(t, func() bool {
		n, err := paused.Metric(ctx, "seckill_writer_entries_settled_before_total")
		return err == nil && n > 0
	}, patience, 10*time.Millisecond, "the late settle was not tried")
	proven(ctx, t, s, 1, 100)
}

// A writer that cannot finish is told to stop: what it holds goes to released,
// a peer takes it long before min idle, and its consumer is gone.
func TestFleet_SIGTERMHandsBackWhatItCannotFinish(t *testing.T) {
	ctx := testContext(t)
	slow := []string{"--min-idle=60s", "--batch-timeout=1400ms", "--block=200ms", "--drain-timeout=6s"}
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: 1, WriterArgs: slow})
	s.MustOpenVoucher(t, 1, 1000)
	release, err := s.HoldVoucherRow(ctx, 1)
	require.NoError(t, err)
	first := s.Writer(0)
	admitMany(ctx, t, s, 1, 1, 600)
	require.Eventually(t, func() bool { _, orders, err := s.Held(ctx, 1, first.Name); return err == nil && orders == 600 }, patience, 5*time.Millisecond)
	peer, err := s.StartWriter(ctx)
	require.NoError(t, err)
	require.NoError(t, first.Stop(20*time.Second))
	require.Zero(t, first.ExitCode())
	pending, err := s.Pending(ctx, 1)
	require.NoError(t, err)
	var left int64
	for _, p := range pending {
		require.NotEqual(t, first.Name, p.Consumer, "its consumer is still there")
		left += p.Entries
	}
	require.Positive(t, left, "it finished after all")
	release()
	began := time.Now()
	soon, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	require.NoError(t, s.AwaitSettled(soon, 1), "min idle is a minute: what is handed back must not wait for it")
	t.Logf("settled %.1f s after the row was free", time.Since(began).Seconds())
	proven(ctx, t, s, 1, 600)
	reclaimed, err := peer.Metric(ctx, "seckill_writer_orders_reclaimed_total")
	require.NoError(t, err)
	require.EqualValues(t, 600, reclaimed)
}

func TestFleet_ManyRestartsLeaveNoConsumers(t *testing.T) {
	const restarts, atOnce = 200, 8
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: 1, WriterArgs: append(stack.FastTakeover(), "--block=50ms")})
	s.MustOpenVoucher(t, 1, 1_000_000)
	var left atomic.Int64
	left.Store(restarts)
	var user atomic.Int64
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				w, err := s.StartWriter(ctx)
				if err != nil {
					t.Errorf("starting a writer: %v", err)
					return
				}
				admit(ctx, t, s, 1, buy(user.Add(1))) // there is work in hand
				if err := w.Stop(20 * time.Second); err != nil {
					t.Errorf("stopping a writer: %v", err)
					return
				}
			}
		})
	}
	all.Wait()
	proven(ctx, t, s, 1, restarts)
	pending, err := s.Pending(ctx, 1)
	require.NoError(t, err)
	names := make([]string, len(pending))
	for i, p := range pending {
		names[i] = p.Consumer
	}
	require.LessOrEqual(t, len(pending), 2, "%v", names) // the writer that lives, and released
}

// Writers die by SIGKILL with entries in hand: takeover empties their consumers,
// the guardian removes them.
func TestFleet_DeadConsumersAreEmptiedAndRemoved(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: 1, WriterArgs: append(stack.FastTakeover(), "--consumer-idle=4s", "--guardian-interval=200ms")})
	s.MustOpenVoucher(t, 1, 1000)
	alive := s.Writer(0)
	release, err := s.HoldVoucherRow(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, alive.Pause())
	unblocked(ctx, t, s)
	var dead []string
	for i := range int64(5) {
		w, err := s.StartWriter(ctx)
		require.NoError(t, err)
		admitMany(ctx, t, s, 1, 100*i+1, 50)
		require.Eventually(t, func() bool { entries, _, err := s.Held(ctx, 1, w.Name); return err == nil && entries > 0 }, patience, 5*time.Millisecond)
		w.Kill()
		dead = append(dead, w.Name)
	}
	release()
	require.NoError(t, alive.Resume())
	proven(ctx, t, s, 1, 250)
	require.Eventually(t, func() bool {
		pending, err := s.Pending(ctx, 1)
		if err != nil {
			return false
		}
		for _, p := range pending {
			for _, name := range dead {
				if p.Consumer == name {
					return false
				}
			}
		}
		return true
	}, patience, 100*time.Millisecond, "dead consumers are still there")
	// A live one may have gone with them where Redis cannot tell: it goes on.
	admitMany(ctx, t, s, 1, 1001, 50)
	proven(ctx, t, s, 1, 300)
}

// The bound on orders in flight lives in the ledger: it holds over all gateways,
// what is beyond it leaves no trace, and who needs no unit is still answered.
func TestBackpressure_BoundHoldsOverAllGateways(t *testing.T) {
	ctx := testContext(t)
	const bound, users = 600, 2000
	s := stack.Test(t, stack.Options{Gateways: 3, Writers: 2, Partitions: 1, WriterArgs: append(stack.FastTakeover(), fmt.Sprintf("--max-in-flight=%d", bound))})
	s.MustOpenVoucher(t, 1, 10_000)
	s.MustOpenVoucher(t, 2, 1)
	_, err := grab(ctx, s.Seckill(0), 1, 2)
	require.NoError(t, err)
	settled(ctx, t, s, 2)
	for _, w := range s.Writers() {
		require.NoError(t, w.Pause())
	}
	unblocked(ctx, t, s)
	answers, errs := crowd(ctx, t, s, 1, 1, users)
	require.EqualValues(t, bound, count(answers, seckillv1.Outcome_OUTCOME_ADMITTED))
	require.Len(t, errs, users-bound)
	for user, err := range errs {
		requireBusy(t, err, user)
	}
	full, err := s.Ledger(ctx, 1)
	require.NoError(t, err)
	require.EqualValues(t, bound, full.InFlight())
	// Beyond the bound nothing changes, through any gateway.
	for user := range errs {
		_, err := grab(ctx, s.Seckill(int(user)%3), user, 1)
		requireBusy(t, err, user)
		if user%10 == 0 {
			break
		}
	}
	again, err := s.Ledger(ctx, 1)
	require.NoError(t, err)
	again.Now = full.Now
	require.Equal(t, full, again)
	for gateway := range 3 {
		refused, err := grab(ctx, s.Seckill(gateway), 5000, 2)
		require.NoError(t, err)
		require.Equal(t, seckillv1.Outcome_OUTCOME_SOLD_OUT, refused.GetOutcome(), "sold out is not hidden by a backlog")
	}
	for user, first := range answers {
		replay, err := grab(ctx, s.Seckill(int(user)%3), user, 1)
		require.NoError(t, err)
		require.True(t, replay.GetReplayed())
		require.Equal(t, first.GetOrder().GetOrderId(), replay.GetOrder().GetOrderId())
		if user%20 == 0 {
			break
		}
	}
	for _, w := range s.Writers() {
		require.NoError(t, w.Resume())
	}
	settled(ctx, t, s, 1)
	for user := range errs {
		require.Eventually(t, func() bool {
			answer, err := grab(ctx, s.Seckill(0), user, 1)
			answers[user] = answer
			return err == nil
		}, patience, 10*time.Millisecond)
	}
	proven(ctx, t, s, 1, users)
	stored(ctx, t, s, 1, answers)
	require.Empty(t, outcomes(ctx, t, s, 1), "nothing was dropped")
	meta, err := ledger.ReadMeta(ctx, s.Client(), 0)
	require.NoError(t, err)
	require.EqualValues(t, bound, meta.Bound)
}
