package admit

import (
	"context"
	"math"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
)

func TestGrab_FiveHundredUsersAtOnceForOneUnit(t *testing.T) {
	_, client, v := open(t, 1)
	a := newAdmitter(t, client)
	count := countCalls(a)
	orders := 0
	for _, got := range crowd(a, 500, 1, patience) {
		require.NoError(t, got.err)
		if got.result.Decision == ledger.DecisionAdmitted {
			orders++
			require.Equal(t, orderid.Position{VoucherID: 1, Epoch: 1, Seq: 1}, got.result.Order)
			require.Equal(t, ledger.DurabilityStrict, got.result.Durability)
		} else {
			require.Equal(t, ledger.DecisionSoldOut, got.result.Decision)
		}
		require.WithinDuration(t, time.Now(), got.result.DecidedAt, time.Minute)
	}
	require.Equal(t, 1, orders)
	books := ledgertest.Books(t, client, v)
	require.Equal(t, int64(1), books.Seq)
	require.Zero(t, books.Stock)
	require.Less(t, count(), 250, "Grabs are combined")
}

// countCalls counts the calls that an Admitter makes.
func countCalls(a *Admitter) func() int {
	var mu sync.Mutex
	calls := 0
	inner := a.admit
	a.admit = func(ctx context.Context, call ledger.AdmitCall) (ledger.AdmitReply, error) {
		mu.Lock()
		calls++
		mu.Unlock()
		return inner(ctx, call)
	}
	return func() int {
		mu.Lock()
		defer mu.Unlock()
		return calls
	}
}

func TestGrab_OneUserManyTimesOverTwoGatewaysIsOneOrder(t *testing.T) {
	_, client, v := open(t, 100)
	gateways := []*Admitter{newAdmitter(t, client), newAdmitter(t, client)}
	all := make([]answered, 200)
	var callers sync.WaitGroup
	for i := range all {
		callers.Go(func() { all[i].result, all[i].err = grab(gateways[i%2], 42, 1, patience) })
	}
	callers.Wait()
	first := 0
	for _, got := range all {
		require.NoError(t, got.err)
		require.Equal(t, ledger.DecisionAdmitted, got.result.Decision)
		require.Equal(t, orderid.Position{VoucherID: 1, Epoch: 1, Seq: 1}, got.result.Order)
		if !got.result.Replayed {
			first++
		}
	}
	require.Equal(t, 1, first)
	require.Equal(t, int64(99), ledgertest.Books(t, client, v).Stock)
}

func TestGrab_ReplayWhateverTheSaleHasBecome(t *testing.T) {
	_, client, v := open(t, 1)
	a := newAdmitter(t, client)
	want := admitted(t, a, 1, 1).Order
	refused := func(decision ledger.Decision) {
		t.Helper()
		got := admitted(t, a, 1, 1)
		require.True(t, got.Replayed)
		require.Equal(t, want, got.Order)
		other, err := grab(a, 2, 1, patience)
		require.NoError(t, err)
		require.Equal(t, decision, other.Decision)
		require.Zero(t, other.Order)
	}
	refused(ledger.DecisionSoldOut)
	v.Rev, v.State, v.Opening = 2, ledger.VoucherPaused, 10
	ledgertest.Apply(t, client, v)
	refused(ledger.DecisionPaused)
	v.Rev, v.State, v.End = 3, ledger.VoucherOpen, time.Now().Add(-time.Minute)
	ledgertest.Apply(t, client, v)
	refused(ledger.DecisionEnded)
	v.Rev, v.Begin, v.End = 4, time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
	ledgertest.Apply(t, client, v)
	refused(ledger.DecisionNotStarted)
	v.Rev, v.State = 5, ledger.VoucherClosed
	ledgertest.Apply(t, client, v)
	refused(ledger.DecisionEnded)
}

func TestGrab_WindowToTheMillisecondByRedisTime(t *testing.T) {
	_, client, _ := open(t, 1)
	a := newAdmitter(t, client)
	v := ledgertest.Voucher(1, 2, 1_000_000)
	v.Begin = time.Now().Add(100 * time.Millisecond).Truncate(time.Millisecond)
	v.End = v.Begin.Add(100 * time.Millisecond)
	ledgertest.Sell(t, client, v)
	counts := map[ledger.Decision]int{}
	for user := int64(1); counts[ledger.DecisionEnded] < 5; user++ {
		got, err := grab(a, user, 2, patience)
		require.NoError(t, err)
		counts[got.Decision]++
		switch at := got.DecidedAt; got.Decision {
		case ledger.DecisionNotStarted:
			require.True(t, at.Before(v.Begin), "%s", at)
		case ledger.DecisionAdmitted:
			require.False(t, at.Before(v.Begin), "%s", at)
			require.True(t, at.Before(v.End), "%s", at)
		case ledger.DecisionEnded:
			require.False(t, at.Before(v.End), "%s", at)
		default:
			require.FailNow(t, "unexpected", "%v", got)
		}
	}
	require.Positive(t, counts[ledger.DecisionNotStarted])
	require.Positive(t, counts[ledger.DecisionAdmitted])
}

