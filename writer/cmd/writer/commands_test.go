package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/pipeline"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

const (
	patience = 60 * time.Second
	pollTime = 20 * time.Millisecond
)

// The settings refuse exactly what the pipeline would, in the words of flags.
func TestSettings_SlotsAndConsumerAreRefusedAsByThePipeline(t *testing.T) {
	for _, partitions := range []int{1, 8, 64} {
		least := 1000 + ledger.MaxBatch*partitions
		for _, slots := range []int{1, least - 1, least, least + 1} {
			s := settings{Slots: slots, BatchSize: 1000, Committers: 1}
			o := pipeline.Options{
				Consumer: "w", Partitions: partitions, Committers: 1, BatchMax: 1000, SlotsMax: s.slots(partitions),
				BatchTimeout: time.Second, MinIdle: time.Minute, Block: time.Second, DrainTimeout: time.Second,
			}
			require.Equal(t, o.Validate() == nil, s.checkSlots(partitions) == nil, "%d slots for %d partitions", slots, partitions)
			require.Equal(t, slots >= least, o.Validate() == nil)
			o.SlotsMax, o.Consumer = least, ledger.ReleasedConsumer
			require.ErrorContains(t, o.Validate(), "released")
		}
		s := settings{BatchSize: 1000, Committers: 1}
		require.NoError(t, s.checkSlots(partitions))
		require.GreaterOrEqual(t, s.slots(partitions), least)
	}
}

// program runs the program in this process.
func program(args ...string) (code int, out, errs string) {
	var stdout, stderr bytes.Buffer
	code = execute(args, command.Streams{Out: &stdout, Err: &stderr})
	return code, stdout.String(), stderr.String()
}

func file(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

func keyFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "order.key")
	code, _, errs := program("keygen", path)
	require.Zero(t, code, errs)
	return path
}

// migrated is a DSN file of a database that is ready.
func migrated(t *testing.T, partitions int) (dsn, dsnFile string) {
	t.Helper()
	dsn = devstack.TestDatabase(t)
	dsnFile = file(t, "dsn", dsn+"\n")
	code, _, errs := program("migrate", "--database-dsn-file", dsnFile, "--partitions", fmt.Sprint(partitions))
	require.Zero(t, code, errs)
	return dsn, dsnFile
}

func TestKeygen_WritesASecretOnceAndShowsItsFingerprint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "order.key")
	code, out, errs := program("keygen", path)
	require.Zero(t, code, errs)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	codec, err := orderid.Load(path)
	require.NoError(t, err)
	require.Contains(t, out, codec.Fingerprints()[0])
	secret, err := os.ReadFile(path)
	require.NoError(t, err)
	fields := strings.Fields(string(secret))
	require.NotContains(t, out+errs, fields[len(fields)-1], "the key itself is not printed")

	code, out, errs = program("keygen", path)
	require.Equal(t, 1, code)
	require.Empty(t, out)
	require.Contains(t, errs, "not overwritten")
	after, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, secret, after)

	code, _, errs = program("keygen", filepath.Join(t.TempDir(), "no", "such", "folder"))
	require.Equal(t, 1, code)
	require.Contains(t, errs, "writing an order key")
}

