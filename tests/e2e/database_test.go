//go:build fleet

package e2e

import (
	"context"
	"database/sql"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// A database that cannot write now is not the orders' fault: whatever it says,
// they wait and become rows, none of them a dead letter.

// plainUser has no more rights than a writer needs: read-only and a full
// server spare none but an administrator.
const plainUser = "plain"

// dsnOf writes the DSN of the stack's database, over another address and as
// another user, into a file, for a writer's flag.
func dsnOf(t *testing.T, s *stack.Stack, addr, user string) (flag, dsn string) {
	t.Helper()
	cfg, err := mysql.ParseDSN(s.DSN())
	require.NoError(t, err)
	cfg.Addr, cfg.User = addr, user
	path := filepath.Join(t.TempDir(), "dsn")
	require.NoError(t, os.WriteFile(path, []byte(cfg.FormatDSN()+"\n"), 0o600))
	return "--database-dsn-file=" + path, cfg.FormatDSN()
}

// replaceWriter stops the stack's only writer and starts one with other flags
// in its place.
func replaceWriter(ctx context.Context, t *testing.T, s *stack.Stack, args ...string) *stack.Process {
	t.Helper()
	old := s.Writer(0)
	w, err := s.StartWriter(ctx, args...)
	require.NoError(t, err)
	require.NoError(t, old.Stop(20*time.Second))
	return w
}

// asPlainUser lets only writers of plainUser run. It needs 3 s until the new
// one is guardian, which no test waits for.
func asPlainUser(ctx context.Context, t *testing.T, s *stack.Stack) (w *stack.Process, dsn string) {
	t.Helper()
	exec(ctx, t, s, "CREATE USER '"+plainUser+"'@'%'")
	exec(ctx, t, s, "GRANT ALL ON seckill.* TO '"+plainUser+"'@'%'")
	flag, dsn := dsnOf(t, s, s.Database.Addr(), plainUser)
	return replaceWriter(ctx, t, s, flag), dsn
}

// undecided requires that a writer has tried and nothing was decided: no row
// more than before, no outcome, nothing acknowledged.
func undecided(ctx context.Context, t *testing.T, s *stack.Stack, w *stack.Process, voucherID, rows, inFlight int64) {
	t.Helper()
	tries, err := w.Metric(ctx, "seckill_writer_transient_errors_total")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		now, err := w.Metric(ctx, "seckill_writer_transient_errors_total")
		return err == nil && now >= tries+3
	}, patience, 20*time.Millisecond, "the writer does not try")
	n, err := s.Rows(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, rows, n)
	require.Empty(t, outcomes(ctx, t, s, voucherID))
	books, err := s.Ledger(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, inFlight, books.InFlight())
}

// A foreign transaction holds one voucher's row for longer than writers wait
// for it: at no moment is there a row without its decrement, and the other
// vouchers go on.
func TestDatabase_LockWaitNeverLeavesARowWithoutItsDecrement(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 2, Partitions: 1, Database: devstack.DatabaseOptions{
		// As servers come: a lock wait that ran out undoes its statement only, and
		// a commit would keep the insert before it.
		Args: []string{"--innodb-rollback-on-timeout=OFF"},
	}})
	for v := int64(1); v <= 4; v++ {
		s.MustOpenVoucher(t, v, 20_000)
	}
	stop := make(chan struct{})
	var watching sync.WaitGroup
	var looks atomic.Int64
	watching.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for v := 1; v <= 4; v++ {
				// One statement, so one snapshot.
				var rows, sold int64
				err := s.DB().QueryRowContext(ctx, `SELECT (SELECT COUNT(*) FROM orders WHERE voucher_id = vouchers.id), sold FROM vouchers WHERE id = ?`, v).Scan(&rows, &sold)
				if err != nil {
					t.Errorf("watching: %v", err)
					return
				}
				if rows != sold {
					t.Errorf("voucher %d: %d rows, sold %d", v, rows, sold)
					return
				}
			}
			looks.Add(1)
		}
	})
	release, err := s.HoldVoucherRow(ctx, 3)
	require.NoError(t, err)
	defer release()
	var buying sync.WaitGroup
	for v := int64(1); v <= 4; v++ {
		buying.Go(func() {
			_, errs := crowd(ctx, t, s, v, 1, 1500)
			if len(errs) > 0 {
				t.Errorf("voucher %d: %d calls failed", v, len(errs))
			}
		})
	}
	buying.Wait()
	for _, v := range []int64{1, 2, 4} {
		// The stream is not empty meanwhile, so it is the voucher's own figures.
		require.Eventually(t, func() bool {
			books, err := s.Ledger(ctx, v)
			return err == nil && books.Seq == 1500 && books.InFlight() == 0
		}, patience, 20*time.Millisecond, "voucher %d waits for voucher 3", v)
	}
	require.Positive(t, sum(ctx, t, s, "seckill_writer_transient_errors_total"), "nobody waited for the row")
	rows, err := s.Rows(ctx, 3)
	require.NoError(t, err)
	require.Zero(t, rows)
	release()
	for v := int64(1); v <= 4; v++ {
		proven(ctx, t, s, v, 1500)
		require.Empty(t, outcomes(ctx, t, s, v))
	}
	close(stop)
	watching.Wait()
	require.Greater(t, looks.Load(), int64(20))
}

