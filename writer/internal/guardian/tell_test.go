package guardian_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// stepped makes a guardian that looks only when it is told to, and tends at
// every look, and lets it open its partition.
func stepped(t *testing.T, f *writertest.Fixture) (g *guardian.Guardian, look func()) {
	t.Helper()
	g = changed(f, func(o *guardian.Options) { o.Interval = 0 })
	look = func() { g.Look(f.Ctx, 0) }
	look()
	require.True(t, g.Status()[0].Open && g.Status()[0].Guardian, "%+v", g.Status())
	return g, look
}

// Many decisions are of orders that are not settled yet.
func TestGuardian_DecisionsThatCannotBeToldDoNotStarveLaterOnes(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	id := held(t, f, g)
	f.Voucher(g, 8, 2000)
	f.Admitted(8, writertest.Users(1, 1200)...)
	_, err := f.Store.Cancel(f.Ctx, id, "op", "test")
	require.NoError(t, err)
	f.Exec(`INSERT INTO ledger_updates (voucher_id, epoch, seq, partition_id, user_id, verdict, created_at)
		WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 600)
		SELECT 8, 1, 2 * i, 0, 2 * i, 'CANCELLED', '2026-01-01' FROM n`)
	untold := func() int64 { return f.Number("SELECT COUNT(*) FROM ledger_updates WHERE voucher_id = 7") }
	require.Equal(t, int64(1), untold())
	look()
	require.Equal(t, int64(1), untold(), "one look tells a bounded number")
	look()
	require.Zero(t, untold())
	f.Admitted(7, 1) // the user may buy again

	// And the others have their turn again.
	f.Exec("UPDATE ledger_updates SET verdict = 'PERSISTED'")
	f.Drained()
	look()
	look()
	require.Zero(t, f.Number("SELECT COUNT(*) FROM ledger_updates"))
}

// The user of an order that cannot be read has a mark all the same. Where the
// order is cancelled he may buy again.
func TestGuardian_UsersOfCancelledOrdersThatNobodyCanReadMayBuyAgain(t *testing.T) {
	broken, half := []byte{0x0a, 0x01, 0xff}, []byte{0x0a, 0x05, 0x08}
	for name, tc := range map[string]struct {
		records [][]byte
		// rows are the orders that can be read, again are users who may buy again.
		rows  int64
		again []int64
	}{
		"an order": {[][]byte{ledger.EncodeRecord(1, "", ""), broken, ledger.EncodeRecord(3, "", "")}, 2, []int64{2}},
		"an entry": {[][]byte{ledger.EncodeRecord(1, "", ""), ledger.EncodeRecord(2, "", ""), half}, 0, []int64{1, 2, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			f := writertest.New(t, 1)
			g := f.Guarded()
			f.Voucher(g, 7, 5000)
			call := ledger.AdmitCall{Partition: 0, Epoch: 1, SHA: ledger.AdmitSHA(0, 1), VoucherID: 7, NotAfter: time.Now().Add(time.Minute)}
			for i, record := range tc.records {
				call.Grabs = append(call.Grabs, ledger.Grab{UserID: int64(i + 1), Record: record})
			}
			_, err := ledger.Admit(f.Ctx, f.Client, call)
			require.NoError(t, err)
			f.Admitted(7, writertest.Users(10, 3000)...)
			f.Drained()
			require.Equal(t, 3000+tc.rows, f.Number("SELECT sold FROM vouchers WHERE id = 7"))

			letters, err := f.Store.DeadLetters(f.Ctx, orderstore.DeadLetterFilter{}, orderstore.DeadLetterID{}, 10)
			require.NoError(t, err)
			require.Len(t, letters, 1)
			_, err = f.Store.Cancel(f.Ctx, letters[0].ID, "op", "test")
			require.NoError(t, err)
			proven(t, f, 5000-3000-tc.rows)
			f.Admitted(7, tc.again...)
			f.Drained()
			proven(t, f, 5000-3000-3)
			require.Empty(t, g.Status()[0].Alarm)
		})
	}
}

// A voucher has more marks than one look goes through.
func TestGuardian_SearchForAUserGoesOnOverSeveralLooks(t *testing.T) {
	if testing.Short() {
		t.Skip("250,000 marks")
	}
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	f.Voucher(g, 7, 300_000)
	f.Admitted(7, writertest.Users(1, 250_000)...)
	// What the ledger knows once an order of an unknown user was cancelled.
	seq := []string{"1", "77777", "250000"}
	for _, s := range seq {
		require.NoError(t, f.Do("HSET", ledger.OutcomesKey(0, 1, 7), s, "0:x:").Error())
		f.Exec("INSERT INTO ledger_updates (voucher_id, epoch, seq, partition_id, user_id, verdict) VALUES (7, 1, ?, 0, 0, 'CANCELLED')", s)
	}
	look()
	require.Equal(t, int64(3), f.Number("SELECT COUNT(*) FROM ledger_updates"), "one look does a bounded part")
	for range 3 {
		look()
	}
	require.Zero(t, f.Number("SELECT COUNT(*) FROM ledger_updates"))
	for _, s := range seq {
		outcome, err := f.Do("HGET", ledger.OutcomesKey(0, 1, 7), s).ToString()
		require.NoError(t, err)
		require.Equal(t, s+":x:", outcome)
		require.Error(t, f.Do("HGET", ledger.BuyersKey(0, 1, 7), s).Error(), "the mark is gone")
	}
	require.True(t, g.Status()[0].Open, "%+v", g.Status()[0])
}