func TestCheckConfig_NamesBothValuesOfWhatDoesNotFit(t *testing.T) {
	key := keyFile(t)
	dsn := file(t, "dsn", "root:hunter2@tcp(127.0.0.1:1)/seckill\n")
	table := []struct {
		name string
		args []string
		want []string
	}{
		{"takeover while working", []string{"--batch-timeout=5s", "--min-idle=10s"}, []string{"--batch-timeout 5s", "--min-idle 10s"}},
		{"lock wait", []string{"--batch-timeout=3s", "--lock-wait=3s"}, []string{"--lock-wait 3s", "--batch-timeout 3s"}},
		{"lock wait in parts", []string{"--lock-wait=1500ms"}, []string{"--lock-wait 1.5s", "whole seconds"}},
		{"batch timeout too short", []string{"--batch-timeout=1s"}, []string{"--batch-timeout 1s"}},
		{"block", []string{"--block=30s"}, []string{"--block 30s", "--min-idle 30s"}},
		{"block 0", []string{"--block=0s"}, []string{"--block 0s"}},
		{"drain timeout", []string{"--drain-timeout=4s"}, []string{"--batch-timeout 5s", "--drain-timeout 4s"}},
		{"drain delay", []string{"--drain-delay=20s"}, []string{"--drain-delay 20s", "--drain-timeout 20s"}},
		{"deadlines", []string{"--default-deadline=3m"}, []string{"--default-deadline 3m0s", "--max-deadline 2m0s"}},
		{"batch size", []string{"--batch-size=0"}, []string{"--batch-size 0"}},
		{"committers", []string{"--committers=0"}, []string{"--committers 0"}},
		{"slots", []string{"--slots=1255"}, []string{"--slots 1255", "1256", "--batch-size 1000"}},
		{"connections", []string{"--database-conns=5"}, []string{"--database-conns 5", "--committers 3"}},
		{"in flight", []string{"--max-in-flight=1"}, []string{"--max-in-flight 1"}},
		{"guardian", []string{"--guardian-interval=0s"}, []string{"--guardian-interval 0s"}},
		{"listen", []string{"--listen=7071"}, []string{`--listen "7071"`}},
		{"admin", []string{"--admin=nowhere"}, []string{`--admin "nowhere"`}},
		{"consumer", []string{"--consumer=a b"}, []string{`--consumer "a b"`}},
		{"consumer of released entries", []string{"--consumer=released"}, []string{`--consumer "released"`}},
		{"consumer as the group", []string{"--consumer=writers"}, []string{`--consumer "writers"`}},
		{"half of TLS", []string{"--tls-cert-file=" + key}, []string{"--tls-key-file"}},
		{"client CA alone", []string{"--tls-client-ca-file=" + key}, []string{"--tls-client-ca-file needs"}},
		{"redis address", []string{"--redis-addr=x"}, []string{`redis address "x"`}},
		{"redis cluster", []string{"--redis-cluster"}, []string{"--redis-cluster", "one server"}},
		{"redis TLS off", []string{"--redis-tls-server-name=x"}, []string{"--redis-tls"}},
		{"file that is not there", []string{"--redis-username=u", "--redis-password-file=/no/such/file"}, []string{"--redis-password-file", "/no/such/file"}},
		{"no order key", []string{"--order-key-file=/no/such/key"}, []string{"/no/such/key"}},
		{"order key that is none", []string{"--order-key-file=" + dsn}, []string{"order key file", "line 1"}},
		{"two at once", []string{"--block=30s", "--batch-size=0"}, []string{"--block 30s", "--batch-size 0"}},
	}
	for _, row := range table {
		t.Run(row.name, func(t *testing.T) {
			args := []string{"--order-key-file=" + key, "--database-dsn-file=" + dsn}
			code, out, errs := program(append(append([]string{"check-config"}, args...), row.args...)...)
			require.Equal(t, 1, code, out)
			for _, want := range row.want {
				require.Contains(t, errs, want)
			}
			require.NotContains(t, out+errs, "hunter2")
		})
	}
	for _, fits := range [][]string{nil, {"--batch-timeout=2s", "--min-idle=5s"}, {"--batch-timeout=10s", "--lock-wait=9s"}, {"--no-reflection"}} {
		code, out, errs := program(append([]string{"check-config", "--order-key-file=" + key, "--database-dsn-file=" + dsn}, fits...)...)
		require.Zero(t, code, errs)
		require.True(t, strings.HasSuffix(out, "ok\n"), out)
	}
}

