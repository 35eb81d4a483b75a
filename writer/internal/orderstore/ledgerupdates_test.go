package orderstore_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// Whatever is left untold, each update is listed once from one end to the other,
// also many of the same millisecond, while others come and go.
func TestLedgerUpdates_AreListedPageByPage(t *testing.T) {
	f := newFixture(t)
	insert := func(partition, voucher, epoch, seq int64, at string) {
		f.exec("INSERT INTO ledger_updates (voucher_id, epoch, seq, partition_id, user_id, verdict, created_at) VALUES (?, ?, ?, ?, 1, 'CANCELLED', ?)",
			voucher, epoch, seq, partition, at)
	}
	var want []orderid.Position
	for i, created := range []string{"2026-01-01 00:00:00.001", "2026-01-01 00:00:00.002"} {
		for _, p := range []orderid.Position{at(7, 1, 8), at(7, 1, 9), at(7, 2, 1), at(8, 1, 2), at(8, 1, 3)} {
			p.Seq += int64(100 * i)
			insert(0, p.VoucherID, p.Epoch, p.Seq, created)
			want = append(want, p)
		}
	}
	insert(1, 9, 1, 1, "2026-01-01 00:00:00.001")
	for limit := 1; limit <= 11; limit++ {
		var got []orderid.Position
		for cursor := (orderstore.UpdateCursor{}); ; {
			list, next, err := f.LedgerUpdates(f.ctx, 0, cursor, limit)
			require.NoError(t, err)
			for _, u := range list {
				got = append(got, u.Position)
			}
			if cursor = next; next == (orderstore.UpdateCursor{}) {
				break
			}
			require.Len(t, list, limit)
		}
		require.Equal(t, want, got, "pages of %d", limit)
	}

	// What is told meanwhile moves nothing.
	list, next, err := f.LedgerUpdates(f.ctx, 0, orderstore.UpdateCursor{}, 3)
	require.NoError(t, err)
	for _, u := range list {
		require.NoError(t, f.MarkTold(f.ctx, u))
	}
	list, _, err = f.LedgerUpdates(f.ctx, 0, next, 3)
	require.NoError(t, err)
	require.Equal(t, want[3:6], []orderid.Position{list[0].Position, list[1].Position, list[2].Position})
}
