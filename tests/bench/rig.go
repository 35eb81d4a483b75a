package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/redis/rueidis"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/tests/bench/baseline"
	"github.com/seckill/seckill/tests/bench/limits"
	"github.com/seckill/seckill/tests/internal/stack"
)

const (
	// vouchersARound is how many vouchers one round takes of a side whose writer is
	// stopped; they are opened before.
	vouchersARound = 10
	// plenty is the stock of a voucher that must not sell out: more than two minutes
	// of the fastest load take.
	plenty = 50_000_000
	// redisLimit is more than the vouchers of a run may ever take: opening one is
	// refused where its whole stock would not fit into Redis beside the others, and
	// by the machine's memory these would not, though hardly any of it is sold.
	redisLimit = "1000000gb"
	// unbounded is a bound on orders in flight that is never met.
	unbounded = 1_000_000_000
	// awaitLimit bounds every wait for something that takes seconds at most.
	awaitLimit = 2 * time.Minute
	// awaitPause is how often it is looked for: each look costs what is measured
	// some of its CPU.
	awaitPause = 20 * time.Millisecond
	// conns is how many connections load is spread over.
	conns = 4
)

// rig is everything that runs.
//
// There are three stacks: "fast" and "strict" measure admission, their writers
// are stopped once the vouchers are open, so that the cores are the admission's;
// "whole" measures what needs writers, and the tutorial's stages.
type rig struct {
	binaries            *devstack.Binaries
	programs            string
	fast, strict, whole *side
	echo, tuned         *echo
}

// side is a stack with a gateway, and connections to it.
type side struct {
	*stack.Stack
	name     string
	conns    []*grpc.ClientConn
	vouchers []int64 // open and unused
	soldOut  int64   // a voucher with one unit
	next     int64
	writer   *stack.Process // nil while it is stopped
}

func startRig(ctx context.Context, rounds int, log io.Writer) (r *rig, err error) {
	r = &rig{}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.binaries, err = devstack.Find(ctx, log); err != nil {
		return r, err
	}
	if r.programs, err = devstack.Build(ctx, log, devstack.BuildOptions{},
		"github.com/seckill/seckill/gateway/cmd/gateway", "github.com/seckill/seckill/writer/cmd/writer"); err != nil {
		return r, err
	}
	for _, s := range []struct {
		into        **side
		name        string
		appendfsync string
		args        []string
	}{
		{&r.fast, "fast", "everysec", []string{"--durability=fast", fmt.Sprintf("--max-in-flight=%d", unbounded)}},
		{&r.strict, "strict", "always", []string{fmt.Sprintf("--max-in-flight=%d", unbounded)}},
		{&r.whole, "whole", "always", nil},
	} {
		fmt.Fprintf(log, "starting stack %s\n", s.name)
		if *s.into, err = r.startSide(ctx, s.name, s.appendfsync, s.args); err != nil {
			return r, fmt.Errorf("starting stack %s: %w", s.name, err)
		}
	}
	for _, s := range []*side{r.fast, r.strict} {
		for range vouchersARound * rounds {
			id, err := s.open(ctx, plenty)
			if err != nil {
				return r, err
			}
			s.vouchers = append(s.vouchers, id)
		}
		if s.soldOut, err = s.open(ctx, 1); err != nil {
			return r, err
		}
	}
	for _, s := range []*side{r.fast, r.strict, r.whole} {
		if err = s.stopWriter(); err != nil {
			return r, err
		}
	}
	if r.echo, err = startEcho(ctx, goDefaultGC); err != nil {
		return r, err
	}
	r.tuned, err = startEcho(ctx, gatewayGC)
	return r, err
}

// The percentages by which a heap grows before garbage is collected.
const (
	goDefaultGC = 100
	gatewayGC   = 400 // what the gateway sets
)

// echo is a bare echo and connections to it.
type echo struct {
	*child
	conns []*grpc.ClientConn
}

func startEcho(ctx context.Context, gcPercent int) (*echo, error) {
	c, err := startChild(ctx, "echo", "echo", fmt.Sprintf("--gc-percent=%d", gcPercent))
	if err != nil {
		return nil, err
	}
	e := &echo{child: c}
	e.conns, err = dial(c.addr)
	return e, err
}

// startSide starts a stack. The database gets room: bursts must not wait for
// checkpoints, on our side as little as on that of the tutorial and of the plain
// INSERTs, which use the same server.
func (r *rig) startSide(ctx context.Context, name, appendfsync string, writerArgs []string) (*side, error) {
	room := []string{"--innodb-buffer-pool-size=2G", "--innodb-log-file-size=1G"}
	if !r.binaries.MariaDB {
		room = []string{"--innodb-buffer-pool-size=2G", "--innodb-redo-log-capacity=1G"}
	}
	s, err := stack.Start(ctx, stack.Options{
		Binaries: r.binaries, Programs: r.programs, WriterArgs: writerArgs,
		Redis:    devstack.RedisOptions{Args: []string{"--appendfsync " + appendfsync, "--maxmemory " + redisLimit}},
		Database: devstack.DatabaseOptions{Args: room},
	})
	if err != nil {
		return nil, err
	}
	side := &side{Stack: s, name: name, writer: s.Writer(0)}
	if side.conns, err = dial(s.Gateway(0).Addr); err != nil {
		s.Close()
		return nil, err
	}
	return side, nil
}

