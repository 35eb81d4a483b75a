package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/rpcserver"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// writer answers as a test tells it.
type writer struct {
	seckillv1.UnimplementedVoucherServiceServer
	seckillv1.UnimplementedWriterServiceServer
	get     func(*seckillv1.GetVoucherRequest) (*seckillv1.GetVoucherResponse, error)
	create  func(*seckillv1.CreateVoucherRequest) (*seckillv1.CreateVoucherResponse, error)
	books   func(*seckillv1.GetBooksRequest) (*seckillv1.GetBooksResponse, error)
	backlog func() (*seckillv1.GetBacklogResponse, error)
	orders  func(*seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error)
	letters func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error)
	resolve func(*seckillv1.ResolveDeadLetterRequest, grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error
}

func (w *writer) GetVoucher(_ context.Context, r *seckillv1.GetVoucherRequest) (*seckillv1.GetVoucherResponse, error) {
	return w.get(r)
}

func (w *writer) CreateVoucher(_ context.Context, r *seckillv1.CreateVoucherRequest) (*seckillv1.CreateVoucherResponse, error) {
	return w.create(r)
}

func (w *writer) GetBooks(_ context.Context, r *seckillv1.GetBooksRequest) (*seckillv1.GetBooksResponse, error) {
	return w.books(r)
}

func (w *writer) GetBacklog(context.Context, *seckillv1.GetBacklogRequest) (*seckillv1.GetBacklogResponse, error) {
	return w.backlog()
}

func (w *writer) ListOrders(_ context.Context, r *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
	return w.orders(r)
}

func (w *writer) ListDeadLetters(_ context.Context, r *seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
	return w.letters(r)
}

func (w *writer) ResolveDeadLetter(r *seckillv1.ResolveDeadLetterRequest, s grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
	return w.resolve(r, s)
}

// serve serves w until the test ends and returns its address.
func serve(t *testing.T, w *writer) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	seckillv1.RegisterVoucherServiceServer(server, w)
	seckillv1.RegisterWriterServiceServer(server, w)
	go server.Serve(l)
	t.Cleanup(server.Stop)
	return l.Addr().String()
}

// certificate makes a certificate for 127.0.0.1 that is its own authority.
func certificate(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	require.NoError(t, os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600))
	return certFile, keyFile
}

func TestTLS_BothSidesShowWhoTheyAre(t *testing.T) {
	serverCert, serverKey := certificate(t, "server")
	ownCert, ownKey := certificate(t, "operator")
	server, err := rpcserver.New(rpcserver.Options{Addr: "127.0.0.1:0", Settings: rpcserver.Settings{TLSCertFile: serverCert, TLSKeyFile: serverKey, TLSClientCAFile: ownCert}})
	require.NoError(t, err)
	seckillv1.RegisterWriterServiceServer(server.GRPC(), &writer{backlog: func() (*seckillv1.GetBacklogResponse, error) {
		return &seckillv1.GetBacklogResponse{DatabaseState: "available"}, nil
	}})
	require.NoError(t, server.Listen())
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	t.Cleanup(func() { stop(); require.NoError(t, <-ended) })

	backlog := func(flags ...string) (int, string, string) {
		return run(append([]string{"--writer", server.Addr(), "backlog"}, flags...)...)
	}
	code, out, errs := backlog("--tls-ca-file", serverCert, "--tls-cert-file", ownCert, "--tls-key-file", ownKey)
	require.Zero(t, code, errs)
	require.Contains(t, out, "available")
	for name, flags := range map[string][]string{
		"no TLS":            {},
		"unknown authority": {"--tls", "--tls-cert-file", ownCert, "--tls-key-file", ownKey},
		"no certificate":    {"--tls-ca-file", serverCert},
		"another name":      {"--tls-ca-file", serverCert, "--tls-cert-file", ownCert, "--tls-key-file", ownKey, "--tls-server-name", "elsewhere"},
	} {
		code, _, errs := backlog(flags...)
		require.Equal(t, 1, code, name)
		require.Contains(t, errs, "UNAVAILABLE", name)
	}
}

