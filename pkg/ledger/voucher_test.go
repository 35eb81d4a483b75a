package ledger

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/orderid"
)

func TestVoucher_IsCreatedOnceAsADraftThatSellsNothing(t *testing.T) {
	b := newEmptyBook(t, sharedClient(t))
	b.voucher.Opening = 10
	require.ErrorIs(t, CreateVoucher(b.ctx, b.client, b.voucher), ErrMissing)
	require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 5, DurabilityStrict, testRunID))
	require.NoError(t, LoadAdmit(b.ctx, b.client, b.partition, epoch))
	stale := b.voucher
	stale.Epoch = epoch - 1
	require.ErrorIs(t, CreateVoucher(b.ctx, b.client, stale), ErrStaleEpoch)
	require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, b.voucher), ErrMissing)

	require.NoError(t, CreateVoucher(b.ctx, b.client, b.voucher))
	books := b.books()
	require.Equal(t, Books{
		Now: books.Now, Exists: true, State: VoucherDraft, Stock: 10, Opening: 10,
		Meta: Meta{Exists: true, Open: true, Epoch: epoch},
	}, books)
	reply, err := Admit(b.ctx, b.client, b.call(1))
	require.NoError(t, err)
	require.Equal(t, AdmitNotFound, reply.Status)

	before := b.snapshot()
	again := b.voucher
	again.Opening = 99
	require.NoError(t, CreateVoucher(b.ctx, b.client, again), "a repeat changes nothing")
	require.Equal(t, before, b.snapshot())
}

func TestCreateVoucher_FaultsHaveNoEffect(t *testing.T) {
	for name, change := range map[string]func(b *book){
		"marks without a voucher":    func(b *book) { b.must("HSET", b.keys()["buyers"], "1", "7.1a") },
		"outcomes without a voucher": func(b *book) { b.must("HSET", b.keys()["outcomes"], "1", "1:h:") },
		"voucher of another type":    func(b *book) { b.must("SET", b.keys()["voucher"], "1") },
		"meta of another type":       func(b *book) { b.must("DEL", b.keys()["meta"]); b.must("SET", b.keys()["meta"], "1") },
	} {
		t.Run(name, func(t *testing.T) {
			b := newEmptyBook(t, sharedClient(t))
			require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
			change(b)
			before := b.snapshot()
			require.ErrorIs(t, CreateVoucher(b.ctx, b.client, b.voucher), ErrFault)
			require.Equal(t, before, b.snapshot())
		})
	}
}

func TestApplyVoucher_OnlyAGreaterRevChangesAnything(t *testing.T) {
	b := newBook(t, 10)
	opened := b.voucher
	b.admit(1, 2)
	b.apply(VoucherPaused)
	b.apply(VoucherOpen)
	b.apply(VoucherClosed)
	before := b.snapshot()
	require.NoError(t, ApplyVoucher(b.ctx, b.client, opened), "a late open after the close is no error")
	require.Equal(t, before, b.snapshot())
	require.Equal(t, VoucherClosed, b.books().State)
	same := b.voucher
	same.State = VoucherOpen
	require.NoError(t, ApplyVoucher(b.ctx, b.client, same))
	require.Equal(t, before, b.snapshot())
	require.Equal(t, []Decision{DecisionEnded}, decisions(b.admit(3)))

	// Ten is greater than nine, as numbers.
	b.voucher.Rev = 8
	b.apply(VoucherPaused)
	b.apply(VoucherOpen)
	require.Equal(t, int64(10), b.books().Rev)
	require.Equal(t, VoucherOpen, b.books().State)
}

func TestApplyVoucher_CarriesTheWholeWantedState(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3)
	b.voucher.Opening = 12
	b.voucher.Begin, b.voucher.End = b.voucher.Begin.Add(time.Millisecond), b.voucher.End.Add(time.Hour)
	b.apply(VoucherPaused)
	books := b.books()
	require.Equal(t, []int64{9, 12, 3}, []int64{books.Stock, books.Opening, books.Seq})
	require.Equal(t, formatInt(b.voucher.Begin.UnixMilli()), b.get(b.keys()["voucher"], "begin_ms"))
	require.Equal(t, formatInt(b.voucher.End.UnixMilli()), b.get(b.keys()["voucher"], "end_ms"))
	b.voucher.Opening = 3
	b.apply(VoucherOpen)
	require.Equal(t, int64(0), b.books().Stock)

	before := b.snapshot()
	less := b.voucher
	less.Opening, less.Rev = 2, less.Rev+1
	require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, less), ErrFault, "fewer units than were admitted")
	require.Equal(t, before, b.snapshot())
}

