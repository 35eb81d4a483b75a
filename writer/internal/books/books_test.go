package books_test

import (
	"context"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

func newReckoner(f *writertest.Fixture) *books.Reckoner {
	return &books.Reckoner{Store: f.Store, Client: f.Client, Now: time.Now}
}

func TestReckon_FollowsASaleFromDraftToArchive(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	reckoner := newReckoner(f)
	verdict := func(want books.Verdict) books.Books {
		t.Helper()
		got, err := reckoner.Reckon(f.Ctx, 7)
		require.NoError(t, err)
		require.Equal(t, want, got.Verdict, "%v", got.Violations)
		return got
	}
	_, err := reckoner.Reckon(f.Ctx, 7)
	require.ErrorIs(t, err, orderstore.ErrVoucherNotFound)
	now := time.Now().UTC().Truncate(time.Millisecond)
	_, err = f.Store.CreateVoucher(f.Ctx, orderstore.Voucher{ID: 7, Total: 300, BeginAt: now.Add(-time.Minute), EndAt: now.Add(time.Hour)})
	require.NoError(t, err)
	require.Nil(t, verdict(books.Proven).Ledger)

	f.Transition(g, 7, orderstore.StateDraft, orderstore.StateOpen)
	verdict(books.Proven)
	f.Admitted(7, writertest.Users(1, 200)...)
	require.Equal(t, int64(200), verdict(books.InFlight).InFlight)
	f.Drained()
	proven := verdict(books.Proven)
	require.Equal(t, int64(200), proven.Database.Orders)
	require.Equal(t, int64(100), proven.Ledger.Stock)

	f.Transition(g, 7, orderstore.StateOpen, orderstore.StateClosed)
	f.Transition(g, 7, orderstore.StateClosed, orderstore.StateArchived)
	archived := verdict(books.Proven)
	require.Nil(t, archived.Ledger)
	require.Equal(t, int64(200), archived.Database.Orders)
}

// Every number that can be tampered with is named by a rule.
func TestReckon_NamesWhatWasTamperedWith(t *testing.T) {
	voucherKey, buyersKey, metaKey, ordersKey := ledger.VoucherKey(0, 1, 7), ledger.BuyersKey(0, 1, 7), ledger.MetaKey(0), ledger.OrdersKey(0, 1)
	for _, tc := range []struct {
		name   string
		rule   string
		tamper func(f *writertest.Fixture)
		seqs   []int64
	}{
		{"stock in redis", books.RuleLedgerStock, func(f *writertest.Fixture) { f.Do("HINCRBY", voucherKey, "stock", "1") }, nil},
		{"seq in redis", books.RuleLedgerStock, func(f *writertest.Fixture) { f.Do("HINCRBY", voucherKey, "seq", "-1") }, nil},
		{"stock and opening in redis", books.RuleBridgeStock, func(f *writertest.Fixture) {
			f.Do("HINCRBY", voucherKey, "stock", "5")
			f.Do("HINCRBY", voucherKey, "opening", "5")
		}, nil},
		{"a mark", books.RuleLedgerBuyers, func(f *writertest.Fixture) { f.Do("HDEL", buyersKey, "1") }, nil},
		{"settled in redis", books.RuleLedgerSettled, func(f *writertest.Fixture) { f.Do("HINCRBY", voucherKey, "settled", "1") }, nil},
		{"an entry out of nowhere", books.RuleLedgerEntries, func(f *writertest.Fixture) { f.Do("XADD", ordersKey, "*", "v", "1") }, nil},
		{"the count of entries", books.RuleLedgerEntries, func(f *writertest.Fixture) { f.Do("HINCRBY", metaKey, "entries_in", "1") }, nil},
		{"the voucher's ledger", books.RuleLedgerMissing, func(f *writertest.Fixture) { f.Do("DEL", voucherKey) }, nil},
		{"the partition's ledger", books.RuleLedgerMissing, func(f *writertest.Fixture) { f.Do("DEL", metaKey) }, nil},
		{"stock in the database", books.RuleDatabaseStock, func(f *writertest.Fixture) {
			f.Exec("ALTER TABLE vouchers DROP CONSTRAINT vouchers_sum")
			f.Exec("UPDATE vouchers SET stock = stock + 1 WHERE id = 7")
		}, nil},
		{"sold in the database", books.RuleDatabaseSold, func(f *writertest.Fixture) {
			f.Exec("UPDATE vouchers SET stock = stock + 1, sold = sold - 1 WHERE id = 7")
		}, nil},
		{"rows deleted", books.RuleOrdersMissing, func(f *writertest.Fixture) {
			f.Exec("DELETE FROM orders WHERE voucher_id = 7 AND seq IN (3, 150, 200)")
		}, []int64{3, 150, 200}},
		{"a row beyond the ledger", books.RuleDatabaseAhead, func(f *writertest.Fixture) {
			f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 201, 9999, NOW(3))")
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := writertest.New(t, 1)
			g := f.Guardian()
			stop := f.Run(g)
			f.Open(g)
			f.Voucher(g, 7, 300)
			f.Admitted(7, writertest.Users(1, 200)...)
			f.Drained()
			stop()
			tc.tamper(f)
			got, err := newReckoner(f).Reckon(f.Ctx, 7)
			require.NoError(t, err)
			require.Equal(t, books.Violated, got.Verdict)
			byRule := map[string]books.Violation{}
			for _, v := range got.Violations {
				byRule[v.Rule] = v
			}
			require.Contains(t, byRule, tc.rule)
			if tc.seqs != nil {
				var seqs []int64
				for _, o := range byRule[tc.rule].Orders {
					seqs = append(seqs, o.Seq)
				}
				require.Equal(t, tc.seqs, seqs)
			}
		})
	}
}

