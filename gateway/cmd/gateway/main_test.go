package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

const patience = 30 * time.Second

// keyFile writes an order key file and reads it back.
func keyFile(t *testing.T) (string, *orderid.Codec) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "order.key")
	require.NoError(t, os.WriteFile(path, orderid.Generate(), 0o600))
	codec, err := orderid.Load(path)
	require.NoError(t, err)
	return path, codec
}

func layOut(t *testing.T, redis *devstack.Redis, codec *orderid.Codec, partitions int) {
	t.Helper()
	_, err := ledger.WriteLayout(context.Background(), ledgertest.Client(t, redis.Addr()),
		ledger.Layout{Partitions: partitions, Keys: codec.Fingerprints(), EntryVersion: ledger.EntryVersion})
	require.NoError(t, err)
}

// process is the built program.
type process struct {
	*devstack.Process
	addr, admin string
	conn        *grpc.ClientConn
}

func start(t *testing.T, redis, key string, flags ...string) *process {
	t.Helper()
	dir, err := devstack.Build(context.Background(), io.Discard, devstack.BuildOptions{}, "github.com/seckill/seckill/gateway/cmd/gateway")
	require.NoError(t, err)
	p := &process{}
	for _, addr := range []*string{&p.addr, &p.admin} {
		port, err := devstack.FreePort()
		require.NoError(t, err)
		*addr = fmt.Sprintf("127.0.0.1:%d", port)
	}
	args := append([]string{"serve", "--listen", p.addr, "--admin", p.admin, "--redis-addr", redis, "--order-key-file", key}, flags...)
	p.Process, err = devstack.StartProcess(context.Background(), devstack.ProcessOptions{Name: "gateway", Path: filepath.Join(dir, "gateway"), Args: args})
	require.NoError(t, err)
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("gateway, last output:\n%s", p.Output())
		}
	})
	p.conn, err = grpc.NewClient(p.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { p.conn.Close() })
	return p
}

func (p *process) health(service string) healthpb.HealthCheckResponse_ServingStatus {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	response, err := healthpb.NewHealthClient(p.conn).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	if err != nil {
		return healthpb.HealthCheckResponse_UNKNOWN
	}
	return response.GetStatus()
}

func (p *process) becomes(t *testing.T, want healthpb.HealthCheckResponse_ServingStatus) {
	t.Helper()
	require.Eventually(t, func() bool {
		return p.health("") == want && p.health("seckill.v1.SeckillService") == want
	}, patience, 20*time.Millisecond)
}

func (p *process) grab(userID, voucherID int64) (*seckillv1.GrabResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return seckillv1.NewSeckillServiceClient(p.conn).Grab(ctx, &seckillv1.GrabRequest{UserId: userID, VoucherId: voucherID})
}

type healthz struct {
	Status string
	Parts  []struct{ Name, State, Reason string }
}

func (p *process) healthz(t *testing.T) (code int, body healthz) {
	t.Helper()
	response, err := http.Get("http://" + p.admin + "/healthz")
	require.NoError(t, err)
	defer response.Body.Close()
	require.NoError(t, json.NewDecoder(response.Body).Decode(&body))
	return response.StatusCode, body
}

// From no Redis at all to a sale, and through the loss of Redis, without a
// restart.
func TestGateway_WaitsForRedisAndOutlivesIt(t *testing.T) {
	key, codec := keyFile(t)
	redis := devstack.TestRedis(t)
	redis.Kill()
	p := start(t, redis.Addr(), key)
	p.becomes(t, healthpb.HealthCheckResponse_NOT_SERVING)
	_, err := p.grab(1, 8)
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.Eventually(t, func() bool { return strings.Contains(p.Output(), "redis cannot be connected to") }, patience, 10*time.Millisecond)
	code, body := p.healthz(t)
	require.Equal(t, http.StatusServiceUnavailable, code)
	require.Equal(t, "redis", body.Parts[0].Name)

	require.NoError(t, redis.Restart(context.Background()))
	require.Eventually(t, func() bool { return strings.Contains(p.Output(), "waiting for the layout") }, patience, 10*time.Millisecond)
	client := ledgertest.Client(t, redis.Addr())
	layOut(t, redis, codec, 2)
	ledgertest.Open(t, client, 2)
	ledgertest.Sell(t, client, ledgertest.Voucher(2, 8, 10))
	p.becomes(t, healthpb.HealthCheckResponse_SERVING)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, p.health("seckill.partition.1"))
	first, err := p.grab(1, 8)
	require.NoError(t, err)
	require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, first.Outcome)
	position, err := codec.Decode(first.Order.OrderId)
	require.NoError(t, err)
	require.Equal(t, orderid.Position{VoucherID: 8, Epoch: 1, Seq: 1}, position)

	// One partition closed: the gateway serves, that partition does not.
	require.NoError(t, ledger.ClosePartition(context.Background(), client, 1, 1, "somebody closed it"))
	require.Eventually(t, func() bool {
		return p.health("seckill.partition.1") == healthpb.HealthCheckResponse_NOT_SERVING
	}, patience, 20*time.Millisecond)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, p.health(""))
	_, body = p.healthz(t)
	require.Equal(t, "partition.1", body.Parts[2].Name)
	require.Equal(t, "closed", body.Parts[2].State)
	require.Equal(t, "somebody closed it", body.Parts[2].Reason)

	redis.Kill()
	p.becomes(t, healthpb.HealthCheckResponse_NOT_SERVING)
	require.Eventually(t, func() bool {
		_, err := p.grab(1, 8)
		require.Error(t, err)
		reason, _ := rpcserver.Reason(err)
		return reason == seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE
	}, patience, 20*time.Millisecond)
	require.NoError(t, redis.Restart(context.Background()))
	require.Eventually(t, func() bool {
		_, err := p.grab(1, 8)
		reason, _ := rpcserver.Reason(err)
		return reason == seckillv1.ErrorReason_ERROR_REASON_REBUILDING
	}, patience, 20*time.Millisecond)
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, p.health(""))
	require.NoError(t, ledger.LoadAdmit(context.Background(), ledgertest.Client(t, redis.Addr()), 0, 1))
	p.becomes(t, healthpb.HealthCheckResponse_SERVING)
	again, err := p.grab(1, 8)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Order.OrderId, again.Order.OrderId)

	require.NoError(t, p.Stop(patience))
	require.Less(t, strings.Count(p.Output(), "\n"), 60, "no storm of lines")
	require.NotContains(t, p.Output(), "goroutine ")
}