func (r *rig) close() {
	for _, e := range []*echo{r.echo, r.tuned} {
		if e != nil {
			hangUp(e.conns)
			e.Kill()
		}
	}
	for _, s := range []*side{r.fast, r.strict, r.whole} {
		if s != nil {
			hangUp(s.conns)
			s.Close()
		}
	}
	if r.programs != "" {
		_ = os.RemoveAll(r.programs) // else it goes with the process's folder
	}
}

func dial(addr string) ([]*grpc.ClientConn, error) {
	var all []*grpc.ClientConn
	for range conns {
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			hangUp(all)
			return nil, err
		}
		all = append(all, conn)
	}
	return all, nil
}

func hangUp(all []*grpc.ClientConn) {
	for _, conn := range all {
		_ = conn.Close() // it is our end
	}
}

// open opens a voucher; a writer must run.
func (s *side) open(ctx context.Context, total int64) (int64, error) {
	s.next++
	return s.next, s.OpenVoucher(ctx, s.next, total)
}

// voucher takes one of those that were opened before.
func (s *side) voucher() (int64, error) {
	if len(s.vouchers) == 0 {
		return 0, fmt.Errorf("stack %s has no unused voucher left", s.name)
	}
	id := s.vouchers[0]
	s.vouchers = s.vouchers[1:]
	return id, nil
}

// startWriter starts the writer and returns when every partition is open with
// that bound on orders in flight.
func (s *side) startWriter(ctx context.Context, bound int64, args ...string) error {
	writer, err := s.StartWriter(ctx, append([]string{fmt.Sprintf("--max-in-flight=%d", bound)}, args...)...)
	if err != nil {
		return err
	}
	s.writer = writer
	return await(ctx, "the guardian to set the bound", func() (bool, error) {
		for p := range s.Partitions() {
			meta, err := ledger.ReadMeta(ctx, s.Client(), p)
			if err != nil || meta.Bound != bound || !meta.Open {
				return false, err
			}
		}
		return true, nil
	})
}

func (s *side) stopWriter() error {
	if s.writer == nil {
		return nil
	}
	writer := s.writer
	s.writer = nil
	return writer.Stop(awaitLimit)
}

// pids are the processes of a stack, for their CPU time.
func (s *side) pids() map[string]int {
	pids := map[string]int{"gateway": s.Gateway(0).Pid(), "redis": s.Redis.Pid(), "database": s.Database.Pid()}
	if s.writer != nil {
		pids["writer"] = s.writer.Pid()
	}
	return pids
}

// awaitSettled waits until no order of a voucher is in flight.
func (s *side) awaitSettled(ctx context.Context, voucherID int64, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return s.AwaitSettled(ctx, voucherID)
}

// await waits until done; what it could not see is tried again until the limit.
func await(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, awaitLimit)
	defer cancel()
	for {
		ok, err := done()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, errors.Join(ctx.Err(), err))
		case <-time.After(awaitPause):
		}
	}
}

// child is this program in another role.
type child struct {
	*devstack.Process
	addr string
}

func startChild(ctx context.Context, name string, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	port, err := devstack.FreePort()
	if err != nil {
		return nil, err
	}
	c := &child{addr: fmt.Sprintf("127.0.0.1:%d", port)}
	if c.Process, err = devstack.StartProcess(ctx, devstack.ProcessOptions{Name: name, Path: self, Args: append(args, "--listen="+c.addr)}); err != nil {
		return nil, err
	}
	err = await(ctx, name+" to listen", func() (bool, error) {
		conn, err := net.Dial("tcp", c.addr)
		if err != nil {
			return false, err
		}
		return true, conn.Close()
	})
	if err != nil {
		c.Kill()
		return nil, fmt.Errorf("%w\n%s", err, c.Output())
	}
	return c, nil
}

// echoCommand is the bare echo.
type echoCommand struct {
	Listen    string `required:""`
	GCPercent int    `required:""`
}

// Run serves until it is killed.
func (c *echoCommand) Run(ctx context.Context) error {
	debug.SetGCPercent(c.GCPercent)
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	return limits.ServeEcho(ctx, l)
}

// stageCommand is one of the tutorial's stages.
type stageCommand struct {
	Listen string `required:""`
	Stage  string `required:""`
	Redis  string `required:""`
	DSN    string `required:""`
}

// Run serves until it is killed.
func (c *stageCommand) Run(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{c.Redis}, DisableCache: true})
	if err != nil {
		return err
	}
	defer client.Close()
	db, err := sql.Open("mysql", c.DSN)
	if err != nil {
		return err
	}
	defer db.Close()
	db.SetMaxOpenConns(16)
	db.SetMaxIdleConns(16)
	server, err := baseline.New(baseline.Stage(c.Stage), client, db, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	front := grpc.NewServer(grpc.MaxConcurrentStreams(1024))
	seckillv1.RegisterSeckillServiceServer(front, server)
	defer context.AfterFunc(ctx, front.Stop)()
	go func() { _ = front.Serve(l) }() // ends with Stop
	return server.Run(ctx)
}
