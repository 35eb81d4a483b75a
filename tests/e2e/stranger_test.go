package e2e

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// What tests do to Redis and the database behind the back of gateways and
// writers, and how they look at what came of it.

// do sends a command to Redis.
func do(ctx context.Context, t *testing.T, s *stack.Stack, args ...string) rueidis.RedisResult {
	t.Helper()
	result := s.Client().Do(ctx, s.Client().B().Arbitrary(args[0]).Args(args[1:]...).Build())
	if err := result.Error(); err != nil && !rueidis.IsRedisNil(err) {
		require.NoError(t, err, "%v", args)
	}
	return result
}

// transaction sends commands to Redis as one.
func transaction(ctx context.Context, t *testing.T, s *stack.Stack, commands ...[]string) {
	t.Helper()
	b := s.Client().B()
	all := rueidis.Commands{b.Multi().Build()}
	for _, command := range commands {
		all = append(all, b.Arbitrary(command[0]).Args(command[1:]...).Build())
	}
	all = append(all, b.Exec().Build())
	client, release := s.Client().Dedicate()
	defer release()
	for i, result := range client.DoMulti(ctx, all...) {
		require.NoError(t, result.Error(), "command %d of %v", i, commands)
	}
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

// exec changes the database.
func exec(ctx context.Context, t *testing.T, s *stack.Stack, statement string, args ...any) {
	t.Helper()
	_, err := s.DB().ExecContext(ctx, statement, args...)
	require.NoError(t, err, statement)
}

// whole queries the database for one number.
func whole(ctx context.Context, t *testing.T, s *stack.Stack, query string, args ...any) (n int64) {
	t.Helper()
	require.NoError(t, s.DB().QueryRowContext(ctx, query, args...).Scan(&n), query)
	return n
}

// buy is a Grab with a sound record.
func buy(user int64) ledger.Grab {
	return ledger.Grab{UserID: user, Record: ledger.EncodeRecord(user, "", "")}
}

// undecodable is a Grab whose element of the entry holds no order: the entry is
// sound, its neighbours are not touched.
func undecodable(user int64) ledger.Grab {
	return ledger.Grab{UserID: user, Record: []byte{0x0a, 0x01, 0xff}}
}

// admit runs one admission without a gateway, as one entry.
func admit(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64, grabs ...ledger.Grab) {
	t.Helper()
	partition := ledger.Partition(voucherID, s.Partitions())
	reply, err := ledger.Admit(ctx, s.Client(), ledger.AdmitCall{
		Partition: partition, Epoch: 1, SHA: ledger.AdmitSHA(partition, 1), VoucherID: voucherID,
		NotAfter: time.Now().Add(time.Minute), Grabs: grabs,
	})
	require.NoError(t, err)
	require.Equal(t, ledger.AdmitOK, reply.Status, reply.Detail)
	for _, answer := range reply.Answers {
		require.Equal(t, ledger.DecisionAdmitted, answer.Decision)
	}
}

// forget takes a user's mark away in such a way that the books still hold: the
// user is admitted once more and meets the order that stands.
func forget(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, user int64) {
	t.Helper()
	partition := ledger.Partition(voucherID, s.Partitions())
	transaction(ctx, t, s,
		[]string{"HDEL", ledger.BuyersKey(partition, 1, voucherID), number(user)},
		[]string{"HINCRBY", ledger.VoucherKey(partition, 1, voucherID), "removed", "1"})
}

// mark is what the ledger knows of a user, empty for nothing.
func mark(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, user int64) string {
	t.Helper()
	partition := ledger.Partition(voucherID, s.Partitions())
	text, _ := do(ctx, t, s, "HGET", ledger.BuyersKey(partition, 1, voucherID), number(user)).ToString()
	return text
}

// outcomes counts a voucher's outcomes in the database by kind.
func outcomes(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64) map[string]int {
	t.Helper()
	rows, err := s.DB().QueryContext(ctx, "SELECT kind, COUNT(*) FROM order_outcomes WHERE voucher_id = ? GROUP BY kind", voucherID)
	require.NoError(t, err)
	defer rows.Close()
	kinds := map[string]int{}
	for rows.Next() {
		var kind string
		var n int
		require.NoError(t, rows.Scan(&kind, &n))
		kinds[kind] = n
	}
	require.NoError(t, rows.Err())
	return kinds
}

// unblocked waits until no client of Redis waits for an entry: a paused writer
// would still be given one that its last read waits for.
func unblocked(ctx context.Context, t *testing.T, s *stack.Stack) {
	t.Helper()
	require.Eventually(t, func() bool { return info(ctx, t, s, "clients", "blocked_clients") == 0 }, patience, 5*time.Millisecond)
}

// info reads a number from a section of INFO.
func info(ctx context.Context, t *testing.T, s *stack.Stack, section, field string) int64 {
	t.Helper()
	text, err := do(ctx, t, s, "INFO", section).ToString()
	require.NoError(t, err)
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), field+":"); ok {
			n, err := strconv.ParseInt(rest, 10, 64)
			require.NoError(t, err, line)
			return n
		}
	}
	require.Fail(t, "INFO has no such field", field)
	return 0
}

// nothingPending requires that no consumer of a voucher's partition holds an
// entry and that its stream is empty.
func nothingPending(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64) {
	t.Helper()
	pending, err := s.Pending(ctx, voucherID)
	require.NoError(t, err)
	for _, p := range pending {
		require.Zero(t, p.Entries, "consumer %s", p.Consumer)
	}
	length, err := do(ctx, t, s, "XLEN", ledger.OrdersKey(ledger.Partition(voucherID, s.Partitions()), 1)).AsInt64()
	require.NoError(t, err)
	require.Zero(t, length)
}

// balanced requires the books of a voucher to be proven, with so many rows and
// units left in the ledger.
func balanced(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, rows, left int64) {
	t.Helper()
	// What an operator decided is told to the ledger within moments.
	for until := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		books, err := s.Books(ctx, voucherID)
		if err == nil && books.GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN {
			break
		}
		if time.Now().After(until) {
			require.NoError(t, err)
			require.Fail(t, "the books are not proven", "%v", books)
		}
	}
	n, err := s.Rows(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, rows, n)
	total, stock, sold, err := s.Total(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, rows, sold)
	require.Equal(t, total-rows, stock)
	figures, err := s.Ledger(ctx, voucherID)
	require.NoError(t, err)
	require.Equal(t, left, figures.Stock)
	duplicates, err := s.DuplicateBuyers(ctx, voucherID)
	require.NoError(t, err)
	require.Zero(t, duplicates)
}
