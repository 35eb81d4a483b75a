package pipeline_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// admitRaw admits users whose records are given as they are.
func (f *fixture) admitRaw(voucherID int64, first int64, records ...[]byte) {
	f.T.Helper()
	call := ledger.AdmitCall{
		Partition: ledger.Partition(voucherID, f.Partitions), Epoch: 1, VoucherID: voucherID, NotAfter: time.Now().Add(time.Minute),
	}
	call.SHA = ledger.AdmitSHA(call.Partition, 1)
	for i, record := range records {
		call.Grabs = append(call.Grabs, ledger.Grab{UserID: first + int64(i), Record: record})
	}
	reply, err := ledger.Admit(f.Ctx, f.Client, call)
	require.NoError(f.T, err)
	for _, answer := range reply.Answers {
		require.Equal(f.T, ledger.DecisionAdmitted, answer.Decision)
	}
}

// brokenRecord is an element of OrderBatch whose order cannot be used.
func brokenRecord() []byte { return []byte{0x0a, 0x01, 0xff} }

// One order of an entry cannot be read: it alone is held, the others are rows,
// and the entry settles.
func TestPipeline_OrderThatCannotBeReadCostsThatOrderAlone(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	records := make([][]byte, 200)
	for i := range records {
		records[i] = ledger.EncodeRecord(int64(i+1), "", "")
	}
	records[100] = brokenRecord()
	f.admitRaw(7, 1, records...)
	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(199), f.rows(7))
	letters, err := f.Store.DeadLetters(f.Ctx, orderstore.DeadLetterFilter{}, orderstore.DeadLetterID{}, 10)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Equal(t, int64(101), letters[0].Seq)
	require.Equal(t, int64(199), f.Number("SELECT sold FROM vouchers WHERE id = 7"), "a held order takes no stock in the database")
	f.proven(7)
	f.nothingPending(0)
}

// A row that the database refuses among many.
func TestPipeline_OrderThatTheDatabaseRefusesIsHeld(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	f.Exec("ALTER TABLE orders ADD CONSTRAINT test_refused CHECK (user_id <> 77)")
	f.Admitted(7, writertest.Users(1, 256)...)
	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(255), f.rows(7))
	require.Equal(t, int64(1), f.Number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'HELD' AND user_id = 77"))
	letters, err := f.Store.DeadLetters(f.Ctx, orderstore.DeadLetterFilter{UserID: 77}, orderstore.DeadLetterID{}, 10)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Regexp(t, `^the database refuses it: check constraint \(error (4025|3819)\)$`, letters[0].Reason)
	found, err := ledger.FindOrder(f.Ctx, f.Client, 0, 1, 7, 77, 77)
	require.NoError(t, err)
	require.Equal(t, ledger.MarkHeld, found.Mark.State)
	f.proven(7)
}

func TestPipeline_EntryThatCannotBeReadIsHeldForItsPositions(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	// Two elements are announced, the bytes are one and a half.
	f.admitRaw(7, 1, ledger.EncodeRecord(1, "", ""), []byte{0x0a, 0x05, 0x08})
	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Zero(t, f.rows(7))
	letters, err := f.Store.DeadLetters(f.Ctx, orderstore.DeadLetterFilter{}, orderstore.DeadLetterID{}, 10)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Equal(t, int64(2), letters[0].Units)
	f.proven(7)
}

// What nobody admitted stands for nothing; what a newer writer may know is left
// to it. The sale goes on.
func TestPipeline_StrangersEntries(t *testing.T) {
	f := newFixture(t, 2)
	g := f.Guarded()
	f.Voucher(g, 2, 100)
	key := ledger.OrdersKey(0, 1)
	add := func(fields ...string) {
		t.Helper()
		require.NoError(t, f.Do(append([]string{"XADD", key, "*"}, fields...)...).Error())
	}
	record := string(ledger.EncodeRecord(5, "", ""))
	add("v", "99", "orders", "later")
	add("v", "1", "orders", "garbage")
	add("v", "1", "voucher", "3", "epoch", "1", "first", "1", "n", "1", "at", "1", "orders", record)
	add("v", "1", "voucher", "2", "epoch", "9", "first", "1", "n", "1", "at", "1", "orders", record)
	f.Admitted(2, 1, 2)
	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(2), f.rows(2))
	require.Eventually(t, func() bool {
		length, err := f.Do("XLEN", key).AsInt64()
		return err == nil && length == 1
	}, writertest.Patience, 10*time.Millisecond, "only the entry of an unknown version stays")
	require.GreaterOrEqual(t, f.metric("seckill_writer_entries_unknown_version_total"), 1.0)
	n, err := f.Store.CountDeadLetters(f.Ctx, orderstore.DeadLetterFilter{})
	require.NoError(t, err)
	require.Equal(t, int64(3), n)
	require.Zero(t, f.Number("SELECT COUNT(*) FROM orders WHERE voucher_id = 3"))
}

