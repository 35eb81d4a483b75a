package pipeline_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/pipeline"
	"github.com/seckill/seckill/writer/internal/writertest"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

// alarms records what a pipeline reports.
type alarms struct {
	mu         sync.Mutex
	partitions []string
	vouchers   []string
}

func (a *alarms) PartitionFault(partition int, reason string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.partitions = append(a.partitions, fmt.Sprintf("%d: %s", partition, reason))
}

func (a *alarms) VoucherFault(voucherID int64, reason string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.vouchers = append(a.vouchers, fmt.Sprintf("%d: %s", voucherID, reason))
}

func (a *alarms) heard() (partitions, vouchers []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string{}, a.partitions...), append([]string{}, a.vouchers...)
}

type fixture struct {
	*writertest.Fixture
	alarms   *alarms
	registry *prometheus.Registry
}

func newFixture(t *testing.T, partitions int) *fixture {
	t.Helper()
	return &fixture{Fixture: writertest.New(t, partitions), alarms: &alarms{}, registry: prometheus.NewRegistry()}
}

func (f *fixture) options(consumer string) pipeline.Options {
	return pipeline.Options{
		Reader: f.Dial(f.Redis.Addr()), Client: f.Client, Store: f.Store, Holder: f.Store, Ping: f.Store.Ping, Alarm: f.alarms, Partitions: f.Partitions,
		Consumer: consumer, Committers: 3, BatchMax: 1000, BatchTimeout: 400 * time.Millisecond, MinIdle: time.Second,
		Block: 100 * time.Millisecond, DrainTimeout: 5 * time.Second, SlotsMax: 8192, Logger: writertest.Logger(), Registerer: f.registry,
	}
}

func (f *fixture) pipeline(o pipeline.Options) *pipeline.Pipeline {
	f.T.Helper()
	p, err := pipeline.New(o)
	require.NoError(f.T, err)
	return p
}

// settled waits until nothing is in flight in a partition.
func (f *fixture) settled(partition int) {
	f.T.Helper()
	require.Eventually(f.T, func() bool {
		meta, err := ledger.ReadMeta(f.Ctx, f.Client, partition)
		return err == nil && meta.InFlight() == 0
	}, writertest.Patience, 10*time.Millisecond)
}

func (f *fixture) proven(voucherID int64) {
	f.T.Helper()
	reckoner := books.Reckoner{Store: f.Store, Client: f.Client, Now: time.Now}
	reckoning, err := reckoner.Reckon(f.Ctx, voucherID)
	require.NoError(f.T, err)
	require.Empty(f.T, reckoning.Violations)
	require.Equal(f.T, books.Proven, reckoning.Verdict)
}

func (f *fixture) nothingPending(partition int) {
	f.T.Helper()
	consumers, err := ledger.PendingByConsumer(f.Ctx, f.Client, partition, 1)
	require.NoError(f.T, err)
	for _, c := range consumers {
		require.Zero(f.T, c.Entries, "consumer %s", c.Consumer)
	}
}

func (f *fixture) rows(voucherID int64) int64 {
	f.T.Helper()
	return f.Number("SELECT COUNT(*) FROM orders WHERE voucher_id = ?", voucherID)
}

func TestPipeline_PersistsWhatWasAdmittedBeforeItStarted(t *testing.T) {
	for _, partitions := range []int{1, 8} {
		f := newFixture(t, partitions)
		g := f.Guarded()
		for voucher := int64(1); voucher <= 4; voucher++ {
			f.Voucher(g, voucher, 600)
			f.Admitted(voucher, writertest.Users(1, 500)...)
		}
		f.Run(f.pipeline(f.options("w1")))
		for voucher := int64(1); voucher <= 4; voucher++ {
			f.settled(ledger.Partition(voucher, partitions))
			require.Equal(t, int64(500), f.rows(voucher))
			f.proven(voucher)
		}
	}
}

func TestPipeline_FleetSharesTheWorkAndStoresEachOrderOnce(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 5000)
	f.Voucher(g, 8, 5000)
	for i := range 4 {
		f.Run(f.pipeline(withRegistry(f.options(fmt.Sprintf("w%d", i)))))
	}
	for first := int64(1); first <= 5000; first += 50 {
		f.Admitted(7, writertest.Users(first, 50)...)
		f.Admitted(8, writertest.Users(first, 50)...)
	}
	f.settled(0)
	for _, voucher := range []int64{7, 8} {
		require.Equal(t, int64(5000), f.rows(voucher))
		f.proven(voucher)
	}
	f.nothingPending(0)
}

