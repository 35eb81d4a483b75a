package books_test

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// watched are vouchers 1 to n of a partition that is open and has no guardian,
// with a watcher whose clock moves by a step whenever it is asked.
func watched(t *testing.T, n int64, step time.Duration) (*writertest.Fixture, *guardian.Guardian, *books.Watcher, func() []string) {
	t.Helper()
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	for id := int64(1); id <= n; id++ {
		f.Voucher(g, id, 1000)
	}
	stop()
	clock := time.Now()
	w := &books.Watcher{
		Store: f.Store, Client: f.Client, AlarmAge: time.Nanosecond,
		Now: func() time.Time { clock = clock.Add(step); return clock },
	}
	return f, g, w, func() []string {
		t.Helper()
		vouchers, err := f.Store.LiveVouchers(f.Ctx, 0)
		require.NoError(t, err)
		violations, err := w.Look(f.Ctx, 1, vouchers)
		require.NoError(t, err)
		texts := []string{}
		for _, v := range violations {
			text := v.String()
			if v.Again {
				text += " again"
			}
			texts = append(texts, text)
		}
		return texts
	}
}

const (
	unsettled3 = "ledger_settled: voucher 3: settled 1 is more than seq 0"
	unsettled1 = "ledger_settled: voucher 1: settled 1 is more than seq 0"
)

// A look that takes too long stops, the next one goes on there, and what was
// found is not forgotten meanwhile.
func TestWatcher_EveryVoucherHasItsTurnHoweverLongTheyTake(t *testing.T) {
	f, g, w, look := watched(t, 4, time.Second)
	require.Empty(t, look())
	w.LookFor = time.Nanosecond // each look is one voucher's
	settled := func(id int64, by string) {
		require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, id), "settled", by).Error())
	}
	settled(3, "1")
	require.Empty(t, look(), "voucher 1")
	require.Empty(t, look(), "voucher 2")
	require.Equal(t, []string{unsettled3}, look())
	settled(1, "1")
	require.Equal(t, []string{unsettled3}, look(), "voucher 4; 3 was not read again, and says nothing again")
	require.Equal(t, []string{unsettled1, unsettled3}, look(), "voucher 1")
	look()
	require.Equal(t, []string{unsettled1, unsettled3 + " again"}, look(), "voucher 3")
	settled(1, "-1")
	settled(3, "-1")
	look()
	require.Equal(t, []string{unsettled3 + " again"}, look(), "voucher 1")
	// Vouchers come and go.
	f.Transition(g, 3, orderstore.StateOpen, orderstore.StateClosed)
	f.Transition(g, 3, orderstore.StateClosed, orderstore.StateArchived)
	f.Transition(g, 4, orderstore.StateOpen, orderstore.StateClosed)
	f.Transition(g, 4, orderstore.StateClosed, orderstore.StateArchived)
	require.Empty(t, look(), "voucher 2")
	settled(1, "1")
	require.Equal(t, []string{unsettled1}, look(), "voucher 1")
}

// One that cannot be read costs its own turn, and hides nothing that is known.
func TestWatcher_VoucherThatCannotBeReadDoesNotStopTheRound(t *testing.T) {
	f, _, w, _ := watched(t, 3, time.Second)
	vouchers, err := f.Store.LiveVouchers(f.Ctx, 0)
	require.NoError(t, err)
	f.Exec("DELETE FROM vouchers WHERE id = 2")
	require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 3), "settled", "1").Error())
	violations, err := w.Look(f.Ctx, 1, vouchers)
	require.ErrorIs(t, err, orderstore.ErrVoucherNotFound)
	require.Empty(t, violations)
	for range 2 {
		violations, err = w.Look(f.Ctx, 1, vouchers)
		require.ErrorIs(t, err, orderstore.ErrVoucherNotFound)
		require.Len(t, violations, 1)
		require.Equal(t, unsettled3, violations[0].String())
	}
	require.True(t, violations[0].Again)
}

