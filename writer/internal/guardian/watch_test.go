package guardian_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// named waits until the running guardian names a rule, as the reason why the
// partition is closed or as an alarm, and tells which.
func named(t *testing.T, g *guardian.Guardian, rule string) guardian.Status {
	t.Helper()
	began := time.Now()
	require.Eventually(t, func() bool {
		status := g.Status()[0]
		return strings.Contains(status.Reason, rule) || strings.Contains(status.Alarm, rule)
	}, writertest.Patience, 10*time.Millisecond, "want %s, have %+v", rule, g.Status()[0])
	took := time.Since(began)
	t.Logf("%s was named after %v", rule, took.Round(time.Millisecond))
	require.Less(t, took, 5*time.Second, rule)
	return g.Status()[0]
}

// Each number is tampered with in a sale of 100,000 orders that goes on, and
// put right again.
func TestGuardian_BooksNameEveryNumberThatIsTamperedWith(t *testing.T) {
	if testing.Short() {
		t.Skip("100,000 orders")
	}
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 200_000)
	f.Admitted(7, writertest.Users(1, 100_000)...)
	f.Drained()
	stop()
	voucherKey, buyersKey, metaKey, ordersKey := ledger.VoucherKey(0, 1, 7), ledger.BuyersKey(0, 1, 7), ledger.MetaKey(0), ledger.OrdersKey(0, 1)
	redis := func(args ...string) func() {
		return func() { t.Helper(); require.NoError(t, f.Do(args...).Error()) }
	}
	var entry string
	for _, tc := range []struct {
		name     string
		rule     string
		tamper   func()
		closes   bool
		seq      string
		putRight func()
	}{
		{name: "stock in redis, up", rule: books.RuleLedgerStock, closes: true,
			tamper: redis("HINCRBY", voucherKey, "stock", "1"), putRight: redis("HINCRBY", voucherKey, "stock", "-1")},
		{name: "stock in redis, down", rule: books.RuleLedgerStock, closes: false,
			tamper: redis("HINCRBY", voucherKey, "stock", "-1"), putRight: redis("HINCRBY", voucherKey, "stock", "1")},
		{name: "a mark removed", rule: books.RuleLedgerBuyers, closes: true,
			tamper: redis("HDEL", buyersKey, "77"), putRight: redis("HSET", buyersKey, "77", "1.77p")},
		{name: "a mark added", rule: books.RuleLedgerBuyers, closes: false,
			tamper: redis("HSET", buyersKey, "999999999", "1.77p"), putRight: redis("HDEL", buyersKey, "999999999")},
		{name: "an entry trimmed", rule: books.RuleLedgerEntries, closes: true,
			tamper: redis("HINCRBY", metaKey, "entries_in", "1"), putRight: redis("HINCRBY", metaKey, "entries_in", "-1")},
		{name: "a stranger's entry", rule: books.RuleLedgerEntries, closes: false,
			tamper: func() {
				var err error
				entry, err = f.Do("XADD", ordersKey, "*", "v", "99").ToString()
				require.NoError(t, err)
			},
			putRight: func() { require.NoError(t, f.Do("XDEL", ordersKey, entry).Error()) }},
		{name: "stock in the database", rule: books.RuleBridgeStock, closes: true,
			tamper:   func() { f.Exec("UPDATE vouchers SET stock = stock - 1, total = total - 1 WHERE id = 7") },
			putRight: func() { f.Exec("UPDATE vouchers SET stock = stock + 1, total = total + 1 WHERE id = 7") }},
		{name: "sold in the database", rule: books.RuleDatabaseSold, closes: true,
			tamper:   func() { f.Exec("UPDATE vouchers SET stock = stock + 1, sold = sold - 1 WHERE id = 7") },
			putRight: func() { f.Exec("UPDATE vouchers SET stock = stock - 1, sold = sold + 1 WHERE id = 7") }},
		{name: "a row deleted", rule: books.RuleOrdersMissing, closes: true, seq: "[54321]",
			tamper: func() { f.Exec("DELETE FROM orders WHERE voucher_id = 7 AND seq = 54321") },
			putRight: func() {
				f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 54321, 54321, NOW(3))")
			}},
		{name: "a row of a seq that was never given", rule: books.RuleDatabaseAhead, closes: true,
			tamper: func() {
				f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 100001, 999999999, NOW(3))")
			},
			putRight: func() { f.Exec("DELETE FROM orders WHERE voucher_id = 7 AND seq = 100001") }},
		{name: "a seq twice", rule: books.RuleDatabaseSold, closes: true,
			tamper: func() {
				f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 2, 54321, 999999999, NOW(3))")
			},
			putRight: func() { f.Exec("DELETE FROM orders WHERE voucher_id = 7 AND epoch = 2") }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := f.Guardian()
			stop := f.Run(g)
			f.Open(g)
			tc.tamper()
			status := named(t, g, tc.rule)
			require.Contains(t, status.Reason+status.Alarm, tc.seq)
			if tc.closes {
				closed(t, g, 0, "books violated: ")
			} else {
				require.Never(t, func() bool { return !g.Status()[0].Open }, 500*time.Millisecond, 20*time.Millisecond)
			}
			tc.putRight()
			f.Open(g)
			stop()
		})
	}
}

// Orders that are in flight for longer than the alarm age are not lost.
func TestGuardian_BacklogIsNoViolation(t *testing.T) {
	f := writertest.New(t, 1)
	g := f.Guardian()
	g.AlarmAge = 50 * time.Millisecond
	f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 1000)
	f.Admitted(7, writertest.Users(1, 500)...)
	require.Never(t, func() bool { s := g.Status()[0]; return !s.Open || s.Alarm != "" }, 2*time.Second, 10*time.Millisecond)
}