func TestApplyVoucher_NeverMakesWhatIsMissing(t *testing.T) {
	b := newBook(t, 10)
	next := b.voucher
	next.Rev++
	closed, archived := next, next
	closed.State, archived.State = VoucherClosed, VoucherArchived
	b.must("DEL", b.keys()["voucher"])
	before := b.snapshot()
	for _, v := range []Voucher{next, closed, archived} {
		require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, v), ErrMissing)
	}
	require.Equal(t, before, b.snapshot())
	b.must("DEL", b.keys()["meta"])
	before = b.snapshot()
	for _, v := range []Voucher{next, archived} {
		require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, v), ErrMissing)
	}
	require.Equal(t, before, b.snapshot())
}

func TestApplyVoucher_OfAnotherEpochHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.must("HSET", b.keys()["meta"], "epoch", "8")
	before := b.snapshot()
	next := b.voucher
	next.Rev++
	for _, state := range []VoucherState{VoucherPaused, VoucherArchived} {
		next.State = state
		require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, next), ErrStaleEpoch)
	}
	require.Equal(t, before, b.snapshot())
}

func TestApplyVoucher_AFieldThatIsNoNumberHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	next := b.voucher
	next.Rev++
	next.State = VoucherClosed
	for _, field := range []string{"rev", "stock", "opening"} {
		for _, bad := range []string{"x", "", "-1", "1.5", "nil"} {
			good := b.get(b.keys()["voucher"], field)
			if bad == "nil" {
				b.must("HDEL", b.keys()["voucher"], field)
			} else {
				b.must("HSET", b.keys()["voucher"], field, bad)
			}
			before := b.snapshot()
			require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, next), ErrFault, "%s %q", field, bad)
			require.Equal(t, before, b.snapshot())
			b.must("HSET", b.keys()["voucher"], field, good)
		}
	}
	b.apply(VoucherClosed)
	archive := b.voucher
	archive.Rev++
	archive.State = VoucherArchived
	for _, field := range []string{"seq", "settled"} {
		for _, bad := range []string{"x", "", "nil"} {
			if bad == "nil" {
				b.must("HDEL", b.keys()["voucher"], field)
			} else {
				b.must("HSET", b.keys()["voucher"], field, bad)
			}
			before := b.snapshot()
			require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, archive), ErrFault, "%s %q", field, bad)
			require.Equal(t, before, b.snapshot())
			b.must("HSET", b.keys()["voucher"], field, "0")
		}
	}
	require.NoError(t, ApplyVoucher(b.ctx, b.client, archive))
}

func TestArchive_LeavesATombstone(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2)
	archive := b.voucher
	busy := func(why string) {
		t.Helper()
		archive.Rev, archive.State = b.voucher.Rev+1, VoucherArchived
		before := b.snapshot()
		require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, archive), ErrVoucherBusy, why)
		require.Equal(t, before, b.snapshot())
	}
	busy("open, in flight")
	b.apply(VoucherClosed)
	busy("in flight")
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictHeld)).Settled)
	b.apply(VoucherPaused)
	busy("not closed")
	b.apply(VoucherClosed)
	b.apply(VoucherArchived)

	require.Equal(t, "hash rev="+formatInt(b.voucher.Rev)+" state=archived", b.snapshot()[b.keys()["voucher"]])
	require.NotContains(t, b.snapshot(), b.keys()["buyers"])
	require.NotContains(t, b.snapshot(), b.keys()["outcomes"])
	books := b.books()
	require.True(t, books.Exists)
	require.Equal(t, VoucherArchived, books.State)
	require.Equal(t, b.voucher.Rev, books.Rev)

	// A repeat finishes what was cut short, and an older change finds a greater rev.
	b.must("HSET", b.keys()["buyers"], "1", "7.1p")
	require.NoError(t, ApplyVoucher(b.ctx, b.client, b.voucher))
	require.NotContains(t, b.snapshot(), b.keys()["buyers"])
	before := b.snapshot()
	late := b.voucher
	late.State, late.Rev = VoucherOpen, late.Rev-1
	require.NoError(t, ApplyVoucher(b.ctx, b.client, late))
	late.Rev = b.voucher.Rev + 1
	require.ErrorIs(t, ApplyVoucher(b.ctx, b.client, late), ErrFault, "there is no way back")
	require.NoError(t, CreateVoucher(b.ctx, b.client, b.voucher))
	require.Equal(t, before, b.snapshot())
}

