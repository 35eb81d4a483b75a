package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// operator is a person at a shell.
type operator struct {
	t       *testing.T
	ctx     context.Context
	program string
	env     []string
}

func newOperator(ctx context.Context, t *testing.T, s *stack.Stack) *operator {
	t.Helper()
	dir, err := devstack.Build(ctx, nil, devstack.BuildOptions{}, "github.com/seckill/seckill/gateway/cmd/seckillctl")
	require.NoError(t, err)
	return &operator{t: t, ctx: ctx, program: filepath.Join(dir, "seckillctl"), env: []string{
		"PATH=" + os.Getenv("PATH"), "USER=ann", "SECKILL_GATEWAY=" + s.Gateway(0).Addr, "SECKILL_WRITER=" + s.Writer(0).Addr,
	}}
}

// run runs seckillctl and returns what it printed and its code.
func (o *operator) run(args ...string) (code int, out, errs string) {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(o.ctx, patience)
	defer cancel()
	cmd := osexec.CommandContext(ctx, o.program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = o.env, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		require.IsType(o.t, &osexec.ExitError{}, err, "%v", args)
	}
	return cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
}

// ok requires code 0 and returns standard output.
func (o *operator) ok(args ...string) string {
	o.t.Helper()
	code, out, errs := o.run(args...)
	require.Zero(o.t, code, "%v: %s", args, errs)
	return out
}

// line is a message as one line of JSON.
func line[T any](o *operator, args ...string) (m T) {
	o.t.Helper()
	out := o.ok(append([]string{"--output", "json"}, args...)...)
	require.Equal(o.t, 1, strings.Count(out, "\n"), out)
	require.NoError(o.t, json.Unmarshal([]byte(out), &m), out)
	return m
}

type orderLine struct {
	OrderID     string `json:"order_id"`
	UserID      int64  `json:"user_id,string"`
	VoucherID   int64  `json:"voucher_id,string"`
	State       string
	Reference   string
	AdmittedAt  time.Time `json:"admitted_at"`
	PersistedAt time.Time `json:"persisted_at"`
}

func (o *operator) orders(args ...string) (lines []orderLine) {
	o.t.Helper()
	for text := range strings.Lines(o.ok(append([]string{"orders"}, args...)...)) {
		var order orderLine
		require.NoError(o.t, json.Unmarshal([]byte(text), &order), text)
		lines = append(lines, order)
	}
	return lines
}

// A whole sale by hand: from the draft to the archive, with the list of its
// orders for finance.
func TestSeckillctl_RunsASale(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{})
	o := newOperator(ctx, t, s)

	type voucher struct {
		State string
		Sold  int64 `json:",string"`
	}
	require.Equal(t, "VOUCHER_STATE_DRAFT", line[voucher](o, "voucher", "create", "--id=7", "--title=tea", "--total=6000", "--end=+1h").State)
	code, _, errs := o.run("voucher", "create", "--id=7", "--total=1", "--end=+1h")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "ALREADY_EXISTS, VOUCHER_EXISTS")
	code, _, errs = o.run("voucher", "create", "--total=0", "--end=-1h")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "\n  total: ")
	require.Contains(t, errs, "\n  end_time: ")
	require.Contains(t, o.ok("voucher", "open", "7"), "OPEN")
	require.Contains(t, o.ok("voucher", "pause", "7"), "PAUSED")
	require.Contains(t, o.ok("grab", "--user=1", "--voucher=7"), "PAUSED")
	require.Contains(t, o.ok("voucher", "resume", "7"), "OPEN")

	type grabbed struct{ Order orderLine }
	first := line[grabbed](o, "grab", "--user=9007199254740993", "--voucher=7", "--reference=basket 12").Order
	require.EqualValues(t, 1<<53+1, first.UserID)
	answers, failed := crowd(ctx, t, s, 7, 1, 5200)
	require.Empty(t, failed)
	settled(ctx, t, s, 7)

	for _, key := range []string{"--voucher=7", "--id=" + first.OrderID} {
		order := line[orderLine](o, "get-order", "--user=9007199254740993", key)
		require.Equal(t, first.OrderID, order.OrderID)
		require.Equal(t, "ORDER_STATE_PERSISTED", order.State)
	}
	found := line[grabbed](o, "order", "find", "--id="+first.OrderID).Order
	require.Equal(t, "basket 12", found.Reference)
	require.False(t, found.PersistedAt.IsZero())
	require.Contains(t, o.ok("order", "find", "--user=9007199254740993", "--voucher=7"), first.OrderID)
	code, _, errs = o.run("order", "find", "--user=99999", "--voucher=7")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "NOT_FOUND, ORDER_NOT_FOUND")

	// More than a page of them, each once, in the order of admission.
	orders := o.orders("--voucher=7")
	require.Len(t, orders, 5201)
	require.Equal(t, first.OrderID, orders[0].OrderID)
	for i, order := range orders {
		at, err := s.OrderIDs().Decode(order.OrderID)
		require.NoError(t, err)
		require.EqualValues(t, i+1, at.Seq)
		require.EqualValues(t, 7, order.VoucherID)
		if i > 0 {
			require.Equal(t, answers[order.UserID].GetOrder().GetOrderId(), order.OrderID)
		}
	}
	require.Equal(t, o.ok("orders", "--voucher=7"), o.ok("orders", "--voucher=7"), "a list of what does not change does not change")
	require.Len(t, o.orders("--user=9007199254740993"), 1)
	require.Empty(t, o.orders("--user=99999"))

	type backlog struct {
		Partitions []struct {
			Open     bool
			InFlight int64  `json:"in_flight,string"`
			Lag      string `json:"lag_entries"`
		}
		DeadLetters   string `json:"dead_letters"`
		DatabaseState string `json:"database_state"`
	}
	lies := line[backlog](o, "backlog")
	require.Len(t, lies.Partitions, 8)
	for _, p := range lies.Partitions {
		require.True(t, p.Open)
		require.Zero(t, p.InFlight)
		require.Equal(t, "0", p.Lag)
	}
	require.Equal(t, "0", lies.DeadLetters)
	require.Equal(t, "available", lies.DatabaseState)

	require.Contains(t, o.ok("books", "7"), "PROVEN")
	require.Contains(t, o.ok("voucher", "close", "7"), "CLOSED")
	require.Contains(t, o.ok("voucher", "archive", "7"), "ARCHIVED")
	require.EqualValues(t, 5201, line[voucher](o, "voucher", "get", "7").Sold)
	require.Contains(t, o.ok("voucher", "list"), "tea")
}

