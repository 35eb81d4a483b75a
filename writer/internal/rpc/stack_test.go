package rpc

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/rpcserver"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

const (
	patience = 30 * time.Second
	pollTime = 10 * time.Millisecond
)

// stack is the service as a caller meets it: over gRPC, with a real guardian,
// Redis and database, both behind proxies.
type stack struct {
	seckillv1.VoucherServiceClient
	service  *Service
	store    *orderstore.Store
	redis    rueidis.Client // not through the proxy
	guardian *guardian.Guardian
	orderIDs *orderid.Codec

	redisServer          *devstack.Redis
	redisProxy, sqlProxy *devstack.Proxy
	partitions           int
}

func newStack(t *testing.T, partitions int, redisArgs ...string) *stack {
	t.Helper()
	ctx := context.Background()
	s := &stack{partitions: partitions, redisServer: devstack.TestRedis(t, devstack.RedisOptions{Args: redisArgs})}
	s.redisProxy = devstack.TestProxy(t, s.redisServer.Addr())
	options := redisconn.Options{Addr: s.redisServer.Addr()}
	var err error
	s.redis, err = options.Client(redisconn.Calls)
	require.NoError(t, err)
	t.Cleanup(s.redis.Close)
	options.Addr = s.redisProxy.Addr()
	calls, err := options.Client(redisconn.Calls)
	require.NoError(t, err)
	t.Cleanup(calls.Close)

	dsn := devstack.TestDatabase(t)
	open := func(dsn string) *orderstore.Store {
		store, err := orderstore.Open(ctx, orderstore.Options{DSN: dsn})
		require.NoError(t, err)
		t.Cleanup(func() { store.Close() })
		return store
	}
	s.store = open(dsn)
	require.NoError(t, migrations.Up(ctx, s.store.DB(), slog.New(slog.DiscardHandler)))
	require.NoError(t, s.store.InitPartitions(ctx, partitions))
	before, rest, _ := strings.Cut(dsn, "tcp(")
	addr, after, _ := strings.Cut(rest, ")")
	s.sqlProxy = devstack.TestProxy(t, addr)
	throughProxy := open(before + "tcp(" + s.sqlProxy.Addr() + ")" + after)

	s.orderIDs, err = orderid.New(orderid.Key{Number: 0, Secret: [orderid.KeySize]byte{1, 2, 3}})
	require.NoError(t, err)
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	s.guardian = guardian.New(guardian.Options{
		Store: throughProxy, Client: calls, Partitions: partitions, Bound: 1_000_000,
		Durability: ledger.DurabilityStrict, Interval: 50 * time.Millisecond, OrderKeys: s.orderIDs.Fingerprints(),
		Logger: log, Registerer: prometheus.NewRegistry(),
	})
	s.service = New(Options{Vouchers: throughProxy, OrderIDs: s.orderIDs, Logger: log})
	s.service.Bind(Ledger{
		Client: calls, Partitions: partitions, Carrier: s.guardian,
		Reckoner: &books.Reckoner{Store: throughProxy, Client: calls, Now: time.Now},
	})
	s.VoucherServiceClient = serve(t, s.service, log)
	run(t, s.guardian.Run)
	require.Eventually(t, func() bool {
		for _, p := range s.guardian.Status() {
			if !p.Open {
				return false
			}
		}
		return true
	}, patience, pollTime, "the guardian opens new partitions")
	return s
}

// run runs a part until the test ends.
func run(t *testing.T, part func(context.Context) error) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- part(ctx) }()
	t.Cleanup(func() {
		stop()
		require.NoError(t, <-done)
	})
}

func serve(t *testing.T, service *Service, log *slog.Logger) seckillv1.VoucherServiceClient {
	t.Helper()
	server, err := rpcserver.New(rpcserver.Options{Addr: "127.0.0.1:0", DefaultDeadline: 20 * time.Second, Logger: log})
	require.NoError(t, err)
	seckillv1.RegisterVoucherServiceServer(server.GRPC(), service)
	require.NoError(t, server.Listen())
	conn, err := grpc.NewClient(server.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	run(t, server.Run)
	t.Cleanup(func() { conn.Close() })
	return seckillv1.NewVoucherServiceClient(conn)
}

var (
	begin = time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	end   = begin.Add(24 * time.Hour)
)

func createRequest(id, total int64) *seckillv1.CreateVoucherRequest {
	return &seckillv1.CreateVoucherRequest{
		VoucherId: id, Title: "tea", Total: total, BeginTime: timestamppb.New(begin), EndTime: timestamppb.New(end),
	}
}

func (s *stack) create(t *testing.T, id, total int64) {
	t.Helper()
	_, err := s.CreateVoucher(context.Background(), createRequest(id, total))
	require.NoError(t, err)
}

// The five steps as functions of one shape.
type step func(ctx context.Context, s *stack, id int64) (*seckillv1.Voucher, error)

var steps = map[string]step{
	"Open": func(ctx context.Context, s *stack, id int64) (*seckillv1.Voucher, error) {
		r, err := s.OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: id})
		return r.GetVoucher(), err
	},
	"Pause": func(ctx context.Context, s *stack, id int64) (*seckillv1.Voucher, error) {
		r, err := s.PauseVoucher(ctx, &seckillv1.PauseVoucherRequest{VoucherId: id})
		return r.GetVoucher(), err
	},
	"Resume": func(ctx context.Context, s *stack, id int64) (*seckillv1.Voucher, error) {
		r, err := s.ResumeVoucher(ctx, &seckillv1.ResumeVoucherRequest{VoucherId: id})
		return r.GetVoucher(), err
	},
	"Close": func(ctx context.Context, s *stack, id int64) (*seckillv1.Voucher, error) {
		r, err := s.CloseVoucher(ctx, &seckillv1.CloseVoucherRequest{VoucherId: id})
		return r.GetVoucher(), err
	},
	"Archive": func(ctx context.Context, s *stack, id int64) (*seckillv1.Voucher, error) {
		r, err := s.ArchiveVoucher(ctx, &seckillv1.ArchiveVoucherRequest{VoucherId: id})
		return r.GetVoucher(), err
	},
}