func TestGateway_StopsWhileItWaits(t *testing.T) {
	key, _ := keyFile(t)
	redis := devstack.TestRedis(t)
	for _, waitsFor := range []string{"waiting for the layout", "redis cannot be connected to"} {
		p := start(t, redis.Addr(), key)
		require.Eventually(t, func() bool { return strings.Contains(p.Output(), waitsFor) }, patience, 10*time.Millisecond)
		require.NoError(t, p.Stop(patience))
		require.Contains(t, p.Output(), "gateway stopped")
		redis.Kill()
	}
}

func TestGateway_RefusesAnotherKeyOrVersion(t *testing.T) {
	key, codec := keyFile(t)
	_, other := keyFile(t)
	for name, c := range map[string]struct {
		layout ledger.Layout
		want   string
	}{
		"another key":      {ledger.Layout{Partitions: 1, Keys: other.Fingerprints(), EntryVersion: ledger.EntryVersion}, "order key"},
		"no key":           {ledger.Layout{Partitions: 1, EntryVersion: ledger.EntryVersion}, "not registered"},
		"another version":  {ledger.Layout{Partitions: 1, Keys: codec.Fingerprints(), EntryVersion: "999"}, "upgrade writers first"},
		"a key it has not": {ledger.Layout{Partitions: 1, Keys: map[int]string{0: codec.Fingerprints()[0], 1: "0123456789abcdef"}, EntryVersion: ledger.EntryVersion}, "order key 1"},
	} {
		t.Run(name, func(t *testing.T) {
			redis := devstack.TestRedis(t)
			_, err := ledger.WriteLayout(context.Background(), ledgertest.Client(t, redis.Addr()), c.layout)
			require.NoError(t, err)
			p := start(t, redis.Addr(), key)
			select {
			case <-p.Done():
			case <-time.After(patience):
				require.FailNow(t, "it did not end")
			}
			require.Equal(t, 1, p.ExitCode())
			require.Contains(t, p.Output(), c.want)
		})
	}
}

func TestGateway_ReflectionMetricsAndSettings(t *testing.T) {
	key, codec := keyFile(t)
	redis := devstack.TestRedis(t)
	client := ledgertest.Client(t, redis.Addr())
	layOut(t, redis, codec, 1)
	ledgertest.Open(t, client, 1)
	ledgertest.Sell(t, client, ledgertest.Voucher(1, 1, 10))
	p := start(t, redis.Addr(), key)
	p.becomes(t, healthpb.HealthCheckResponse_SERVING)
	_, err := p.grab(1, 1)
	require.NoError(t, err)

	stream, err := reflectionpb.NewServerReflectionClient(p.conn).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	require.NoError(t, stream.Send(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}))
	answer, err := stream.Recv()
	require.NoError(t, err)
	require.Contains(t, answer.String(), "seckill.v1.SeckillService")
	require.NoError(t, stream.CloseSend())

	response, err := http.Get("http://" + p.admin + "/metrics")
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	for _, line := range []string{
		`seckill_gateway_grabs_total{outcome="admitted"} 1`, "seckill_gateway_batch_grabs_count 1", "seckill_gateway_script_seconds_count 1",
		"seckill_gateway_streams_open 0", "seckill_gateway_stream_grabs_owed 0", "seckill_gateway_grabs_waiting 0", "seckill_gateway_batches_in_flight 0", "seckill_gateway_unknown_runs_total 0",
		`seckill_gateway_partition_open{partition="0"} 1`, `grpc_server_handled_total{`,
		"seckill_gateway_grab_seconds_count 1", "seckill_gateway_grabs_invalid_total 0",
	} {
		require.Contains(t, string(text), line)
	}
	require.Contains(t, string(text), `grpc_server_started_total{grpc_method="Grab",grpc_service="seckill.v1.SeckillService",grpc_type="unary"} 0`, "Grabs count themselves")
	require.Contains(t, p.Output(), "effective settings")
	require.Contains(t, p.Output(), `"max-batches":256`)
	require.NoError(t, p.Stop(patience))
	require.Contains(t, p.Output(), "gateway stopped")
}

