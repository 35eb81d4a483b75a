package guardian_test

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// An entry of an unknown version is never taken for nothing: it is admitted
// orders that a newer writer can read, or somebody put it there.
func TestGuardian_EntryOfAnUnknownVersionIsNamed(t *testing.T) {
	f := writertest.New(t, 1)
	registry := prometheus.NewRegistry()
	g := changed(f, func(o *guardian.Options) { o.Registerer = registry })
	f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2)
	f.Drained()
	ordersKey := ledger.OrdersKey(0, 1)
	reckon := func() books.Books {
		t.Helper()
		reckoner := books.Reckoner{Store: f.Store, Client: f.Client, Now: time.Now}
		reckoning, err := reckoner.Reckon(f.Ctx, 7)
		require.NoError(t, err)
		return reckoning
	}
	// health is that of the partition, which stays open all the while.
	health := func(reason string) {
		t.Helper()
		require.Eventually(t, func() bool {
			part := g.Health()[0]
			require.True(t, part.Serving, part.Reason)
			return part.Reason == reason
		}, writertest.Patience, 10*time.Millisecond, "want %q", reason)
	}
	// read has a writer meet what is in the stream, while others buy.
	read := func(user int64) {
		t.Helper()
		f.Admitted(7, user)
		stop := f.Run(f.Pipeline("w"))
		require.Eventually(t, func() bool {
			return f.Number("SELECT COUNT(*) FROM orders WHERE user_id = ?", user) == 1
		}, writertest.Patience, 10*time.Millisecond, "the sale goes on")
		stop()
	}
	health("")

	t.Run("admitted by a newer gateway", func(t *testing.T) {
		f.Admitted(7, 3, 4)
		entries, err := ledger.Scan(f.Ctx, f.Client, 0, 1, "-", 10)
		require.NoError(t, err)
		require.Len(t, entries, 1)
		// rewritten puts the entry in place of another one, as of a version.
		rewritten := func(id, version string) {
			t.Helper()
			args := []string{"EVAL", `redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) redis.call('XDEL', KEYS[1], ARGV[2])
				return redis.call('XADD', KEYS[1], '*', 'v', unpack(ARGV, 3))`, "1", ordersKey, ledger.Group, id, version}
			for name, value := range entries[0].Fields {
				if name != "v" {
					args = append(args, name, value)
				}
			}
			require.NoError(t, f.Do(args...).Error())
		}
		rewritten(entries[0].ID, "99")
		read(5)
		got := reckon()
		require.Equal(t, books.InFlight, got.Verdict, "%v", got.Violations)
		require.Equal(t, int64(2), got.InFlight)
		left, err := ledger.Scan(f.Ctx, f.Client, 0, 1, "-", 10)
		require.NoError(t, err)
		require.Len(t, left, 1)
		health("entry " + left[0].ID + " is of an unknown version and left to a newer writer")
		require.Empty(t, g.Status()[0].Alarm, "it is not lost")
		// A writer that can read it comes.
		rewritten(left[0].ID, ledger.EntryVersion)
		f.Drained()
		require.Equal(t, books.Proven, reckon().Verdict)
		health("")
	})

	t.Run("of nobody", func(t *testing.T) {
		id, err := f.Do("XADD", ordersKey, "*", "v", "99", "orders", "later").ToString()
		require.NoError(t, err)
		read(6)
		got := reckon()
		require.Equal(t, books.Violated, got.Verdict, "somebody wrote to the ledger")
		require.Len(t, got.Violations, 1)
		require.Equal(t, books.RuleLedgerEntries, got.Violations[0].Rule)
		require.Equal(t, books.Undersell, got.Violations[0].Drift)
		health("ledger_entries: voucher 7: the stream has 1 entries, not entries in 4 - entries out 4; entry " + id +
			" is of an unknown version and left to a newer writer")
		families, err := registry.Gather()
		require.NoError(t, err)
		named := false
		for _, family := range families {
			named = named || (family.GetName() == "seckill_books_violations" && len(family.GetMetric()) == 1 && family.GetMetric()[0].GetGauge().GetValue() == 1)
		}
		require.True(t, named)
		require.NoError(t, f.Do("XACK", ordersKey, ledger.Group, id).Error())
		require.NoError(t, f.Do("XDEL", ordersKey, id).Error())
		health("")
		require.Equal(t, books.Proven, reckon().Verdict)
	})
}
