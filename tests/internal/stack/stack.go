package stack

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/orderid"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// The programs of a stack.
const (
	gatewayPackage = "github.com/seckill/seckill/gateway/cmd/gateway"
	writerPackage  = "github.com/seckill/seckill/writer/cmd/writer"
)

const (
	databaseName = "seckill"
	// migrateTimeout bounds "writer migrate" and "writer keygen".
	migrateTimeout = 2 * time.Minute
)

// Options says what Start starts. The zero value is one gateway and one writer
// on 8 partitions.
type Options struct {
	// Gateways and Writers count processes; 0 is one, a negative number none.
	Gateways, Writers int
	// Partitions of the ledger; 0 is 8.
	Partitions int
	// GatewayArgs and WriterArgs are flags for every gateway and for "serve" of
	// every writer. They win over those that Start sets. See FastTakeover.
	GatewayArgs, WriterArgs []string
	// Programs is a folder that holds gateway and writer already; empty builds
	// them, and Race and BuildTags say how.
	Programs string
	// Race builds the race detector into the programs, which needs a C compiler.
	Race bool
	// BuildTags are for the programs, for example "faultpoint".
	BuildTags []string
	// Env holds KEY=value lines for every process.
	Env []string
	// Log gets a line for each step of the start; nil is silent.
	Log io.Writer
	// Output gets what gateways and writers print, as it comes and from all of
	// them at once; the last part is kept for Process.Output in any case.
	Output io.Writer
	// Binaries are the servers' programs; nil finds or fetches them.
	Binaries *devstack.Binaries
	// Redis and Database configure the servers.
	Redis    devstack.RedisOptions
	Database devstack.DatabaseOptions
}

// FastTakeover are flags of a writer that takes over a dead one's orders after
// 3 s instead of half a minute, in the order of timeouts that the writer checks:
// lock wait (1 s) < batch timeout, 2 x batch timeout < min idle.
func FastTakeover() []string {
	return []string{"--min-idle=3s", "--batch-timeout=1400ms", "--block=500ms"}
}

func (o *Options) complete() {
	count := func(n *int, otherwise int) {
		if *n == 0 {
			*n = otherwise
		}
		*n = max(*n, 0)
	}
	count(&o.Gateways, 1)
	count(&o.Writers, 1)
	count(&o.Partitions, 8)
	if o.Log == nil {
		o.Log = io.Discard
	}
}

// Stack is a running seckill. All methods are safe for concurrent use.
type Stack struct {
	// Redis and Database are the servers, to be killed, paused and restarted.
	Redis    *devstack.Redis
	Database *devstack.Database

	opt    Options
	bin    string // folder of the programs
	folder string // of the secrets
	db     *sql.DB
	client rueidis.Client
	ids    *orderid.Codec

	mu                sync.Mutex
	gateways, writers []*Process
	started           map[string]int // by program; names are given once
}

