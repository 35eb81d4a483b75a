package guardian_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

// closed waits until a partition is closed for a reason that has a text in it.
func closed(t *testing.T, g *guardian.Guardian, partition int, text string) {
	t.Helper()
	require.Eventually(t, func() bool {
		status := g.Status()[partition]
		return !status.Open && strings.Contains(status.Reason, text)
	}, writertest.Patience, 10*time.Millisecond, "want closed because of %q, have %+v", text, g.Status()[partition])
}

func refused(t *testing.T, f *writertest.Fixture, voucherID int64) {
	t.Helper()
	reply, err := f.Admit(voucherID, 999_999)
	if err != nil {
		require.ErrorIs(t, err, ledger.ErrNoScript)
		return
	}
	require.Equal(t, ledger.AdmitClosed, reply.Status)
}

func TestGuardian_OpensPartitionsThatNeverWereOpen(t *testing.T) {
	for _, partitions := range []int{1, 8} {
		f := writertest.New(t, partitions)
		g := f.Guarded()
		f.Voucher(g, 7, 10)
		f.Admitted(7, writertest.Users(1, 10)...)
		for partition := range partitions {
			row, err := f.Store.Partition(f.Ctx, partition)
			require.NoError(t, err)
			require.Equal(t, int64(1), row.OpenEpoch)
		}
	}
}

func TestGuardian_OneOfThreeIsGuardianAndAnotherTakesOver(t *testing.T) {
	f := writertest.New(t, 1)
	all := []*guardian.Guardian{f.Guardian(), f.Guardian(), f.Guardian()}
	var stops []func()
	for _, g := range all {
		stops = append(stops, f.Run(g))
	}
	guards := func() (held []int) {
		for i, g := range all {
			if g.Status()[0].Guardian {
				held = append(held, i)
			}
		}
		return held
	}
	require.Eventually(t, func() bool { return len(guards()) == 1 }, writertest.Patience, 10*time.Millisecond)
	for _, g := range all {
		f.Open(g) // the others report what they see
	}
	first := guards()[0]
	stops[first]()
	others := append(append([]*guardian.Guardian{}, all[:first]...), all[first+1:]...)
	require.Eventually(t, func() bool {
		n := 0
		for _, g := range others {
			if status := g.Status()[0]; status.Guardian && status.Open {
				n++
			}
		}
		return n == 1
	}, writertest.Patience, 10*time.Millisecond)
}

// A restart of Redis forgets scripts: nobody gets in before the ledger that
// came back is proven.
func TestGuardian_ProvesTheLedgerAfterARestartOfRedis(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	f.Admitted(7, writertest.Users(1, 40)...)
	stop()

	f.Redis.Kill()
	require.NoError(t, f.Redis.Restart(f.Ctx))
	require.Eventually(t, func() bool {
		_, err := f.Admit(7, 41)
		return err != nil && strings.Contains(err.Error(), "NOSCRIPT")
	}, writertest.Patience, 10*time.Millisecond)

	f.Guarded()
	f.Admitted(7, writertest.Users(41, 60)...)
	reply, err := f.Admit(7, 101)
	require.NoError(t, err)
	require.Equal(t, ledger.DecisionSoldOut, reply.Answers[0].Decision)
}

func TestGuardian_ScriptFlushShutsTheDoorOnlyUntilTheNextLook(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 10)
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	require.Eventually(t, func() bool {
		reply, err := f.Admit(7, 1)
		return err == nil && reply.Status == ledger.AdmitOK
	}, writertest.Patience, 10*time.Millisecond)
}

func TestGuardian_FlushallStaysClosedAndNothingIsMadeAgain(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 200)
	f.Admitted(7, writertest.Users(1, 100)...)
	require.NoError(t, f.Do("FLUSHALL").Error())
	refused(t, f, 7)
	closed(t, g, 0, "ledger is missing")

	stop()
	again := f.Guardian()
	f.Run(again)
	closed(t, again, 0, "ledger is missing")
	refused(t, f, 7)
	keys, err := f.Do("KEYS", "sk:{*").AsStrSlice()
	require.NoError(t, err)
	require.Empty(t, keys, "a lost ledger must not be made again")
	require.Eventually(t, func() bool {
		layout, err := ledger.ReadLayout(f.Ctx, f.Client)
		return err == nil && layout.Partitions == 1
	}, writertest.Patience, 10*time.Millisecond, "a gateway that starts must learn the layout")
}

