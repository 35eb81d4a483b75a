package guardian_test

import (
	"context"
	"strings"
	"sync/atomic"
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
	var status guardian.Status
	require.Eventually(t, func() bool {
		status = g.Status()[0]
		return strings.Contains(status.Reason, rule) || strings.Contains(status.Alarm, rule)
	}, writertest.Patience, 10*time.Millisecond, "want %s, have %+v", rule, &status)
	took := time.Since(began)
	t.Logf("%s was named after %v", rule, took.Round(time.Millisecond))
	require.Less(t, took, 5*time.Second, rule)
	return status
}

// traffic has users buy and a writer write until stop is called.
func traffic(f *writertest.Fixture, voucherID int64) (stop func()) {
	f.T.Helper()
	ctx, cancel := context.WithCancel(f.Ctx)
	stopWriter := f.Run(f.Pipeline("traffic"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ticker := time.NewTicker(100 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				ticker.Stop()
				return
			case <-ticker.C:
				user := buyers.Add(3)
				_, _ = f.Admit(voucherID, user, user+1, user+2) // refused while the partition is closed
			}
		}
	}()
	return func() { cancel(); <-done; stopWriter() }
}

// buyers counts the users of all traffic.
var buyers atomic.Int64

// Each number is tampered with in a sale of nearly 100,000 orders that goes on,
// and put right again.
func TestGuardian_BooksNameEveryNumberThatIsTamperedWith(t *testing.T) {
	if testing.Short() {
		t.Skip("100,000 orders")
	}
	f := writertest.New(t, 1)
	g := f.Guardian()
	stop := f.Run(g)
	f.Open(g)
	f.Voucher(g, 7, 200_000)
	f.Admitted(7, writertest.Users(1, 98_000)...)
	f.Drained()
	stop()
	buyers.Store(1_000_000)
	voucherKey, buyersKey, ordersKey := ledger.VoucherKey(0, 1, 7), ledger.BuyersKey(0, 1, 7), ledger.OrdersKey(0, 1)
	redis := func(args ...string) func() {
		return func() { t.Helper(); require.NoError(t, f.Do(args...).Error()) }
	}
	seq := func(text string) func() string { return func() string { return text } }
	// The three entries that are in flight when the stream is tampered with, of
	// which the first ones vanish.
	var inFlight []ledger.RawEntry
	admitThree := func() {
		t.Helper()
		for range 3 {
			f.Admitted(7, buyers.Add(3))
		}
		var err error
		inFlight, err = ledger.Scan(f.Ctx, f.Client, 0, 1, "-", 10)
		require.NoError(t, err)
		require.Len(t, inFlight, 3)
	}
	seqsOf := func(from, to int) func() string {
		return func() string {
			var seqs []string
			for _, raw := range inFlight[from:to] {
				seqs = append(seqs, raw.Fields["first"])
			}
			return "seq [" + strings.Join(seqs, " ") + "]"
		}
	}
	addAgain := func(from, to int) func() {
		return func() {
			t.Helper()
			for _, raw := range inFlight[from:to] {
				args := []string{"XADD", ordersKey, "*"}
				for name, value := range raw.Fields {
					args = append(args, name, value)
				}
				require.NoError(t, f.Do(args...).Error())
			}
		}
	}
	var stranger string
	for _, tc := range []struct {
		name   string
		rule   string
		tamper func()
		closes bool
		// seq is what must be named besides the rule.
		seq      func() string
		putRight func()
		// quiet is for what shows only with nothing in flight, and for what needs
		// entries that nobody takes.
		quiet bool
	}{
		{name: "stock in redis, up", rule: books.RuleLedgerStock, closes: true,
			tamper: redis("HINCRBY", voucherKey, "stock", "1"), putRight: redis("HINCRBY", voucherKey, "stock", "-1")},
		{name: "stock in redis, down", rule: books.RuleLedgerStock, closes: false,
			tamper: redis("HINCRBY", voucherKey, "stock", "-1"), putRight: redis("HINCRBY", voucherKey, "stock", "1")},
		{name: "a mark removed", rule: books.RuleLedgerBuyers, closes: true,
			tamper: redis("HDEL", buyersKey, "77"), putRight: redis("HSET", buyersKey, "77", "1.77p")},
		{name: "a mark added", rule: books.RuleLedgerBuyers, closes: false,
			tamper: redis("HSET", buyersKey, "999999999", "1.77p"), putRight: redis("HDEL", buyersKey, "999999999")},
		{name: "entries trimmed", rule: books.RuleOrdersMissing, closes: true, seq: seqsOf(0, 2), quiet: true,
			tamper: func() { admitThree(); redis("XTRIM", ordersKey, "MAXLEN", "1")() }, putRight: addAgain(0, 2)},
		{name: "an entry deleted", rule: books.RuleOrdersMissing, closes: true, seq: seqsOf(1, 2), quiet: true,
			tamper: func() { admitThree(); redis("XDEL", ordersKey, inFlight[1].ID)() }, putRight: addAgain(1, 2)},
		{name: "a stranger's entry", rule: books.RuleLedgerEntries, closes: false,
			tamper: func() {
				var err error
				stranger, err = f.Do("XADD", ordersKey, "*", "v", "99").ToString()
				require.NoError(t, err)
			},
			putRight: func() {
				redis("XACK", ordersKey, ledger.Group, stranger)()
				redis("XDEL", ordersKey, stranger)()
			}},
		{name: "stock in the database", rule: books.RuleDatabaseStock, closes: true,
			tamper: func() {
				f.Exec("ALTER TABLE vouchers DROP CONSTRAINT vouchers_sum")
				f.Exec("UPDATE vouchers SET stock = stock + 1 WHERE id = 7")
			},
			putRight: func() { f.Exec("UPDATE vouchers SET stock = stock - 1 WHERE id = 7") }},
		{name: "stock and total in the database", rule: books.RuleBridgeStock, closes: true, quiet: true,
			tamper:   func() { f.Exec("UPDATE vouchers SET stock = stock - 1, total = total - 1 WHERE id = 7") },
			putRight: func() { f.Exec("UPDATE vouchers SET stock = stock + 1, total = total + 1 WHERE id = 7") }},
		{name: "sold in the database", rule: books.RuleDatabaseSold, closes: true,
			tamper:   func() { f.Exec("UPDATE vouchers SET stock = stock + 1, sold = sold - 1 WHERE id = 7") },
			putRight: func() { f.Exec("UPDATE vouchers SET stock = stock - 1, sold = sold + 1 WHERE id = 7") }},
		{name: "a row deleted", rule: books.RuleOrdersMissing, closes: true, seq: seq("[54321]"),
			tamper: func() { f.Exec("DELETE FROM orders WHERE voucher_id = 7 AND seq = 54321") },
			putRight: func() {
				f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 54321, 54321, NOW(3))")
			}},
		{name: "a row of a seq that was never given", rule: books.RuleDatabaseAhead, closes: true,
			tamper: func() {
				f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 900001, 999999999, NOW(3))")
			},
			putRight: func() { f.Exec("DELETE FROM orders WHERE voucher_id = 7 AND seq = 900001") }},
		{name: "a seq twice", rule: books.RuleDatabaseSold, closes: true,
			tamper: func() {
				f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 2, 54321, 999999999, NOW(3))")
			},
			putRight: func() { f.Exec("DELETE FROM orders WHERE voucher_id = 7 AND epoch = 2") }},
		{name: "seq in redis, to be given twice", rule: books.RuleLedgerSettled, closes: true, quiet: true,
			tamper: redis("HINCRBY", voucherKey, "seq", "-1"), putRight: redis("HINCRBY", voucherKey, "seq", "1")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f.Drained()
			g := f.Guardian()
			stop := f.Run(g)
			f.Open(g)
			if !tc.quiet {
				defer traffic(f, 7)()
			}
			tc.tamper()
			status := named(t, g, tc.rule)
			if tc.seq != nil {
				require.Contains(t, status.Reason+status.Alarm, tc.seq())
			}
			if tc.closes {
				closed(t, g, 0, tc.rule)
			} else {
				require.Never(t, func() bool { return !g.Status()[0].Open }, 500*time.Millisecond, 20*time.Millisecond)
			}
			tc.putRight()
			f.Open(g)
			stop()
		})
	}
	f.Drained()
	reckoning, err := (&books.Reckoner{Store: f.Store, Client: f.Client, Now: time.Now}).Reckon(f.Ctx, 7)
	require.NoError(t, err)
	require.Equal(t, books.Proven, reckoning.Verdict, "%v", reckoning.Violations)
}