func run(args ...string) (code int, out, errs string) {
	var stdout, stderr bytes.Buffer
	code = execute(args, command.Streams{Out: &stdout, Err: &stderr})
	return code, stdout.String(), stderr.String()
}

func TestExecute_HelpAndMistakes(t *testing.T) {
	t.Setenv("USER", "ann")
	for name, c := range map[string]struct {
		args []string
		code int
		want []string
	}{
		"help":              {[]string{"--help"}, 0, []string{"Exit codes", "backlog", "voucher create", "dead-letters requeue", "get-order", "SECKILL_WRITER"}},
		"help of cancel":    {[]string{"dead-letters", "cancel", "--help"}, 0, []string{"--operator=NAME", "$USER", "--held-reason", "-y, --yes"}},
		"help of create":    {[]string{"voucher", "create", "--help"}, 0, []string{"--begin=now", "--end=TIME"}},
		"help of orders":    {[]string{"orders", "--help"}, 0, []string{"seckillctl orders [flags]", "--voucher=VOUCHER", "--user=USER"}},
		"help of get-order": {[]string{"get-order", "--help"}, 0, []string{"seckillctl get-order --user=USER [flags]", "--id=ORDER"}},
		"order of nothing":  {[]string{"get-order", "--user", "1"}, 2, []string{"--voucher", "--id"}},
		"order of both":     {[]string{"get-order", "--user", "1", "--voucher", "2", "--id", "X"}, 2, []string{"--voucher", "--id"}},
		"nothing":           {nil, 2, []string{"expected one of", "See seckillctl --help"}},
		"unknown command":   {[]string{"sell"}, 2, []string{"sell"}},
		"unknown flag":      {[]string{"backlog", "--nonsense"}, 2, []string{"--nonsense"}},
		"no number":         {[]string{"books", "seven"}, 2, []string{"seven"}},
		"form":              {[]string{"--output", "xml", "backlog"}, 2, []string{"--output"}},
		"no timeout":        {[]string{"--timeout", "0s", "backlog"}, 2, []string{"--timeout 0s"}},
		"half a key pair":   {[]string{"--tls-cert-file", "a.pem", "backlog"}, 2, []string{"--tls-key-file"}},
		"orders of nothing": {[]string{"orders"}, 2, []string{"--voucher", "--user"}},
		"orders of both":    {[]string{"orders", "--voucher", "1", "--user", "2"}, 2, []string{"--voucher", "--user"}},
		"find nothing":      {[]string{"order", "find", "--user", "1"}, 2, []string{"--user and --voucher"}},
		"find both":         {[]string{"order", "find", "--id", "X", "--user", "1", "--voucher", "2"}, 2, []string{"--id, or"}},
		"no time":           {[]string{"voucher", "create", "--total", "1", "--end", "soon"}, 2, []string{"neither now"}},
		"no reason":         {[]string{"dead-letters", "cancel", "o.1"}, 2, []string{"--reason"}},
		"none named":        {[]string{"dead-letters", "cancel", "--reason", "x"}, 2, []string{"say which"}},
		"two named":         {[]string{"dead-letters", "cancel", "o.1", "--voucher", "1", "--reason", "x"}, 2, []string{"say which"}},
		"nobody to ask":     {[]string{"dead-letters", "requeue", "--all", "--reason", "x"}, 2, []string{"--yes"}},
		"no CA":             {[]string{"--tls-ca-file", "/nonexistent", "backlog"}, 1, []string{"--tls-ca-file"}},
		"nobody there":      {[]string{"--writer", "127.0.0.1:1", "backlog"}, 1, []string{"writer at 127.0.0.1:1: UNAVAILABLE"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(c.args...)
			require.Equal(t, c.code, code, out+errs)
			for _, want := range c.want {
				require.Contains(t, out+errs, want)
			}
			if c.code == 0 {
				require.Empty(t, errs)
			} else {
				require.Empty(t, out)
			}
		})
	}
}

