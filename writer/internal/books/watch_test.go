package books_test

import (
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