// The garbage collector runs as rarely as a gateway wants it, or as the
// environment says.
func TestGateway_CollectsGarbageAsTheEnvironmentSays(t *testing.T) {
	key, _ := keyFile(t)
	for gogc, want := range map[string]string{"": "400", "70": "70"} {
		if gogc == "" {
			t.Setenv("GOGC", "") // so that it is put back
			require.NoError(t, os.Unsetenv("GOGC"))
		} else {
			t.Setenv("GOGC", gogc)
		}
		p := start(t, "127.0.0.1:1", key)
		var text string
		require.Eventually(t, func() bool {
			response, err := http.Get("http://" + p.admin + "/metrics")
			if err != nil {
				return false
			}
			defer response.Body.Close()
			body, err := io.ReadAll(response.Body)
			text = string(body)
			return err == nil
		}, patience, 20*time.Millisecond)
		require.Contains(t, text, "go_gc_gogc_percent "+want+"\n")
		require.NoError(t, p.Stop(patience))
	}
}

// The gateway decides from the ledger alone: it cannot even be linked with a
// database.
func TestGateway_LinksNoDatabase(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	require.NoError(t, err)
	for dep := range strings.Lines(string(out)) {
		require.NotContains(t, dep, "gorm")
		require.NotContains(t, dep, "mysql")
	}
}

func TestExecute_HelpAndMistakes(t *testing.T) {
	key, _ := keyFile(t)
	exposed, _ := keyFile(t)
	require.NoError(t, os.Chmod(exposed, 0o644))
	for name, c := range map[string]struct {
		args []string
		code int
		want []string
	}{
		"help":          {[]string{"--help"}, 0, []string{"check-config", "serve"}},
		"help of serve": {[]string{"serve", "--help"}, 0, []string{`--redis-addr="127.0.0.1:6379"`, `--listen=":7070"`, "SECKILL_ORDER_KEY_FILE", "--max-batches=256"}},
		"unknown flag":  {[]string{"--nonsense"}, 2, []string{"--nonsense", "See gateway --help"}},
		"no key":        {[]string{"serve"}, 1, []string{"--order-key-file"}},
		"default":       {[]string{"--max-batch", "0"}, 1, []string{"--max-batch 0", "--order-key-file"}},
		"config":        {[]string{"check-config", "--order-key-file", key}, 0, []string{"order-key-file: " + key, "default-deadline: 2s", "ok"}},
		"config of secrets that others read": {[]string{"check-config", "--order-key-file", exposed, "--redis-password-file", exposed}, 0,
			[]string{"warning: --order-key-file " + exposed + " may be read by others", "warning: --redis-password-file", "ok"}},
		"config missing": {[]string{"check-config", "--order-key-file", key + ".no"}, 1, []string{"no such file"}},
		"config contradictions": {[]string{"check-config", "--order-key-file", key, "--drain-timeout", "1s", "--default-deadline", "1m", "--tls-cert-file", key,
			"--redis-tls-ca-file", key, "--listen", "nonsense"}, 1,
			[]string{"--drain-timeout 1s", "--default-deadline 1m", "--tls-cert-file and --tls-key-file", "--redis-tls", "--listen"}},
		"bad level": {[]string{"check-config", "--order-key-file", key, "--log-level", "loud"}, 2, []string{"log-level"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			require.Equal(t, c.code, execute(c.args, command.Streams{Out: &out, Err: &out}), "%s", out.String())
			for _, want := range c.want {
				require.Contains(t, out.String(), want)
			}
		})
	}
}

func TestExecute_EveryFlagHasAnEnvironmentVariable(t *testing.T) {
	var out bytes.Buffer
	require.Zero(t, execute([]string{"serve", "--help"}, command.Streams{Out: &out, Err: &out}))
	flags := strings.Split(out.String(), "\n      --")[1:]
	require.Greater(t, len(flags), 20)
	for _, flag := range flags {
		if !strings.HasPrefix(flag, "version") {
			require.Contains(t, flag, "$SECKILL_", "--%s", flag)
		}
	}
}