// Start builds and starts everything and returns when every gateway and writer
// serves and every partition is open. When it fails, it has removed what it
// had started. The error holds the last output of a process that ended.
func Start(ctx context.Context, opt Options) (*Stack, error) {
	opt.complete()
	s := &Stack{opt: opt, started: make(map[string]int)}
	if err := s.start(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Stack) start(ctx context.Context) error {
	if err := s.step("finding Redis and the database", "", func() (err error) {
		if s.opt.Binaries == nil {
			s.opt.Binaries, err = devstack.Find(ctx, s.opt.Log)
		}
		return err
	}); err != nil {
		return err
	}
	if s.bin = s.opt.Programs; s.bin == "" {
		if err := s.step("building gateway and writer", "building", func() (err error) {
			s.bin, err = devstack.Build(ctx, s.opt.Log, devstack.BuildOptions{Race: s.opt.Race, Tags: s.opt.BuildTags}, gatewayPackage, writerPackage)
			return err
		}); err != nil {
			return err
		}
	}
	if err := s.step("starting Redis "+s.opt.Binaries.RedisVersion, "starting Redis", func() (err error) {
		if s.Redis, err = devstack.StartRedis(ctx, s.opt.Binaries, s.opt.Redis); err != nil {
			return err
		}
		s.client, err = rueidis.NewClient(rueidis.ClientOption{
			InitAddress: []string{s.Redis.Addr()}, DisableCache: true, ForceSingleClient: true, ClientName: "stack",
		})
		return err
	}); err != nil {
		return err
	}
	if err := s.step("starting the database "+shortVersion(s.opt.Binaries.DatabaseVersion), "starting the database", func() (err error) {
		if s.Database, err = devstack.StartDatabase(ctx, s.opt.Binaries, s.opt.Database); err != nil {
			return err
		}
		if err := s.Database.CreateDatabase(ctx, databaseName); err != nil {
			return err
		}
		s.db, err = sql.Open("mysql", s.DSN()+"?parseTime=true")
		return err
	}); err != nil {
		return err
	}
	if err := s.step(fmt.Sprintf("migrating the schema, %d partitions", s.opt.Partitions), "migrating", func() error {
		return s.prepare(ctx)
	}); err != nil {
		return err
	}
	return s.step(fmt.Sprintf("starting gateways (%d) and writers (%d)", s.opt.Gateways, s.opt.Writers), "", func() error {
		for range s.opt.Writers {
			if _, err := s.LaunchWriter(ctx, nil); err != nil {
				return err
			}
		}
		for range s.opt.Gateways {
			if _, err := s.LaunchGateway(ctx, nil); err != nil {
				return err
			}
		}
		if s.opt.Writers == 0 {
			return nil // without a writer nobody opens a partition
		}
		services := []string{""}
		for p := range s.opt.Partitions {
			services = append(services, fmt.Sprintf("seckill.partition.%d", p))
		}
		for _, p := range append(s.Writers(), s.Gateways()...) {
			if err := p.AwaitServing(ctx, services...); err != nil {
				return err
			}
		}
		return nil
	})
}

// shortVersion leaves out how a distribution numbers its packages:
// "10.11.18-MariaDB-0+deb12u1" is 10.11.18-MariaDB.
func shortVersion(version string) string {
	parts := strings.SplitN(version, "-", 3)
	return strings.Join(parts[:min(2, len(parts))], "-")
}

// step runs f and logs how long it took. Its error begins with doing.
func (s *Stack) step(title, doing string, f func() error) error {
	began := time.Now()
	if err := f(); err != nil {
		if doing == "" {
			return err
		}
		return fmt.Errorf("%s: %w", doing, err)
	}
	fmt.Fprintf(s.opt.Log, "%-46s %6.1f s\n", title, time.Since(began).Seconds())
	return nil
}

// prepare writes the secrets into files and brings the schema.
func (s *Stack) prepare(ctx context.Context) (err error) {
	// Beside Redis' data, in the folder that goes with this process.
	if s.folder, err = os.MkdirTemp(filepath.Dir(s.Redis.Dir()), "stack-"); err != nil {
		return err
	}
	if err := os.WriteFile(s.dsnFile(), []byte(s.DSN()+"\n"), 0o600); err != nil {
		return err
	}
	if err := s.runWriter(ctx, "keygen", s.OrderKeyFile()); err != nil {
		return err
	}
	if s.ids, err = orderid.Load(s.OrderKeyFile()); err != nil {
		return err
	}
	return s.runWriter(ctx, "migrate", "--database-dsn-file="+s.dsnFile(), fmt.Sprintf("--partitions=%d", s.opt.Partitions))
}

// runWriter runs a command of the writer to its end.
func (s *Stack) runWriter(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, migrateTimeout)
	defer cancel()
	p, err := devstack.StartProcess(ctx, devstack.ProcessOptions{
		Name: "writer " + args[0], Path: filepath.Join(s.bin, "writer"), Args: args, Env: s.opt.Env,
	})
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		p.Kill()
		return fmt.Errorf("writer %s: %w\n%s", args[0], ctx.Err(), p.Output())
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("%w\n%s", err, p.Output())
	}
	return nil
}

