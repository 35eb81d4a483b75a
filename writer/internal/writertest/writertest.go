// Package writertest gives the tests of the writer's packages a real Redis, a
// migrated real database and a guardian between them. Only tests import it.
package writertest

import (
	"context"
	"database/sql"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/pipeline"
)

// Patience bounds every wait for something that must come true; it is long
// because a machine under load is slow, not because anything takes so long.
const Patience = 30 * time.Second

// Interval is that of guardians in tests.
const Interval = 50 * time.Millisecond

// Fixture is one test's servers.
type Fixture struct {
	T          testing.TB
	Ctx        context.Context
	Redis      *devstack.Redis
	Client     rueidis.Client
	Store      *orderstore.Store
	DB         *sql.DB
	DSN        string
	Partitions int
}

// New starts a Redis of the test's own and makes it a database, migrated for
// the given number of partitions.
func New(t testing.TB, partitions int) *Fixture {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	f := &Fixture{T: t, Ctx: ctx, Redis: devstack.TestRedis(t), DSN: devstack.TestDatabase(t), Partitions: partitions}
	f.Client = f.Dial(f.Redis.Addr())
	store, err := orderstore.Open(ctx, orderstore.Options{DSN: f.DSN, LockWait: 2 * time.Second, Logger: Logger()})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, store.Close()) })
	f.Store, f.DB = store, store.DB()
	require.NoError(t, migrations.Up(ctx, f.DB, slog.New(slog.DiscardHandler)))
	require.NoError(t, store.InitPartitions(ctx, partitions))
	return f
}

// Logger is silent, unless SECKILL_TEST_LOG is set.
func Logger() *slog.Logger {
	if os.Getenv("SECKILL_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}

// Dial connects to a Redis or to a proxy before it.
func (f *Fixture) Dial(addr string) rueidis.Client {
	f.T.Helper()
	client, err := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{addr}, DisableCache: true, DisableRetry: true, ForceSingleClient: true, ConnWriteTimeout: 2 * time.Second,
		// One connection: once it answers after an outage, it is not another one
		// that the next call finds broken.
		PipelineMultiplex: -1,
	})
	require.NoError(f.T, err)
	f.T.Cleanup(client.Close)
	return client
}

// Guardian makes a guardian that is not running.
func (f *Fixture) Guardian() *guardian.Guardian {
	return guardian.New(guardian.Options{
		Store: f.Store, Client: f.Client, Partitions: f.Partitions, Bound: 1_000_000, Durability: ledger.DurabilityStrict,
		Interval: Interval, OrderKeys: map[int]string{0: "test"}, Logger: Logger(), Registerer: prometheus.NewRegistry(),
	})
}

// Run runs something with Run(ctx) until the test ends or stop is called, which
// waits for its end.
func (f *Fixture) Run(runner interface{ Run(context.Context) error }) (stop func()) {
	f.T.Helper()
	ctx, cancel := context.WithCancel(f.Ctx)
	done := make(chan error, 1)
	go func() { done <- runner.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		require.NoError(f.T, <-done)
	}
	f.T.Cleanup(stop)
	return stop
}

// Guarded starts a guardian and waits until every partition is open.
func (f *Fixture) Guarded() *guardian.Guardian {
	f.T.Helper()
	g := f.Guardian()
	f.Run(g)
	f.Open(g)
	return g
}

// Open waits until a guardian says that every partition is open.
func (f *Fixture) Open(g *guardian.Guardian) {
	f.T.Helper()
	require.Eventually(f.T, func() bool {
		for _, status := range g.Status() {
			if !status.Open {
				return false
			}
		}
		return true
	}, Patience, 10*time.Millisecond, "partitions did not open: %v", g.Status())
}

// Voucher makes a voucher, opens it for an hour and carries it over.
func (f *Fixture) Voucher(g *guardian.Guardian, id, total int64) orderstore.Voucher {
	f.T.Helper()
	now := time.Now().UTC().Truncate(time.Millisecond)
	_, err := f.Store.CreateVoucher(f.Ctx, orderstore.Voucher{
		ID: id, Title: "test", Total: total, BeginAt: now.Add(-time.Minute), EndAt: now.Add(time.Hour),
	})
	require.NoError(f.T, err)
	return f.Transition(g, id, orderstore.StateDraft, orderstore.StateOpen)
}

// Transition brings a voucher to another state, in the database and the ledger.
func (f *Fixture) Transition(g *guardian.Guardian, id int64, from, to string) orderstore.Voucher {
	f.T.Helper()
	voucher, err := f.Store.Transition(f.Ctx, id, []string{from}, to)
	require.NoError(f.T, err)
	require.NoError(f.T, g.Carry(f.Ctx, voucher))
	voucher, err = f.Store.Voucher(f.Ctx, id)
	require.NoError(f.T, err)
	return voucher
}