func TestReadBooks_OfWhatIsMissing(t *testing.T) {
	b := newEmptyBook(t, sharedClient(t))
	books := b.books()
	require.Equal(t, Books{Now: books.Now}, books)
	require.WithinDuration(t, time.Now(), books.Now, patience)
	require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
	books = b.books()
	require.Equal(t, Books{Now: books.Now, Meta: Meta{Exists: true, Epoch: epoch}}, books)
}

func TestReadBooks_AFigureThatIsNoNumberIsAFault(t *testing.T) {
	b := newBook(t, 10)
	for name, fields := range map[string][]string{
		"meta":    {"epoch", "admitted", "settled", "entries_in", "entries_out"},
		"voucher": {"rev", "stock", "opening", "seq", "returned", "settled", "carried", "removed"},
	} {
		for _, field := range fields {
			for _, bad := range []string{"x", "", "-1"} {
				good := b.get(b.keys()[name], field)
				b.must("HSET", b.keys()[name], field, bad)
				_, err := ReadBooks(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID)
				require.ErrorIs(t, err, ErrFault, "%s %s %q", name, field, bad)
				b.must("HSET", b.keys()[name], field, good)
			}
		}
	}
	for _, name := range []string{"meta", "voucher", "buyers", "orders"} {
		b := newBook(t, 10)
		b.must("DEL", b.keys()[name])
		b.must("SET", b.keys()[name], "1")
		_, err := ReadBooks(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID)
		require.ErrorIs(t, err, ErrFault, name)
	}
}

func TestFindOrder_TellsMarkStateAndOutcome(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	find := func(user, seq int64) Lookup {
		t.Helper()
		lookup, err := FindOrder(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID, user, seq)
		require.NoError(t, err)
		return lookup
	}
	lookup := find(1, 1)
	require.True(t, lookup.Meta.Open)
	require.Equal(t, VoucherOpen, lookup.Voucher)
	require.Equal(t, &Mark{Epoch: epoch, Seq: 1, State: MarkAdmitted}, lookup.Mark)
	require.Equal(t, orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: epoch, Seq: 1}, lookup.Mark.Position(b.voucher.VoucherID))
	require.Equal(t, Outcome{}, lookup.Outcome)
	require.Nil(t, find(2, 0).Mark)

	b.must("HSET", b.keys()["outcomes"], "0", "1:h:")
	require.Equal(t, Outcome{}, find(1, 0).Outcome, "seq 0 asks for none")
	for _, bad := range []string{"", "1", "1:h", "x:h:", "1::", "1:hh:", "1:c:7", "1:c:0.1"} {
		b.must("HSET", b.keys()["outcomes"], "1", bad)
		_, err := FindOrder(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID, 1, 1)
		require.ErrorIs(t, err, ErrFault, "%q", bad)
	}
	b.must("HSET", b.keys()["buyers"], "1", "mark")
	_, err := FindOrder(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID, 1, 0)
	require.ErrorIs(t, err, ErrFault)
	for _, name := range []string{"meta", "voucher", "buyers", "outcomes"} {
		b := newBook(t, 1)
		b.must("DEL", b.keys()[name])
		b.must("SET", b.keys()[name], "1")
		_, err := FindOrder(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID, 1, 1)
		require.ErrorIs(t, err, ErrFault, name)
	}
	empty := newEmptyBook(t, b.client)
	lookup, err = FindOrder(b.ctx, b.client, empty.partition, epoch, 1, 1, 1)
	require.NoError(t, err)
	require.Equal(t, Lookup{}, lookup)
}
