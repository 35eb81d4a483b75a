package guardian_test

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// held makes a voucher of 100 units whose order of user 1 is a dead letter and
// that of user 2 a row.
func held(t *testing.T, f *writertest.Fixture, g *guardian.Guardian) orderstore.DeadLetterID {
	t.Helper()
	f.Voucher(g, 7, 100)
	f.Exec("ALTER TABLE orders ADD CONSTRAINT test_refused CHECK (user_id <> 1)")
	f.Admitted(7, 1, 2)
	f.Drained()
	f.Exec("ALTER TABLE orders DROP CONSTRAINT test_refused")
	letters, err := f.Store.DeadLetters(f.Ctx, orderstore.DeadLetterFilter{}, orderstore.DeadLetterID{}, 10)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	return letters[0].ID
}

// eventually proven, with no decision left untold.
func proven(t *testing.T, f *writertest.Fixture, stock int64) {
	t.Helper()
	reckoner := books.Reckoner{Store: f.Store, Client: f.Client, Now: time.Now}
	var reckoning books.Books
	require.Eventually(t, func() bool {
		updates, _, err := f.Store.LedgerUpdates(f.Ctx, 0, orderstore.UpdateCursor{}, 10)
		if err != nil || len(updates) > 0 {
			return false
		}
		reckoning, err = reckoner.Reckon(f.Ctx, 7)
		return err == nil && reckoning.Verdict == books.Proven
	}, writertest.Patience, 10*time.Millisecond, "%+v", reckoning)
	require.Equal(t, stock, reckoning.Ledger.Stock)
}

func TestGuardian_TellsTheLedgerOfACancelledDeadLetter(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	id := held(t, f, g)
	proven(t, f, 98)
	for range 2 { // the second changes nothing
		resolution, err := f.Store.Cancel(f.Ctx, id, "op", "test")
		require.NoError(t, err)
		require.Equal(t, orderstore.ResultCancelled, resolution.Result)
	}
	proven(t, f, 99)
	f.Admitted(7, 1) // the user may buy again
	require.True(t, g.Status()[0].Open)
}

func TestGuardian_TellsTheLedgerOfARequeuedDeadLetter(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	id := held(t, f, g)
	resolution, err := f.Store.Requeue(f.Ctx, id, "op", "test")
	require.NoError(t, err)
	require.Equal(t, orderstore.ResultPersisted, resolution.Result)
	proven(t, f, 98)
	found, err := ledger.FindOrder(f.Ctx, f.Client, 0, 1, 7, 1, 1)
	require.NoError(t, err)
	require.Equal(t, &ledger.Mark{Epoch: 1, Seq: 1, State: ledger.MarkPersisted}, found.Mark)
	require.Equal(t, int64(2), f.Number("SELECT COUNT(*) FROM orders WHERE voucher_id = 7"))
}

// The user bought again meanwhile: the requeued order is a conflict.
func TestGuardian_TellsTheLedgerOfARequeueThatBecameAConflict(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	id := held(t, f, g)
	f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 3, 1, NOW(3))")
	f.Exec("UPDATE vouchers SET stock = stock - 1, sold = sold + 1 WHERE id = 7")
	resolution, err := f.Store.Requeue(f.Ctx, id, "op", "test")
	require.NoError(t, err)
	require.Equal(t, orderstore.ResultConflict, resolution.Result)
	// The ledger does not know of seq 3: a second look would close the partition.
	look()
	found, err := ledger.FindOrder(f.Ctx, f.Client, 0, 1, 7, 1, 1)
	require.NoError(t, err)
	require.Equal(t, ledger.VerdictConflict, found.Outcome.Verdict)
	require.Equal(t, orderid.Position{VoucherID: 7, Epoch: 1, Seq: 3}, found.Outcome.Standing)
}