// Two readings of a voucher must agree before a partition is closed for figures
// that contradict each other: the two sides are read one after the other.
func TestGuardian_OneReadingThatContradictsItselfClosesNothing(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	f.Voucher(g, 7, 100)
	f.Voucher(g, 8, 100)
	settled := func(voucherID int64, by string) {
		t.Helper()
		require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, voucherID), "settled", by).Error())
	}
	open := func(alarm string) {
		t.Helper()
		look()
		status := g.Status()[0]
		require.True(t, status.Open, status.Reason)
		require.Contains(t, status.Alarm, alarm)
		require.Equal(t, alarm == "", status.Alarm == "", status.Alarm)
	}
	settled(7, "1")
	open("ledger_settled: voucher 7")
	settled(7, "-1")
	open("")
	settled(7, "1")
	open("ledger_settled: voucher 7")
	settled(7, "-1")
	settled(8, "1")
	open("ledger_settled: voucher 8") // a reading of another voucher is no second one
	look()
	require.False(t, g.Status()[0].Open)
	require.Contains(t, g.Status()[0].Reason, "books violated: ledger_settled: voucher 8")
}

// A partition that was put right and proven is not closed for what was seen
// before: a recount is remembered until the next one.
func TestGuardian_WhatWasSeenBeforeItWasPutRightCountsNoMore(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1, 2, 3)
	f.Drained()
	look()
	f.Exec("DELETE FROM orders WHERE seq = 2")
	require.Eventually(t, func() bool { look(); return !g.Status()[0].Open }, writertest.Patience, time.Millisecond)
	require.Contains(t, g.Status()[0].Reason, "books violated: orders_missing")
	f.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 2, 2, NOW(3))")
	for range 5 {
		look()
		require.True(t, g.Status()[0].Open, g.Status()[0].Reason)
		require.Empty(t, g.Status()[0].Alarm)
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
