package guardian_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// A second writer starts while Redis rewrites its log, on a server on which
// somebody once changed a setting. The guardian knows that the log is complete.
func TestGuardian_WriterThatStartsDuringARewriteDoesNotCloseAnOpenPartition(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	require.NoError(t, f.Do("CONFIG", "SET", "rdb-key-save-delay", "3000000").Error())
	time.Sleep(500 * time.Millisecond) // the guardian has seen that
	require.NoError(t, f.Do("BGREWRITEAOF").Error())
	require.Never(t, func() bool { return !g.Status()[0].Open }, time.Second, 10*time.Millisecond, "the guardian minds")
	second := f.Guardian()
	f.Run(second)
	closed := 0
	reason := ""
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
		require.NoError(t, err)
		if !meta.Open {
			closed++
			reason = meta.Reason
		}
	}
	require.Zero(t, closed, "looks of 600 at which the partition was closed: %s", reason)
}

// A decision that cannot be told must not keep the guardian from its books.
func TestGuardian_DecisionThatCannotBeToldDoesNotEndTheWatch(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	id := held(t, f, g)
	f.Voucher(g, 8, 100)
	stop()
	_, err := f.Store.Cancel(f.Ctx, id, "op", "test")
	require.NoError(t, err)
	t.Run("its outcome is locked", func(t *testing.T) {
		release := f.HoldRow("SELECT seq FROM order_outcomes WHERE voucher_id = 7 FOR UPDATE")
		g := f.Guardian()
		stop := f.Run(g)
		defer stop()
		f.Open(g)
		require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 8), "stock", "5").Error()) // oversells
		ok := false
		for end := time.Now().Add(12 * time.Second); time.Now().Before(end) && !ok; time.Sleep(20 * time.Millisecond) {
			meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
			require.NoError(t, err)
			ok = !meta.Open
		}
		release()
		require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 8), "stock", "-5").Error())
		require.True(t, ok, "another voucher oversold for 12 s and the partition stayed open: %+v", g.Status()[0])
	})
}

func TestGuardian_DecisionOfAVoucherWhoseLedgerIsGone(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	id := held(t, f, g)
	f.Voucher(g, 8, 100)
	stop()
	_, err := f.Store.Cancel(f.Ctx, id, "op", "test")
	require.NoError(t, err)
	require.NoError(t, f.Do("DEL", ledger.VoucherKey(0, 1, 7)).Error())
	require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 8), "stock", "5").Error())
	g = f.Guardian()
	f.Run(g)
	shut := false
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end) && !shut; time.Sleep(20 * time.Millisecond) {
		meta, err := ledger.ReadMeta(f.Ctx, f.Client, 0)
		require.NoError(t, err)
		shut = !meta.Open
	}
	require.True(t, shut, "ledger_missing and ledger_stock, and open: %+v", g.Status()[0])
}

// One voucher that cannot be carried over must not keep another one selling.
func TestGuardian_FaultyVoucherThatCannotBeCarriedDoesNotHoldUpAnother(t *testing.T) {
	f := writertest.New(t, 2)
	g := f.Guarded()
	f.Voucher(g, 2, 100)
	f.Voucher(g, 3, 100)
	require.NoError(t, f.Do("HSET", ledger.VoucherKey(0, 1, 2), "opening", "x").Error())
	g.VoucherFault(2, "test")
	require.Eventually(t, func() bool {
		v, err := f.Store.Voucher(f.Ctx, 2)
		return err == nil && v.State == orderstore.StateClosed
	}, 5*time.Second, 20*time.Millisecond)
	g.VoucherFault(3, "the database had fewer units than were admitted")
	require.Eventually(t, func() bool {
		v, err := f.Store.Voucher(f.Ctx, 3)
		return err == nil && v.State == orderstore.StateClosed
	}, 8*time.Second, 20*time.Millisecond, "voucher 3, of another partition, goes on selling")
}

// A partition that a fault closed still writes what is in flight.
func TestGuardian_FaultClosedPartitionStillBringsItsOrdersToAnEnd(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2, 3)
	g.PartitionFault(0, "test")
	closed(t, g, 0, "fault: ")
	require.NoError(t, f.Do("XGROUP", "DESTROY", ledger.OrdersKey(0, 1), ledger.Group).Error())
	require.Eventually(t, func() bool {
		_, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "w", 1, 0)
		return err == nil
	}, 8*time.Second, 50*time.Millisecond, "three acknowledged orders can be read by nobody")
}

// The same where it is the books that do not hold.
func TestGuardian_PartitionClosedByItsBooksStillBringsItsOrdersToAnEnd(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2, 3)
	require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 7), "stock", "1").Error())
	closed(t, g, 0, "ledger_stock")
	taken(t, f, "gone")
	require.NoError(t, f.Do("XGROUP", "DELCONSUMER", ledger.OrdersKey(0, 1), ledger.Group, "gone").Error())
	require.Eventually(t, func() bool { return lastDelivered(t, f) == "0-0" }, writertest.Patience, 50*time.Millisecond,
		"three acknowledged orders can be read by nobody")
	require.False(t, g.Status()[0].Open)
}

// Nothing can be counted in the database. What the ledger says is still known,
// and all other duties of a guardian go on.
func TestGuardian_BooksThatCannotBeCountedEndNothingElse(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	f.Voucher(g, 7, 100)
	f.Voucher(g, 8, 100)
	f.Admitted(7, 1)
	look()
	f.Exec("RENAME TABLE order_outcomes TO away")
	require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 7), "stock", "-1").Error())
	_, err := f.Store.Transition(f.Ctx, 8, []string{orderstore.StateOpen}, orderstore.StateClosed)
	require.NoError(t, err)
	look()
	status := g.Status()[0]
	require.NotEmpty(t, status.Reason, "the books could be counted")
	require.True(t, status.Open)
	require.Contains(t, status.Alarm, "ledger_stock: voucher 7")
	voucher, err := f.Store.Voucher(f.Ctx, 8)
	require.NoError(t, err)
	require.True(t, voucher.Applied(), "the ledger does not know that voucher 8 is closed")
	f.Exec("RENAME TABLE away TO order_outcomes")
}