func TestGrab_UnknownDraftAndArchivedVouchers(t *testing.T) {
	_, client, v := open(t, 1)
	a := newAdmitter(t, client)
	draft := ledgertest.Voucher(1, 2, 1)
	require.NoError(t, ledger.CreateVoucher(context.Background(), client, draft))
	for _, id := range []int64{2, 3, math.MaxInt64} {
		_, err := grab(a, 1, id, patience)
		require.ErrorIs(t, err, ErrVoucherNotFound)
	}
	for id := int64(100); id < 400; id++ {
		_, err := grab(a, 1, id, patience)
		require.ErrorIs(t, err, ErrVoucherNotFound)
	}
	for i := range a.shards {
		require.Empty(t, a.shards[i].seen, "an unknown voucher leaves nothing behind")
	}
	v.Rev, v.State = 2, ledger.VoucherClosed
	ledgertest.Apply(t, client, v)
	v.Rev, v.State = 3, ledger.VoucherArchived
	ledgertest.Apply(t, client, v)
	_, err := grab(a, 1, 1, patience)
	require.ErrorIs(t, err, ErrVoucherArchived)
}

func TestGrab_LargestIDsAreExact(t *testing.T) {
	_, client, _ := open(t, 1)
	a := newAdmitter(t, client)
	for _, id := range []int64{math.MaxInt64, math.MaxInt64 - 1, 1<<53 + 1} {
		v := ledgertest.Voucher(1, id, 2)
		ledgertest.Sell(t, client, v)
		require.Equal(t, orderid.Position{VoucherID: id, Epoch: 1, Seq: 1}, admitted(t, a, math.MaxInt64, id).Order)
		require.Equal(t, orderid.Position{VoucherID: id, Epoch: 1, Seq: 2}, admitted(t, a, math.MaxInt64-1, id).Order)
		found, err := a.Find(context.Background(), id, math.MaxInt64, 0)
		require.NoError(t, err)
		require.Equal(t, int64(1), found.Mark.Seq)
	}
	entries, err := ledger.Scan(context.Background(), client, 0, 1, "-", 10)
	require.NoError(t, err)
	entry, err := ledger.DecodeEntry(0, entries[0].ID, entries[0].Fields)
	require.NoError(t, err)
	require.Equal(t, int64(math.MaxInt64), entry.VoucherID)
	require.Equal(t, int64(math.MaxInt64), entry.Orders[0].UserID)
}

func TestGrab_CarriesReferenceAndTrace(t *testing.T) {
	_, client, _ := open(t, 1)
	a := newAdmitter(t, client)
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	_, err := a.Grab(context.Background(), 5, 1, "cart-7", trace)
	require.NoError(t, err)
	entries, err := ledger.Scan(context.Background(), client, 0, 1, "-", 10)
	require.NoError(t, err)
	entry, err := ledger.DecodeEntry(0, entries[0].ID, entries[0].Fields)
	require.NoError(t, err)
	require.Equal(t, "cart-7", entry.Orders[0].Reference)
	require.Equal(t, trace, entry.Orders[0].Traceparent)
}

func TestGrab_BoundOnOrdersInFlight(t *testing.T) {
	_, client, _ := open(t, 10)
	a := newAdmitter(t, client)
	require.NoError(t, client.Do(context.Background(), client.B().Hset().Key(ledger.MetaKey(0)).FieldValue().FieldValue("bound", "1").Build()).Error())
	admitted(t, a, 1, 1)
	_, err := grab(a, 2, 1, patience)
	require.ErrorIs(t, err, ErrBusy)
	require.True(t, admitted(t, a, 1, 1).Replayed)
}

func TestGrab_PartitionsAreIndependent(t *testing.T) {
	client := ledgertest.Client(t, devstack.TestRedis(t).Addr())
	ledgertest.Open(t, client, 8)
	a := newAdmitter(t, client, func(c *Config) { c.Partitions = 8 })
	for id := int64(8); id < 16; id++ {
		ledgertest.Sell(t, client, ledgertest.Voucher(8, id, 1))
	}
	require.NoError(t, ledger.ClosePartition(context.Background(), client, 3, 1, "a test says so"))
	for id := int64(8); id < 16; id++ {
		if ledger.Partition(id, 8) == 3 {
			_, err := grab(a, 1, id, patience)
			require.ErrorIs(t, err, ErrClosed)
			require.ErrorContains(t, err, "a test says so")
			continue
		}
		require.Equal(t, id, admitted(t, a, 1, id).Order.VoucherID)
	}
}

func BenchmarkGrab(b *testing.B) {
	for _, users := range []int{1, 64, 1024} {
		b.Run("callers="+strconv.Itoa(users), func(b *testing.B) {
			_, client, _ := open(b, 100_000_000)
			a := newAdmitter(b, client)
			count := countCalls(a)
			var mu sync.Mutex
			next := int64(0)
			b.ReportAllocs()
			b.SetParallelism(users)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					mu.Lock()
					next++
					user := next
					mu.Unlock()
					if _, err := grab(a, user, 1, patience); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.StopTimer()
			b.ReportMetric(float64(b.N)/float64(count()), "grabs/call")
		})
	}
}
