package guardian_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// A writer could not read an entry, held it and died; one that can read it
// settles it. Then the entry is cancelled.
func TestGuardian_EntryHeldByAWriterThatCouldNotReadItIsCancelled(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 5)
	raw, err := ledger.Scan(f.Ctx, f.Client, 0, 1, "-", 10)
	require.NoError(t, err)
	require.Len(t, raw, 1)
	_, err = f.Store.HoldEntry(f.Ctx, orderstore.DeadEntry{PartitionID: 0, Epoch: 1, EntryID: raw[0].ID, Raw: []byte("x"), Reason: "test", VoucherID: 7, FirstSeq: 1, Units: 1})
	require.NoError(t, err)
	f.Drained()
	letters, err := f.Store.DeadLetters(f.Ctx, orderstore.DeadLetterFilter{}, orderstore.DeadLetterID{}, 10)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	_, err = f.Store.Cancel(f.Ctx, letters[0].ID, "op", "test")
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		updates, _, err := f.Store.LedgerUpdates(f.Ctx, 0, orderstore.UpdateCursor{}, 10)
		return err == nil && len(updates) == 0
	}, writertest.Patience, 10*time.Millisecond)
	reckoner := books.Reckoner{Store: f.Store, Client: f.Client, Now: time.Now}
	reckoning, err := reckoner.Reckon(f.Ctx, 7)
	require.NoError(t, err)
	require.Equal(t, books.Proven, reckoning.Verdict, "%+v", reckoning.Violations)
}
