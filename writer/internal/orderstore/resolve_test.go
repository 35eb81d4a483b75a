package orderstore_test

import (
	"context"
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
	list, _, err := f.LedgerUpdates(f.ctx, partition, orderstore.UpdateCursor{}, 1000)
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
		"GRANT SELECT, INSERT ON granted.operator_actions TO 'clerk'@'%'",
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
	found, err := clerk.FindByPosition(f.ctx, at(7, 1, 2))
	require.NoError(t, err)
	action, err := clerk.ActionOn(f.ctx, found)
	require.NoError(t, err)
	require.Equal(t, "ada", action.Operator)
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