func TestCheckConfig_ShowsEffectiveSettingsAndNoSecret(t *testing.T) {
	key := keyFile(t)
	t.Setenv("SECKILL_DATABASE_DSN", "root:hunter2@tcp(db:3306)/seckill")
	t.Setenv("SECKILL_ORDER_KEY_FILE", key)
	t.Setenv("SECKILL_BATCH_TIMEOUT", "4s")
	t.Setenv("SECKILL_REDIS_ADDR", "redis:6380")
	code, out, errs := program("check-config", "--block=250ms")
	require.Zero(t, code, errs)
	for _, want := range []string{
		"batch-timeout: 4s\n", "lock-wait: 3s\n", "block: 250ms\n", "redis-addr: redis:6380\n",
		"order-key-file: " + key + "\n", "database-dsn: ***\n", "durability: strict\n", "committers: 3\n",
	} {
		require.Contains(t, out, want)
	}
	require.NotContains(t, out+errs, "hunter2")

	code, _, errs = program("check-config", "--database-dsn-file="+key)
	require.Equal(t, 1, code)
	require.Contains(t, errs, "given twice")
	t.Setenv("SECKILL_DATABASE_DSN", "")
	code, _, errs = program("check-config")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "--database-dsn-file")
	code, _, errs = program("check-config", "--database-dsn-file="+key)
	require.Equal(t, 1, code, "not one line")
	require.Contains(t, errs, key)
	code, _, errs = program("check-config", "--database-dsn-file="+file(t, "dsn", "root:hunter2@tcp(/x"))
	require.Equal(t, 1, code)
	require.NotContains(t, errs, "hunter2")
}

func TestCheckConfig_WarnsOfSecretsThatOthersMayRead(t *testing.T) {
	key, dsn := keyFile(t), file(t, "dsn", "root@tcp(127.0.0.1:1)/seckill\n")
	args := []string{"check-config", "--order-key-file=" + key, "--database-dsn-file=" + dsn}
	code, out, errs := program(args...)
	require.Zero(t, code, errs)
	require.NotContains(t, out, "warning")
	require.NoError(t, os.Chmod(key, 0o640))
	require.NoError(t, os.Chmod(dsn, 0o604))
	code, out, errs = program(args...)
	require.Zero(t, code, errs)
	require.Contains(t, out, "warning: --order-key-file "+key+" may be read by others (mode -rw-r-----)\n")
	require.Contains(t, out, "warning: --database-dsn-file "+dsn+" may be read by others (mode -rw----r--)\n")
	require.True(t, strings.HasSuffix(out, "ok\n"), out)
}

func TestCommandLine_RefusesADSNThatEverybodyCouldRead(t *testing.T) {
	code, out, errs := program("serve", "--database-dsn=root:hunter2@tcp(db:3306)/x")
	require.Equal(t, 2, code)
	require.Contains(t, errs, "--database-dsn-file")
	require.NotContains(t, out+errs, "hunter2")
}

func TestCommandLine_HelpNamesEveryCommandAndVariable(t *testing.T) {
	code, out, _ := program("--help")
	require.Zero(t, code)
	for _, want := range []string{"serve", "migrate", "check-config", "keygen"} {
		require.Contains(t, out, want)
	}
	code, out, _ = program("serve", "--help")
	require.Zero(t, code)
	for _, want := range []string{
		"SECKILL_LISTEN", "SECKILL_ADMIN", "SECKILL_DATABASE_DSN_FILE", "SECKILL_ORDER_KEY_FILE", "SECKILL_REDIS_ADDR",
		"SECKILL_REDIS_PASSWORD_FILE", "SECKILL_BATCH_TIMEOUT", "SECKILL_MIN_IDLE", "SECKILL_DURABILITY", "--[no-]reflection",
		`--redis-addr="127.0.0.1:6379"`, `--listen=":7071"`, `--admin="127.0.0.1:7081"`,
	} {
		require.Contains(t, out, want)
	}
	code, _, errs := program("serve", "--no-such-flag")
	require.Equal(t, 2, code)
	require.Contains(t, errs, "--no-such-flag")
	code, _, _ = program()
	require.NotZero(t, code)
	code, out, _ = program("--version")
	require.Zero(t, code)
	require.NotEmpty(t, strings.TrimSpace(out))
}

func TestConsumer_IsUniquePerProcess(t *testing.T) {
	var a, b settings
	a.complete()
	b.complete()
	require.NotEqual(t, a.Consumer, b.Consumer)
	require.Contains(t, a.Consumer, fmt.Sprint(os.Getpid()))
}

