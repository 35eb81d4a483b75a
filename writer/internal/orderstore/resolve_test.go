package orderstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// idOf names the dead letter of an order.
func idOf(o orderstore.Order) orderstore.DeadLetterID {
	return orderstore.DeadLetterID{Position: o.Position}
}

// hold makes orders dead letters.
func (f *fixture) hold(orders ...orderstore.Order) {
	f.t.Helper()
	held := make([]orderstore.Held, len(orders))
	for i, o := range orders {
		held[i] = orderstore.Held{Order: o, Raw: []byte("raw"), Reason: "staged"}
	}
	verdicts, err := f.Hold(f.ctx, held)
	require.NoError(f.t, err)
	for _, v := range verdicts {
		require.Equal(f.t, orderstore.Verdict{Kind: orderstore.Ended, Outcome: orderstore.OutcomeHeld}, v)
	}
}

func (f *fixture) requeue(id orderstore.DeadLetterID) orderstore.Resolution {
	f.t.Helper()
	r, err := f.Requeue(f.ctx, id, "ada", "because")
	require.NoError(f.t, err)
	return r
}

func (f *fixture) cancel(id orderstore.DeadLetterID) orderstore.Resolution {
	f.t.Helper()
	r, err := f.Cancel(f.ctx, id, "ada", "because")
	require.NoError(f.t, err)
	return r
}

func (f *fixture) updates(partition int) []orderstore.LedgerUpdate {
	f.t.Helper()
	list, err := f.LedgerUpdates(f.ctx, partition, 1000)
	require.NoError(f.t, err)
	return list
}

// actions returns the audit as "action result" in order.
func (f *fixture) actions() (list []string) {
	f.t.Helper()
	rows, err := f.sql.QueryContext(f.ctx, "SELECT CONCAT(operator, ' ', action, ' ', target, ' ', result) FROM operator_actions ORDER BY id")
	require.NoError(f.t, err)
	defer rows.Close()
	for rows.Next() {
		var text string
		require.NoError(f.t, rows.Scan(&text))
		list = append(list, text)
	}
	require.NoError(f.t, rows.Err())
	return list
}

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

func TestCancel_EndsAHeldOrderAndTellsTheLedgerLater(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	o := order(7, 3, 50)
	f.hold(o)
	require.Equal(t, orderstore.Resolution{Result: orderstore.ResultCancelled, Position: o.Position, UserID: 50}, f.cancel(idOf(o)))
	f.books(7, 0, 1)
	update := orderstore.LedgerUpdate{Position: o.Position, UserID: 50, Outcome: orderstore.ResultCancelled}
	require.Equal(t, []orderstore.LedgerUpdate{update}, f.updates(0))
	require.Equal(t, orderstore.ResultCancelled, f.cancel(idOf(o)).Result)
	require.Equal(t, orderstore.ResultCancelled, f.requeue(idOf(o)).Result)
	require.Equal(t, []string{"ada CANCEL order 7/1/3 CANCELLED"}, f.actions())
	f.books(7, 0, 1)

	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'CANCELLED' AND applied_at IS NULL"))
	other := update
	other.Outcome = orderstore.ResultPersisted
	require.NoError(t, f.MarkTold(f.ctx, other))
	require.Len(t, f.updates(0), 1, "another verdict is not this one")
	require.NoError(t, f.MarkTold(f.ctx, update))
	require.Empty(t, f.updates(0))
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'CANCELLED' AND applied_at IS NOT NULL"))

	f.hold2(orderstore.Ended, o)
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'CANCELLED' AND tries = 1"))
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted}, f.persist(order(7, 4, 50)), "the user may buy again")
	f.books(7, 1, 1)
}

func TestCancel_OfAVoucherThatDoesNotExist(t *testing.T) {
	f := newFixture(t)
	f.hold(order(6, 1, 50))
	require.Equal(t, orderstore.ResultCancelled, f.cancel(idOf(order(6, 1, 50))).Result)
	require.Len(t, f.updates(0), 1)
}

func TestResolve_RefusesWhatIsNoDeadLetter(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 1, 50, 'LOST'), (7, 1, 2, 51, 'REJECTED')")
	for _, id := range []orderstore.DeadLetterID{
		{}, idOf(order(7, 1, 50)), idOf(order(7, 2, 50)), idOf(order(7, 9, 50)), idOf(order(6, 1, 1)), idOf(order(-1, 1, 1)),
		{EntryID: "1-1"}, {PartitionID: 5, Epoch: 1, EntryID: "1-1"},
	} {
		_, err := f.Requeue(f.ctx, id, "ada", "because")
		require.ErrorIs(t, err, orderstore.ErrDeadLetterNotFound, "%v", id)
		_, err = f.Cancel(f.ctx, id, "ada", "because")
		require.ErrorIs(t, err, orderstore.ErrDeadLetterNotFound, "%v", id)
	}
	f.hold(order(7, 3, 50))
	for _, c := range [][2]string{{"", "why"}, {"who", ""}, {strings.Repeat("x", 65), "why"}, {"who", strings.Repeat("x", 256)}, {"\xff", "why"}} {
		_, err := f.Cancel(f.ctx, idOf(order(7, 3, 50)), c[0], c[1])
		require.Error(t, err)
	}
	require.Empty(t, f.actions())
	_, err := f.Cancel(f.ctx, idOf(order(7, 3, 50)), strings.Repeat("ü", 64), strings.Repeat("ü", 255))
	require.NoError(t, err)
}