func withRegistry(o pipeline.Options) pipeline.Options {
	o.Registerer = prometheus.NewRegistry()
	return o
}

// A writer died right after its entries were delivered to it.
func TestPipeline_TakesOverWhatADeadWriterHadOnlyRead(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	for user := int64(1); user <= 100; user++ {
		f.Admitted(7, user)
	}
	raw, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead", 100, 0)
	require.NoError(t, err)
	require.Len(t, raw, 100)

	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(100), f.rows(7))
	require.Equal(t, 100.0, f.metric("seckill_writer_orders_reclaimed_total"))
	f.proven(7)
	f.nothingPending(0)
}

// However often an entry was delivered, during an outage or by writers that died,
// it says nothing about its orders.
func TestPipeline_DeliveryCountIsNoReasonForADeadLetter(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2, 3)
	raw, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead", 1, 0)
	require.NoError(t, err)
	require.Len(t, raw, 1)
	claimed, err := f.Do("XCLAIM", ledger.OrdersKey(0, 1), ledger.Group, "dead", "0", raw[0].ID, "IDLE", "3600000", "RETRYCOUNT", "100000", "JUSTID").AsStrSlice()
	require.NoError(t, err)
	require.Equal(t, []string{raw[0].ID}, claimed)

	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(3), f.rows(7))
	require.Zero(t, f.Number("SELECT COUNT(*) FROM order_outcomes"))
	require.Equal(t, 0.0, f.metric("seckill_writer_dead_letters_total"))
	f.proven(7)
}

// A writer died after COMMIT, before it told the ledger.
func TestPipeline_TakesOverWhatADeadWriterHadCommitted(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, writertest.Users(1, 60)...)
	f.commitAs("dead")
	require.Equal(t, int64(60), f.rows(7))

	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(60), f.rows(7))
	require.Equal(t, int64(40), f.Number("SELECT stock FROM vouchers WHERE id = 7"))
	f.proven(7)
	f.nothingPending(0)
}

// commitAs reads and persists everything under a consumer's name and goes no
// further.
func (f *fixture) commitAs(consumer string) {
	f.T.Helper()
	raw, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, consumer, 100, 0)
	require.NoError(f.T, err)
	for _, r := range raw {
		entry, err := ledger.DecodeEntry(0, r.ID, r.Fields)
		require.NoError(f.T, err)
		var orders []orderstore.Order
		for _, o := range entry.Orders {
			orders = append(orders, orderstore.Order{Position: o.Position, UserID: o.UserID, AdmittedAt: entry.AdmittedAt, EntryID: entry.ID})
		}
		verdicts, err := f.Store.Persist(f.Ctx, orders)
		require.NoError(f.T, err)
		for _, v := range verdicts {
			require.Equal(f.T, orderstore.Persisted, v.Kind)
		}
	}
}

// A writer died in the middle of taking over from another that had died.
func TestPipeline_TakesOverATakeover(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	for user := int64(1); user <= 300; user++ {
		f.Admitted(7, user)
	}
	_, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead", 300, 0)
	require.NoError(t, err)
	claimed, err := ledger.Claim(f.Ctx, f.Client, 0, 1, "dead too", 0, ledger.ClaimEnd, 120)
	require.NoError(t, err)
	require.Len(t, claimed.Entries, 120)
	require.NotEqual(t, ledger.ClaimEnd, claimed.Next)

	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(300), f.rows(7))
	f.proven(7)
	f.nothingPending(0)
}

// 2,000 entries are pending and only the last has lain long enough: a page looks
// at some hundred, so those before it are empty and mean nothing.
func TestReader_FollowsCursorPastEmptyPages(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 5000)
	for user := int64(1); user <= 2000; user++ {
		f.Admitted(7, user)
	}
	raw, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "slow", 2000, 0)
	require.NoError(t, err)
	last := raw[len(raw)-1]
	require.NoError(t, f.Do("XCLAIM", ledger.OrdersKey(0, 1), ledger.Group, "slow", "0", last.ID, "IDLE", "3600000", "JUSTID").Error())

	o := f.options("w1")
	o.MinIdle, o.BatchTimeout = 10*time.Minute, time.Second
	f.Run(f.pipeline(o))
	require.Eventually(t, func() bool { return f.rows(7) == 1 }, writertest.Patience, 10*time.Millisecond)
	require.Equal(t, int64(2000), f.Number("SELECT seq FROM orders WHERE voucher_id = 7"))
}

