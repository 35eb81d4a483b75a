package orderstore

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/orderid"
)

var nasty = []string{
	"", "a", "plain reference-1", `'`, `\`, `\'`, `'' OR 1=1 -- `, `"`, "`", "?", "@user", ":name", "%_", "\x00", "a\x00b", "\x1a", "\n\r\t", "\x7f",
	"ü", "日本語", "😀", "\u2028", "ü'😀\\", "/* */", "#", ";", "_utf8mb4 X'00'", strings.Repeat(`\`, 64), strings.Repeat("'", 64),
	strings.Repeat("😀", 16), "trailing ", " ",
}

func TestAppendString_MeansTheSameInEverySQLMode(t *testing.T) {
	s, err := Open(t.Context(), Options{DSN: devstack.TestDatabase(t)})
	require.NoError(t, err)
	defer s.Close()
	conn, err := s.DB().Conn(t.Context())
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.ExecContext(t.Context(), "CREATE TABLE literals (id INT, v VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin)")
	require.NoError(t, err)
	for i, mode := range []string{sqlMode, "", "NO_BACKSLASH_ESCAPES", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,STRICT_ALL_TABLES"} {
		_, err := conn.ExecContext(t.Context(), "SET SESSION sql_mode = '"+mode+"'")
		require.NoError(t, err)
		for _, want := range nasty {
			var got string
			require.NoError(t, conn.QueryRowContext(t.Context(), string(appendString([]byte("SELECT "), want))).Scan(&got))
			require.Equal(t, want, got, "sql_mode %q", mode)
			_, err := conn.ExecContext(t.Context(), "DELETE FROM literals")
			require.NoError(t, err)
			_, err = conn.ExecContext(t.Context(), string(appendString(fmt.Appendf(nil, "INSERT INTO literals VALUES (%d,", i), want))+")")
			require.NoError(t, err)
			require.NoError(t, conn.QueryRowContext(t.Context(), "SELECT v FROM literals").Scan(&got))
			require.Equal(t, want, got, "stored, sql_mode %q", mode)
		}
	}
}

// Through Persist as well, many in one statement, of several vouchers, epochs'
// neighbours and times: what neighbours share must end where it ends.
func TestPersist_StoresEveryFieldOfEveryRow(t *testing.T) {
	s, err := Open(t.Context(), Options{DSN: devstack.TestDatabase(t)})
	require.NoError(t, err)
	defer s.Close()
	require.NoError(t, migrations.Up(t.Context(), s.DB(), slog.New(slog.DiscardHandler)))
	require.NoError(t, s.InitPartitions(t.Context(), 1))
	begin := time.Date(2030, 1, 2, 3, 4, 5, 999_999_999, time.FixedZone("", 5*3600))
	var orders []Order
	for id := int64(1); id <= 3; id++ {
		_, err := s.CreateVoucher(t.Context(), Voucher{ID: id, Total: 1000, BeginAt: begin, EndAt: begin.Add(time.Hour)})
		require.NoError(t, err)
		for k, reference := range nasty {
			orders = append(orders, Order{
				Position: orderid.Position{VoucherID: id, Epoch: 1, Seq: int64(k + 1)}, UserID: int64(100 + k), Reference: reference,
				AdmittedAt: begin.Add(time.Duration(k/5) * 1234567 * time.Microsecond),
			})
		}
	}
	shuffled := append([]Order(nil), orders...)
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	verdicts, err := s.Persist(t.Context(), shuffled)
	require.NoError(t, err)
	for _, v := range verdicts {
		require.Equal(t, Verdict{Kind: Persisted}, v)
	}
	for _, want := range orders {
		got := Order{Position: want.Position}
		require.NoError(t, s.DB().QueryRowContext(t.Context(), "SELECT user_id, reference, admitted_at FROM orders WHERE voucher_id = ? AND epoch = ? AND seq = ?",
			want.VoucherID, want.Epoch, want.Seq).Scan(&got.UserID, &got.Reference, &got.AdmittedAt))
		want.AdmittedAt = want.AdmittedAt.UTC().Truncate(time.Millisecond)
		require.Equal(t, want, got)
	}
}

// The wave without maps is the wave with them.
func TestBatch_DistinctOrdersNeedNoLookingForFirsts(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var distinct, shared int
	for range 3000 {
		orders := make([]Order, r.IntN(8))
		for i := range orders {
			orders[i] = Order{
				Position: orderid.Position{VoucherID: 1 + r.Int64N(2), Epoch: 1 + r.Int64N(2), Seq: 1 + r.Int64N(12)}, UserID: 1 + r.Int64N(12),
				AdmittedAt: time.Unix(2e9, 0),
			}
		}
		b := newBatch(orders)
		all := b.undecided()
		require.Len(t, all, len(orders))
		firsts := b.firsts(b.undecided())
		sorted := b.undecided()
		b.sortByBuyer(sorted)
		require.Equal(t, len(firsts) == len(all), b.distinct(all, sorted), "%v", orders)
		if len(firsts) == len(all) {
			distinct++
		} else {
			shared++
		}
		require.ElementsMatch(t, firsts, b.wave(), "%v", orders)
		keys, members := b.groups(all)
		var regrouped []int
		for _, g := range keys {
			for _, i := range members[g] {
				require.Equal(t, g, groupOf(&orders[i]))
			}
			regrouped = append(regrouped, members[g]...)
		}
		require.ElementsMatch(t, all, regrouped)
		require.Len(t, members, len(keys))
	}
	require.NotZero(t, distinct)
	require.NotZero(t, shared)
}