// Whoever decides, the position ends in one way and is told once.
func TestResolve_TwoOperatorsAtOnce(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 1000)
	other := f.open(f.dsn, 0)
	for seq := int64(1); seq <= 40; seq++ {
		o := order(7, seq, seq)
		f.hold(o)
		second := other.Cancel
		if seq%2 == 0 {
			second = other.Requeue
		}
		results := make([]orderstore.Resolution, 3)
		var g errgroup.Group
		for i, decide := range []func(context.Context, orderstore.DeadLetterID, string, string) (orderstore.Resolution, error){f.Cancel, second, f.Cancel} {
			g.Go(func() (err error) {
				results[i], err = decide(f.ctx, idOf(o), fmt.Sprintf("operator %d", i), "at once")
				return err
			})
		}
		require.NoError(t, g.Wait())
		require.Equal(t, results[0].Result, results[1].Result)
		require.Equal(t, results[0].Result, results[2].Result)
		require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM operator_actions WHERE target = ?", fmt.Sprintf("order 7/1/%d", seq)))
		require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM ledger_updates WHERE seq = ? AND verdict = ?", seq, results[0].Result))
	}
	require.EqualValues(t, 40, f.number("SELECT (SELECT COUNT(*) FROM orders) + (SELECT COUNT(*) FROM order_outcomes)"))
	f.books(7, f.number("SELECT COUNT(*) FROM orders"), f.number("SELECT COUNT(*) FROM order_outcomes"))
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

// The connection breaks at every statement of a decision: nothing or all of it.
func TestResolve_ConnectionCutAtEveryStatement(t *testing.T) {
	f := newFixture(t)
	proxy := newCutter(t, addrOf(t, f.dsn))
	s := f.open(proxy.through(t, f.dsn), 0)
	voucher := int64(0)
	requeue, cancel := s.Requeue, s.Cancel
	for _, c := range []struct {
		name       string
		decide     func(context.Context, orderstore.DeadLetterID, string, string) (orderstore.Resolution, error)
		bought     bool
		result     string
		statements []string
	}{
		{"requeue", requeue, false, orderstore.ResultPersisted, []string{
			"START TRANSACTION", "FROM `vouchers`", "first_seen_at FROM order_outcomes", "FROM orders\nWHERE voucher_id", "FORCE INDEX",
			"DELETE FROM order_outcomes", "INSERT INTO `orders`", "UPDATE vouchers SET stock", "INSERT INTO `ledger_updates`",
			"INSERT INTO `operator_actions`", "\x03COMMIT",
		}},
		{"requeue of a conflict", requeue, true, orderstore.ResultConflict, []string{"SET kind = 'CONFLICT'", "INSERT INTO `ledger_updates`", "INSERT INTO `operator_actions`", "\x03COMMIT"}},
		{"cancel", cancel, false, orderstore.ResultCancelled, []string{"START TRANSACTION", "SET kind = 'CANCELLED'", "INSERT INTO `ledger_updates`", "INSERT INTO `operator_actions`", "\x03COMMIT"}},
	} {
		for _, statement := range c.statements {
			for _, delivered := range []bool{false, true} {
				about := fmt.Sprintf("%s, %q, delivered %v", c.name, statement, delivered)
				voucher++
				f.voucher(voucher, 10)
				o := order(voucher, 1, 50)
				f.hold(o)
				rows := int64(0)
				if c.bought {
					f.persist(order(voucher, 2, 50))
					rows = 1
				}
				proxy.cut(statement, delivered, 1)
				_, err := c.decide(f.ctx, idOf(o), "ada", "cut")
				require.ErrorIs(t, err, orderstore.ErrTransient, about)
				require.Equal(t, 1, proxy.count(), about)
				if statement != "\x03COMMIT" || !delivered {
					f.books(voucher, rows, 1)
					require.Zero(t, f.number("SELECT COUNT(*) FROM ledger_updates WHERE voucher_id = ?", voucher), about)
					require.Zero(t, f.number("SELECT COUNT(*) FROM operator_actions WHERE target = ?", fmt.Sprintf("order %d/1/1", voucher)), about)
				}
				r, err := c.decide(f.ctx, idOf(o), "ada", "cut")
				require.NoError(t, err, about)
				require.Equal(t, c.result, r.Result, about)
				require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM ledger_updates WHERE voucher_id = ?", voucher), about)
				require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM operator_actions WHERE target = ?", fmt.Sprintf("order %d/1/1", voucher)), about)
				if c.result == orderstore.ResultPersisted {
					f.books(voucher, 1, 0)
				} else {
					f.books(voucher, rows, 1)
				}
			}
		}
	}
}