func TestMigrate_AgainAndAtOnceChangesNothing(t *testing.T) {
	dsn := devstack.TestDatabase(t)
	dsnFile := file(t, "dsn", dsn)
	var running sync.WaitGroup
	codes, errs := make([]int, 3), make([]string, 3)
	for i := range codes {
		running.Go(func() { codes[i], _, errs[i] = program("migrate", "--database-dsn-file", dsnFile, "--partitions=8") })
	}
	running.Wait()
	for i, code := range codes {
		require.Zero(t, code, errs[i])
	}
	code, out, stderr := program("migrate", "--database-dsn-file", dsnFile)
	require.Zero(t, code, stderr)
	require.Contains(t, out, "8 partitions")

	code, _, stderr = program("migrate", "--database-dsn-file", dsnFile, "--partitions=4")
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "8 partitions, 4 were asked for")

	store, err := orderstore.Open(context.Background(), orderstore.Options{DSN: dsn})
	require.NoError(t, err)
	defer store.Close()
	n, err := store.Partitions(context.Background())
	require.NoError(t, err)
	require.Equal(t, 8, n)
}

func TestMigrate_WaitsForTheDatabaseAndSaysHowLong(t *testing.T) {
	port, err := devstack.FreePort()
	require.NoError(t, err)
	dsnFile := file(t, "dsn", fmt.Sprintf("root:hunter2@tcp(127.0.0.1:%d)/x", port))
	code, _, errs := program("migrate", "--database-dsn-file", dsnFile, "--wait=500ms")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "--wait 500ms")
	require.NotContains(t, errs, "hunter2")

	proxy := devstack.TestProxy(t, strings.SplitN(strings.SplitN(devstack.TestDatabase(t), "tcp(", 2)[1], ")", 2)[0])
	proxy.Refuse()
	name := devstack.TestDatabase(t)
	dsnFile = file(t, "dsn", "root@tcp("+proxy.Addr()+")"+name[strings.LastIndex(name, "/"):])
	done := make(chan string, 1)
	go func() {
		code, _, errs := program("migrate", "--database-dsn-file", dsnFile)
		done <- fmt.Sprint(code, errs)
	}()
	require.Never(t, func() bool { return len(done) > 0 }, 300*time.Millisecond, pollTime)
	proxy.Pass()
	select {
	case result := <-done:
		require.True(t, strings.HasPrefix(result, "0"), result)
	case <-time.After(patience):
		t.Fatal("migrate did not go on when the database was there")
	}
}

// client is a connection to Redis for tests.
func client(t *testing.T, addr string) redisClient {
	t.Helper()
	c, err := redisconn.Options{Addr: addr}.Client(redisconn.Calls)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func TestCheckConfig_ConnectChecksTheServersAndChangesNothing(t *testing.T) {
	key := keyFile(t)
	dsn, dsnFile := migrated(t, 2)
	redis := devstack.TestRedis(t)
	args := []string{"check-config", "--connect", "--order-key-file=" + key, "--database-dsn-file=" + dsnFile, "--redis-addr=" + redis.Addr()}
	code, out, errs := program(args...)
	require.Zero(t, code, errs)
	require.Contains(t, out, "2 partitions")
	require.Contains(t, out, "durability strict")
	require.Contains(t, out, "holds no ledger yet")

	ctx := context.Background()
	store, err := orderstore.Open(ctx, orderstore.Options{DSN: dsn})
	require.NoError(t, err)
	defer store.Close()
	keys, err := store.RegisterKeys(ctx, nil)
	require.NoError(t, err)
	require.Empty(t, keys)
	c := client(t, redis.Addr())
	_, err = ledger.ReadLayout(ctx, c)
	require.ErrorIs(t, err, ledger.ErrMissing)

	require.NoError(t, c.Do(ctx, c.B().ConfigSet().ParameterValue().ParameterValue("appendfsync", "everysec").Build()).Error())
	code, _, errs = program(args...)
	require.Equal(t, 1, code)
	require.Contains(t, errs, "appendfsync is everysec")
	code, _, errs = program(append(args, "--durability=fast")...)
	require.Zero(t, code, errs)
	require.NoError(t, c.Do(ctx, c.B().ConfigSet().ParameterValue().ParameterValue("maxmemory-policy", "allkeys-lru").Build()).Error())
	code, _, errs = program(append(args, "--durability=fast")...)
	require.Equal(t, 1, code)
	require.Contains(t, errs, "maxmemory-policy is allkeys-lru")
}
