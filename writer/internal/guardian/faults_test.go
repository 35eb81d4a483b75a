package guardian_test

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

func changed(f *writertest.Fixture, change func(*guardian.Options)) *guardian.Guardian {
	o := guardian.Options{
		Store: f.Store, Client: f.Client, Partitions: f.Partitions, Bound: 1_000_000, Durability: ledger.DurabilityStrict,
		Interval: writertest.Interval, OrderKeys: map[int]string{0: "test"}, Logger: writertest.Logger(), Registerer: prometheus.NewRegistry(),
	}
	change(&o)
	return guardian.New(o)
}

// The row of a voucher is gone (or MySQL was restored from before it was made).
func TestGuardian_VoucherWithoutARowStopsSelling(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	f.Admitted(7, 1)
	f.Exec("DELETE FROM vouchers WHERE id = 7")
	g.VoucherFault(7, "orders were admitted of a voucher that the database does not have") // what pipeline.judge says
	closed(t, g, 0, "the database does not have")
	refused(t, f, 7)
}

// A sale was closed while Redis was away; the door opens before the ledger is told.
func TestGuardian_ClosedVoucherDoesNotSellAfterARestart(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	stop()
	f.Redis.Kill()
	_, err := f.Store.Transition(f.Ctx, 7, []string{orderstore.StateOpen}, orderstore.StateClosed) // rpc.step: recorded, not carried
	require.NoError(t, err)
	require.NoError(t, f.Redis.Restart(f.Ctx))
	g = changed(f, func(o *guardian.Options) { o.Interval = time.Second }) // the default interval
	require.Eventually(t, func() bool { return f.Do("PING").Error() == nil }, writertest.Patience, 10*time.Millisecond)
	f.Run(g)
	f.Open(g)
	reply, err := f.Admit(7, 2)
	require.NoError(t, err)
	require.NotEqual(t, ledger.DecisionAdmitted, reply.Answers[0].Decision, "sold after CloseVoucher was recorded")
}

// The ledger's rev is behind the row's, which counts as applied.
func TestGuardian_LedgerBehindTheRowIsBroughtForward(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	old, err := f.Client.Do(f.Ctx, f.Client.B().Hmget().Key(ledger.VoucherKey(0, 1, 7)).Field("rev", "state").Build()).AsStrSlice()
	require.NoError(t, err)
	f.Transition(g, 7, orderstore.StateOpen, orderstore.StateClosed)
	// as a ledger restored from a backup taken before the closing has it
	require.NoError(t, f.Do("HSET", ledger.VoucherKey(0, 1, 7), "rev", old[0], "state", old[1]).Error())
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	user := int64(100)
	require.Eventually(t, func() bool {
		user++
		reply, err := f.Admit(7, user)
		return err == nil && reply.Status == ledger.AdmitOK && reply.Answers[0].Decision == ledger.DecisionEnded
	}, writertest.Patience, 20*time.Millisecond, "a voucher CLOSED in the database sells")
}

// Writers are upgraded first: the new guardian's admit.lua is another than the
// one that gateways are using.
func TestGuardian_UpgradeOfTheScriptDoesNotCloseASale(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 1_000_000)
	stop()
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	source, err := os.ReadFile("../../../pkg/ledger/admit.lua")
	require.NoError(t, err)
	old := string(source) + "-- the version before, partition 0 epoch 1\n"
	sum := sha1.Sum([]byte(old))
	sha := hex.EncodeToString(sum[:])
	require.NoError(t, f.Do("SCRIPT", "LOAD", old).Error())
	require.NoError(t, f.Do("HSET", ledger.MetaKey(0), "admit_sha", sha).Error())

	ctx, cancel := context.WithCancel(f.Ctx)
	defer cancel()
	refusals := make(chan string, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for user := int64(1); ctx.Err() == nil; user++ {
			reply, err := ledger.Admit(ctx, f.Client, ledger.AdmitCall{
				Partition: 0, Epoch: 1, SHA: sha, VoucherID: 7, NotAfter: time.Now().Add(time.Minute),
				Grabs: []ledger.Grab{{UserID: user, Record: ledger.EncodeRecord(user, "", "")}},
			})
			if err == nil && reply.Status != ledger.AdmitOK {
				select {
				case refusals <- fmt.Sprint(reply.Status, " ", reply.Detail):
				default:
				}
			}
		}
	}()
	require.Eventually(t, func() bool {
		books, err := ledger.ReadBooks(f.Ctx, f.Client, 0, 1, 7)
		return err == nil && books.Seq > 100
	}, writertest.Patience, 10*time.Millisecond, "the sale is running")
	f.Guarded()
	require.Eventually(t, func() bool {
		loaded, err := ledger.AdmitLoaded(f.Ctx, f.Client, 0, 1)
		return err == nil && loaded
	}, writertest.Patience, 10*time.Millisecond)
	cancel()
	<-done
	require.Empty(t, refusals, "the running sale was closed by the upgrade")
}