func TestExecute_ErrorsTellReasonFieldsAndWhenToComeAgain(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	w.create = func(*seckillv1.CreateVoucherRequest) (*seckillv1.CreateVoucherResponse, error) {
		return nil, rpcserver.InvalidFields([]rpcserver.FieldViolation{{Field: "total", Description: "must be more"}, {Field: "title", Description: "is too long"}})
	}
	code, out, errs := run("--writer", addr, "voucher", "create", "--total", "0", "--end", "+1h")
	require.Equal(t, 1, code)
	require.Empty(t, out)
	require.Contains(t, errs, "writer at "+addr+": INVALID_ARGUMENT, INVALID_FIELD: total: must be more")
	require.Contains(t, errs, "\n  total: must be more\n  title: is too long\n")

	w.books = func(*seckillv1.GetBooksRequest) (*seckillv1.GetBooksResponse, error) {
		return nil, rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE, "redis did not answer", rpcserver.WithRetryAfter(time.Second))
	}
	code, _, errs = run("--writer", addr, "books", "7")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "UNAVAILABLE, REDIS_UNREACHABLE: redis did not answer\n  try again after 1s\n")
}

func TestVoucherCreate_SendsWhatIsGiven(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	var got *seckillv1.CreateVoucherRequest
	w.create = func(r *seckillv1.CreateVoucherRequest) (*seckillv1.CreateVoucherResponse, error) {
		got = r
		return &seckillv1.CreateVoucherResponse{Voucher: &seckillv1.Voucher{VoucherId: 1<<53 + 1, State: seckillv1.VoucherState_VOUCHER_STATE_DRAFT, Title: "a\x1b[2Jb"}}, nil
	}
	code, out, errs := run("--writer", addr, "voucher", "create", "--id", "9007199254740993", "--title", "tea", "--total", "5", "--begin", "2026-11-30T18:00:00+01:00", "--end", "+2h")
	require.Zero(t, code, errs)
	require.EqualValues(t, 1<<53+1, got.GetVoucherId())
	require.Equal(t, time.Date(2026, 11, 30, 17, 0, 0, 0, time.UTC), got.GetBeginTime().AsTime())
	require.WithinDuration(t, time.Now().Add(2*time.Hour), got.GetEndTime().AsTime(), time.Minute)
	require.Contains(t, out, "9007199254740993\n")
	require.Regexp(t, `(?m)^state +DRAFT$`, out)
	require.NotContains(t, out, "\x1b", "what others wrote does not steer the terminal")
	_, out, _ = run("--writer", addr, "--output", "json", "voucher", "create", "--total", "5", "--end", "+2h")
	require.Contains(t, out, `"voucher_id":"9007199254740993"`)
}

func TestBooks_ViolatedIsAnError(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	verdict := seckillv1.BooksVerdict_BOOKS_VERDICT_IN_FLIGHT
	w.books = func(*seckillv1.GetBooksRequest) (*seckillv1.GetBooksResponse, error) {
		return &seckillv1.GetBooksResponse{Books: &seckillv1.Books{VoucherId: 7, Verdict: verdict, Database: &seckillv1.DatabaseReading{Sold: 3, Outcomes: new(int64)}, Violations: []*seckillv1.Violation{{Rule: "orders_missing", OrderIds: []string{"X", "Y"}}}}}, nil
	}
	code, out, _ := run("--writer", addr, "books", "7")
	require.Zero(t, code)
	require.Regexp(t, `(?m)^verdict +IN_FLIGHT$`, out)
	require.Regexp(t, `(?m)^database\.sold +3$`, out)
	require.Regexp(t, `(?m)^database\.orders +-$`, out, "not counted is not 0")
	require.Regexp(t, `(?m)^database\.outcomes +0$`, out)
	_, line, _ := run("--writer", addr, "--output", "json", "books", "7")
	require.Contains(t, line, `"outcomes":"0"`)
	require.NotContains(t, line, `"orders"`)
	verdict = seckillv1.BooksVerdict_BOOKS_VERDICT_VIOLATED
	code, out, errs := run("--writer", addr, "books", "7")
	require.Equal(t, 1, code)
	require.Regexp(t, `(?m)^violations\[0\]\.order_ids\[1\] +Y$`, out)
	require.Contains(t, errs, "violated")
}