// The row of a voucher is gone: its orders are held, and the guardian is told.
func TestPipeline_OrdersOfAVoucherWithoutARowAreHeld(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2)
	stop()
	f.Exec("DELETE FROM vouchers WHERE id = 7")
	f.Run(f.pipeline(f.options("w1")))
	f.settled(0)
	require.Equal(t, int64(2), f.Number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'HELD'"))
	_, vouchers := f.alarms.heard()
	require.NotEmpty(t, vouchers)
}

// A writer that cannot finish hands back what it holds: a peer takes it at once.
func TestPipeline_StopHandsBackWhatItCannotFinish(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 1000)
	f.Admitted(7, writertest.Users(1, 300)...)
	stuck := f.options("w1")
	stuck.Store, stuck.DrainTimeout, stuck.MinIdle = stalled{}, 200*time.Millisecond, time.Hour
	stop := f.Run(f.pipeline(stuck))
	require.Eventually(t, func() bool {
		ids, err := ledger.PendingIDs(f.Ctx, f.Client, 0, 1, "w1", 10)
		return err == nil && len(ids) == 2
	}, writertest.Patience, 10*time.Millisecond)
	stop()
	consumers, err := ledger.PendingByConsumer(f.Ctx, f.Client, 0, 1)
	require.NoError(t, err)
	require.Len(t, consumers, 1)
	require.Equal(t, ledger.ReleasedConsumer, consumers[0].Consumer)
	require.Equal(t, int64(2), consumers[0].Entries)

	peer := withRegistry(f.options("w2"))
	peer.MinIdle = time.Hour
	f.Run(f.pipeline(peer))
	f.settled(0)
	require.Equal(t, int64(300), f.rows(7))
	f.proven(7)
}

// Entries that somebody adds by hand, with headers that look sound, while the
// guardian watches: none changes a figure, takes a unit or stops the sale.
func TestPipeline_EntriesAddedByHandChangeNothing(t *testing.T) {
	record := string(ledger.EncodeRecord(2, "", ""))
	for name, c := range map[string]struct {
		first, n, orders string
		letters          int64
		// counted tells that the writer must see that nothing was left to count.
		counted bool
	}{
		"an order again that is a row":                 {first: "2", n: "1", orders: record, counted: true},
		"a position that is a row, unreadable":         {first: "2", n: "1", orders: "garbage", letters: 1, counted: true},
		"positions that were never admitted":           {first: "901", n: "3", orders: "garbage", letters: 1},
		"positions half of which were admitted":        {first: "8", n: "2", orders: "garbage", letters: 1},
		"an order that was never admitted":             {first: "901", n: "1", orders: string(ledger.EncodeRecord(77, "", "")), letters: 1},
		"the position that is to be admitted next":     {first: "9", n: "1", orders: string(ledger.EncodeRecord(77, "", "")), letters: 1},
		"a row's position with one never admitted yet": {first: "8", n: "2", orders: string(ledger.EncodeRecord(8, "", "")) + record, letters: 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			g := f.Guarded()
			f.Voucher(g, 7, 100)
			f.Run(f.pipeline(f.options("w1")))
			f.Admitted(7, writertest.Users(1, 8)...)
			f.settled(0)
			before, err := ledger.ReadBooks(f.Ctx, f.Client, 0, 1, 7)
			require.NoError(t, err)

			key := ledger.OrdersKey(0, 1)
			require.NoError(t, f.Do("XADD", key, "*", "v", "1", "voucher", "7", "epoch", "1",
				"first", c.first, "n", c.n, "at", "1", "orders", c.orders).Error())
			require.Eventually(t, func() bool {
				length, err := f.Do("XLEN", key).AsInt64()
				return err == nil && length == 0
			}, writertest.Patience, 10*time.Millisecond)
			after, err := ledger.ReadBooks(f.Ctx, f.Client, 0, 1, 7)
			require.NoError(t, err)
			after.Now = before.Now
			after.Meta.Open, after.Meta.Reason = before.Meta.Open, before.Meta.Reason
			require.Equal(t, before, after)
			require.Equal(t, int64(8), f.rows(7))
			require.Zero(t, f.Number("SELECT COUNT(*) FROM order_outcomes"))
			letters, err := f.Store.CountDeadLetters(f.Ctx, orderstore.DeadLetterFilter{})
			require.NoError(t, err)
			require.Equal(t, c.letters, letters)
			if c.counted {
				require.Eventually(t, func() bool { return f.metric("seckill_writer_stranger_entries_total") == 1 }, writertest.Patience, 10*time.Millisecond)
			}

			// The sale goes on, and the next order has the position that is its own.
			f.Open(g)
			f.Admitted(7, 9, 10)
			f.settled(0)
			require.Equal(t, int64(10), f.rows(7))
			require.Equal(t, int64(9), f.Number("SELECT user_id FROM orders WHERE voucher_id = 7 AND seq = 9"))
			f.proven(7)
			f.nothingPending(0)
			partitions, vouchers := f.alarms.heard()
			require.Empty(t, partitions)
			require.Empty(t, vouchers)
		})
	}
}

