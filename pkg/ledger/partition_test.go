package ledger

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPartition_IsTheRemainder(t *testing.T) {
	for _, c := range []struct {
		voucher          int64
		partitions, want int
	}{{1, 1, 0}, {8, 8, 0}, {9, 8, 1}, {1<<63 - 1, 8, 7}, {1<<63 - 1, 1, 0}} {
		require.Equal(t, c.want, Partition(c.voucher, c.partitions))
	}
}

func TestKeys_AreTheContractsAndShareTheHashTag(t *testing.T) {
	require.Equal(t, "sk:{3}:meta", MetaKey(3))
	require.Equal(t, "sk:{3}:e7:voucher:9223372036854775807", VoucherKey(3, 7, 1<<63-1))
	require.Equal(t, "sk:{3}:e7:buyers:11", BuyersKey(3, 7, 11))
	require.Equal(t, "sk:{3}:e7:outcomes:11", OutcomesKey(3, 7, 11))
	require.Equal(t, "sk:{3}:e7:orders", OrdersKey(3, 7))
	require.Equal(t, "sk:layout", LayoutKey)
}

func TestPartition_FromCreationToClosing(t *testing.T) {
	b := newEmptyBook(t, sharedClient(t))
	meta := func() Meta {
		t.Helper()
		m, err := ReadMeta(b.ctx, b.client, b.partition)
		require.NoError(t, err)
		return m
	}
	require.Equal(t, Meta{}, meta())
	require.ErrorIs(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 5, DurabilityStrict, testRunID), ErrMissing)
	require.ErrorIs(t, ClosePartition(b.ctx, b.client, b.partition, epoch, "x"), ErrMissing)
	require.Equal(t, map[string]string{}, b.snapshot(), "missing is never made here")

	require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
	require.Equal(t, Meta{Exists: true, Epoch: epoch, Reason: "created", Bound: 5}, meta())
	before := b.snapshot()
	require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5), "a repeat after a crash")
	require.Equal(t, before, b.snapshot())

	before = b.snapshot()
	require.ErrorIs(t, OpenPartition(b.ctx, b.client, b.partition, epoch+1, 5, DurabilityStrict, testRunID), ErrStaleEpoch)
	require.ErrorIs(t, ClosePartition(b.ctx, b.client, b.partition, epoch+1, "x"), ErrStaleEpoch)
	require.ErrorIs(t, ClosePartition(b.ctx, b.client, b.partition, epoch-1, "x"), ErrStaleEpoch)
	require.Equal(t, before, b.snapshot())

	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 6, DurabilityFast, testRunID))
	require.Equal(t, Meta{
		Exists: true, Epoch: epoch, Open: true, Durability: DurabilityFast, Bound: 6, RunID: testRunID,
		AdmitSHA: AdmitSHA(b.partition, epoch),
	}, meta())
	require.NoError(t, ClosePartition(b.ctx, b.client, b.partition, epoch, "operator"))
	require.False(t, meta().Open)
	require.Equal(t, "operator", meta().Reason)
	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 6, DurabilityFast, testRunID))
	require.Empty(t, meta().Reason)
}

func TestTunePartition_ChangesAnOpenPartitionAndOpensNone(t *testing.T) {
	b := newEmptyBook(t, sharedClient(t))
	tune := func(epoch int64) error {
		return TunePartition(b.ctx, b.client, b.partition, epoch, 9, DurabilityFast)
	}
	require.ErrorIs(t, tune(epoch), ErrMissing)
	require.Equal(t, map[string]string{}, b.snapshot(), "missing is never made here")

	require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
	closed := func(reason string) {
		t.Helper()
		before := b.snapshot()
		require.ErrorIs(t, tune(epoch), ErrClosed)
		require.ErrorContains(t, tune(epoch), reason)
		require.Equal(t, before, b.snapshot())
	}
	closed("created")
	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 5, DurabilityStrict, testRunID))
	before := b.snapshot()
	require.ErrorIs(t, tune(epoch+1), ErrStaleEpoch)
	require.ErrorIs(t, tune(epoch-1), ErrStaleEpoch)
	require.Equal(t, before, b.snapshot())

	want, err := ReadMeta(b.ctx, b.client, b.partition)
	require.NoError(t, err)
	require.NoError(t, tune(epoch))
	want.Bound, want.Durability = 9, DurabilityFast
	got, err := ReadMeta(b.ctx, b.client, b.partition)
	require.NoError(t, err)
	require.Equal(t, want, got, "and nothing else")

	require.NoError(t, ClosePartition(b.ctx, b.client, b.partition, epoch, "operator"))
	closed("operator")
	b.must("HDEL", b.keys()["meta"], "reason")
	closed("")
	require.NoError(t, ClosePartition(b.ctx, b.client, b.partition, epoch, FaultPrefix+"seen by a writer"))
	closed("seen by a writer")
	b.must("DEL", b.keys()["meta"])
	b.must("SET", b.keys()["meta"], "1")
	require.ErrorIs(t, tune(epoch), ErrFault)
}