// Orders are lost while others are still in flight.
func TestReckon_NamesAnEntryThatWasTrimmed(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 300)
	f.Admitted(7, 1, 2)
	f.Admitted(7, 3, 4)
	f.Admitted(7, 5)
	stop()
	entries, err := ledger.Scan(f.Ctx, f.Client, 0, 1, "-", 10)
	require.NoError(t, err)
	require.NoError(t, f.Do("XDEL", ledger.OrdersKey(0, 1), entries[1].ID).Error())
	got, err := newReckoner(f).Reckon(f.Ctx, 7)
	require.NoError(t, err)
	require.Equal(t, books.Violated, got.Verdict)
	var lost []int64
	for _, v := range got.Violations {
		for _, o := range v.Orders {
			lost = append(lost, o.Seq)
		}
	}
	require.Equal(t, []int64{3, 4}, lost)
}

// fake positions: only these seqs have a row.
type rows map[int64]bool

func (r rows) CountPositions(_ context.Context, _, _, from, to int64) (n int64, err error) {
	for seq := from; seq <= to; seq++ {
		if r[seq] {
			n++
		}
	}
	return n, nil
}

func (r rows) MissingSeqs(_ context.Context, _, _, from, to int64, limit int) (missing []int64, err error) {
	for seq := from; seq <= to && len(missing) < limit; seq++ {
		if !r[seq] {
			missing = append(missing, seq)
		}
	}
	return missing, nil
}

// Whatever is split between stream and rows, exactly what is in neither is
// named.
func TestMissing_NamesExactlyWhatIsInNeither(t *testing.T) {
	f := writertest.New(t, 1)
	partition := 1000
	rapid.Check(t, func(rt *rapid.T) {
		partition++
		var want []int64
		rowed := rows{}
		seq := int64(1)
		for range rapid.IntRange(1, 20).Draw(rt, "runs") {
			n := rapid.Int64Range(1, 5).Draw(rt, "orders")
			kind := rapid.SampledFrom([]string{"entry", "rows", "both", "neither"}).Draw(rt, "where")
			if kind == "entry" || kind == "both" {
				var batch []byte
				for i := range n {
					batch = append(batch, ledger.EncodeRecord(seq+i, "", "")...)
				}
				err := f.Client.Do(f.Ctx, f.Client.B().Xadd().Key(ledger.OrdersKey(partition, 1)).Id("*").FieldValue().
					FieldValue("v", ledger.EntryVersion).FieldValue("voucher", "7").FieldValue("epoch", "1").FieldValue("first", itoa(seq)).
					FieldValue("n", itoa(n)).FieldValue("at", "1").FieldValue("orders", string(batch)).Build()).Error()
				require.NoError(rt, err)
			}
			for i := range n {
				if kind == "rows" || kind == "both" {
					rowed[seq+i] = true
				}
				if kind == "neither" {
					want = append(want, seq+i)
				}
			}
			seq += n
		}
		got, err := books.Missing(f.Ctx, rowed, f.Client, partition, 1, map[int64]books.Range{7: {From: 1, To: seq - 1}}, 1000)
		require.NoError(rt, err)
		require.Equal(rt, want, got[7])
	})
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
