//go:build fleet

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

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
