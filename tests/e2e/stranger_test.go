package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
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

// truncated is a Grab that makes the whole entry unreadable: an element that is
// longer than what follows. The entry still tells which positions it stands for.
func truncated(user int64) ledger.Grab {
	return ledger.Grab{UserID: user, Record: []byte{0x0a, 0x7f, 0x08}}
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

// admitMany admits users first..first+n-1 in entries of up to 256.
func admitMany(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, first, n int64) {
	t.Helper()
	for n > 0 {
		var grabs []ledger.Grab
		for range min(n, ledger.MaxBatch) {
			grabs = append(grabs, buy(first))
			first++
		}
		n -= int64(len(grabs))
		admit(ctx, t, s, voucherID, grabs...)
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

// admittedAs writes what an admission of users writes, with fields of the entry
// replaced, as another version of the script or a torn hand would.
func admittedAs(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64, replaced map[string]string, users ...int64) {
	t.Helper()
	partition := ledger.Partition(voucherID, s.Partitions())
	figures, err := s.Ledger(ctx, voucherID)
	require.NoError(t, err)
	n := int64(len(users))
	var orders strings.Builder
	marks := []string{"HSET", ledger.BuyersKey(partition, 1, voucherID)}
	for i, user := range users {
		orders.Write(ledger.EncodeRecord(user, "", ""))
		marks = append(marks, number(user), fmt.Sprintf("1.%da", figures.Seq+int64(i)+1))
	}
	entry := []string{"XADD", ledger.OrdersKey(partition, 1), "*"}
	for _, field := range [][2]string{
		{"v", "1"}, {"voucher", number(voucherID)}, {"epoch", "1"}, {"first", number(figures.Seq + 1)}, {"n", number(n)},
		{"at", number(time.Now().UnixMilli())}, {"orders", orders.String()},
	} {
		value, ok := replaced[field[0]]
		if !ok {
			value = field[1]
		}
		entry = append(entry, field[0], value)
	}
	transaction(ctx, t, s, entry, marks,
		[]string{"HINCRBY", ledger.VoucherKey(partition, 1, voucherID), "stock", number(-n)},
		[]string{"HINCRBY", ledger.VoucherKey(partition, 1, voucherID), "seq", number(n)},
		[]string{"HINCRBY", ledger.MetaKey(partition), "admitted", number(n)},
		[]string{"HINCRBY", ledger.MetaKey(partition), "entries_in", "1"})
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

// calls is how often Redis ran a command so far, in scripts, too.
func calls(ctx context.Context, t *testing.T, s *stack.Stack, commands ...string) (n int64) {
	t.Helper()
	text, err := do(ctx, t, s, "INFO", "commandstats").ToString()
	require.NoError(t, err)
	for line := range strings.Lines(text) {
		for _, command := range commands {
			if rest, ok := strings.CutPrefix(line, "cmdstat_"+command+":calls="); ok {
				count, _, _ := strings.Cut(rest, ",")
				c, err := strconv.ParseInt(count, 10, 64)
				require.NoError(t, err, line)
				n += c
			}
		}
	}
	return n
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

// stored requires the rows of a voucher to be just what callers were told, and
// those of users that got no answer, nothing else.
func stored(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64, answers map[int64]*seckillv1.GrabResponse) {
	t.Helper()
	rows, err := s.Orders(ctx, voucherID)
	require.NoError(t, err)
	byUser := map[int64]orderid.Position{}
	for _, row := range rows {
		byUser[row.UserID] = row.Position
	}
	require.Len(t, byUser, len(rows))
	for user, answer := range answers {
		if answer.GetOutcome() == seckillv1.Outcome_OUTCOME_ADMITTED {
			position, err := s.OrderIDs().Decode(answer.GetOrder().GetOrderId())
			require.NoError(t, err)
			require.Equal(t, position, byUser[user], "user %d", user)
		}
	}
}

// sum adds up a metric over the writers that run.
func sum(ctx context.Context, t *testing.T, s *stack.Stack, metric string) (total float64) {
	t.Helper()
	for _, w := range s.Writers() {
		select {
		case <-w.Done():
			continue
		default:
		}
		n, err := w.Metric(ctx, metric)
		require.NoError(t, err)
		total += n
	}
	return total
}

// requireBusy requires the answer to a Grab beyond the bound on orders in flight.
func requireBusy(t *testing.T, err error, user int64) {
	t.Helper()
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "user %d: %v", user, err)
	requireReason(t, err, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED)
	_, retry := reason(err)
	require.True(t, retry, "user %d: when to try again", user)
}

// serves tells whether a part of a process's health serves.
func serves(ctx context.Context, t *testing.T, p *stack.Process, name string) bool {
	t.Helper()
	text, err := healthz(ctx, p)
	require.NoError(t, err)
	var page struct {
		Parts []struct {
			Name    string `json:"name"`
			Serving bool   `json:"serving"`
		} `json:"parts"`
	}
	require.NoError(t, json.Unmarshal([]byte(text), &page), text)
	for _, part := range page.Parts {
		if part.Name == name {
			return part.Serving
		}
	}
	require.Fail(t, "health has no such part", "%s: %s", name, text)
	return false
}
