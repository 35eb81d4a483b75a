package orderstore_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/writer/internal/orderstore"
)

func TestRequeue_StoresTheOrderAndClosesTheDeadLetterInOne(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	o := order(7, 3, 50)
	f.hold(o)
	f.books(7, 0, 1)

	require.Equal(t, orderstore.Resolution{Result: orderstore.ResultPersisted, Position: o.Position, UserID: 50}, f.requeue(idOf(o)))
	f.books(7, 1, 0)
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM orders WHERE user_id = 50 AND reference = 'ref-3' AND admitted_at = ?", o.AdmittedAt))
	update := orderstore.LedgerUpdate{Position: o.Position, UserID: 50, Outcome: orderstore.ResultPersisted}
	require.Equal(t, []orderstore.LedgerUpdate{update}, f.updates(0))
	require.Empty(t, f.updates(1))
	r, err := f.Read(f.ctx, 7, true)
	require.NoError(t, err)
	require.EqualValues(t, 1, r.Untold)

	again := f.requeue(idOf(o))
	require.Equal(t, orderstore.ResultPersisted, again.Result)
	require.EqualValues(t, 50, again.UserID)
	require.Equal(t, orderstore.ResultPersisted, f.cancel(idOf(o)).Result, "a cancel that comes late changes nothing")
	f.books(7, 1, 0)
	require.Equal(t, []string{"ada REQUEUE order 7/1/3 PERSISTED"}, f.actions(), "what changes nothing is not recorded")

	require.NoError(t, f.MarkTold(f.ctx, update))
	require.NoError(t, f.MarkTold(f.ctx, update))
	require.Empty(t, f.updates(0))
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted}, f.persist(o), "its redelivery")
	f.hold2(orderstore.Persisted, o)
	f.books(7, 1, 0)
}

// hold2 holds one order and requires this kind of verdict.
func (f *fixture) hold2(kind orderstore.VerdictKind, o orderstore.Order) {
	f.t.Helper()
	verdicts, err := f.Hold(f.ctx, []orderstore.Held{{Order: o, Reason: "again"}})
	require.NoError(f.t, err)
	require.Equal(f.t, kind, verdicts[0].Kind)
}

func TestRequeue_TakesTheUnitInTheCurrentEpochAndKeepsTheOrdersOwn(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.hold(order(7, 3, 50))
	f.exec("UPDATE partitions SET epoch = 2")
	f.exec("UPDATE vouchers SET epoch = 2")
	require.Equal(t, orderstore.ResultPersisted, f.requeue(idOf(order(7, 3, 50))).Result)
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM orders WHERE epoch = 1"))
	f.books(7, 1, 0)
}

func TestRequeue_UserBoughtAgainIsAConflict(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.hold(order(7, 3, 50))
	f.persist(order(7, 9, 50))
	r := f.requeue(idOf(order(7, 3, 50)))
	require.Equal(t, orderstore.ResultConflict, r.Result)
	f.books(7, 1, 1)
	update := orderstore.LedgerUpdate{Position: at(7, 1, 3), UserID: 50, Outcome: orderstore.ResultConflict, Standing: at(7, 1, 9)}
	require.Equal(t, []orderstore.LedgerUpdate{update}, f.updates(0))
	found, err := f.FindByPosition(f.ctx, at(7, 1, 3))
	require.NoError(t, err)
	require.Equal(t, orderstore.OutcomeConflict, found.Outcome)
	require.Equal(t, at(7, 1, 9), found.Standing)
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM order_outcomes WHERE applied_at IS NULL"))
	require.NoError(t, f.MarkTold(f.ctx, update))
	require.Zero(t, f.number("SELECT COUNT(*) FROM order_outcomes WHERE applied_at IS NULL"))
	require.Equal(t, orderstore.ResultConflict, f.requeue(idOf(order(7, 3, 50))).Result)
	require.Len(t, f.actions(), 1)
	verdicts, err := f.Persist(f.ctx, []orderstore.Order{order(7, 3, 50)})
	require.NoError(t, err)
	require.Equal(t, orderstore.Verdict{Kind: orderstore.Ended, Outcome: orderstore.OutcomeConflict, Standing: at(7, 1, 9)}, verdicts[0])
}

