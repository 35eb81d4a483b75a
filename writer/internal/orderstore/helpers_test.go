package orderstore_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

var quiet = slog.New(slog.DiscardHandler)

// fixture is a migrated database with one partition, seen through the store and,
// for what only a stranger would do, through a plain connection.
type fixture struct {
	*orderstore.Store
	ctx context.Context
	t   *testing.T
	dsn string
	sql *sql.DB
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return fixtureAt(t, devstack.TestDatabase(t))
}

func fixtureAt(t *testing.T, dsn string) *fixture {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	f := &fixture{ctx: ctx, t: t, dsn: dsn}
	f.Store = f.open(dsn, 0)
	f.sql = f.DB()
	require.NoError(t, migrations.Up(ctx, f.DB(), quiet))
	require.NoError(t, f.InitPartitions(ctx, 1))
	return f
}

func (f *fixture) open(dsn string, lockWait time.Duration) *orderstore.Store {
	f.t.Helper()
	s, err := orderstore.Open(f.ctx, orderstore.Options{DSN: dsn, LockWait: lockWait, Logger: quiet})
	require.NoError(f.t, err)
	f.t.Cleanup(func() { require.NoError(f.t, s.Close()) })
	return s
}

func (f *fixture) exec(query string, args ...any) {
	f.t.Helper()
	_, err := f.sql.ExecContext(f.ctx, query, args...)
	require.NoError(f.t, err)
}

func (f *fixture) number(query string, args ...any) (n int64) {
	f.t.Helper()
	require.NoError(f.t, f.sql.QueryRowContext(f.ctx, query, args...).Scan(&n))
	return n
}

// voucher creates a voucher and opens it.
func (f *fixture) voucher(id, total int64) {
	f.t.Helper()
	_, err := f.CreateVoucher(f.ctx, orderstore.Voucher{ID: id, Title: "v", Total: total, BeginAt: begin, EndAt: begin.Add(time.Hour)})
	require.NoError(f.t, err)
	_, err = f.Transition(f.ctx, id, []string{orderstore.StateDraft}, orderstore.StateOpen)
	require.NoError(f.t, err)
}

// books requires the voucher's books to hold and to show these rows.
func (f *fixture) books(id, orders, outcomes int64) {
	f.t.Helper()
	r, err := f.Read(f.ctx, id, true)
	require.NoError(f.t, err)
	require.Equal(f.t, r.Total, r.Stock+r.Sold, "stock + sold")
	require.Equal(f.t, r.Sold, r.Orders, "sold and counted")
	require.Equal(f.t, orders, r.Orders, "orders")
	require.Equal(f.t, outcomes, r.Outcomes, "outcomes %v", r.OutcomeByKind)
	require.Zero(f.t, f.number(`SELECT COUNT(*) FROM orders o JOIN order_outcomes u USING (voucher_id, epoch, seq)`),
		"a position is never a row and an outcome")
}

// persist requires Persist to succeed and returns the kinds.
func (f *fixture) persist(orders ...orderstore.Order) []orderstore.VerdictKind {
	f.t.Helper()
	verdicts, err := f.Persist(f.ctx, orders)
	require.NoError(f.t, err)
	return kinds(verdicts)
}

var begin = time.Date(2030, 1, 2, 3, 4, 5, 678_000_000, time.UTC)

func at(voucherID, epoch, seq int64) orderid.Position {
	return orderid.Position{VoucherID: voucherID, Epoch: epoch, Seq: seq}
}

func order(voucherID, seq, userID int64) orderstore.Order {
	return orderstore.Order{
		Position: at(voucherID, 1, seq), UserID: userID, Reference: fmt.Sprintf("ref-%d", seq),
		AdmittedAt: begin.Add(time.Duration(seq) * time.Millisecond), EntryID: fmt.Sprintf("1-%d", seq),
	}
}

// run returns orders with seq from..to, user = base + seq.
func run(voucherID, from, to, base int64) []orderstore.Order {
	var list []orderstore.Order
	for seq := from; seq <= to; seq++ {
		list = append(list, order(voucherID, seq, base+seq))
	}
	return list
}

func kinds(verdicts []orderstore.Verdict) []orderstore.VerdictKind {
	list := make([]orderstore.VerdictKind, len(verdicts))
	for i, v := range verdicts {
		list[i] = v.Kind
	}
	return list
}

func all(n int, k orderstore.VerdictKind) []orderstore.VerdictKind {
	list := make([]orderstore.VerdictKind, n)
	for i := range list {
		list[i] = k
	}
	return list
}

// cutter is a proxy that cuts the connection at a statement: before the server
// gets it, or after the server has run it and before the reply is passed on. Or
// it lets a test do something in between two statements.
type cutter struct {
	listener net.Listener
	upstream string

	mu      sync.Mutex
	match   []byte // in a request; nil: pass everything
	deliver bool
	times   int
	cuts    int
	hook    func() // runs before a request that contains match is passed on
}

func newCutter(t *testing.T, upstream string) *cutter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := &cutter{listener: l, upstream: upstream}
	t.Cleanup(func() { _ = l.Close() })
	go c.accept()
	return c
}

// cut arms the cutter for the next times requests that contain match.
func (c *cutter) cut(match string, deliver bool, times int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.match, c.deliver, c.times, c.cuts, c.hook = []byte(match), deliver, times, 0, nil
}

// before arms the cutter to run hook, once, before it passes on the next request
// that contains match. It cuts nothing.
func (c *cutter) before(match string, hook func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.match, c.times, c.cuts, c.hook = []byte(match), 1, 0, hook
}

func (c *cutter) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cuts
}

func (c *cutter) hit(request []byte) (hit, deliver bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.match == nil || c.cuts == c.times || !bytes.Contains(request, c.match) {
		return false, false
	}
	c.cuts++
	if c.hook != nil {
		c.hook()
		return false, false
	}
	return true, c.deliver
}

func (c *cutter) accept() {
	for {
		client, err := c.listener.Accept()
		if err != nil {
			return
		}
		go c.serve(client)
	}
}

func (c *cutter) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", c.upstream)
	if err != nil {
		return
	}
	defer server.Close()
	swallow := make(chan struct{})
	swallowed := make(chan struct{})
	go func() {
		defer client.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := server.Read(buf)
			if err != nil {
				return
			}
			select {
			case <-swallow:
				close(swallowed)
				return
			default:
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, 256<<10)
	for {
		n, err := client.Read(buf)
		if err != nil {
			return
		}
		hit, deliver := c.hit(buf[:n])
		if hit && !deliver {
			return
		}
		if hit {
			close(swallow)
		}
		if _, err := server.Write(buf[:n]); err != nil {
			return
		}
		if hit {
			<-swallowed // the server has answered: the statement is done
			return
		}
	}
}

// through returns the DSN with the server's address replaced by the cutter's.
func (c *cutter) through(t *testing.T, dsn string) string {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	require.NoError(t, err)
	cfg.Addr = c.listener.Addr().String()
	return cfg.FormatDSN()
}

func addrOf(t *testing.T, dsn string) string {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	require.NoError(t, err)
	return cfg.Addr
}