func TestGuardian_RemovesDeadConsumersThatHoldNothing(t *testing.T) {
	f := writertest.New(t, 1)
	g := changed(f, func(o *guardian.Options) { o.ConsumerIdle = 100 * time.Millisecond })
	f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	_, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead with an entry", 10, 0)
	require.NoError(t, err)
	for _, name := range []string{"dead 1", "dead 2"} {
		require.NoError(t, f.Do("XGROUP", "CREATECONSUMER", ledger.OrdersKey(0, 1), ledger.Group, name).Error())
	}
	require.Eventually(t, func() bool {
		consumers, err := ledger.PendingByConsumer(f.Ctx, f.Client, 0, 1)
		return err == nil && len(consumers) == 1 && consumers[0].Consumer == "dead with an entry"
	}, writertest.Patience, 20*time.Millisecond)
	require.Never(t, func() bool {
		ids, err := ledger.PendingIDs(f.Ctx, f.Client, 0, 1, "dead with an entry", 10)
		return err != nil || len(ids) != 1
	}, 500*time.Millisecond, 20*time.Millisecond)
}

// The end of the ledger may be gone with orders that only it knew.
func TestGuardian_FastDurabilityStaysClosedAfterARestart(t *testing.T) {
	f := writertest.New(t, 1)
	require.NoError(t, f.Do("CONFIG", "SET", "appendfsync", "everysec").Error())
	fast := func(o *guardian.Options) { o.Durability = ledger.DurabilityFast }
	g := changed(f, fast)
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	reply, err := f.Admit(7, 1)
	require.NoError(t, err)
	require.Equal(t, ledger.DurabilityFast, reply.Durability)
	// Without a restart the ledger can be proven.
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	require.Eventually(t, func() bool {
		loaded, err := ledger.AdmitLoaded(f.Ctx, f.Client, 0, 1)
		return err == nil && loaded
	}, writertest.Patience, 10*time.Millisecond)
	stop()
	require.NoError(t, f.Redis.Stop())
	require.NoError(t, f.Redis.Restart(f.Ctx, "--appendfsync", "everysec"))
	require.Eventually(t, func() bool { return f.Do("PING").Error() == nil }, writertest.Patience, 10*time.Millisecond)
	again := changed(f, fast)
	f.Run(again)
	closed(t, again, 0, "fast durability")
	refused(t, f, 7)
}

func TestGuardian_SettingsThatAreWeakenedWhileOpenCloseThePartition(t *testing.T) {
	for setting, value := range map[string]string{"appendfsync": "everysec", "maxmemory-policy": "allkeys-lru", "appendonly": "no"} {
		t.Run(setting, func(t *testing.T) {
			f := writertest.New(t, 1)
			registry := prometheus.NewRegistry()
			g := changed(f, func(o *guardian.Options) { o.Registerer = registry })
			f.Run(g)
			f.Open(g)
			f.Voucher(g, 7, 100)
			require.NoError(t, f.Do("CONFIG", "SET", setting, value).Error())
			closed(t, g, 0, setting)
			refused(t, f, 7)
			meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
			require.NoError(t, err)
			require.Contains(t, meta.Reason, setting, "gateways show it")
			require.Equal(t, 1.0, metric(t, registry, "seckill_partition_closed_reason", "configuration"))
		})
	}
}

// metric is the value of a gauge whose reason is as given.
func metric(t *testing.T, registry *prometheus.Registry, name, reason string) float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			for _, label := range m.GetLabel() {
				if family.GetName() == name && label.GetName() == "reason" && label.GetValue() == reason {
					return m.GetGauge().GetValue()
				}
			}
		}
	}
	return 0
}

// Orders are in flight that no voucher's ledger knows of.
func TestGuardian_CheckHoldsThePartitionAgainstItsVouchers(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	stop()
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	require.NoError(t, f.Do("HSET", ledger.MetaKey(0), "admitted", "9").Error())
	again := f.Guardian()
	f.Run(again)
	closed(t, again, 0, "9 orders are in flight, the vouchers' ledgers know of 1")
}