func TestRequeue_WhatCannotBeStoredStaysHeldAndIsRecorded(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 1)
	f.voucher(8, 10)
	f.persist(order(7, 1, 1))
	f.exec("ALTER TABLE orders ADD CONSTRAINT superstition CHECK (user_id <> 666)")
	nobody := order(8, 2, -5)
	for name, c := range map[string]struct {
		order orderstore.Order
		says  string
	}{
		"no stock":     {order(7, 2, 50), "no stock left"},
		"no user":      {nobody, "user could not be read"},
		"no voucher":   {order(6, 1, 50), "no such voucher"},
		"a data error": {order(8, 3, 666), "check constraint"},
	} {
		f.hold(c.order)
		before := len(f.actions())
		for range 2 {
			r := f.requeue(idOf(c.order))
			require.Equal(t, orderstore.ResultHeld, r.Result, name)
			require.Contains(t, r.Detail, c.says, name)
			require.NotContains(t, r.Detail, "superstition", "no words of the driver: %s", name)
			require.Equal(t, max(c.order.UserID, 0), r.UserID, name)
		}
		require.Len(t, f.actions(), before+2, name)
		require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'HELD' AND voucher_id = ? AND seq = ?", c.order.VoucherID, c.order.Seq), name)
	}
	f.books(7, 1, 1)
	f.books(8, 0, 2)
	require.Empty(t, f.updates(0), "nothing came of any")

	// What stood in the way is gone.
	f.exec("ALTER TABLE orders DROP CONSTRAINT superstition")
	f.exec("UPDATE vouchers SET total = 2, stock = 1 WHERE id = 7")
	f.voucher(6, 10)
	for _, o := range []orderstore.Order{order(7, 2, 50), order(6, 1, 50), order(8, 3, 666)} {
		require.Equal(t, orderstore.ResultPersisted, f.requeue(idOf(o)).Result)
	}
	f.books(6, 1, 0)
	f.books(7, 2, 0)
	f.books(8, 1, 1)
}

func TestRequeue_PositionThatIsARowAlreadyIsToldApart(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.persist(order(7, 1, 50))
	f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 1, 50, 'HELD')")
	r := f.requeue(idOf(order(7, 1, 50)))
	require.Equal(t, orderstore.ResultHeld, r.Result)
	require.Contains(t, r.Detail, "books are wrong")
}

// A peer persists the same position, again and again, while an operator requeues
// or cancels it, or while another order of the user is persisted.
func TestRequeue_RacesWritersOfThePositionAndOfTheUser(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 1000)
	for seq := int64(1); seq <= 60; seq++ {
		o := order(7, seq, seq)
		rival := order(7, 5000+seq, seq)
		f.hold(o)
		var r orderstore.Resolution
		var own, others []orderstore.Verdict
		var g errgroup.Group
		g.Go(func() error {
			for {
				var err error
				r, err = f.Requeue(f.ctx, idOf(o), "ada", "race")
				if !errors.Is(err, orderstore.ErrTransient) {
					return err
				}
			}
		})
		g.Go(func() (err error) {
			own, err = persistUntilDecided(f, f.Store, []orderstore.Order{o, order(7, 10_000+seq, 10_000+seq)})
			return err
		})
		if seq%2 == 0 {
			g.Go(func() (err error) {
				others, err = persistUntilDecided(f, f.Store, []orderstore.Order{rival})
				return err
			})
		}
		require.NoError(t, g.Wait())
		found, err := f.FindByPosition(f.ctx, o.Position)
		require.NoError(t, err)
		switch r.Result {
		case orderstore.ResultPersisted:
			require.Empty(t, found.Outcome)
			if seq%2 == 0 {
				require.Equal(t, orderstore.Conflict, others[0].Kind)
			}
		case orderstore.ResultConflict:
			require.Equal(t, rival.Position, found.Standing)
			require.Equal(t, orderstore.Persisted, others[0].Kind)
		default:
			t.Fatalf("came to %v", r)
		}
		switch own[0].Kind {
		case orderstore.Persisted:
			require.Equal(t, orderstore.ResultPersisted, r.Result)
		case orderstore.Ended:
			require.Contains(t, []string{orderstore.OutcomeHeld, orderstore.OutcomeConflict}, own[0].Outcome)
		default:
			t.Fatalf("the redelivery came to %v", own[0].Kind)
		}
		require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM ledger_updates WHERE seq = ?", seq))
	}
	f.books(7, f.number("SELECT COUNT(*) FROM orders"), f.number("SELECT COUNT(*) FROM order_outcomes"))
}

// A writer has the user's next order in its transaction and wins the deadlock.
func TestRequeue_LosesADeadlockAndDecidesAgain(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.hold(order(7, 3, 50))
	tx, err := f.sql.BeginTx(f.ctx, nil)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback() }()
	// The heavier transaction survives: this one changes more rows.
	for i := range 50 {
		_, err := tx.Exec("INSERT INTO settings (name, value) VALUES (?, '')", i)
		require.NoError(t, err)
	}
	_, err = tx.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 9, 50, NOW())")
	require.NoError(t, err)
	done := make(chan error, 1)
	var r orderstore.Resolution
	go func() {
		var err error
		r, err = f.Requeue(f.ctx, idOf(order(7, 3, 50)), "ada", "deadlock")
		done <- err
	}()
	require.Eventually(t, func() bool {
		var n int
		err := f.sql.QueryRowContext(f.ctx, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND INFO LIKE 'INSERT INTO `orders`%'").Scan(&n)
		return err == nil && n == 1
	}, 20*time.Second, 20*time.Millisecond)
	_, err = tx.Exec("UPDATE vouchers SET stock = stock - 1, sold = sold + 1 WHERE id = 7")
	require.NoError(t, err, "the writer survives")
	require.NoError(t, tx.Commit())
	require.NoError(t, <-done)
	require.Equal(t, orderstore.ResultConflict, r.Result)
	f.books(7, 1, 1)
	require.Len(t, f.actions(), 1)
}
