package guardian_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// MySQL failed over to a replica that lacked the last change of a voucher (its
// resuming). The operator closes it: the call succeeds, and it sells on.
func TestGuardian_CloseAfterTheDatabaseLostARevisionReachesTheLedger(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Transition(g, 7, orderstore.StateOpen, orderstore.StatePaused)
	f.Transition(g, 7, orderstore.StatePaused, orderstore.StateOpen)
	f.Exec("UPDATE vouchers SET state = 'PAUSED', rev = rev - 1 WHERE id = 7") // the replica's row
	time.Sleep(500 * time.Millisecond)
	f.Transition(g, 7, orderstore.StatePaused, orderstore.StateClosed)
	time.Sleep(3 * time.Second)
	voucher, err := f.Store.Voucher(f.Ctx, 7)
	require.NoError(t, err)
	reply, err := f.Admit(7, 1)
	if err == nil && reply.Status == ledger.AdmitOK {
		require.NotEqual(t, ledger.DecisionAdmitted, reply.Answers[0].Decision, "the database says %s, applied %v; the guardian says %+v", voucher.State, voucher.Applied(), g.Status()[0])
	}
}

// What is only an alarm while a partition is open must not keep it closed when
// Redis restarts.
func TestGuardian_DriftThatIsOnlyAnAlarmDoesNotKeepThePartitionClosed(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	f.Drained()
	require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 7), "stock", "-1").Error())
	require.Never(t, func() bool { return !g.Status()[0].Open }, 2*time.Second, 20*time.Millisecond)
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	time.Sleep(time.Second)
	require.Eventually(t, func() bool { return g.Status()[0].Open }, 8*time.Second, 20*time.Millisecond)
}
