package deploy_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/redisconn"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// start starts a program that serves gRPC and waits until it says so.
func start(t testing.TB, name string, env []string, listen string) *grpc.ClientConn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	process, err := devstack.StartProcess(ctx, devstack.ProcessOptions{Name: name, Path: binary(t, name), Args: []string{"serve"}, Env: env})
	require.NoError(t, err)
	t.Cleanup(func() {
		err := process.Stop(patience)
		if t.Failed() {
			t.Logf("%s, last output:\n%s", name, process.Output())
		}
		require.NoError(t, err)
	})
	conn, err := grpc.NewClient(listen, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	require.Eventually(t, func() bool {
		answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
		return err == nil && answer.GetStatus() == healthpb.HealthCheckResponse_SERVING
	}, patience, 50*time.Millisecond, "%s does not serve", name)
	return conn
}

func freeAddr(t testing.TB) string {
	t.Helper()
	port, err := devstack.FreePort()
	require.NoError(t, err)
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// The whole path with the users, passwords, grants and settings that are
// deployed, and with nothing that they refuse.
func TestDeployedUsers_CarryAnOrderTheWholePath(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	secrets := makeSecrets(t)
	redis := startRedis(t, secrets)
	database, _ := startDatabase(t)
	apply(t, database, secrets, "users.sql")
	out, code := run(t, []string{"SECKILL_DATABASE_DSN_FILE=" + dsnFile(t, database, secrets, "migrator"), "SECKILL_PARTITIONS=2"}, binary(t, "writer"), "migrate")
	require.Zero(t, code, out)
	apply(t, database, secrets, "grants.sql")
	key := filepath.Join(t.TempDir(), "order.key")
	out, code = run(t, nil, binary(t, "writer"), "keygen", key)
	require.Zero(t, code, out)

	admins := map[string]string{"writer": freeAddr(t), "gateway": freeAddr(t)}
	env := func(user, listen string) []string {
		return []string{
			"SECKILL_LISTEN=" + listen, "SECKILL_ADMIN=" + admins[user], "SECKILL_ORDER_KEY_FILE=" + key,
			"SECKILL_REDIS_ADDR=" + redis.addr, "SECKILL_REDIS_USERNAME=" + user,
			"SECKILL_REDIS_PASSWORD_FILE=" + filepath.Join(secrets, "redis_"+user+"_password"),
		}
	}
	writerAddr, gatewayAddr := freeAddr(t), freeAddr(t)
	writer := start(t, "writer", append(env("writer", writerAddr), "SECKILL_DATABASE_DSN_FILE="+dsnFile(t, database, secrets, "writer")), writerAddr)
	gateway := start(t, "gateway", env("gateway", gatewayAddr), gatewayAddr)

	vouchers, seckill := seckillv1.NewVoucherServiceClient(writer), seckillv1.NewSeckillServiceClient(gateway)
	created, err := vouchers.CreateVoucher(ctx, &seckillv1.CreateVoucherRequest{
		Title: "one", Total: 1, BeginTime: timestamppb.New(time.Now().Add(-time.Hour)), EndTime: timestamppb.New(time.Now().Add(time.Hour)),
	})
	require.NoError(t, err)
	id := created.GetVoucher().GetVoucherId()
	_, err = vouchers.OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: id})
	require.NoError(t, err)

	grab := func(user int64) (answer *seckillv1.GrabResponse) {
		t.Helper()
		// Both partitions need not be open in the same moment.
		require.Eventually(t, func() bool {
			answer, err = seckill.Grab(ctx, &seckillv1.GrabRequest{UserId: user, VoucherId: id, Reference: "r"})
			return err == nil
		}, patience, 50*time.Millisecond, "grab: %v", err)
		return answer
	}
	first := grab(7)
	require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, first.GetOutcome())
	require.Equal(t, seckillv1.Durability_DURABILITY_STRICT, first.GetDurability())
	require.Equal(t, seckillv1.Outcome_OUTCOME_SOLD_OUT, grab(8).GetOutcome())
	again := grab(7)
	require.True(t, again.GetReplayed())
	require.Equal(t, first.GetOrder().GetOrderId(), again.GetOrder().GetOrderId())
	found, err := seckill.GetOrder(ctx, &seckillv1.GetOrderRequest{UserId: 7, Key: &seckillv1.GetOrderRequest_OrderId{OrderId: first.GetOrder().GetOrderId()}})
	require.NoError(t, err)
	require.Equal(t, first.GetOrder().GetOrderId(), found.GetOrder().GetOrderId())

	proven := func() {
		t.Helper()
		require.Eventually(t, func() bool {
			books, err := vouchers.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: id})
			return err == nil && books.GetBooks().GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN && books.GetBooks().GetDatabase().GetOrders() == 1
		}, patience, 50*time.Millisecond)
	}
	proven()
	metricsOfTheDocuments(ctx, t, admins["writer"], admins["gateway"])
	_, err = vouchers.PauseVoucher(ctx, &seckillv1.PauseVoucherRequest{VoucherId: id})
	require.NoError(t, err)
	_, err = vouchers.ResumeVoucher(ctx, &seckillv1.ResumeVoucherRequest{VoucherId: id})
	require.NoError(t, err)
	_, err = vouchers.CloseVoucher(ctx, &seckillv1.CloseVoucherRequest{VoucherId: id})
	require.NoError(t, err)
	proven()
	_, err = vouchers.ArchiveVoucher(ctx, &seckillv1.ArchiveVoucherRequest{VoucherId: id})
	require.NoError(t, err)

	holdAndResolve(ctx, t, redis.client("gateway", redisconn.Calls), vouchers, seckillv1.NewWriterServiceClient(writer))

	// Nothing of all this was refused on the quiet.
	operator := redis.client("operator", redisconn.Calls)
	refused, err := operator.Do(ctx, operator.B().Arbitrary("ACL", "LOG").Build()).ToArray()
	require.NoError(t, err)
	for i := range refused {
		entry, err := refused[i].AsMap()
		require.NoError(t, err)
		user, object := entry["username"], entry["object"]
		name, _ := user.ToString()
		what, _ := object.ToString()
		require.Equal(t, "client|setinfo", strings.ToLower(what), "refused to %s", name)
	}
}

