package orderstore_test

import (
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
	list, err := f.LedgerUpdates(f.ctx, 0, 2)
	require.NoError(t, err)
	require.Len(t, list, 2)
	require.NoError(t, f.MarkTold(f.ctx, list[0]))
	require.Len(t, f.updates(0), 2)
}