// Admit runs one admission of some users, as a gateway would.
func (f *Fixture) Admit(voucherID int64, users ...int64) (ledger.AdmitReply, error) {
	partition := ledger.Partition(voucherID, f.Partitions)
	call := ledger.AdmitCall{
		Partition: partition, Epoch: 1, SHA: ledger.AdmitSHA(partition, 1), VoucherID: voucherID,
		NotAfter: time.Now().Add(time.Minute),
	}
	for _, user := range users {
		call.Grabs = append(call.Grabs, ledger.Grab{UserID: user, Record: ledger.EncodeRecord(user, "", "")})
	}
	return ledger.Admit(f.Ctx, f.Client, call)
}

// Admitted admits users who all get a unit.
func (f *Fixture) Admitted(voucherID int64, users ...int64) {
	f.T.Helper()
	for len(users) > 0 {
		n := min(len(users), ledger.MaxBatch)
		reply, err := f.Admit(voucherID, users[:n]...)
		require.NoError(f.T, err)
		require.Equal(f.T, ledger.AdmitOK, reply.Status, reply.Detail)
		for _, answer := range reply.Answers {
			require.Equal(f.T, ledger.DecisionAdmitted, answer.Decision)
		}
		users = users[n:]
	}
}

// Drained runs a pipeline until nothing is in flight in any partition.
func (f *Fixture) Drained() {
	f.T.Helper()
	stop := f.Run(f.Pipeline("drain"))
	require.Eventually(f.T, func() bool {
		for partition := range f.Partitions {
			meta, err := ledger.ReadMeta(f.Ctx, f.Client, partition)
			if err != nil || meta.InFlight() != 0 {
				return false
			}
		}
		return true
	}, Patience, 10*time.Millisecond)
	stop()
}

// Pipeline makes a writer's pipeline that is not running.
func (f *Fixture) Pipeline(consumer string) *pipeline.Pipeline {
	f.T.Helper()
	p, err := pipeline.New(pipeline.Options{
		Reader: f.Dial(f.Redis.Addr()), Client: f.Client, Store: f.Store, Holder: f.Store, Ping: f.Store.Ping, Alarm: silent{}, Partitions: f.Partitions,
		Consumer: consumer, Committers: 2, BatchMax: 1000, BatchTimeout: 5 * time.Second, MinIdle: 30 * time.Second,
		Block: 50 * time.Millisecond, DrainTimeout: 10 * time.Second, SlotsMax: 8192, Logger: Logger(), Registerer: prometheus.NewRegistry(),
	})
	require.NoError(f.T, err)
	return p
}

type silent struct{}

func (silent) PartitionFault(int, string) {}
func (silent) VoucherFault(int64, string) {}

// Users are n users from first on.
func Users(first, n int64) []int64 {
	users := make([]int64, n)
	for i := range users {
		users[i] = first + int64(i)
	}
	return users
}

// Number is the answer to a query for one number.
func (f *Fixture) Number(query string, args ...any) (n int64) {
	f.T.Helper()
	require.NoError(f.T, f.DB.QueryRowContext(f.Ctx, query, args...).Scan(&n))
	return n
}

// Exec changes the database as a stranger would.
func (f *Fixture) Exec(query string, args ...any) {
	f.T.Helper()
	_, err := f.DB.ExecContext(f.Ctx, query, args...)
	require.NoError(f.T, err)
}

// Do sends a command to Redis as a stranger would.
func (f *Fixture) Do(args ...string) rueidis.RedisResult {
	f.T.Helper()
	return f.Client.Do(f.Ctx, f.Client.B().Arbitrary(args[0]).Args(args[1:]...).Build())
}

// HoldRow locks the rows of a query, as a foreign transaction does, until release
// is called or the test ends. Its session is never silent for so long that the
// server would end it.
func (f *Fixture) HoldRow(query string, args ...any) (release func()) {
	f.T.Helper()
	tx, err := f.DB.BeginTx(f.Ctx, nil)
	require.NoError(f.T, err)
	_, err = tx.Exec(query, args...)
	require.NoError(f.T, err)
	ctx, cancel := context.WithCancel(f.Ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if _, err := tx.Exec("SELECT SLEEP(0.1)"); err != nil {
				return
			}
		}
	}()
	release = sync.OnceFunc(func() {
		cancel()
		<-done
		_ = tx.Rollback()
	})
	f.T.Cleanup(release)
	return release
}
