package orderstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/writer/internal/orderstore"
)

func TestFind_TellsHowEveryOrderEnded(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 3)
	f.persist(order(7, 1, 50))
	f.persist(order(7, 2, 50)) // a conflict
	f.hold(order(7, 3, 51))
	for _, missing := range []int64{0, 9} {
		_, err := f.FindByPosition(f.ctx, at(7, 1, missing))
		require.ErrorIs(t, err, orderstore.ErrOrderNotFound)
	}
	_, err := f.FindByUser(f.ctx, 99, 7)
	require.ErrorIs(t, err, orderstore.ErrOrderNotFound)
	_, err = f.FindByUser(f.ctx, 50, 8)
	require.ErrorIs(t, err, orderstore.ErrOrderNotFound)

	found, err := f.FindByPosition(f.ctx, at(7, 1, 1))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), found.PersistedAt, time.Minute)
	require.Equal(t, time.UTC, found.PersistedAt.Location())
	want := order(7, 1, 50)
	want.EntryID = "" // not kept with a row
	require.Equal(t, orderstore.Found{Order: want, PersistedAt: found.PersistedAt}, found)
	byUser, err := f.FindByUser(f.ctx, 50, 7)
	require.NoError(t, err)
	require.Equal(t, found, byUser, "the row, not the outcome")

	found, err = f.FindByPosition(f.ctx, at(7, 1, 2))
	require.NoError(t, err)
	require.Equal(t, order(7, 2, 50), found.Order)
	require.Equal(t, orderstore.OutcomeConflict, found.Outcome)
	require.Equal(t, at(7, 1, 1), found.Standing)
	require.NotEmpty(t, found.Reason)

	found, err = f.FindByUser(f.ctx, 51, 7)
	require.NoError(t, err)
	require.Equal(t, orderstore.OutcomeHeld, found.Outcome)
	require.Equal(t, "staged", found.Reason)
	f.cancel(idOf(order(7, 3, 51)))
	f.hold(order(7, 4, 51))
	found, err = f.FindByUser(f.ctx, 51, 7)
	require.NoError(t, err)
	require.Equal(t, order(7, 4, 51), found.Order, "of several outcomes the last")
}

func TestActionOn_IsTheOneThatMadeTheOrderWhatItIs(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.exec("UPDATE vouchers SET stock = 0, sold = 10 WHERE id = 7")
	f.hold(order(7, 1, 51), order(7, 2, 52), order(7, 3, 53), order(7, 4, 54))
	dead := entry("5-1")
	dead.VoucherID, dead.FirstSeq, dead.Units = 7, 10, 2
	_, err := f.HoldEntry(f.ctx, dead)
	require.NoError(t, err)
	id := orderstore.DeadLetterID{Epoch: 1, EntryID: "5-1"}

	decide := func(do func(context.Context, orderstore.DeadLetterID, string, string) (orderstore.Resolution, error), id orderstore.DeadLetterID, operator, result string) {
		t.Helper()
		r, err := do(f.ctx, id, operator, "asked by "+operator)
		require.NoError(t, err)
		require.Equal(t, result, r.Result)
	}
	decide(f.Requeue, idOf(order(7, 1, 51)), "ada", orderstore.ResultHeld)
	decide(f.Requeue, idOf(order(7, 2, 52)), "ada", orderstore.ResultHeld)
	decide(f.Requeue, idOf(order(7, 2, 52)), "bob", orderstore.ResultHeld)
	decide(f.Cancel, idOf(order(7, 1, 51)), "cid", orderstore.ResultCancelled)
	decide(f.Cancel, idOf(order(7, 1, 51)), "eve", orderstore.ResultCancelled) // too late
	decide(f.Requeue, id, "ada", orderstore.ResultHeld)
	decide(f.Cancel, id, "dan", orderstore.ResultCancelled)
	f.exec("UPDATE vouchers SET stock = 10, sold = 0 WHERE id = 7")
	f.persist(order(7, 20, 53), order(7, 21, 60))
	decide(f.Requeue, idOf(order(7, 3, 53)), "fay", orderstore.ResultConflict)
	decide(f.Requeue, idOf(order(7, 4, 54)), "gus", orderstore.ResultPersisted)

	for seq, want := range map[int64]string{1: "CANCEL cid", 2: "REQUEUE bob", 3: "REQUEUE fay", 4: "REQUEUE gus", 10: "CANCEL dan", 11: "CANCEL dan", 21: ""} {
		found, err := f.FindByPosition(f.ctx, at(7, 1, seq))
		require.NoError(t, err)
		action, err := f.ActionOn(f.ctx, found)
		require.NoError(t, err)
		if want == "" {
			require.Nil(t, action, "seq %d", seq)
			continue
		}
		require.NotNil(t, action, "seq %d", seq)
		require.Equal(t, want, action.Action+" "+action.Operator, "seq %d", seq)
		require.Equal(t, "asked by "+action.Operator, action.Reason)
		require.WithinDuration(t, time.Now(), action.At, time.Minute)
	}
	// It was held when it was found, and is cancelled by now: no answer says both.
	held := orderstore.Found{Order: order(7, 1, 51), Outcome: orderstore.OutcomeHeld}
	action, err := f.ActionOn(f.ctx, held)
	require.NoError(t, err)
	require.Equal(t, "ada", action.Operator)
}