// The writer needs no more than these rights: it could not change the audit.
func TestResolve_WorksForAUserThatMayOnlyAddToTheAudit(t *testing.T) {
	server := devstack.TestDatabaseServer(t)
	require.NoError(t, server.CreateDatabase(t.Context(), "granted"))
	f := fixtureAt(t, server.DSN("granted"))
	f.voucher(7, 10)
	for _, statement := range []string{
		"CREATE USER 'clerk'@'%' IDENTIFIED BY 'clerk'",
		"GRANT SELECT, INSERT ON granted.orders TO 'clerk'@'%'",
		"GRANT SELECT, INSERT, DELETE, UPDATE (kind, standing_epoch, standing_seq, reason, applied_at, tries, last_seen_at) ON granted.order_outcomes TO 'clerk'@'%'",
		"GRANT SELECT, INSERT, UPDATE (tries, last_seen_at, state, resolved_at) ON granted.dead_entries TO 'clerk'@'%'",
		"GRANT SELECT, INSERT, DELETE ON granted.ledger_updates TO 'clerk'@'%'",
		"GRANT INSERT ON granted.operator_actions TO 'clerk'@'%'",
		"GRANT SELECT, UPDATE (stock, sold) ON granted.vouchers TO 'clerk'@'%'",
		"GRANT SELECT, UPDATE (open_epoch) ON granted.partitions TO 'clerk'@'%'",
		"GRANT SELECT ON granted.settings TO 'clerk'@'%'",
		"GRANT SELECT ON granted.goose_db_version TO 'clerk'@'%'",
	} {
		f.exec(statement)
	}
	cfg, err := mysql.ParseDSN(f.dsn)
	require.NoError(t, err)
	cfg.User, cfg.Passwd = "clerk", "clerk"
	clerk := f.open(cfg.FormatDSN(), 0)

	require.NoError(t, clerk.CheckSchema(f.ctx))
	verdicts, err := clerk.Hold(f.ctx, []orderstore.Held{{Order: order(7, 1, 1)}, {Order: order(7, 2, 2)}, {Order: order(6, 1, 1)}})
	require.NoError(t, err)
	require.Equal(t, all(3, orderstore.Ended), kinds(verdicts))
	_, err = clerk.HoldEntry(f.ctx, orderstore.DeadEntry{Epoch: 1, EntryID: "1-1", VoucherID: 7, FirstSeq: 3, Units: 2})
	require.NoError(t, err)
	_, err = clerk.Requeue(f.ctx, idOf(order(7, 1, 1)), "ada", "granted")
	require.NoError(t, err)
	_, err = clerk.Cancel(f.ctx, idOf(order(7, 2, 2)), "ada", "granted")
	require.NoError(t, err)
	_, err = clerk.Cancel(f.ctx, orderstore.DeadLetterID{Epoch: 1, EntryID: "1-1"}, "ada", "granted")
	require.NoError(t, err)
	for _, u := range f.updates(0) {
		require.NoError(t, clerk.MarkTold(f.ctx, u))
	}
	require.Empty(t, f.updates(0))
	letters, err := clerk.DeadLetters(f.ctx, orderstore.DeadLetterFilter{}, orderstore.DeadLetterID{}, 10)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Len(t, f.actions(), 3)
	for _, statement := range []string{"UPDATE operator_actions SET operator = 'nobody'", "DELETE FROM operator_actions"} {
		_, err := clerk.DB().ExecContext(f.ctx, statement)
		require.Error(t, err, statement)
	}
}

func TestOperatorActions_KeepWhoWhyAndWhen(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 1)
	f.persist(order(7, 9, 9))
	f.hold(order(7, 1, 50))
	for range 3 {
		f.requeue(idOf(order(7, 1, 50)))
	}
	f.cancel(idOf(order(7, 1, 50)))
	require.Equal(t, []string{
		"ada REQUEUE order 7/1/1 HELD", "ada REQUEUE order 7/1/1 HELD", "ada REQUEUE order 7/1/1 HELD", "ada CANCEL order 7/1/1 CANCELLED",
	}, f.actions(), "each decision is one more row")
	var when time.Time
	var reason, detail string
	require.NoError(t, f.sql.QueryRow("SELECT at, reason, detail FROM operator_actions ORDER BY id LIMIT 1").Scan(&when, &reason, &detail))
	require.WithinDuration(t, time.Now(), when, time.Minute)
	require.Equal(t, "because", reason)
	require.Contains(t, detail, "no stock")
}