// Orders that are overdue are looked for, also those of vouchers whose turn never
// falls on a scan.
func TestWatcher_OverdueOrdersOfEveryVoucherAreLookedFor(t *testing.T) {
	// Two looks, one for each voucher, take about as long as the time between scans.
	f, _, w, look := watched(t, 2, 400*time.Millisecond)
	f.Admitted(1, 1, 2)
	f.Admitted(2, 1)
	f.Admitted(2, 2)
	require.NoError(t, f.Do("XTRIM", ledger.OrdersKey(0, 1), "MAXLEN", "1").Error())
	w.LookFor = time.Nanosecond
	missing := map[string]bool{}
	for range 20 {
		for _, text := range look() {
			missing[text] = true
		}
	}
	require.True(t, missing["orders_missing: voucher 1: seq [1 2] is neither a row, nor an outcome, nor in a stream entry again"], "%v", missing)
	require.True(t, missing["orders_missing: voucher 2: seq [1] is neither a row, nor an outcome, nor in a stream entry again"], "%v", missing)
	require.Equal(t, int64(4), w.InFlight())
}

// counting stands between a watcher and the database's counts.
type counting struct {
	books.Store
	count func(from, to int64) (int64, error)
	whole func() (orderstore.Reading, error)
}

func (c counting) CountPositions(_ context.Context, _, _, from, to int64) (int64, error) {
	return c.count(from, to)
}

func (c counting) Read(context.Context, int64, bool) (orderstore.Reading, error) { return c.whole() }

// Figures of the ledger that contradict each other need no count of rows.
func TestWatcher_CountThatFailsHidesNoFigureOfTheLedger(t *testing.T) {
	f, _, w, look := watched(t, 1, time.Second)
	down := errors.New("too slow")
	for name, store := range map[string]counting{
		"a count": {Store: f.Store, count: func(int64, int64) (int64, error) { return 0, down }},
		"a recount": {
			Store: f.Store, count: func(from, to int64) (int64, error) { return to - from + 1, nil },
			whole: func() (orderstore.Reading, error) { return orderstore.Reading{}, down },
		},
	} {
		w.Store = f.Store
		require.Empty(t, look(), name)
		vouchers, err := f.Store.LiveVouchers(f.Ctx, 0)
		require.NoError(t, err)
		require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 1), "stock", "1").Error())
		w.Store = store
		violations, err := w.Look(f.Ctx, 1, vouchers)
		require.ErrorIs(t, err, down, name)
		require.Len(t, violations, 1, name)
		require.Equal(t, books.RuleLedgerStock, violations[0].Rule)
		require.Equal(t, books.Oversell, violations[0].Drift)
		// What was found before, and was not asked again, is not taken back.
		require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 1), "stock", "-1").Error())
		violations, err = w.Look(f.Ctx, 1, vouchers)
		require.ErrorIs(t, err, down, name)
		require.Len(t, violations, 1, name)
	}
}

// However long a sale is, one look counts a bounded part of it, but where it is to
// prove all of it.
func TestWatcher_LongSaleIsCountedInParts(t *testing.T) {
	f, _, w, look := watched(t, 1, time.Second)
	const orders, most = 5_500_000, 1_000_000
	w.LookFor = time.Hour
	require.NoError(t, f.Do("HSET", ledger.VoucherKey(0, 1, 1), "seq", strconv.Itoa(orders), "settled", strconv.Itoa(orders)).Error())
	var widest, last int64
	w.Store = counting{
		Store: f.Store,
		count: func(from, to int64) (int64, error) {
			widest, last = max(widest, to-from+1), max(last, to)
			return to - from + 1, nil
		},
		whole: func() (orderstore.Reading, error) {
			t.Error("all rows are counted at once")
			return orderstore.Reading{}, nil
		},
	}
	for range 6 {
		look()
	}
	require.LessOrEqual(t, widest, int64(most))
	require.Equal(t, int64(orders), last, "six looks see all of it")

	last = 0
	proof := books.Watcher{Store: w.Store, Client: f.Client, Now: time.Now}
	vouchers, err := f.Store.LiveVouchers(f.Ctx, 0)
	require.NoError(t, err)
	_, err = proof.Look(f.Ctx, 1, vouchers)
	require.NoError(t, err)
	require.Equal(t, int64(orders), last, "a proof sees all of it at once")
}