func TestBacklog_UnknownIsNotZero(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	zero := int64(0)
	resp := &seckillv1.GetBacklogResponse{DatabaseState: "unavailable", Partitions: []*seckillv1.PartitionBacklog{
		{Partition: 0, Epoch: 1, Open: true, InFlight: 3, LagEntries: &zero, OldestAge: durationpb.New(1500 * time.Millisecond), Consumers: []*seckillv1.ConsumerBacklog{{Name: "w1", PendingEntries: 2, Idle: durationpb.New(time.Second)}}},
		{Partition: 1, Reason: "the ledger is missing"},
	}}
	w.backlog = func() (*seckillv1.GetBacklogResponse, error) { return resp, nil }
	code, out, errs := run("--writer", addr, "backlog")
	require.Zero(t, code, errs)
	require.Regexp(t, `(?m)^0 +1 +yes +3 +0 +1\.5s +w1:2 \(idle 1s\) +-$`, out)
	require.Regexp(t, `(?m)^1 +0 +no +0 +unknown +- +- +the ledger is missing$`, out)
	require.Contains(t, out, "dead letters: unknown, database: unavailable\n")
	_, out, _ = run("--writer", addr, "--output", "json", "backlog")
	var parsed struct{ Partitions []map[string]any }
	require.NoError(t, json.Unmarshal([]byte(out), &parsed))
	require.Equal(t, "0", parsed.Partitions[0]["lag_entries"])
	require.NotContains(t, parsed.Partitions[1], "lag_entries")
	require.NotContains(t, out, "dead_letters")
}

// pages answers n orders by pages of two.
func pages(n int) func(*seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
	return func(r *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
		from := 0
		if r.GetPageToken() != "" {
			fmt.Sscan(r.GetPageToken(), &from)
		}
		resp := &seckillv1.ListOrdersResponse{}
		for i := from; i < min(from+2, n); i++ {
			resp.Orders = append(resp.Orders, &seckillv1.Order{OrderId: fmt.Sprint("order ", i), UserId: 1<<62 + int64(i), VoucherId: r.GetVoucherId(), AdmittedAt: timestamppb.New(time.Unix(0, 1e6))})
		}
		if from+2 < n {
			resp.NextPageToken = fmt.Sprint(from + 2)
		}
		return resp, nil
	}
}

func TestOrders_AreOneLineEachOverAllPages(t *testing.T) {
	w := &writer{orders: pages(5)}
	addr := serve(t, w)
	code, out, errs := run("--writer", addr, "orders", "--voucher", "7")
	require.Zero(t, code, errs)
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	require.Len(t, lines, 5)
	require.Equal(t, `{"order_id":"order 4","user_id":"4611686018427387908","voucher_id":"7","state":"ORDER_STATE_UNSPECIFIED","admitted_at":"1970-01-01T00:00:00.001Z","reference":""}`, lines[4])
	require.Equal(t, "5 orders\n", errs)
}

func TestOrders_PageThatFailsForAMomentIsAskedForAgain(t *testing.T) {
	var failures atomic.Int32
	failures.Store(2)
	answer := pages(5)
	w := &writer{orders: func(r *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
		if r.GetPageToken() == "2" && failures.Add(-1) >= 0 {
			return nil, status.Error(codes.Unavailable, "away")
		}
		return answer(r)
	}}
	code, out, errs := run("--writer", serve(t, w), "orders", "--user", "7")
	require.Zero(t, code, errs)
	require.Equal(t, 5, strings.Count(out, "\n"))
}

