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
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

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
	find    func(*seckillv1.FindOrderRequest) (*seckillv1.FindOrderResponse, error)
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

func (w *writer) FindOrder(_ context.Context, r *seckillv1.FindOrderRequest) (*seckillv1.FindOrderResponse, error) {
	return w.find(r)
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
		{Partition: 2, Epoch: 1, InFlight: 4, Reason: "the orders stream is missing"},
		{Partition: 3, Epoch: 1, Open: true, LagEntries: &zero},
	}}
	w.backlog = func() (*seckillv1.GetBacklogResponse, error) { return resp, nil }
	code, out, errs := run("--writer", addr, "backlog")
	require.Zero(t, code, errs)
	require.Regexp(t, `(?m)^0 +1 +yes +3 +0 +1\.5s +w1:2 \(idle 1s\) +-$`, out)
	require.Regexp(t, `(?m)^1 +0 +no +unknown +unknown +unknown +- +the ledger is missing$`, out)
	require.Regexp(t, `(?m)^2 +1 +no +4 +unknown +unknown +- +the orders stream is missing$`, out)
	require.Regexp(t, `(?m)^3 +1 +yes +0 +0 +- +- +-$`, out)
	require.Contains(t, out, "dead letters: unknown, database: unavailable\n")
	_, out, _ = run("--writer", addr, "--output", "json", "backlog")
	var parsed struct{ Partitions []map[string]any }
	require.NoError(t, json.Unmarshal([]byte(out), &parsed))
	require.Equal(t, "0", parsed.Partitions[0]["lag_entries"])
	require.NotContains(t, parsed.Partitions[1], "lag_entries")
	require.NotContains(t, out, "dead_letters")
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