func TestPartition_FaultIsNeitherOpenedNorGivesWayToAnotherReason(t *testing.T) {
	b := newEmptyBook(t, sharedClient(t))
	require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 5, DurabilityStrict, testRunID))
	require.NoError(t, ClosePartition(b.ctx, b.client, b.partition, epoch, FaultPrefix+"seen by a writer"))
	before := b.snapshot()
	require.ErrorIs(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 5, DurabilityStrict, testRunID), ErrFaulty)
	require.NoError(t, ClosePartition(b.ctx, b.client, b.partition, epoch, "a check failed"))
	require.Equal(t, before, b.snapshot())
}

func TestCreatePartition_RefusesWhereAnythingWasInUse(t *testing.T) {
	for name, c := range map[string]struct {
		change func(b *book)
		want   error
	}{
		"another epoch": {func(b *book) { b.must("HSET", b.keys()["meta"], "epoch", "6") }, ErrLedgerInUse},
		"no epoch":      {func(b *book) { b.must("HDEL", b.keys()["meta"], "epoch") }, ErrLedgerInUse},
		"open": {func(b *book) {
			require.NoError(b.t, OpenPartition(b.ctx, b.client, b.partition, epoch, 5, DurabilityStrict, testRunID))
		}, ErrLedgerInUse},
		"orders were admitted": {func(b *book) { b.must("HSET", b.keys()["meta"], "admitted", "1") }, ErrLedgerInUse},
		"the stream is gone":   {func(b *book) { b.must("DEL", b.keys()["orders"]) }, ErrLedgerInUse},
		"meta is gone":         {func(b *book) { b.must("DEL", b.keys()["meta"]); b.must("XADD", b.keys()["orders"], "*", "v", "1") }, ErrLedgerInUse},
		"meta of another type": {func(b *book) { b.must("DEL", b.keys()["meta"]); b.must("SET", b.keys()["meta"], "1") }, ErrFault},
		"stream of another type": {func(b *book) {
			b.must("DEL", b.keys()["meta"], b.keys()["orders"])
			b.must("SET", b.keys()["orders"], "1")
		}, ErrFault},
	} {
		t.Run(name, func(t *testing.T) {
			b := newEmptyBook(t, sharedClient(t))
			require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
			c.change(b)
			before := b.snapshot()
			require.ErrorIs(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5), c.want)
			require.Equal(t, before, b.snapshot())
		})
	}
}

func TestCreatePartition_GoesOnAfterItWasCutShort(t *testing.T) {
	b := newEmptyBook(t, sharedClient(t))
	require.Error(t, CreatePartition(b.ctx, b.aclUser(sharedAddr(t), "-xgroup"), b.partition, epoch, 5))
	require.Equal(t, map[string]string{}, b.snapshot())
	require.Error(t, CreatePartition(b.ctx, b.aclUser(sharedAddr(t), "-hset"), b.partition, epoch, 5))
	require.Len(t, b.snapshot(), 1, "a stream with its group")
	require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, epoch, 5))
	require.Len(t, b.snapshot(), 2)
}