// Two batches that overlap: the second delivery of an entry is worked on while
// the first is.
func TestPipeline_OverlappingDeliveriesStoreEachOrderOnce(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 2000)
	for first := int64(1); first <= 2000; first += 20 {
		f.Admitted(7, writertest.Users(first, 20)...)
	}
	for i := range 3 {
		o := withRegistry(f.options(fmt.Sprintf("w%d", i)))
		// Everything is taken over at once, again and again.
		o.MinIdle, o.BatchTimeout = 2*time.Millisecond, 999*time.Microsecond
		o.Store = patient{f.Store}
		f.Run(f.pipeline(o))
	}
	f.settled(0)
	require.Equal(t, int64(2000), f.rows(7))
	require.Zero(t, f.Number("SELECT stock FROM vouchers WHERE id = 7"))
	f.proven(7)
}

// patient gives runs the time that a test's batch timeout does not.
type patient struct{ store *orderstore.Store }

func (p patient) Persist(ctx context.Context, orders []orderstore.Order) ([]orderstore.Verdict, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	return p.store.Persist(ctx, orders)
}

// The user has an order of this voucher that the ledger does not know.
func TestPipeline_ConflictGivesTheUnitBackAndNamesTheOrderThatStands(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2, 3)
	f.commitAs("w0")
	// The mark of user 2 gets lost, and the user is admitted again.
	require.NoError(t, f.Do("HDEL", ledger.BuyersKey(0, 1, 7), "2").Error())
	require.NoError(t, f.Do("HSET", ledger.VoucherKey(0, 1, 7), "removed", "1").Error())
	f.Admitted(7, 2)

	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(3), f.rows(7))
	found, err := ledger.FindOrder(f.Ctx, f.Client, 0, 1, 7, 2, 4)
	require.NoError(t, err)
	require.Equal(t, &ledger.Mark{Epoch: 1, Seq: 2, State: ledger.MarkPersisted}, found.Mark)
	require.Equal(t, ledger.Outcome{UserID: 2, Verdict: ledger.VerdictConflict, Standing: orderid.Position{VoucherID: 7, Epoch: 1, Seq: 2}}, found.Outcome)
	reading, err := ledger.ReadBooks(f.Ctx, f.Client, 0, 1, 7)
	require.NoError(t, err)
	require.Equal(t, int64(97), reading.Stock)
	require.Equal(t, int64(1), f.Number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'CONFLICT' AND standing_seq = 2"))
	f.proven(7)
}

// A position that is already another user's row: the entry must not be
// acknowledged, whatever else is in it.
func TestPipeline_PositionOfAnotherUserIsNeverAcknowledged(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2, 3)
	f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 2, 999, NOW(3))")

	f.Run(f.pipeline(f.options("w1")))
	require.Eventually(t, func() bool { partitions, _ := f.alarms.heard(); return len(partitions) > 0 }, writertest.Patience, 10*time.Millisecond)
	partitions, _ := f.alarms.heard()
	require.Contains(t, partitions[0], "seq 2 is another user's order")
	meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
	require.NoError(t, err)
	require.Equal(t, int64(3), meta.InFlight())
	require.Equal(t, int64(1), f.Number("SELECT COUNT(*) FROM orders WHERE voucher_id = 7 AND user_id = 999"))
	require.Zero(t, f.Number("SELECT COUNT(*) FROM orders WHERE voucher_id = 7 AND user_id = 2"))
}

// The database has fewer units than the ledger gave away.
func TestPipeline_StockShortRejectsTheRestAndTellsTheGuardian(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, writertest.Users(1, 10)...)
	f.Exec("UPDATE vouchers SET stock = 4, sold = 96 WHERE id = 7")

	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(4), f.rows(7))
	require.Equal(t, int64(4), f.Number("SELECT MAX(seq) FROM orders WHERE voucher_id = 7"))
	require.Equal(t, int64(6), f.Number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'REJECTED'"))
	_, vouchers := f.alarms.heard()
	require.NotEmpty(t, vouchers)
	reading, err := ledger.ReadBooks(f.Ctx, f.Client, 0, 1, 7)
	require.NoError(t, err)
	require.Equal(t, int64(90), reading.Stock, "no unit comes back")
}

func TestPipeline_RecreatedGroupDeliversFromTheBeginning(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 500)
	f.Admitted(7, writertest.Users(1, 50)...)
	require.NoError(t, f.Do("XGROUP", "DESTROY", ledger.OrdersKey(0, 1), ledger.Group).Error())
	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(50), f.rows(7))
	f.proven(7)
}

