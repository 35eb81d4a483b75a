package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

type redisClient = rueidis.Client

// refused runs serve in this process until it refuses, and returns what it said.
func refused(t *testing.T, args ...string) string {
	t.Helper()
	said, _ := refusedAndLogged(t, args...)
	return said
}

// refusedAndLogged also returns the lines of the log before it.
func refusedAndLogged(t *testing.T, args ...string) (said, log string) {
	t.Helper()
	type result struct {
		code int
		errs string
	}
	done := make(chan result, 1)
	go func() {
		code, _, errs := program(append([]string{"serve", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0"}, args...)...)
		done <- result{code, errs}
	}()
	select {
	case r := <-done:
		require.Equal(t, 1, r.code, r.errs)
		// The last line is what a person reads.
		lines := strings.Split(strings.TrimSpace(r.errs), "\n")
		require.NotContains(t, r.errs, "goroutine ", "no stack trace")
		for _, line := range lines {
			if strings.HasPrefix(line, "writer: ") {
				log, said, _ := strings.Cut(r.errs, "writer: ")
				return "writer: " + said, log
			}
		}
		t.Fatalf("no message for a person in: %s", r.errs)
	case <-time.After(patience):
		t.Fatal("serve did not refuse")
	}
	return "", ""
}

func exec(t *testing.T, dsn, statement string) {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	require.NoError(t, err)
	defer db.Close()
	_, err = db.Exec(statement)
	require.NoError(t, err)
}

func TestServe_RefusesADatabaseThatThePromisesCannotStandOn(t *testing.T) {
	key := keyFile(t)
	redis := "--redis-addr=" + devstack.TestRedis(t).Addr()

	empty := file(t, "dsn", devstack.TestDatabase(t))
	require.Contains(t, refused(t, redis, "--order-key-file="+key, "--database-dsn-file="+empty), "run writer migrate")

	dsn, dsnFile := migrated(t, 1)
	exec(t, dsn, "ALTER TABLE orders DROP INDEX orders_user_voucher")
	require.Contains(t, refused(t, redis, "--order-key-file="+key, "--database-dsn-file="+dsnFile), "orders_user_voucher")
}

func TestServe_RefusesAnotherOrderKeyAndAnotherRedis(t *testing.T) {
	ctx := context.Background()
	key, other := keyFile(t), keyFile(t)
	dsn, dsnFile := migrated(t, 1)
	codec, err := orderid.Load(key)
	require.NoError(t, err)
	store, err := orderstore.Open(ctx, orderstore.Options{DSN: dsn})
	require.NoError(t, err)
	defer store.Close()
	_, err = store.RegisterKeys(ctx, codec.Fingerprints())
	require.NoError(t, err)
	redis := devstack.TestRedis(t)
	addr := "--redis-addr=" + redis.Addr()

	said, log := refusedAndLogged(t, addr, "--order-key-file="+other, "--database-dsn-file="+dsnFile)
	require.Contains(t, said, "order key file is not the one")
	require.Contains(t, log, `"msg":"the database is refused"`)
	require.NotContains(t, log, "waiting for", "it answers: there is nothing to wait for")
	for line := range strings.Lines(log) {
		require.Contains(t, line, `"service":"writer"`)
		require.Contains(t, line, `"version":`)
	}
	require.Contains(t, log, `"msg":"writer starting"`)
	keys, err := store.RegisterKeys(ctx, nil)
	require.NoError(t, err)
	require.Equal(t, codec.Fingerprints(), keys)

	for _, layout := range []struct {
		ledger.Layout
		want string
	}{
		{ledger.Layout{Partitions: 8, EntryVersion: ledger.EntryVersion}, "ledger of 8 partitions, the database has 1"},
		{ledger.Layout{Partitions: 1, EntryVersion: "0"}, `entries of version "0"`},
		{ledger.Layout{Partitions: 1, EntryVersion: ledger.EntryVersion, Keys: map[int]string{0: "0123456789abcdef"}}, "0123456789abcdef"},
	} {
		c := client(t, redis.Addr())
		require.NoError(t, c.Do(ctx, c.B().Del().Key(ledger.LayoutKey).Build()).Error())
		_, err = ledger.WriteLayout(ctx, c, layout.Layout)
		require.NoError(t, err)
		said := refused(t, addr, "--order-key-file="+key, "--database-dsn-file="+dsnFile)
		require.Contains(t, said, "another database")
		require.Contains(t, said, layout.want)
		meta, err := ledger.ReadMeta(ctx, c, 0)
		require.NoError(t, err)
		require.False(t, meta.Exists, "nothing was made in it")
	}
}

func TestServe_SaysWhatIsWrongBeforeItWaitsForAnything(t *testing.T) {
	key := keyFile(t)
	dsn := file(t, "dsn", "root:hunter2@tcp(127.0.0.1:1)/x")
	said := refused(t, "--order-key-file="+key, "--database-dsn-file="+dsn, "--min-idle=10s", "--block=30s")
	require.Contains(t, said, "--batch-timeout 5s")
	require.Contains(t, said, "--block 30s")
	said = refused(t)
	require.Contains(t, said, "--order-key-file")
	require.Contains(t, said, "--database-dsn-file")
	require.Contains(t, refused(t, "--order-key-file=/no/such/key", "--database-dsn-file="+dsn), "/no/such/key")
	require.Contains(t, refused(t, "--order-key-file="+key, "--database-dsn-file=/no/such/dsn"), "/no/such/dsn")
	require.Contains(t, refused(t, "--order-key-file="+key, "--database-dsn-file="+dsn, "--listen=127.0.0.1:1x"), "1x")
}

// writer is a running writer process.
type writer struct {
	*devstack.Process
	seckillv1.VoucherServiceClient
	health healthpb.HealthClient
	admin  string
}

func startWriter(t *testing.T, args ...string) *writer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	dir, err := devstack.Build(ctx, nil, devstack.BuildOptions{}, "github.com/seckill/seckill/writer/cmd/writer")
	require.NoError(t, err)
	api, err := devstack.FreePort()
	require.NoError(t, err)
	admin, err := devstack.FreePort()
	require.NoError(t, err)
	w := &writer{admin: fmt.Sprintf("http://127.0.0.1:%d", admin)}
	w.Process, err = devstack.StartProcess(ctx, devstack.ProcessOptions{
		Name: "writer", Path: dir + "/writer",
		Args: append([]string{
			"serve", fmt.Sprintf("--listen=127.0.0.1:%d", api), fmt.Sprintf("--admin=127.0.0.1:%d", admin),
			"--batch-timeout=2s", "--min-idle=5s", "--block=200ms", "--drain-timeout=10s", "--guardian-interval=50ms", "--log-format=text",
		}, args...),
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		w.Kill()
		if t.Failed() {
			t.Logf("writer, last output:\n%s", w.Output())
		}
	})
	conn, err := grpc.NewClient(fmt.Sprintf("127.0.0.1:%d", api), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	w.VoucherServiceClient, w.health = seckillv1.NewVoucherServiceClient(conn), healthpb.NewHealthClient(conn)
	return w
}

// is tells the state of a service in grpc.health.v1, empty where none answers.
func (w *writer) is(service string) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	r, err := w.health.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	if err != nil {
		return ""
	}
	return r.GetStatus().String()
}

func (w *writer) await(t *testing.T, service, state string) {
	t.Helper()
	require.Eventually(t, func() bool { return w.is(service) == state }, patience, pollTime, "%q becomes %s", service, state)
}

// healthz returns the code and the parts by name.
func (w *writer) healthz(t *testing.T) (code int, parts map[string]string) {
	t.Helper()
	r, err := http.Get(w.admin + "/healthz")
	require.NoError(t, err)
	defer r.Body.Close()
	var body struct {
		Parts []struct{ Name, State, Reason string }
	}
	require.NoError(t, json.NewDecoder(r.Body).Decode(&body))
	parts = map[string]string{}
	for _, p := range body.Parts {
		parts[p.Name] = p.State + ": " + p.Reason
	}
	return r.StatusCode, parts
}

const service = "seckill.v1.VoucherService"

func TestServe_StartsWithoutServersAndRecovers(t *testing.T) {
	key := keyFile(t)
	database := devstack.TestDatabaseServer(t)
	require.NoError(t, database.CreateDatabase(context.Background(), "sale"))
	dsnFile := file(t, "dsn", database.DSN("sale"))
	code, _, errs := program("migrate", "--database-dsn-file", dsnFile, "--partitions=2")
	require.Zero(t, code, errs)
	redis := devstack.TestRedis(t)
	require.NoError(t, redis.Stop())
	require.NoError(t, database.Stop())
	ctx := context.Background()

	w := startWriter(t, "--order-key-file="+key, "--database-dsn-file="+dsnFile, "--redis-addr="+redis.Addr())
	w.await(t, service, "NOT_SERVING")
	require.Equal(t, "NOT_SERVING", w.is(""))
	status, parts := w.healthz(t)
	require.Equal(t, http.StatusServiceUnavailable, status)
	require.Contains(t, parts["database"], "connecting")
	_, err := w.GetVoucher(ctx, &seckillv1.GetVoucherRequest{VoucherId: 1})
	require.ErrorContains(t, err, "the database cannot answer now")

	require.NoError(t, database.Restart(ctx))
	require.Eventually(t, func() bool { _, parts = w.healthz(t); return strings.HasPrefix(parts["database"], "answers") }, patience, pollTime)
	require.Equal(t, "NOT_SERVING", w.is(service))
	require.NoError(t, redis.Restart(ctx))
	w.await(t, service, "SERVING")
	w.await(t, "", "SERVING")
	w.await(t, "seckill.v1.WriterService", "SERVING")
	w.await(t, "seckill.partition.0", "SERVING")
	w.await(t, "seckill.partition.1", "SERVING")
	status, parts = w.healthz(t)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, parts["partition.0"], "open")
	require.Contains(t, parts, "reader.1")

	// Both go away while running and come back: no restart is needed.
	redis.Kill()
	w.await(t, service, "NOT_SERVING")
	require.NoError(t, redis.Restart(ctx))
	w.await(t, service, "SERVING")
	w.await(t, "seckill.partition.0", "SERVING")
	database.Kill()
	w.await(t, service, "NOT_SERVING")
	require.NoError(t, database.Restart(ctx))
	w.await(t, service, "SERVING")

	require.NoError(t, w.Stop(30*time.Second))
	require.Zero(t, w.ExitCode())
	require.NotContains(t, w.Output(), "goroutine ", "no stack trace in all of it")
	require.Less(t, strings.Count(w.Output(), "waiting for the database"), 20, "the lines get rarer")
}

func TestServe_StoppedWhileItWaitsForADatabaseEndsAtOnce(t *testing.T) {
	port, err := devstack.FreePort()
	require.NoError(t, err)
	dsnFile := file(t, "dsn", fmt.Sprintf("root@tcp(127.0.0.1:%d)/x", port))
	w := startWriter(t, "--order-key-file="+keyFile(t), "--database-dsn-file="+dsnFile)
	w.await(t, service, "NOT_SERVING")
	require.NoError(t, w.Stop(15*time.Second))
	require.Zero(t, w.ExitCode())
}

func TestServe_CarriesOrdersAndLeavesNothingBehindOnSIGTERM(t *testing.T) {
	ctx := context.Background()
	_, dsnFile := migrated(t, 2)
	redis := devstack.TestRedis(t)
	w := startWriter(t, "--order-key-file="+keyFile(t), "--database-dsn-file="+dsnFile, "--redis-addr="+redis.Addr(), "--consumer=first")
	w.await(t, "seckill.partition.1", "SERVING")
	w.await(t, service, "SERVING")

	now := time.Now()
	_, err := w.CreateVoucher(ctx, &seckillv1.CreateVoucherRequest{
		VoucherId: 7, Total: 10_000, BeginTime: timestamppb.New(now.Add(-time.Hour)), EndTime: timestamppb.New(now.Add(time.Hour)),
	})
	require.NoError(t, err)
	_, err = w.OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: 7})
	require.NoError(t, err)

	c := client(t, redis.Addr())
	user := int64(0)
	admit := func(n int) {
		call := ledger.AdmitCall{Partition: 1, Epoch: 1, SHA: ledger.AdmitSHA(1, 1), VoucherID: 7, NotAfter: time.Now().Add(time.Hour)}
		for range n {
			user++
			call.Grabs = append(call.Grabs, ledger.Grab{UserID: user, Record: ledger.EncodeRecord(user, "", "")})
		}
		reply, err := ledger.Admit(ctx, c, call)
		require.NoError(t, err)
		require.Equal(t, ledger.AdmitOK, reply.Status)
	}
	for range 20 {
		admit(100)
	}
	var books *seckillv1.Books
	require.Eventually(t, func() bool {
		r, err := w.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: 7})
		require.NoError(t, err)
		books = r.GetBooks()
		return books.GetInFlight() == 0
	}, patience, pollTime)
	require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN, books.GetVerdict(), "%v", books)
	require.EqualValues(t, 2000, books.GetDatabase().GetOrders())

	metrics, err := http.Get(w.admin + "/metrics")
	require.NoError(t, err)
	defer metrics.Body.Close()
	text, err := io.ReadAll(metrics.Body)
	require.NoError(t, err)
	for _, want := range []string{"seckill_build_info", "go_sql_open_connections", "grpc_server_handled_total"} {
		require.Contains(t, string(text), want)
	}

	// Stopped with work on its way: what it read it finishes, and its consumer
	// is gone; what it did not read is whole for the next one.
	for range 20 {
		admit(100)
	}
	require.NoError(t, w.Signal(syscall.SIGTERM))
	select {
	case <-w.Done():
	case <-time.After(15 * time.Second):
		t.Fatal("the writer did not end within the drain time")
	}
	require.Zero(t, w.ExitCode(), w.Output())
	consumers, err := ledger.PendingByConsumer(ctx, c, 1, 1)
	require.NoError(t, err)
	require.Empty(t, consumers, "nothing pending, no consumer left")

	next := startWriter(t, "--order-key-file="+keyFileOf(t, w), "--database-dsn-file="+dsnFile, "--redis-addr="+redis.Addr())
	next.await(t, service, "SERVING")
	require.Eventually(t, func() bool {
		r, err := next.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: 7})
		return err == nil && r.GetBooks().GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN &&
			r.GetBooks().GetDatabase().GetOrders() == 4000
	}, patience, pollTime)
}