func TestReadMeta_AFieldThatIsNoNumberIsAFault(t *testing.T) {
	b := newBook(t, 1)
	for _, field := range []string{"epoch", "bound", "admitted", "settled", "entries_in", "entries_out"} {
		for _, bad := range []string{"x", "", "-1"} {
			good := b.get(b.keys()["meta"], field)
			b.must("HSET", b.keys()["meta"], field, bad)
			_, err := ReadMeta(b.ctx, b.client, b.partition)
			require.ErrorIs(t, err, ErrFault, "%s %q", field, bad)
			b.must("HSET", b.keys()["meta"], field, good)
		}
	}
	b.must("DEL", b.keys()["meta"])
	b.must("SET", b.keys()["meta"], "1")
	_, err := ReadMeta(b.ctx, b.client, b.partition)
	require.ErrorIs(t, err, ErrFault)
}

func TestMeta_CountsWhatIsInFlight(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2)
	b.admit(3)
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	meta, err := ReadMeta(b.ctx, b.client, b.partition)
	require.NoError(t, err)
	require.Equal(t, []int64{3, 2, 2, 1, 1}, []int64{meta.Admitted, meta.Settled, meta.EntriesIn, meta.EntriesOut, meta.InFlight()})
}

func TestLayout_TheFirstWriterDecides(t *testing.T) {
	b := newEmptyBook(t, sharedClient(t))
	b.must("DEL", LayoutKey)
	_, err := ReadLayout(b.ctx, b.client)
	require.ErrorIs(t, err, ErrMissing)

	first := Layout{Partitions: 8, Keys: map[int]string{0: "abc"}, EntryVersion: EntryVersion}
	got, err := WriteLayout(b.ctx, b.client, first)
	require.NoError(t, err)
	require.Equal(t, first, got)
	got, err = WriteLayout(b.ctx, b.client, Layout{Partitions: 4, Keys: map[int]string{0: "xyz", 1: "def"}, EntryVersion: "2"})
	require.NoError(t, err)
	want := Layout{Partitions: 8, Keys: map[int]string{0: "abc", 1: "def"}, EntryVersion: EntryVersion}
	require.Equal(t, want, got)
	got, err = ReadLayout(b.ctx, b.client)
	require.NoError(t, err)
	require.Equal(t, want, got)

	// What a crash left out is added.
	b.must("HDEL", LayoutKey, "partitions")
	_, err = ReadLayout(b.ctx, b.client)
	require.ErrorIs(t, err, ErrFault)
	got, err = WriteLayout(b.ctx, b.client, first)
	require.NoError(t, err)
	require.Equal(t, want, got)

	b.must("HSET", LayoutKey, "order_key_x", "1")
	_, err = ReadLayout(b.ctx, b.client)
	require.ErrorIs(t, err, ErrFault)
	b.must("HDEL", LayoutKey, "order_key_x")
	for _, bad := range []string{"", "0", "-1", "x"} {
		b.must("HSET", LayoutKey, "partitions", bad)
		_, err = ReadLayout(b.ctx, b.client)
		require.ErrorIs(t, err, ErrFault)
	}
	b.must("DEL", LayoutKey)
	b.must("SET", LayoutKey, "1")
	_, err = WriteLayout(b.ctx, b.client, first)
	require.ErrorIs(t, err, ErrFault)
	_, err = ReadLayout(b.ctx, b.client)
	require.ErrorIs(t, err, ErrFault)
	b.must("DEL", LayoutKey)
}

// A writer must be able to start there, or nothing would be settled and memory
// never freed.
func TestLayout_IsFoundWhenMemoryIsFull(t *testing.T) {
	client := connect(t, ownServer(t).Addr(), "")
	layout := Layout{Partitions: 1, EntryVersion: EntryVersion, Keys: map[int]string{0: "k"}}
	_, err := WriteLayout(t.Context(), client, layout)
	require.NoError(t, err)
	require.NoError(t, client.Do(t.Context(), client.B().Arbitrary("CONFIG", "SET", "maxmemory", "1").Build()).Error())
	got, err := WriteLayout(t.Context(), client, layout)
	require.NoError(t, err)
	require.Equal(t, layout, got)
	layout.Keys[1] = "new"
	_, err = WriteLayout(t.Context(), client, layout)
	require.ErrorIs(t, err, ErrRefused, "what is missing cannot be written")
}