// Close kills every process and removes every folder of the stack. It may be
// called more than once.
func (s *Stack) Close() {
	s.mu.Lock()
	processes := append(s.gateways, s.writers...)
	s.gateways, s.writers = nil, nil
	s.mu.Unlock()
	for _, p := range processes {
		p.close()
	}
	if s.client != nil {
		s.client.Close()
	}
	if s.db != nil {
		_ = s.db.Close()
	}
	if s.Redis != nil {
		s.Redis.Close()
	}
	if s.Database != nil {
		s.Database.Close()
	}
	if s.folder != "" {
		_ = os.RemoveAll(s.folder) // what is left goes with the process's folder
	}
}

// Partitions is the number of partitions.
func (s *Stack) Partitions() int { return s.opt.Partitions }

// DSN is how go-sql-driver/mysql connects to the database of the stack. There
// is no password in it.
func (s *Stack) DSN() string { return s.Database.DSN(databaseName) }

// OrderKeyFile is the path of the order key.
func (s *Stack) OrderKeyFile() string { return filepath.Join(s.folder, "order.key") }

func (s *Stack) dsnFile() string { return filepath.Join(s.folder, "database.dsn") }

// OrderIDs makes and reads order ids with the stack's key.
func (s *Stack) OrderIDs() *orderid.Codec { return s.ids }

// DB is a connection pool to the database of the stack.
func (s *Stack) DB() *sql.DB { return s.db }

// Client is a client of the stack's Redis.
func (s *Stack) Client() rueidis.Client { return s.client }

// Gateways lists the gateways that were ever started, in that order.
func (s *Stack) Gateways() []*Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*Process(nil), s.gateways...)
}

// Writers lists the writers that were ever started, in that order.
func (s *Stack) Writers() []*Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*Process(nil), s.writers...)
}

// Gateway is the i-th gateway that was started, from 0.
func (s *Stack) Gateway(i int) *Process { return s.Gateways()[i] }

// Writer is the i-th writer that was started, from 0.
func (s *Stack) Writer(i int) *Process { return s.Writers()[i] }

// Seckill calls the i-th gateway.
func (s *Stack) Seckill(i int) seckillv1.SeckillServiceClient {
	return seckillv1.NewSeckillServiceClient(s.Gateway(i).Conn())
}

// Vouchers calls the i-th writer.
func (s *Stack) Vouchers(i int) seckillv1.VoucherServiceClient {
	return seckillv1.NewVoucherServiceClient(s.Writer(i).Conn())
}

// OpenVoucher creates and opens a voucher through the first writer that runs.
// Its window is open for the next 24 hours.
func (s *Stack) OpenVoucher(ctx context.Context, voucherID, total int64) error {
	vouchers, err := s.anyVouchers()
	if err != nil {
		return err
	}
	now := time.Now()
	if _, err := vouchers.CreateVoucher(ctx, &seckillv1.CreateVoucherRequest{
		VoucherId: voucherID, Title: fmt.Sprintf("voucher %d", voucherID), Total: total,
		BeginTime: timestamppb.New(now.Add(-time.Second)), EndTime: timestamppb.New(now.Add(24 * time.Hour)),
	}); err != nil {
		return fmt.Errorf("creating voucher %d: %w", voucherID, err)
	}
	if _, err := vouchers.OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: voucherID}); err != nil {
		return fmt.Errorf("opening voucher %d: %w", voucherID, err)
	}
	return nil
}

// Books asks the first writer that runs for the books of a voucher.
func (s *Stack) Books(ctx context.Context, voucherID int64) (*seckillv1.Books, error) {
	vouchers, err := s.anyVouchers()
	if err != nil {
		return nil, err
	}
	answer, err := vouchers.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: voucherID})
	if err != nil {
		return nil, fmt.Errorf("asking for the books of voucher %d: %w", voucherID, err)
	}
	return answer.GetBooks(), nil
}

func (s *Stack) anyVouchers() (seckillv1.VoucherServiceClient, error) {
	for _, p := range s.Writers() {
		select {
		case <-p.Done():
		default:
			return seckillv1.NewVoucherServiceClient(p.Conn()), nil
		}
	}
	return nil, errors.New("no writer runs")
}