// admitBroken admits users by orders that nobody can read.
func admitBroken(ctx context.Context, t *testing.T, s *stack.Stack, voucherID, first, n int64) {
	t.Helper()
	p := ledger.Partition(voucherID, s.Partitions())
	broken := ledger.AdmitCall{Partition: p, Epoch: 1, SHA: ledger.AdmitSHA(p, 1), VoucherID: voucherID, NotAfter: time.Now().Add(time.Minute)}
	for user := first; user < first+n; user++ {
		broken.Grabs = append(broken.Grabs, ledger.Grab{UserID: user, Record: []byte{0x0a, 0x01, 0xff}})
	}
	reply, err := ledger.Admit(ctx, s.Client(), broken)
	require.NoError(t, err)
	for _, answer := range reply.Answers {
		require.Equal(t, ledger.DecisionAdmitted, answer.Decision)
	}
}

// What cannot be stored is seen and settled by hand: refused values are requeued
// once the database takes them, the rest is cancelled, and the books hold.
func TestSeckillctl_SettlesDeadLetters(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 2})
	o := newOperator(ctx, t, s)
	s.MustOpenVoucher(t, 7, 100)
	_, err := s.DB().ExecContext(ctx, "ALTER TABLE orders ADD CONSTRAINT test_refused CHECK (user_id > 20)")
	require.NoError(t, err)
	_, failed := crowd(ctx, t, s, 7, 1, 50)
	require.Empty(t, failed)
	admitBroken(ctx, t, s, 7, 900, 3)
	settled(ctx, t, s, 7)
	require.Contains(t, o.ok("get-order", "--user=5", "--voucher=7"), "HELD")
	require.Contains(t, o.ok("grab", "--user=5", "--voucher=7"), "HELD", "a repeated Grab answers the same order")
	require.Contains(t, o.ok("backlog"), "dead letters: 23, database: available")
	require.Equal(t, 1+23, strings.Count(o.ok("dead-letters", "list"), "\n"))
	require.Equal(t, 1, strings.Count(o.ok("--output=json", "dead-letters", "list", "--user=5"), "\n"))

	code, _, errs := o.run("dead-letters", "requeue", "--all", "--reason=schema repaired")
	require.Equal(t, 2, code, "nobody is there to say yes")
	require.Contains(t, errs, "--yes")
	_, err = s.DB().ExecContext(ctx, "ALTER TABLE orders DROP CONSTRAINT test_refused")
	require.NoError(t, err)
	code, out, errs := o.run("dead-letters", "requeue", "--all", "--yes", "--reason=schema repaired")
	require.Equal(t, 1, code, "those that nobody can read are still held")
	require.Equal(t, 20, strings.Count(out, "PERSISTED"), out)
	require.Equal(t, 3, strings.Count(out, "STILL_HELD"), out)
	require.Contains(t, errs, "23 dead letters, 20 persisted, 3 still_held")
	require.Contains(t, errs, "3 are still held")

	type letter struct {
		ID    string `json:"dead_letter_id"`
		Order struct {
			ID string `json:"order_id"`
		}
	}
	var left []letter
	for text := range strings.Lines(o.ok("--output=json", "dead-letters", "list")) {
		var l letter
		require.NoError(t, json.Unmarshal([]byte(text), &l))
		left = append(left, l)
	}
	require.Len(t, left, 3)
	one := o.ok("dead-letters", "cancel", left[0].ID, "--reason=unreadable", "--operator=bob")
	require.Equal(t, fmt.Sprintf("1/1 %s CANCELLED\n", left[0].ID), one)
	require.Contains(t, o.ok("dead-letters", "cancel", left[0].ID, "--reason=again"), "CANCELLED: it was resolved before")
	require.Regexp(t, `(?m)^operator_action\.operator +bob\noperator_action\.action +CANCEL\noperator_action\.reason +unreadable$`, o.ok("order", "find", "--id="+left[0].Order.ID))
	require.Equal(t, 2, strings.Count(o.ok("dead-letters", "cancel", "--voucher=7", "--yes", "--reason=unreadable"), "CANCELLED"))
	require.Contains(t, o.ok("backlog"), "dead letters: 0,")

	require.Eventually(t, func() bool {
		books, err := s.Books(ctx, 7)
		return err == nil && books.GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN &&
			books.GetDatabase().GetOrders() == 50 && books.GetLedger().GetStock() == 50
	}, patience, 50*time.Millisecond, "the ledger hears of it, and the units are back")
	require.Contains(t, o.ok("get-order", "--user=5", "--voucher=7"), "PERSISTED")

	rows, err := s.DB().QueryContext(ctx, "SELECT operator, action, reason, COUNT(*) FROM operator_actions GROUP BY operator, action, reason ORDER BY operator, action")
	require.NoError(t, err)
	defer rows.Close()
	var audit []string
	for rows.Next() {
		var who, action, why string
		var n int
		require.NoError(t, rows.Scan(&who, &action, &why, &n))
		audit = append(audit, fmt.Sprintf("%s %s %s %d", who, action, why, n))
	}
	require.NoError(t, rows.Err())
	require.Equal(t, []string{"ann CANCEL unreadable 2", "ann REQUEUE schema repaired 23", "bob CANCEL unreadable 1"}, audit)
}

