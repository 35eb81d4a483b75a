package orderstore_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// persistUntilDecided does what the pipeline does: the same batch again after
// every transient error.
func persistUntilDecided(f *fixture, s *orderstore.Store, batch []orderstore.Order) ([]orderstore.Verdict, error) {
	for {
		verdicts, err := s.Persist(f.ctx, batch)
		if err == nil || f.ctx.Err() != nil {
			return verdicts, err
		}
	}
}

func TestPersist_OverlappingBatchesFromFourWritersAtOnce(t *testing.T) {
	f := newFixture(t)
	const total, writers, rounds = 300, 4, 8
	f.voucher(7, total)
	f.voucher(8, 2*total)
	// 400 positions of voucher 7 for 300 units, 400 of voucher 8; every user is
	// there twice, so half of them are conflicts, and every batch is delivered to
	// all writers.
	var mu sync.Mutex
	final := make(map[orderid.Position]orderstore.Verdict)
	var g errgroup.Group
	for w := range writers {
		g.Go(func() error {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for range rounds {
				var batch []orderstore.Order
				for _, voucher := range []int64{8, 7} {
					from := 1 + r.Int64N(350)
					for seq := from; seq < from+100; seq++ {
						batch = append(batch, order(voucher, seq, 1000+seq%200))
					}
				}
				r.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
				verdicts, err := persistUntilDecided(f, f.Store, batch)
				if err != nil {
					return err
				}
				mu.Lock()
				for i, v := range verdicts {
					before, ok := final[batch[i].Position]
					if ok && before.Kind == orderstore.Persisted && v.Kind != orderstore.Persisted {
						t.Errorf("%v was persisted and is now %v", batch[i].Position, v)
					}
					if ok && before.Kind != orderstore.Persisted && v.Kind == orderstore.Persisted {
						t.Errorf("%v was %v and is now persisted", batch[i].Position, before)
					}
					final[batch[i].Position] = v
				}
				mu.Unlock()
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
	for _, voucher := range []int64{7, 8} {
		var persisted, ended int64
		users := make(map[int64]bool)
		for p, v := range final {
			if p.VoucherID != voucher {
				continue
			}
			users[1000+p.Seq%200] = true
			if v.Kind == orderstore.Persisted {
				persisted++
			} else {
				ended++
			}
		}
		require.EqualValues(t, len(users), persisted, "one row a user")
		f.books(voucher, persisted, ended)
	}
}

func TestPersist_ScarceStockAmongFourWritersIsNeverOversold(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 50)
	var g errgroup.Group
	for w := range int64(4) {
		g.Go(func() error {
			for k := range int64(5) {
				if _, err := persistUntilDecided(f, f.Store, run(7, 1+w*100+k*10, 10+w*100+k*10, 0)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
	f.books(7, 50, 150)
}

func TestPersist_LockWaitTimeoutLeavesNoRowWithoutItsDecrement(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	impatient := f.open(f.dsn, time.Second)
	tx, err := f.sql.BeginTx(f.ctx, nil)
	require.NoError(t, err)
	_, err = tx.Exec("UPDATE vouchers SET title = 'held' WHERE id = 7")
	require.NoError(t, err)

	verdicts, err := impatient.Persist(f.ctx, run(7, 1, 5, 0)) // inserts, then waits for the voucher row
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.ErrorContains(t, err, "1205")
	require.Equal(t, all(5, orderstore.Undecided), kinds(verdicts))
	f.books(7, 0, 0)

	require.NoError(t, tx.Rollback())
	verdicts, err = impatient.Persist(f.ctx, run(7, 1, 5, 0))
	require.NoError(t, err)
	require.Equal(t, all(5, orderstore.Persisted), kinds(verdicts))
	f.books(7, 5, 0)
}

func TestPersist_DeadlockDecidesNothingAndTheNextRunIsRight(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	tx, err := f.sql.BeginTx(f.ctx, nil)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback() }()
	// The heavier transaction survives a deadlock: this one changes more rows.
	for i := range 50 {
		_, err := tx.Exec("INSERT INTO settings (name, value) VALUES (?, '')", i)
		require.NoError(t, err)
	}
	_, err = tx.Exec("UPDATE vouchers SET title = 'held' WHERE id = 7")
	require.NoError(t, err)

	type result struct {
		verdicts []orderstore.Verdict
		err      error
	}
	done := make(chan result, 1)
	go func() {
		verdicts, err := f.Persist(f.ctx, run(7, 1, 3, 0))
		done <- result{verdicts, err}
	}()
	f.awaitUpdate()
	_, err = tx.Exec("SELECT user_id FROM orders WHERE voucher_id = 7 AND epoch = 1 AND seq = 2 FOR UPDATE")
	require.NoError(t, err, "the stranger survives")
	got := <-done
	require.ErrorIs(t, got.err, orderstore.ErrTransient)
	require.ErrorContains(t, got.err, "1213")
	require.Equal(t, all(3, orderstore.Undecided), kinds(got.verdicts))
	require.NoError(t, tx.Rollback())

	require.Equal(t, all(3, orderstore.Persisted), f.persist(run(7, 1, 3, 0)...))
	f.books(7, 3, 0)
}

func TestPersist_OutcomeWrittenWhileTheBatchWaitsForTheVoucherWins(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	tx, err := f.sql.BeginTx(f.ctx, nil)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback() }()
	_, err = tx.Exec("SELECT id FROM vouchers WHERE id = 7 FOR UPDATE")
	require.NoError(t, err)
	done := make(chan []orderstore.VerdictKind, 1)
	go func() {
		verdicts, err := f.Persist(f.ctx, run(7, 1, 3, 0))
		if err != nil {
			t.Error(err)
		}
		done <- kinds(verdicts)
	}()
	f.awaitUpdate()
	_, err = tx.Exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 2, 2, 'LOST')")
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted, orderstore.Ended, orderstore.Persisted}, <-done)
	f.books(7, 2, 1)
}

// awaitUpdate waits until the guarded UPDATE of a batch is running, which, while
// the test holds the voucher row, means waiting.
func (f *fixture) awaitUpdate() {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		var n int
		err := f.sql.QueryRowContext(f.ctx, `SELECT COUNT(*) FROM information_schema.PROCESSLIST
WHERE DB = DATABASE() AND INFO LIKE 'UPDATE vouchers SET stock%'`).Scan(&n)
		return err == nil && n == 1
	}, 20*time.Second, 20*time.Millisecond)
}

// The connection breaks at every statement of every transaction of Persist, once
// before the server has it and once after the server has run it.
func TestPersist_ConnectionCutAtEveryStatement(t *testing.T) {
	f := newFixture(t)
	voucher := int64(0)
	proxy := newCutter(t, addrOf(t, f.dsn))
	s := f.open(proxy.through(t, f.dsn), 0)
	for _, statement := range []string{
		"START TRANSACTION", "INSERT INTO `orders`", "UPDATE vouchers SET stock", "FROM order_outcomes", "\x03COMMIT",
		"FROM orders\nWHERE voucher_id", "FORCE INDEX", "FOR UPDATE", "INSERT INTO `order_outcomes`", "ROLLBACK",
	} {
		for _, delivered := range []bool{false, true} {
			voucher++
			f.voucher(voucher, 4)
			f.persist(order(voucher, 1, 50)) // user 50 has an order: one more is a conflict
			// 4 units, of which one is gone: 3 persisted, 1 conflict, 2 rejected.
			batch := append(run(voucher, 2, 6, 100), order(voucher, 7, 50))
			proxy.cut(statement, delivered, 1)
			var first error
			verdicts, err := s.Persist(f.ctx, batch)
			if err != nil {
				first = err
				require.ErrorIs(t, err, orderstore.ErrTransient, "%s delivered=%v", statement, delivered)
				verdicts, err = persistUntilDecided(f, s, batch)
			}
			require.NoError(t, err)
			require.Equal(t, 1, proxy.count(), "%s was never sent", statement)
			if statement != "ROLLBACK" {
				require.Error(t, first, "%s delivered=%v", statement, delivered)
			}
			for i, v := range verdicts {
				switch {
				case i < 3:
					require.Equal(t, orderstore.Persisted, v.Kind, "%s delivered=%v order %d", statement, delivered, i)
				case i < 5:
					require.Equal(t, orderstore.OutcomeRejected, v.Outcome, "%s delivered=%v order %d", statement, delivered, i)
				default:
					require.Equal(t, orderstore.OutcomeConflict, v.Outcome, "%s delivered=%v order %d", statement, delivered, i)
					require.Equal(t, at(voucher, 1, 1), v.Standing)
				}
			}
			f.books(voucher, 4, 3)
		}
	}
}

// What was read before the voucher row is locked may have changed by then.
func TestPersist_LooksAgainUnderTheLockBeforeItRecordsAnOutcome(t *testing.T) {
	f := newFixture(t)
	proxy := newCutter(t, addrOf(t, f.dsn))
	s := f.open(proxy.through(t, f.dsn), 0)
	for name, c := range map[string]struct {
		total     int64 // 1: the batch is short of stock, for user 50 took it
		user      int64
		meanwhile []string
		kind      orderstore.VerdictKind
		outcome   string
		orders    int64
		outcomes  int64
	}{
		"nothing, conflict": {9, 50, nil, orderstore.Conflict, "CONFLICT", 1, 1},
		"nothing, short":    {1, 51, nil, orderstore.Rejected, "REJECTED", 1, 1},
		"stock added":       {1, 51, []string{"UPDATE vouchers SET total = total + 1, stock = stock + 1 WHERE id = @v"}, orderstore.Persisted, "", 2, 0},
		"standing order cancelled": {9, 50, []string{
			"DELETE FROM orders WHERE voucher_id = @v",
			"UPDATE vouchers SET stock = stock + 1, sold = sold - 1 WHERE id = @v",
		}, orderstore.Persisted, "", 1, 0},
		"standing order replaced": {9, 50, []string{
			"UPDATE orders SET seq = 9 WHERE voucher_id = @v",
		}, orderstore.Conflict, "CONFLICT", 1, 1},
		"persisted by a peer, conflict": {9, 50, []string{
			"UPDATE orders SET seq = 2 WHERE voucher_id = @v",
		}, orderstore.Persisted, "", 1, 0},
		"persisted by a peer, short": {1, 51, []string{
			"UPDATE vouchers SET total = total + 1, sold = sold + 1 WHERE id = @v",
			"INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (@v, 1, 2, 51, NOW())",
		}, orderstore.Persisted, "", 2, 0},
		"position taken, short": {1, 51, []string{
			"UPDATE vouchers SET total = total + 1, sold = sold + 1 WHERE id = @v",
			"INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (@v, 1, 2, 52, NOW())",
		}, orderstore.SamePosition, "", 2, 0},
		"bought elsewhere, short": {1, 51, []string{
			"UPDATE vouchers SET total = total + 1, sold = sold + 1 WHERE id = @v",
			"INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (@v, 1, 3, 51, NOW())",
		}, orderstore.Conflict, "CONFLICT", 2, 1},
		"outcome by a peer, conflict": {9, 50, []string{
			"INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (@v, 1, 2, 50, 'LOST')",
		}, orderstore.Ended, "LOST", 1, 1},
		"outcome by a peer, short": {1, 51, []string{
			"INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (@v, 1, 2, 51, 'LOST')",
		}, orderstore.Ended, "LOST", 1, 1},
		"epoch raised, conflict": {9, 50, []string{"UPDATE vouchers SET epoch = 2 WHERE id = @v"}, orderstore.Stale, "", 1, 0},
		"epoch raised, short":    {1, 51, []string{"UPDATE vouchers SET epoch = 2 WHERE id = @v"}, orderstore.Stale, "", 1, 0},
	} {
		v, err := f.CreateVoucher(f.ctx, orderstore.Voucher{Total: c.total, BeginAt: begin, EndAt: begin.Add(time.Hour)})
		require.NoError(t, err)
		f.persist(order(v.ID, 1, 50))
		ran := false
		proxy.before("FOR UPDATE", func() {
			ran = true
			conn, err := f.sql.Conn(f.ctx)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			for _, statement := range append([]string{"SET @v = ?"}, c.meanwhile...) {
				var args []any
				if len(statement) == len("SET @v = ?") {
					args = []any{v.ID}
				}
				if _, err := conn.ExecContext(f.ctx, statement, args...); err != nil {
					t.Errorf("%s: %s: %v", name, statement, err)
				}
			}
		})
		verdicts, err := s.Persist(f.ctx, []orderstore.Order{order(v.ID, 2, c.user)})
		require.NoError(t, err, name)
		require.True(t, ran, name)
		require.Equal(t, c.kind, verdicts[0].Kind, name)
		require.Equal(t, c.outcome, verdicts[0].Outcome, name)
		if name == "standing order replaced" {
			require.Equal(t, at(v.ID, 1, 9), verdicts[0].Standing)
		}
		f.books(v.ID, c.orders, c.outcomes)
	}
}

func TestPersist_CommitWhoseAnswerIsLostIsFoundAgain(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	proxy := newCutter(t, addrOf(t, f.dsn))
	s := f.open(proxy.through(t, f.dsn), 0)
	proxy.cut("\x03COMMIT", true, 1) // with the byte that says query: READ COMMITTED is another one
	verdicts, err := s.Persist(f.ctx, run(7, 1, 10, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.Equal(t, all(10, orderstore.Undecided), kinds(verdicts), "nobody knows")
	f.books(7, 10, 0)
	verdicts, err = s.Persist(f.ctx, run(7, 1, 10, 0))
	require.NoError(t, err)
	require.Equal(t, all(10, orderstore.Persisted), kinds(verdicts))
	f.books(7, 10, 0)
}

func TestPersist_ServerThatHangsInCommitHoldsNoBatchBeyondItsDeadline(t *testing.T) {
	server := devstack.TestDatabaseServer(t)
	require.NoError(t, server.CreateDatabase(t.Context(), "hung"))
	proxy := devstack.TestProxy(t, server.Addr())
	f := fixtureAt(t, server.DSN("hung"))
	f.voucher(7, 100)
	cut := newCutter(t, proxy.Addr())
	s := f.open(cut.through(t, f.dsn), 0)
	require.NoError(t, s.Ping(f.ctx))
	cut.before("\x03COMMIT", proxy.SwallowReplies)
	ctx, cancel := context.WithTimeout(f.ctx, 500*time.Millisecond)
	defer cancel()
	_, err := s.Persist(ctx, run(7, 1, 3, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.ErrorContains(t, err, "outcome unknown")
	require.ErrorIs(t, err, context.DeadlineExceeded, "it was the context that ended it")
	proxy.Pass()
	require.Eventually(t, func() bool {
		verdicts, err := s.Persist(f.ctx, run(7, 1, 3, 0))
		return err == nil && verdicts[0].Kind == orderstore.Persisted
	}, 30*time.Second, 50*time.Millisecond)
	f.books(7, 3, 0)
}

func TestPersist_KilledServerKeepsWhatWasPersisted(t *testing.T) {
	server := devstack.TestDatabaseServer(t)
	require.NoError(t, server.CreateDatabase(t.Context(), "killed"))
	f := fixtureAt(t, server.DSN("killed"))
	f.voucher(7, 1000)
	require.Equal(t, all(100, orderstore.Persisted), f.persist(run(7, 1, 100, 0)...))
	server.Kill()
	_, err := f.Persist(f.ctx, run(7, 50, 200, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.Error(t, f.Ping(f.ctx))
	require.NoError(t, server.Restart(f.ctx))
	verdicts, err := persistUntilDecided(f, f.Store, run(7, 50, 200, 0))
	require.NoError(t, err)
	require.Equal(t, all(151, orderstore.Persisted), kinds(verdicts))
	f.books(7, 200, 0)
}