// A requeue moves an order from one table to the other: it is found all the time.
func TestFind_NeverMissesAnOrderThatMoves(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 1000)
	f.hold(run(7, 1, 50, 0)...)
	stop := make(chan struct{})
	var g errgroup.Group
	for range 2 {
		g.Go(func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				for seq := int64(1); seq <= 50; seq++ {
					if _, err := f.FindByPosition(f.ctx, at(7, 1, seq)); err != nil {
						return err
					}
					if _, err := f.FindByUser(f.ctx, seq, 7); err != nil {
						return err
					}
				}
			}
		})
	}
	for seq := int64(1); seq <= 50; seq++ {
		require.Equal(t, orderstore.ResultPersisted, f.requeue(idOf(order(7, seq, seq))).Result)
	}
	close(stop)
	require.NoError(t, g.Wait())
}

func TestOrders_ArePagedByKeyWhileOthersAreWritten(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100_000)
	f.voucher(8, 100_000)
	f.persist(run(7, 1, 1000, 0)...)
	f.persist(run(8, 1, 3, 0)...)
	f.exec("UPDATE vouchers SET epoch = 2")
	for _, o := range run(7, 1, 500, 1000) {
		o.Epoch = 2
		f.exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 2, ?, ?, NOW())", o.Seq, o.UserID)
	}
	one, err := orderstore.Open(f.ctx, orderstore.Options{DSN: f.dsn, MaxConns: 2})
	require.NoError(t, err)
	defer one.Close()
	one.DB().SetMaxOpenConns(1)
	var got []orderstore.Found
	for after, page := at(0, 0, 0), int64(0); ; page++ {
		reads := handlerReads(t, one)
		list, err := one.OrdersOfVoucher(f.ctx, 7, after, 90)
		require.NoError(t, err)
		require.Less(t, handlerReads(t, one)-reads, int64(200), "page %d costs its rows", page)
		if len(list) == 0 {
			break
		}
		got = append(got, list...)
		after = list[len(list)-1].Position
		if page < 5 {
			f.exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 2, ?, ?, NOW())", 600+page, 5000+page)
		}
	}
	for i, o := range got[:1500] {
		if i < 1000 {
			require.Equal(t, at(7, 1, int64(i)+1), o.Position)
		} else {
			require.Equal(t, at(7, 2, int64(i)-999), o.Position)
		}
		require.Empty(t, o.Outcome)
	}
	require.Len(t, got, 1505, "what came meanwhile lies behind")

	for id := int64(20); id < 40; id++ {
		f.exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (?, 1, 2, 2, NOW())", id)
	}
	var vouchers []int64
	for after := int64(0); ; {
		list, err := one.OrdersOfUser(f.ctx, 2, after, 5)
		require.NoError(t, err)
		if len(list) == 0 {
			break
		}
		for _, o := range list {
			vouchers = append(vouchers, o.VoucherID)
			after = o.VoucherID
		}
	}
	require.Equal(t, []int64{7, 8, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39}, vouchers)
}

func TestLedgerUpdates_OldestFirstAndByPartition(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.voucher(9, 100)
	f.exec("UPDATE vouchers SET partition_id = 1 WHERE id = 9")
	f.hold(run(7, 1, 5, 0)...)
	f.hold(run(9, 1, 2, 0)...)
	for _, seq := range []int64{4, 1, 5} {
		f.cancel(idOf(order(7, seq, seq)))
		f.exec("UPDATE ledger_updates SET created_at = created_at - INTERVAL 1 MINUTE")
	}
	f.requeue(idOf(order(9, 2, 2)))
	var seqs []int64
	for _, u := range f.updates(0) {
		seqs = append(seqs, u.Position.Seq)
	}
	require.Equal(t, []int64{4, 1, 5}, seqs)
	require.Len(t, f.updates(1), 1)
	list, _, err := f.LedgerUpdates(f.ctx, 0, orderstore.UpdateCursor{}, 2)
	require.NoError(t, err)
	require.Len(t, list, 2)
	require.NoError(t, f.MarkTold(f.ctx, list[0]))
	require.Len(t, f.updates(0), 2)
}