func TestPipeline_StopFinishesWhatIsInHandAndRemovesItsConsumer(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 20_000)
	f.Admitted(7, writertest.Users(1, 10_000)...)
	o := f.options("w1")
	o.Committers, o.BatchMax = 1, 500
	stop := f.Run(f.pipeline(o))
	require.Eventually(t, func() bool { return f.rows(7) > 0 }, writertest.Patience, time.Millisecond)
	stop()
	f.nothingPending(0)
	consumers, err := ledger.PendingByConsumer(f.Ctx, f.Client, 0, 1)
	require.NoError(t, err)
	require.Empty(t, consumers)
	meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
	require.NoError(t, err)
	require.Equal(t, f.rows(7), meta.Settled)
}

// The reply to settling is lost: the entry is the token, so it counts once.
func TestPipeline_SettleWhoseReplyIsLostCountsOnce(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, writertest.Users(1, 10)...)
	proxy := devstack.TestProxy(t, f.Redis.Addr())
	o := f.options("w1")
	o.Client = f.Dial(proxy.Addr())
	store := &swallowAfterCommit{store: f.Store, proxy: proxy}
	o.Store = store
	f.Run(f.pipeline(o))
	require.Eventually(t, func() bool { return proxy.Swallowed() > 0 }, writertest.Patience, time.Millisecond)
	f.settled(0)
	proxy.Pass()
	require.Equal(t, int64(10), f.rows(7))
	f.proven(7)
}

type swallowAfterCommit struct {
	store *orderstore.Store
	proxy *devstack.Proxy
	once  sync.Once
}

func (s *swallowAfterCommit) Persist(ctx context.Context, orders []orderstore.Order) ([]orderstore.Verdict, error) {
	verdicts, err := s.store.Persist(ctx, orders)
	s.once.Do(s.proxy.SwallowReplies)
	return verdicts, err
}

func TestPipeline_TrimmedPendingEntriesAreAnAlarm(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2)
	_, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead", 10, 0)
	require.NoError(t, err)
	require.NoError(t, f.Do("XTRIM", ledger.OrdersKey(0, 1), "MAXLEN", "0").Error())
	f.Run(f.pipeline(f.options("w1")))
	require.Eventually(t, func() bool { partitions, _ := f.alarms.heard(); return len(partitions) > 0 }, writertest.Patience, 10*time.Millisecond)
	require.Equal(t, 1.0, f.metric("seckill_writer_entries_lost_total"))
}

func TestOptions_RefusesTimeoutsThatDoNotFit(t *testing.T) {
	f := &fixture{Fixture: &writertest.Fixture{Partitions: 8}, registry: prometheus.NewRegistry()}
	good := pipeline.Options{
		Partitions: f.Partitions, Consumer: "w", Committers: 1, BatchMax: 1000, BatchTimeout: 5 * time.Second, MinIdle: 30 * time.Second,
		Block: time.Second, DrainTimeout: time.Second, SlotsMax: 8192,
	}
	require.NoError(t, good.Validate())
	for name, tc := range map[string]struct {
		change func(*pipeline.Options)
		says   []string
	}{
		"batch timeout against min idle": {func(o *pipeline.Options) { o.BatchTimeout = 15 * time.Second }, []string{"15s", "30s"}},
		"consumer named as the group":    {func(o *pipeline.Options) { o.Consumer = ledger.Group }, []string{ledger.Group}},
		"no consumer":                    {func(o *pipeline.Options) { o.Consumer = "" }, []string{"consumer"}},
		"slots":                          {func(o *pipeline.Options) { o.SlotsMax = 1000 }, []string{"1000", "256", "8"}},
		"no committers":                  {func(o *pipeline.Options) { o.Committers = 0 }, []string{"committers"}},
		"block":                          {func(o *pipeline.Options) { o.Block = 0 }, []string{"block"}},
	} {
		t.Run(name, func(t *testing.T) {
			o := good
			tc.change(&o)
			err := o.Validate()
			require.Error(t, err)
			for _, text := range tc.says {
				require.ErrorContains(t, err, text)
			}
		})
	}
}

// metric sums a metric of the fixture's registry.
func (f *fixture) metric(name string) float64 {
	f.T.Helper()
	n, err := testutil.GatherAndCount(f.registry, name)
	require.NoError(f.T, err)
	require.Equal(f.T, 1, n, name)
	families, err := f.registry.Gather()
	require.NoError(f.T, err)
	for _, family := range families {
		if family.GetName() == name {
			return family.GetMetric()[0].GetCounter().GetValue()
		}
	}
	require.NoError(f.T, errors.New("no metric "+name))
	return 0
}