func TestGuardian_LostVoucherClosesThePartitionAndIsNotMadeAgain(t *testing.T) {
	for _, key := range []string{"voucher", "buyers", "orders"} {
		t.Run(key, func(t *testing.T) {
			f := writertest.New(t, 1)
			g := f.Guarded()
			f.Voucher(g, 7, 200)
			f.Admitted(7, writertest.Users(1, 100)...)
			name := map[string]string{
				"voucher": ledger.VoucherKey(0, 1, 7), "buyers": ledger.BuyersKey(0, 1, 7), "orders": ledger.OrdersKey(0, 1),
			}[key]
			deleted, err := f.Do("DEL", name).AsInt64()
			require.NoError(t, err)
			require.Equal(t, int64(1), deleted)
			require.Eventually(t, func() bool { return !g.Status()[0].Open }, writertest.Patience, 10*time.Millisecond)
			refused(t, f, 7)
			// A later guardian does not open it either.
			again := f.Guardian()
			f.Run(again)
			require.Never(t, func() bool { return again.Status()[0].Open || g.Status()[0].Open }, 500*time.Millisecond, 20*time.Millisecond)
			exists, err := f.Do("EXISTS", name).AsInt64()
			require.NoError(t, err)
			require.Zero(t, exists)
		})
	}
}

// Only the partition that was proven is open, though both are on one server.
func TestGuardian_ProvesEachPartitionForItself(t *testing.T) {
	f := writertest.New(t, 2)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 2, 10)
	f.Voucher(g, 3, 10)
	f.Admitted(2, 1)
	f.Admitted(3, 1)
	stop()
	f.Redis.Kill()
	require.NoError(t, f.Redis.Restart(f.Ctx))
	require.Eventually(t, func() bool { return f.Do("PING").Error() == nil }, writertest.Patience, 10*time.Millisecond)
	// Partition 1 lost an order that only its ledger knew.
	require.NoError(t, f.Do("XTRIM", ledger.OrdersKey(1, 1), "MAXLEN", "0").Error())

	again := f.Guardian()
	f.Run(again)
	require.Eventually(t, func() bool { return again.Status()[0].Open }, writertest.Patience, 10*time.Millisecond)
	closed(t, again, 1, "orders_missing")
	f.Admitted(2, 2)
	refused(t, f, 3)
}

func TestGuardian_CheckNamesWhatIsWrong(t *testing.T) {
	for _, tc := range []struct {
		name   string
		tamper func(f *writertest.Fixture)
		reason string
	}{
		{"a voucher's stock", func(f *writertest.Fixture) {
			require.NoError(f.T, f.Do("HSET", ledger.VoucherKey(0, 1, 7), "stock", "99").Error())
		}, "ledger_stock"},
		{"a mark that is gone", func(f *writertest.Fixture) {
			require.NoError(f.T, f.Do("HDEL", ledger.BuyersKey(0, 1, 7), "1").Error())
		}, "ledger_buyers"},
		{"an entry that is gone with its count", func(f *writertest.Fixture) {
			require.NoError(f.T, f.Do("XTRIM", ledger.OrdersKey(0, 1), "MAXLEN", "0").Error())
			require.NoError(f.T, f.Do("HSET", ledger.MetaKey(0), "entries_out", "1").Error())
		}, "orders_missing: voucher 7: seq [1 2 3 4 5] and more, up to 10"},
		{"the database's stock", func(f *writertest.Fixture) {
			f.Exec("ALTER TABLE vouchers DROP CONSTRAINT vouchers_sum")
			f.Exec("UPDATE vouchers SET stock = stock + 1 WHERE id = 7")
		}, "is not total"},
		{"a row beyond the ledger", func(f *writertest.Fixture) {
			f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 11, 11, NOW(3))")
		}, "the database has seq 11, the ledger only 10"},
		{"a database put back", func(f *writertest.Fixture) {
			f.Exec("UPDATE vouchers SET rev = 0 WHERE id = 7")
		}, "the database OPEN by rev 0"},
		{"a ledger of a later epoch", func(f *writertest.Fixture) {
			require.NoError(f.T, f.Do("HSET", ledger.MetaKey(0), "epoch", "2").Error())
		}, "the database only of 1"},
		{"a policy that evicts", func(f *writertest.Fixture) {
			require.NoError(f.T, f.Do("CONFIG", "SET", "maxmemory-policy", "allkeys-random").Error())
		}, "maxmemory-policy"},
		{"fsync turned down", func(f *writertest.Fixture) {
			require.NoError(f.T, f.Do("CONFIG", "SET", "appendfsync", "everysec").Error())
		}, "appendfsync is everysec"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := writertest.New(t, 1)
			g := f.Guardian()
			stop := f.Run(g)
			f.Open(g)
			f.Voucher(g, 7, 100)
			f.Admitted(7, writertest.Users(1, 10)...)
			stop()
			require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
			tc.tamper(f)

			again := f.Guardian()
			f.Run(again)
			closed(t, again, 0, tc.reason)
			_, err := f.Admit(7, 50)
			require.ErrorIs(t, err, ledger.ErrNoScript)
		})
	}
}