// The connection breaks after COMMIT was sent and before its answer came: the
// writer cannot know, and finds out that its rows are there.
func TestDatabase_ConnectionCutAfterCommitWasSent(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 1000)
	proxy := newCommitProxy(t, s.Database.Addr())
	flag, _ := dsnOf(t, s, proxy.addr(), "root")
	writer := replaceWriter(ctx, t, s, flag)
	for round := range int64(3) {
		require.NoError(t, writer.Pause())
		unblocked(ctx, t, s)
		admitMany(ctx, t, s, 1, 300*round+1, 300)
		proxy.arm()
		require.NoError(t, writer.Resume())
		commit := proxy.await()
		rows, err := s.Rows(ctx, 1)
		require.NoError(t, err)
		require.Greater(t, rows, 300*round, "it is committed")
		books, err := s.Ledger(ctx, 1)
		require.NoError(t, err)
		require.Positive(t, books.InFlight(), "the writer cannot know")
		commit.cut()
		proven(ctx, t, s, 1, 300*(round+1))
		require.Empty(t, outcomes(ctx, t, s, 1))
	}
	tries, err := writer.Metric(ctx, "seckill_writer_transient_errors_total")
	require.NoError(t, err)
	require.GreaterOrEqual(t, tries, 3.0, "no commit was in doubt")
}

// Connections break again and again under load, wherever they just are.
func TestDatabase_ConnectionsCutUnderLoad(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 100_000)
	proxy := devstack.TestProxy(t, s.Database.Addr())
	flag, _ := dsnOf(t, s, proxy.Addr(), "root")
	replaceWriter(ctx, t, s, flag)
	done := make(chan struct{})
	var answers map[int64]*seckillv1.GrabResponse
	var errs map[int64]error
	go func() {
		defer close(done)
		answers, errs = crowd(ctx, t, s, 1, 1, 15_000)
	}()
	cuts := 0
	for running := true; running; cuts++ {
		select {
		case <-done:
			running = false
		case <-time.After(25 * time.Millisecond):
		}
		proxy.SwallowReplies()
		time.Sleep(time.Duration(cuts%5) * time.Millisecond) // another place each time
		proxy.CutAll()
		proxy.Pass()
	}
	require.Empty(t, errs)
	require.Greater(t, cuts, 5)
	proven(ctx, t, s, 1, 15_000)
	stored(ctx, t, s, 1, answers)
	require.Empty(t, outcomes(ctx, t, s, 1))
}

// The pool holds connections to a server that is no longer there.
func TestDatabase_PoolSurvivesRestarts(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 2, Partitions: 8})
	s.MustOpenVoucher(t, 1, 10_000)
	for round := range int64(3) {
		_, errs := crowd(ctx, t, s, 1, 1000*round+1, 300)
		require.Empty(t, errs)
		proven(ctx, t, s, 1, 400*round+300)
		if round == 1 {
			s.Database.Kill()
		}
		require.NoError(t, s.Database.Restart(ctx))
		_, errs = crowd(ctx, t, s, 1, 1000*round+501, 100)
		require.Empty(t, errs)
		proven(ctx, t, s, 1, 400*(round+1))
	}
	require.Empty(t, outcomes(ctx, t, s, 1))
}

func TestDatabase_ReadOnlyIsWaitedOut(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 10_000)
	writer, _ := asPlainUser(ctx, t, s)
	first, errs := crowd(ctx, t, s, 1, 1, 200)
	require.Empty(t, errs)
	settled(ctx, t, s, 1)
	exec(ctx, t, s, "SET GLOBAL read_only = 1")
	second, errs := crowd(ctx, t, s, 1, 1001, 500)
	require.Empty(t, errs, "the sale goes on")
	undecided(ctx, t, s, writer, 1, 200, 500)
	exec(ctx, t, s, "SET GLOBAL read_only = 0")
	proven(ctx, t, s, 1, 700)
	stored(ctx, t, s, 1, first)
	stored(ctx, t, s, 1, second)
	require.Empty(t, outcomes(ctx, t, s, 1))
}