// keyFileOf finds the key file that a writer was given.
func keyFileOf(t *testing.T, w *writer) string {
	t.Helper()
	_, after, ok := strings.Cut(w.Output(), "settings.order-key-file=")
	require.True(t, ok, "effective settings are printed at start")
	path, _, _ := strings.Cut(after, " ")
	_, err := os.Stat(path)
	require.NoError(t, err)
	return path
}

func TestServe_EndsInTimeWhileServersHang(t *testing.T) {
	database := devstack.TestDatabaseServer(t)
	require.NoError(t, database.CreateDatabase(context.Background(), "sale"))
	dsnFile := file(t, "dsn", database.DSN("sale"))
	code, _, errs := program("migrate", "--database-dsn-file", dsnFile, "--partitions=2")
	require.Zero(t, code, errs)
	redis := devstack.TestRedis(t)
	w := startWriter(t, "--order-key-file="+keyFile(t), "--database-dsn-file="+dsnFile, "--redis-addr="+redis.Addr(), "--drain-timeout=3s")
	w.await(t, service, "SERVING")
	require.NoError(t, redis.Pause())
	require.NoError(t, database.Pause())
	w.await(t, service, "NOT_SERVING")
	require.NoError(t, w.Signal(syscall.SIGTERM))
	began := time.Now()
	select {
	case <-w.Done():
		t.Logf("ended after %s with code %d", time.Since(began), w.ExitCode())
	case <-time.After(20 * time.Second): // 3 s, stopGrace, and a slow machine
		t.Error("the writer hangs with its servers")
	}
	require.NoError(t, redis.Resume())
	require.NoError(t, database.Resume())
}

func TestServe_ASecondSignalKills(t *testing.T) {
	_, dsnFile := migrated(t, 1)
	redis := devstack.TestRedis(t)
	w := startWriter(t, "--order-key-file="+keyFile(t), "--database-dsn-file="+dsnFile, "--redis-addr="+redis.Addr(),
		"--drain-delay=50s", "--drain-timeout=60s")
	w.await(t, service, "SERVING")
	require.NoError(t, w.Signal(syscall.SIGTERM))
	w.await(t, service, "NOT_SERVING")
	require.NoError(t, w.Signal(syscall.SIGTERM))
	select {
	case <-w.Done():
	case <-time.After(15 * time.Second):
		t.Fatal("the second signal did nothing")
	}
	require.NotZero(t, w.ExitCode())
}