func TestGuardian_OpensWhenWhatWasMissingIsBack(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	stop()
	require.NoError(t, f.Do("SCRIPT", "FLUSH").Error())
	require.NoError(t, f.Do("HSET", ledger.VoucherKey(0, 1, 7), "stock", "101").Error())
	again := f.Guardian()
	f.Run(again)
	closed(t, again, 0, "ledger_stock")
	require.NoError(t, f.Do("HSET", ledger.VoucherKey(0, 1, 7), "stock", "100").Error())
	f.Open(again)
}

func TestGuardian_FaultStaysClosed(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	require.NoError(t, ledger.ReportFault(f.Ctx, f.Client, 0, ledger.FaultRewound, "voucher 7"))
	closed(t, g, 0, "went back")
	refused(t, f, 7)
	require.Never(t, func() bool { return g.Status()[0].Open }, 500*time.Millisecond, 20*time.Millisecond)
}

func TestGuardian_CarriesWhatAnRPCCouldNot(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	voucher, err := f.Store.Transition(f.Ctx, 7, []string{orderstore.StateOpen}, orderstore.StatePaused)
	require.NoError(t, err)
	require.False(t, voucher.Applied())
	require.Eventually(t, func() bool {
		voucher, err := f.Store.Voucher(f.Ctx, 7)
		require.NoError(t, err)
		return voucher.Applied()
	}, writertest.Patience, 10*time.Millisecond)
	reply, err := f.Admit(7, 1)
	require.NoError(t, err)
	require.Equal(t, ledger.DecisionPaused, reply.Answers[0].Decision)
}

func TestCarry_LateOpenAfterCloseDoesNotOpenAgain(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	opened := f.Voucher(g, 7, 100)
	f.Transition(g, 7, orderstore.StateOpen, orderstore.StateClosed)
	require.ErrorIs(t, g.Carry(f.Ctx, opened), orderstore.ErrRevMoved)
	reply, err := f.Admit(7, 1)
	require.NoError(t, err)
	require.Equal(t, ledger.DecisionEnded, reply.Answers[0].Decision)
}

func TestCarry_ArchivesAndFreesTheMarks(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	closing := f.Transition(g, 7, orderstore.StateOpen, orderstore.StateClosed)
	require.Equal(t, int64(2), closing.Rev)
	f.Transition(g, 7, orderstore.StateClosed, orderstore.StateArchived)
	reply, err := f.Admit(7, 1)
	require.NoError(t, err)
	require.Equal(t, ledger.AdmitArchived, reply.Status)
	left, err := f.Do("EXISTS", ledger.BuyersKey(0, 1, 7), ledger.OutcomesKey(0, 1, 7)).AsInt64()
	require.NoError(t, err)
	require.Zero(t, left)
	require.Never(t, func() bool { return !g.Status()[0].Open }, 300*time.Millisecond, 20*time.Millisecond)
}

func TestGuardian_VoucherFaultEndsTheSale(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	g.VoucherFault(7, "test")
	user := int64(0)
	require.Eventually(t, func() bool {
		user++
		reply, err := f.Admit(7, user)
		return err == nil && reply.Status == ledger.AdmitOK && reply.Answers[0].Decision == ledger.DecisionEnded
	}, writertest.Patience, 10*time.Millisecond)
}

func TestGuardian_SurvivesOutagesOfBothServers(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Redis.Kill()
	closed(t, g, 0, "redis cannot be reached")
	require.NoError(t, f.Redis.Restart(f.Ctx))
	f.Open(g)
	f.Admitted(7, 1)
}