// An entry that no writer decodes stands for its positions.
func TestGuardian_UndecodableEntryIsNotALostOrder(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	reply, err := ledger.Admit(f.Ctx, f.Client, ledger.AdmitCall{
		Partition: 0, Epoch: 1, SHA: ledger.AdmitSHA(0, 1), VoucherID: 7, NotAfter: time.Now().Add(time.Minute),
		Grabs: []ledger.Grab{{UserID: 5, Record: []byte{0xff}}},
	})
	require.NoError(t, err)
	require.Equal(t, ledger.DecisionAdmitted, reply.Answers[0].Decision)
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	require.Eventually(t, func() bool {
		loaded, err := ledger.AdmitLoaded(f.Ctx, f.Client, 0, 1)
		return err == nil && loaded
	}, writertest.Patience, 10*time.Millisecond, "%+v", g.Status()[0])
}

// --max-in-flight was changed and the writers restarted.
func TestGuardian_NewBoundReachesAnOpenPartition(t *testing.T) {
	f := writertest.New(t, 1)
	g := changed(f, func(o *guardian.Options) { o.Bound = 1000 })
	stop := f.Run(g)
	f.Open(g)
	stop()
	f.Run(changed(f, func(o *guardian.Options) { o.Bound = 5000 }))
	require.Eventually(t, func() bool {
		meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
		return err == nil && meta.Bound == 5000
	}, writertest.Patience, 50*time.Millisecond, "the bound of an open partition never changes")
}

// Memory is full: the guardian must still see, carry and report.
func TestGuardian_WorksWhenMemoryIsFull(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	require.NoError(t, f.Do("CONFIG", "SET", "maxmemory", "1").Error())
	_, err := f.Store.Transition(f.Ctx, 7, []string{orderstore.StateOpen}, orderstore.StatePaused) // its direct carry failed
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		row, err := f.Store.Voucher(f.Ctx, 7)
		return err == nil && row.Applied()
	}, writertest.Patience, 50*time.Millisecond, "the pause never reaches the ledger while memory is full")

}

// The proof does not need memory either.
func TestGuardian_ProofWorksWhenMemoryIsFull(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	require.NoError(t, f.Do("CONFIG", "SET", "maxmemory", "1").Error())
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	require.Eventually(t, func() bool {
		meta, err := ledger.AdmitLoaded(f.Ctx, f.Client, 0, 1)
		return err == nil && meta
	}, writertest.Patience, 50*time.Millisecond, "the door stays shut after SCRIPT FLUSH while memory is full")
}

// The database is away when a fault is told.
func TestGuardian_FaultToldWhileTheDatabaseIsAwayIsNotForgotten(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 10)
	f.Exec("RENAME TABLE partitions TO partitions_away") // stands for an outage of some 100 ms
	g.PartitionFault(0, "entries were removed from the stream before they were settled: 1-1")
	defer f.Exec("RENAME TABLE partitions_away TO partitions")
	closed(t, g, 0, "were removed from the stream")
	refused(t, f, 7)
}

// The database is away and the server's configuration is weakened.
func TestGuardian_ModeIsCheckedWhileTheDatabaseIsAway(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Exec("RENAME TABLE partitions TO partitions_away")
	defer f.Exec("RENAME TABLE partitions_away TO partitions")
	require.NoError(t, f.Do("CONFIG", "SET", "appendfsync", "everysec").Error())
	closed(t, g, 0, "appendfsync is everysec")
	refused(t, f, 7)
}

// Pending entries were destroyed with their consumer: the orders are in the
// stream and nobody will ever get them.
func TestGuardian_EntriesOfADestroyedConsumerComeBack(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 10)
	f.Admitted(7, 1)
	_, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead", 10, 0)
	require.NoError(t, err)
	require.NoError(t, f.Do("XGROUP", "DELCONSUMER", ledger.OrdersKey(0, 1), ledger.Group, "dead").Error())
	require.Eventually(t, func() bool {
		raw, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "alive", 10, 0)
		return err == nil && len(raw) > 0
	}, writertest.Patience, 50*time.Millisecond, "stuck silently")
}

// MySQL was restored from before the partition was first opened.
func TestGuardian_OpenLedgerThatTheDatabaseNeverOpenedIsClosed(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	f.Admitted(7, 1)
	f.Exec("UPDATE partitions SET open_epoch = 0")
	closed(t, g, 0, "never opened by the database")
	refused(t, f, 7)
}

// A counter of meta that admit.lua does not read is no number.
func TestGuardian_PartitionWhoseMetaIsUnreadableIsClosed(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	f.Admitted(7, 1)
	require.NoError(t, f.Do("HSET", ledger.MetaKey(0), "entries_out", "x").Error())
	closed(t, g, 0, "fault")
	refused(t, f, 7)
}

// The ledger has more units than the database: the sale is closed, and the
// check that could open it again asks the same rules.
func TestGuardian_ClosedForOversellingStaysClosed(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 10)
	f.Admitted(7, 1)
	f.Drained()
	require.NoError(t, f.Do("HSET", ledger.VoucherKey(0, 1, 7), "stock", "14", "opening", "15").Error())
	closed(t, g, 0, "bridge_stock")
	require.Never(t, func() bool {
		meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
		return err != nil || meta.Open
	}, 3*time.Second, 5*time.Millisecond)
}