func TestOrders_SayWhereTheyAreNotAll(t *testing.T) {
	answer := pages(5)
	w := &writer{orders: func(r *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
		if r.GetPageToken() == "2" {
			return nil, status.Error(codes.Internal, "broken")
		}
		return answer(r)
	}}
	code, out, errs := run("--writer", serve(t, w), "orders", "--voucher", "7")
	require.Equal(t, 1, code)
	require.Equal(t, 2, strings.Count(out, "\n"))
	require.Contains(t, errs, "after 2 orders, which are not all")
}

func TestLists_EndWithinTheTimeoutHoweverOftenAPageIsAskedFor(t *testing.T) {
	var tries atomic.Int32
	away := func() error { tries.Add(1); return status.Error(codes.Unavailable, "away") }
	w := &writer{
		orders: func(*seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) { return nil, away() },
		letters: func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
			return nil, away()
		},
	}
	addr := serve(t, w)
	for _, args := range [][]string{{"dead-letters", "list"}, {"orders", "--voucher", "7"}} {
		tries.Store(0)
		code, _, errs := run(append([]string{"--writer", addr, "--timeout", "100ms"}, args...)...)
		require.Equal(t, 1, code)
		require.Contains(t, errs, "UNAVAILABLE: away", "what the server said, not that a wait ended")
		require.EqualValues(t, 1, tries.Load(), "the wait before the second try is longer than the time")
	}

	// One that answers nothing at all has no more time for its pages than for one.
	ended := make(chan struct{})
	t.Cleanup(func() { close(ended) })
	w.letters = func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
		if tries.Add(1) == 1 {
			return nil, status.Error(codes.Unavailable, "away")
		}
		<-ended
		return nil, nil
	}
	tries.Store(0)
	code, _, errs := run("--writer", addr, "--timeout", "1s", "dead-letters", "list")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "DEADLINE_EXCEEDED")
	require.EqualValues(t, 2, tries.Load())
}

// resolving answers n resolutions and then err.
func resolving(n int64, total int64, result seckillv1.DeadLetterResult, err error) func(*seckillv1.ResolveDeadLetterRequest, grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
	return func(_ *seckillv1.ResolveDeadLetterRequest, s grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
		for i := range n {
			if err := s.Send(&seckillv1.ResolveDeadLetterResponse{DeadLetterId: fmt.Sprint("o.", i), Result: result, Detail: "so it is", Done: i + 1, Total: total}); err != nil {
				return err
			}
		}
		return err
	}
}

func TestDeadLetters_ProgressAndSum(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	var got *seckillv1.ResolveDeadLetterRequest
	answer := resolving(2, 2, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED, nil)
	w.resolve = func(r *seckillv1.ResolveDeadLetterRequest, s grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
		got = r
		return answer(r, s)
	}
	t.Setenv("USER", "ann")
	cancel := func(args ...string) (int, string, string) {
		return run(append([]string{"--writer", addr, "dead-letters", "cancel", "--reason", "ticket 12"}, args...)...)
	}
	code, out, errs := cancel("--yes", "--voucher", "7", "--held-reason", "bad", "--seen-before=-10m")
	require.Zero(t, code, errs)
	require.Equal(t, "1/2 o.0 CANCELLED: so it is\n2/2 o.1 CANCELLED: so it is\n", out)
	require.Equal(t, "2 dead letters, 2 cancelled\n", errs)
	require.Equal(t, "ann", got.GetOperator())
	require.Equal(t, "ticket 12", got.GetReason())
	require.EqualValues(t, 7, got.GetFilter().GetVoucherId())
	require.Equal(t, "bad", got.GetFilter().GetReasonPrefix())
	require.WithinDuration(t, time.Now().Add(-10*time.Minute), got.GetFilter().GetSeenBefore().AsTime(), time.Minute)
	code, _, errs = cancel("o.5", "--operator", "bob")
	require.Zero(t, code, errs)
	require.Equal(t, "o.5", got.GetDeadLetterId())
	require.Equal(t, "bob", got.GetOperator())
	require.Equal(t, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL, got.GetAction())

	answer = resolving(1, 3, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
		rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_DATABASE_UNREACHABLE, "away", rpcserver.WithRetryAfter(time.Second)))
	code, out, errs = cancel("--yes", "--all")
	require.Equal(t, 1, code)
	require.Contains(t, out, "1/3 o.0")
	require.Contains(t, errs, "after 1 of 3, which stay resolved")
	require.Contains(t, errs, "DATABASE_UNREACHABLE")

	answer = resolving(2, 2, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_STILL_HELD, nil)
	code, _, errs = cancel("--yes", "--all")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "2 are still held")
}