// metricsOfTheDocuments requires that a writer that has written, and a gateway that
// has admitted, show every metric that the documents name.
func metricsOfTheDocuments(ctx context.Context, t *testing.T, admins ...string) {
	t.Helper()
	var pages strings.Builder
	for _, admin := range admins {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+"/metrics", nil)
		require.NoError(t, err)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		defer response.Body.Close()
		_, err = io.Copy(&pages, response.Body)
		require.NoError(t, err)
	}
	page := pages.String()
	// A gauge of what is wrong has no line while all is well.
	source := read(t, "writer/internal/guardian/metrics.go")
	alarm := map[string]bool{}
	for _, found := range regexp.MustCompile(`Subsystem: "(\w+)", Name: "(\w+)"`).FindAllStringSubmatch(source, -1) {
		alarm["seckill_"+found[1]+"_"+found[2]] = true
	}
	shown := func(name string) bool {
		return alarm[name] || strings.Contains(page, "\n# TYPE "+name+" ")
	}
	for _, document := range documents(t) {
		if document == "CHANGELOG.md" { // which also names what is gone
			continue
		}
		for _, found := range regexp.MustCompile("`(seckill_\\w+)").FindAllStringSubmatch(read(t, document), -1) {
			require.True(t, shown(found[1]), "%s names %s", document, found[1])
		}
	}
	for _, found := range regexp.MustCompile("`(\\w+_total|partition_\\w+)`").FindAllStringSubmatch(read(t, "docs/failure-modes.md"), -1) {
		require.True(t, shown("seckill_writer_"+found[1]) || shown("seckill_"+found[1]), "failure-modes.md names %s", found[1])
	}
}