func (s *stack) step(t *testing.T, name string, id int64) *seckillv1.Voucher {
	t.Helper()
	v, err := steps[name](context.Background(), s, id)
	require.NoError(t, err, "%s of voucher %d", name, id)
	return v
}

func (s *stack) get(t *testing.T, id int64) *seckillv1.Voucher {
	t.Helper()
	r, err := s.GetVoucher(context.Background(), &seckillv1.GetVoucherRequest{VoucherId: id})
	require.NoError(t, err)
	return r.GetVoucher()
}

// ledgerOf reads what the ledger holds of a voucher, past every proxy.
func (s *stack) ledgerOf(t *testing.T, id int64) ledger.Books {
	t.Helper()
	b, err := ledger.ReadBooks(context.Background(), s.redis, ledger.Partition(id, s.partitions), 1, id)
	require.NoError(t, err)
	return b
}

// admit takes a unit for each user, as a gateway would.
func (s *stack) admit(t *testing.T, id int64, users ...int64) []orderid.Position {
	t.Helper()
	p := ledger.Partition(id, s.partitions)
	call := ledger.AdmitCall{
		Partition: p, Epoch: 1, SHA: ledger.AdmitSHA(p, 1), VoucherID: id, NotAfter: time.Now().Add(time.Hour),
	}
	for _, user := range users {
		call.Grabs = append(call.Grabs, ledger.Grab{UserID: user, Record: ledger.EncodeRecord(user, "", "")})
	}
	reply, err := ledger.Admit(context.Background(), s.redis, call)
	require.NoError(t, err)
	require.Equal(t, ledger.AdmitOK, reply.Status, reply.Detail)
	positions := make([]orderid.Position, len(users))
	for i, answer := range reply.Answers {
		require.Equal(t, ledger.DecisionAdmitted, answer.Decision)
		positions[i] = answer.Order
	}
	return positions
}

// persist carries everything that is in a partition's stream into the database
// and settles it.
func (s *stack) persist(t *testing.T, partition int) {
	t.Helper()
	ctx := context.Background()
	raws, err := ledger.Scan(ctx, s.redis, partition, 1, "-", 1000)
	require.NoError(t, err)
	for _, raw := range raws {
		entry, err := ledger.DecodeEntry(partition, raw.ID, raw.Fields)
		require.NoError(t, err)
		var orders []orderstore.Order
		settlement := ledger.Settlement{Partition: partition, EntryID: raw.ID, Epoch: entry.Epoch, VoucherID: entry.VoucherID}
		for _, o := range entry.Orders {
			orders = append(orders, orderstore.Order{Position: o.Position, UserID: o.UserID, AdmittedAt: entry.AdmittedAt, EntryID: raw.ID})
			settlement.Orders = append(settlement.Orders, ledger.Settled{UserID: o.UserID, Seq: o.Seq, Verdict: ledger.VerdictPersisted})
		}
		verdicts, err := s.store.Persist(ctx, orders)
		require.NoError(t, err)
		for _, v := range verdicts {
			require.Equal(t, orderstore.Persisted, v.Kind)
		}
		for _, result := range ledger.Settle(ctx, s.redis, []ledger.Settlement{settlement}) {
			require.NoError(t, result.Err)
			require.True(t, result.Settled)
		}
	}
}

// requireStatus checks code and reason, and that no text of a driver is told.
func requireStatus(t *testing.T, err error, code codes.Code, reason seckillv1.ErrorReason) *status.Status {
	t.Helper()
	require.Error(t, err)
	st := status.Convert(err)
	require.Equal(t, code, st.Code(), "%v", err)
	got, ok := rpcserver.Reason(err)
	require.True(t, ok, "an error without ErrorInfo: %v", err)
	require.Equal(t, reason, got, "%v", err)
	for _, leak := range []string{"127.0.0.1", "tcp", "dial", "EOF", "driver", "Error 1", "WRONGTYPE", "sk:{"} {
		require.NotContains(t, st.Message(), leak)
	}
	if code == codes.Unavailable {
		after, ok := rpcserver.RetryAfter(err)
		require.True(t, ok, "UNAVAILABLE without RetryInfo: %v", err)
		require.Positive(t, after)
	}
	return st
}

// fake is a carrier and a reckoner that answers what it is told.
type fake struct {
	carry  error
	reckon error
	books  books.Books
}

func (f fake) Carry(context.Context, orderstore.Voucher) error { return f.carry }
func (f fake) Reckon(context.Context, int64) (books.Books, error) {
	return f.books, f.reckon
}

var errDriver = errors.New("driver: dial tcp 127.0.0.1:3306")