func TestSeckillctl_ShowsABacklogWhileTheDatabaseIsAway(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Partitions: 1})
	o := newOperator(ctx, t, s)
	s.MustOpenVoucher(t, 7, 100)
	require.NoError(t, s.Database.Pause())
	resumed := false
	defer func() {
		if !resumed {
			_ = s.Database.Resume()
		}
	}()
	require.Contains(t, o.ok("grab", "--user=1", "--voucher=7"), "ADMITTED")
	out := o.ok("backlog")
	require.Contains(t, out, "dead letters: unknown, database: unavailable")
	require.Regexp(t, `(?m)^0 +1 +yes +1 +0 `, out, "what Redis knows is shown all the same")
	code, _, errs := o.run("--timeout=1s", "dead-letters", "list")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "UNAVAILABLE, DATABASE_UNREACHABLE")
	require.NoError(t, s.Database.Resume())
	resumed = true
	settled(ctx, t, s, 7)
	require.Contains(t, o.ok("get-order", "--user=1", "--voucher=7"), "PERSISTED")
}

// A database that answers and takes no orders is told apart from one that is
// well by those who write to it.
func TestSeckillctl_ShowsADatabaseThatTakesNoOrders(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Partitions: 1})
	o := newOperator(ctx, t, s)
	s.MustOpenVoucher(t, 7, 100)
	require.Contains(t, o.ok("backlog"), "database: available")
	exec(ctx, t, s, "RENAME TABLE orders TO orders_away")
	require.Contains(t, o.ok("grab", "--user=1", "--voucher=7"), "ADMITTED")
	require.Eventually(t, func() bool {
		return strings.Contains(o.ok("backlog"), "dead letters: 0, database: unavailable")
	}, patience, 50*time.Millisecond)
	require.Regexp(t, `(?m)^0 +1 +yes +1 +\d+ +[0-9.]+m?s +\S+:1 \(idle `, o.ok("backlog"))
	exec(ctx, t, s, "RENAME TABLE orders_away TO orders")
	settled(ctx, t, s, 7)
	require.Eventually(t, func() bool { return strings.Contains(o.ok("backlog"), "database: available") }, patience, 50*time.Millisecond)
}