func TestDatabase_TooManyConnectionsAreWaitedOut(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 10_000)
	writer, dsn := asPlainUser(ctx, t, s)
	first, errs := crowd(ctx, t, s, 1, 1, 200)
	require.Empty(t, errs)
	settled(ctx, t, s, 1)

	// Others hold as many connections as the server then allows: whatever the
	// writer loses, it cannot get back.
	const places = 60
	hogs, err := sql.Open("mysql", dsn)
	require.NoError(t, err)
	defer hogs.Close()
	taken := make([]*sql.Conn, places)
	for i := range taken {
		taken[i], err = hogs.Conn(ctx)
		require.NoError(t, err)
	}
	exec(ctx, t, s, "SET GLOBAL max_connections = "+number(places))
	ids := connectionsOf(ctx, t, s, taken)
	require.NotEmpty(t, ids)
	for _, id := range ids {
		_, _ = s.DB().ExecContext(ctx, "KILL "+number(id)) // one that has ended is what is wanted
	}
	require.Eventually(t, func() bool { return len(connectionsOf(ctx, t, s, taken)) == 0 }, patience, 10*time.Millisecond)
	_, err = hogs.Conn(ctx)
	require.ErrorContains(t, err, "1040", "there is room")

	second, errs := crowd(ctx, t, s, 1, 1001, 500)
	require.Empty(t, errs, "the sale goes on")
	undecided(ctx, t, s, writer, 1, 200, 500)
	require.Empty(t, connectionsOf(ctx, t, s, taken))
	require.False(t, serves(ctx, t, writer, "database"))
	for _, conn := range taken {
		require.NoError(t, conn.Close())
	}
	require.NoError(t, hogs.Close())
	proven(ctx, t, s, 1, 700)
	stored(ctx, t, s, 1, first)
	stored(ctx, t, s, 1, second)
	require.Empty(t, outcomes(ctx, t, s, 1))
}

// connectionsOf lists plainUser's connections that are not among some.
func connectionsOf(ctx context.Context, t *testing.T, s *stack.Stack, but []*sql.Conn) (ids []int64) {
	t.Helper()
	known := []string{"0"}
	for _, conn := range but {
		var id int64
		require.NoError(t, conn.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id))
		known = append(known, number(id))
	}
	rows, err := s.DB().QueryContext(ctx, "SELECT ID FROM information_schema.PROCESSLIST WHERE USER = ? AND ID NOT IN ("+strings.Join(known, ",")+")", plainUser)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var id int64
		require.NoError(t, rows.Scan(&id))
		ids = append(ids, id)
	}
	require.NoError(t, rows.Err())
	return ids
}

func TestDatabase_BatchBeyondMaxAllowedPacketIsSplit(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 100_000)
	// Less than one full entry needs; a row takes some 80 bytes.
	exec(ctx, t, s, "SET GLOBAL max_allowed_packet = 4096")
	writer := replaceWriter(ctx, t, s)
	require.NoError(t, writer.Pause())
	unblocked(ctx, t, s)
	admitMany(ctx, t, s, 1, 1, 5000)
	require.NoError(t, writer.Resume())
	proven(ctx, t, s, 1, 5000)
	require.Empty(t, outcomes(ctx, t, s, 1))
	require.Zero(t, whole(ctx, t, s, "SELECT COUNT(*) FROM dead_entries"))
	held, err := writer.Metric(ctx, "seckill_writer_dead_letters_total")
	require.NoError(t, err)
	require.Zero(t, held)
}

// An order whose position and whose user are both in the database: the server
// names one key only. In the same row it is a redelivery; in two rows the
// position is judged first, and nothing is acknowledged.
func TestDatabase_BothKeysClashAtOnce(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: 8})
	insert := func(voucher, seq, user int64) {
		exec(ctx, t, s, "INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (?, 1, ?, ?, NOW(3))", voucher, seq, user)
		exec(ctx, t, s, "UPDATE vouchers SET stock = stock - 1, sold = sold + 1 WHERE id = ?", voucher)
	}
	writer := s.Writer(0)
	s.MustOpenVoucher(t, 1, 10)
	s.MustOpenVoucher(t, 2, 10)
	admit(ctx, t, s, 2, buy(11))
	settled(ctx, t, s, 2)
	forget(ctx, t, s, 2, 11)

	require.NoError(t, writer.Pause())
	unblocked(ctx, t, s)
	admit(ctx, t, s, 1, buy(11), buy(12), buy(13))
	insert(1, 2, 12) // as if this had been committed before
	admit(ctx, t, s, 2, buy(11), buy(12))
	insert(2, 2, 99) // user 11 has seq 1, seq 2 is somebody else's
	require.NoError(t, writer.Resume())

	settled(ctx, t, s, 1)
	balanced(ctx, t, s, 1, 3, 7)
	require.Empty(t, outcomes(ctx, t, s, 1))

	require.Eventually(t, func() bool {
		meta, err := ledger.ReadMeta(ctx, s.Client(), 2)
		return err == nil && !meta.Open && strings.Contains(meta.Reason, "voucher 2 epoch 1 seq 2")
	}, patience, 20*time.Millisecond, "the partition is closed and says why")
	require.Empty(t, outcomes(ctx, t, s, 2))
	books, err := s.Ledger(ctx, 2)
	require.NoError(t, err)
	require.EqualValues(t, 2, books.InFlight(), "an entry with a foreign position was acknowledged")
}