// While orders are in flight a stranger's entry may be counted in the place of
// one of them. In the end the books are right.
func TestPipeline_AnEntryAddedByHandAmongOthersLeavesTheBooksRight(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 2000)
	for first := int64(1); first <= 1000; first += 20 {
		f.Admitted(7, writertest.Users(first, 20)...)
		require.NoError(t, f.Do("XADD", ledger.OrdersKey(0, 1), "*", "v", "1", "voucher", "7", "epoch", "1",
			"first", "1", "n", "1", "at", "1", "orders", string(ledger.EncodeRecord(1, "", ""))).Error())
	}
	f.Run(f.pipeline(f.options("w1")))
	require.Eventually(t, func() bool {
		length, err := f.Do("XLEN", ledger.OrdersKey(0, 1)).AsInt64()
		return err == nil && length == 0
	}, writertest.Patience, 10*time.Millisecond)
	f.settled(0)
	require.Equal(t, int64(1000), f.rows(7))
	reading, err := ledger.ReadBooks(f.Ctx, f.Client, 0, 1, 7)
	require.NoError(t, err)
	require.Equal(t, reading.Meta.EntriesIn, reading.Meta.EntriesOut)
	marks, err := f.Do("HVALS", ledger.BuyersKey(0, 1, 7)).AsStrSlice()
	require.NoError(t, err)
	for _, mark := range marks {
		require.Equal(t, byte(ledger.MarkPersisted), mark[len(mark)-1], mark)
	}
	f.proven(7)
}

// Where the ledger cannot tell whether an unreadable entry's positions were
// admitted, the entry waits; once it can, they are held.
func TestPipeline_UnreadableEntryWaitsUntilTheLedgerTells(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	f.admitRaw(7, 1, ledger.EncodeRecord(1, "", ""), []byte{0x0a, 0x05, 0x08})
	stop()
	key := ledger.VoucherKey(0, 1, 7)
	require.NoError(t, f.Do("RENAME", key, key+":away").Error())
	f.Run(f.pipeline(f.options("w1")))
	require.Eventually(t, func() bool { return f.metric("seckill_writer_read_errors_total") > 0 }, writertest.Patience, 10*time.Millisecond)
	require.Zero(t, f.Number("SELECT COUNT(*) FROM dead_entries"))
	require.NoError(t, f.Do("RENAME", key+":away", key).Error())
	f.settled(0)
	require.Equal(t, int64(2), f.Number("SELECT COUNT(*) FROM order_outcomes WHERE kind = 'HELD'"))
	f.proven(7)
}

// A voucher without a ledger has nothing in flight where the database says that
// it never had one, or that it is archived: an entry of it is a stranger's.
func TestPipeline_EntriesOfAVoucherWithoutALedgerStandForNothing(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	const draft, archived = 6, 7 // nobody made 5
	f.Run(f.pipeline(f.options("w1")))
	f.Voucher(g, archived, 100)
	f.Admitted(archived, 1, 2)
	f.settled(0)
	f.Transition(g, archived, orderstore.StateOpen, orderstore.StateClosed)
	f.Transition(g, archived, orderstore.StateClosed, orderstore.StateArchived)
	now := time.Now().UTC().Truncate(time.Millisecond)
	_, err := f.Store.CreateVoucher(f.Ctx, orderstore.Voucher{ID: draft, Title: "test", Total: 10, BeginAt: now, EndAt: now.Add(time.Hour)})
	require.NoError(t, err)

	key := ledger.OrdersKey(0, 1)
	letters := int64(0)
	for _, voucher := range []string{"5", "6", "7"} {
		for _, orders := range []string{"garbage", string(ledger.EncodeRecord(1, "", ""))} {
			require.NoError(t, f.Do("XADD", key, "*", "v", "1", "voucher", voucher, "epoch", "1",
				"first", "1", "n", "1", "at", "1", "orders", orders).Error())
			letters++
		}
	}
	require.Eventually(t, func() bool {
		length, err := f.Do("XLEN", key).AsInt64()
		return err == nil && length == 0
	}, writertest.Patience, 10*time.Millisecond, "a stranger's entry stays for ever")
	n, err := f.Store.CountDeadLetters(f.Ctx, orderstore.DeadLetterFilter{})
	require.NoError(t, err)
	require.Equal(t, letters, n)
	require.Equal(t, int64(2), f.Number("SELECT COUNT(*) FROM orders"))
	require.Zero(t, f.Number("SELECT COUNT(*) FROM order_outcomes"))
	partitions, vouchers := f.alarms.heard()
	require.Empty(t, partitions)
	require.Empty(t, vouchers)
	f.nothingPending(0)
}