func TestDeadLetters_OneThatCameToSomethingElseThanAskedIsAnError(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	t.Setenv("USER", "ann")
	const persisted, conflict, cancelled = seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED,
		seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CONFLICT, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED
	for _, row := range []struct {
		action string
		result seckillv1.DeadLetterResult
		code   int
	}{
		{"requeue", persisted, 0}, {"requeue", cancelled, 1}, {"requeue", conflict, 1},
		{"cancel", cancelled, 0}, {"cancel", persisted, 1}, {"cancel", conflict, 1},
	} {
		w.resolve = resolving(1, 1, row.result, nil)
		code, out, errs := run("--writer", addr, "dead-letters", row.action, "o.7.1.5.0", "--reason", "x")
		require.Equal(t, row.code, code, "%s %s", row.action, row.result)
		require.Contains(t, out, "1/1 o.0 "+enumName(row.result)+": so it is\n", "it is an answer all the same")
		if row.code != 0 {
			require.Contains(t, errs, "o.7.1.5.0 is "+enumName(row.result)+", which is not what was asked for")
		}
		code, _, errs = run("--writer", addr, "dead-letters", row.action, "--all", "--yes", "--reason", "x")
		require.Zero(t, code, errs)
	}
}

func TestDeadLetters_ManyAreResolvedOnlyAfterAYes(t *testing.T) {
	w := &writer{
		letters: func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
			return &seckillv1.ListDeadLettersResponse{DeadLetters: make([]*seckillv1.DeadLetter, 3), NextPageToken: "more"}, nil
		},
		resolve: resolving(1, 1, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED, nil),
	}
	to := &connection{Writer: serve(t, w), Timeout: 10 * time.Second, Output: "text"}
	for answer, goesOn := range map[string]bool{"y\n": true, " YES \n": true, "n\n": false, "\n": false, "": false, "yes please\n": false} {
		var out, errs bytes.Buffer
		r := &resolve{All: true, Operator: "ann", Reason: "why"}
		err := r.run(context.Background(), to, command.Streams{Out: &out, Err: &errs}, strings.NewReader(answer), seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE)
		require.Contains(t, errs.String(), "requeue more than 3 dead letters, as ann? [y/N] ")
		if goesOn {
			require.NoError(t, err, "%q", answer)
			require.NotEmpty(t, out.String())
		} else {
			require.ErrorContains(t, err, "nothing was changed", "%q", answer)
			require.Empty(t, out.String())
		}
	}
}

func TestTerminal_IsNeitherAFileNorTheNullDevice(t *testing.T) {
	for _, name := range []string{os.DevNull, filepath.Join(t.TempDir(), "file")} {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		require.False(t, terminal(f), name)
		require.NoError(t, f.Close())
	}
}

// It is a thin client: whoever has it has no way to a server behind.
func TestSeckillctl_LinksNeitherADatabaseNorTheLedger(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	require.NoError(t, err)
	for dep := range strings.Lines(string(out)) {
		for _, banned := range []string{"gorm", "mysql", "rueidis", "seckill/pkg/ledger", "seckill/gateway/internal"} {
			require.NotContains(t, dep, banned)
		}
	}
}
