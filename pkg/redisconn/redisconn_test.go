package redisconn

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func newClient(t *testing.T, o Options, kind Kind) rueidis.Client {
	t.Helper()
	c, err := o.Client(kind)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func ping(ctx context.Context, c rueidis.Client) error {
	return c.Do(ctx, c.B().Ping().Build()).Error()
}

func freeAddr(t *testing.T) string {
	t.Helper()
	port, err := devstack.FreePort()
	require.NoError(t, err)
	return fmt.Sprintf("127.0.0.1:%d", port)
}

type binary struct {
	Redis Options `embed:"" prefix:"redis-"`
}

func parse(t *testing.T, args ...string) Options {
	t.Helper()
	var cfg binary
	parser, err := kong.New(&cfg)
	require.NoError(t, err)
	_, err = parser.Parse(args)
	require.NoError(t, err)
	return cfg.Redis
}

func TestOptions_AsFlagsAndEnvironmentOfABinary(t *testing.T) {
	require.Equal(t, Options{Addr: "127.0.0.1:6379"}, parse(t))

	want := Options{
		Addr: "redis:6380", Username: "gateway", PasswordFile: "/secrets/password", TLS: true,
		TLSCAFile: "/tls/ca", TLSCertFile: "/tls/cert", TLSKeyFile: "/tls/key", TLSServerName: "redis.internal",
		ClientName: "gateway", Cluster: true,
	}
	require.Equal(t, want, parse(t, "--redis-addr=redis:6380", "--redis-username=gateway", "--redis-password-file=/secrets/password",
		"--redis-tls", "--redis-tls-ca-file=/tls/ca", "--redis-tls-cert-file=/tls/cert", "--redis-tls-key-file=/tls/key",
		"--redis-tls-server-name=redis.internal", "--redis-client-name=gateway", "--redis-cluster"))

	for name, value := range map[string]string{
		"ADDR": "redis:6380", "USERNAME": "gateway", "PASSWORD_FILE": "/secrets/password", "TLS": "true",
		"TLS_CA_FILE": "/tls/ca", "TLS_CERT_FILE": "/tls/cert", "TLS_KEY_FILE": "/tls/key", "TLS_SERVER_NAME": "redis.internal",
		"CLIENT_NAME": "gateway", "CLUSTER": "true",
	} {
		t.Setenv("SECKILL_REDIS_"+name, value)
	}
	require.Equal(t, want, parse(t))
	require.Equal(t, "other:1", parse(t, "--redis-addr=other:1").Addr, "a flag wins over the environment")
}

func TestValidate_RefusesSettingsThatContradict(t *testing.T) {
	require.NoError(t, Options{Addr: "[::1]:6379"}.Validate())
	for name, o := range map[string]Options{
		"no port":              {Addr: "redis"},
		"empty":                {},
		"TLS file without TLS": {Addr: "a:1", TLSCAFile: "x"},
		"cert without key":     {Addr: "a:1", TLS: true, TLSCertFile: "x"},
		"user without password": {
			Addr: "a:1", Username: "x"},
		"name with a space": {Addr: "a:1", ClientName: "x y"},
	} {
		require.Error(t, o.Validate(), name)
		_, err := o.Client(Calls)
		require.Error(t, err, name)
		_, err = o.Connect(t.Context(), Calls, slog.New(slog.DiscardHandler))
		require.Error(t, err, name+": not tried again")
	}
	_, err := Options{Addr: "a:1"}.Client(Blocking)
	require.ErrorIs(t, err, errNoPoolSize)
}

// The traps of the library, held where a later hand might fall in.
func TestCheckFiles_NamesTheFlagsOfFilesThatCannotBeOpened(t *testing.T) {
	there := filepath.Join(t.TempDir(), "there")
	require.NoError(t, os.WriteFile(there, nil, 0o600))
	require.NoError(t, Options{}.CheckFiles())
	require.NoError(t, Options{PasswordFile: there, TLSCAFile: there, TLSCertFile: there, TLSKeyFile: there}.CheckFiles())
	err := Options{PasswordFile: there + ".1", TLSCAFile: there, TLSCertFile: there + ".2", TLSKeyFile: there + ".3"}.CheckFiles()
	for _, want := range []string{"--redis-password-file: open " + there + ".1", "--redis-tls-cert-file: open " + there + ".2", "--redis-tls-key-file: open " + there + ".3"} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), "--redis-tls-ca-file")
}

func TestClientOption_KeepsClearOfKnownTraps(t *testing.T) {
	for _, kind := range []Kind{Calls, Blocking} {
		opt := Options{Addr: "a:1", BlockingPoolSize: 3}.clientOption(kind)
		require.Zero(t, opt.ConnLifetime, "re-sends writes in flight")
		require.True(t, opt.DisableRetry)
		require.True(t, opt.DisableCache)
		require.True(t, opt.ForceSingleClient)
		require.Positive(t, opt.BlockingPoolSize)
	}
	require.False(t, Options{Addr: "a:1", Cluster: true}.clientOption(Calls).ForceSingleClient)
}

func TestClient_RunsCommandsUnderItsName(t *testing.T) {
	r := devstack.TestRedis(t)
	c := newClient(t, Options{Addr: r.Addr(), ClientName: "gateway"}, Calls)
	ctx := within(t, 20*time.Second)
	n, err := c.Do(ctx, c.B().Eval().Script("return 7").Numkeys(0).Build()).AsInt64()
	require.NoError(t, err)
	require.EqualValues(t, 7, n)
	list, err := c.Do(ctx, c.B().ClientList().Build()).ToString()
	require.NoError(t, err)
	require.Contains(t, list, "name=gateway-calls")
}

func TestClient_FailsSoonWhereNothingListens(t *testing.T) {
	addr := freeAddr(t)
	_, err := Options{Addr: addr}.Client(Calls)
	require.ErrorContains(t, err, "connecting to redis at "+addr)
	require.ErrorContains(t, err, "refused")
}

func TestClient_ComesBackAfterARestartOfTheServer(t *testing.T) {
	r := devstack.TestRedis(t)
	c := newClient(t, Options{Addr: r.Addr()}, Calls)
	require.NoError(t, ping(within(t, 20*time.Second), c))
	r.Kill()
	require.Eventually(t, func() bool { return ping(within(t, 20*time.Second), c) != nil }, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, r.Restart(within(t, 60*time.Second)))
	require.Eventually(t, func() bool { return ping(within(t, 20*time.Second), c) == nil }, 20*time.Second, 10*time.Millisecond)
}

// A connection that breaks after the command was sent: a read could be sent again
// silently, and with it whatever rueidis takes for a read.
func TestClient_NeverRepeatsACommandByItself(t *testing.T) {
	r := devstack.TestRedis(t)
	p := devstack.TestProxy(t, r.Addr())
	direct := newClient(t, Options{Addr: r.Addr()}, Calls)
	// A Blocking client has one connection for this, so no handshake of a further
	// one can get in between.
	c := newClient(t, Options{Addr: p.Addr(), BlockingPoolSize: 1}, Blocking)
	ctx := within(t, 60*time.Second)
	for name, cmd := range map[string]rueidis.Completed{
		"write": c.B().Incr().Key("n").Build(),
		"read":  c.B().Get().Key("n").Build(),
	} {
		require.NoError(t, ping(ctx, c), name)
		swallowed := p.Swallowed()
		p.SwallowReplies()
		failed := make(chan error, 1)
		go func() { failed <- c.Do(ctx, cmd).Error() }()
		require.Eventually(t, func() bool { return p.Swallowed() > swallowed }, 20*time.Second, time.Millisecond, name)
		p.CutAll()
		p.Pass()
		require.Error(t, <-failed, "%s: answered by a second run", name)
		require.Eventually(t, func() bool { return ping(ctx, c) == nil }, 20*time.Second, 10*time.Millisecond)
	}
	stats, err := direct.Do(ctx, direct.B().Info().Section("commandstats").Build()).ToString()
	require.NoError(t, err)
	require.Contains(t, stats, "cmdstat_incr:calls=1,")
	require.Contains(t, stats, "cmdstat_get:calls=1,")
}

// A server that hangs is noticed without a deadline of the caller.
func TestClient_GivesUpAServerThatHangs(t *testing.T) {
	r := devstack.TestRedis(t)
	c := newClient(t, Options{Addr: r.Addr()}, Calls)
	require.NoError(t, ping(context.Background(), c))
	require.NoError(t, r.Pause())
	t.Cleanup(func() { r.Resume() })
	failed := make(chan error, 1)
	go func() { failed <- ping(context.Background(), c) }()
	select {
	case err := <-failed:
		require.Error(t, err)
	case <-time.After(30 * time.Second):
		t.Fatal("still waiting")
	}
}

func TestBlocking_OutlivesTheWriteTimeoutAndServesItsPoolAtOnce(t *testing.T) {
	r := devstack.TestRedis(t)
	const reads = 3
	c := newClient(t, Options{Addr: r.Addr(), BlockingPoolSize: reads}, Blocking)
	ctx := within(t, 60*time.Second)
	block := writeTimeout + 500*time.Millisecond
	results := make(chan error, reads)
	for i := range reads {
		go func() {
			results <- c.Do(ctx, c.B().Xread().Block(block.Milliseconds()).Streams().Key(fmt.Sprint("s", i)).Id("$").Build()).Error()
		}()
	}
	admin := newClient(t, Options{Addr: r.Addr()}, Calls)
	require.Eventually(t, func() bool {
		info, err := admin.Do(ctx, admin.B().Info().Section("clients").Build()).ToString()
		return err == nil && strings.Contains(info, fmt.Sprintf("blocked_clients:%d\r\n", reads))
	}, block, 5*time.Millisecond, "all reads block at the same time")
	require.NoError(t, ping(ctx, c), "other commands pass them")
	for range reads {
		require.True(t, rueidis.IsRedisNil(<-results), "an empty read, not a timeout")
	}
}

func TestConnect_WaitsForTheServerAndLogsLessAndLess(t *testing.T) {
	r := devstack.TestRedis(t)
	r.Kill()
	var log lockedBuffer
	type result struct {
		c   rueidis.Client
		err error
	}
	done := make(chan result, 1)
	go func() {
		c, err := Options{Addr: r.Addr()}.Connect(within(t, 2*time.Minute), Calls, slog.New(slog.NewTextHandler(&log, nil)))
		done <- result{c, err}
	}()
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "attempt=4") }, 60*time.Second, 5*time.Millisecond)
	require.NoError(t, r.Restart(within(t, 60*time.Second)))
	got := <-done
	require.NoError(t, got.err)
	defer got.c.Close()
	require.NoError(t, ping(within(t, 20*time.Second), got.c))
	lines := regexp.MustCompile(`level=WARN .*attempt=(\d+)`).FindAllStringSubmatch(log.String(), -1)
	var attempts []string
	for _, l := range lines {
		attempts = append(attempts, l[1])
	}
	require.Subset(t, []string{"1", "2", "4", "8", "16"}, attempts[:min(3, len(attempts))], log.String())
	require.NotContains(t, attempts, "3", "the same failure again")
	require.Contains(t, log.String(), "redis connected")
}

func TestConnect_EndsWithItsContextAndSaysWhy(t *testing.T) {
	addr := freeAddr(t)
	ctx, cancel := context.WithCancel(t.Context())
	var log lockedBuffer
	done := make(chan error, 1)
	go func() {
		_, err := Options{Addr: addr}.Connect(ctx, Calls, slog.New(slog.NewTextHandler(&log, nil)))
		done <- err
	}()
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "attempt=2") }, 30*time.Second, time.Millisecond)
	cancel()
	select {
	case err := <-done:
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorContains(t, err, "refused")
	case <-time.After(20 * time.Second):
		t.Fatal("Connect outlives its context")
	}
}

func TestPassword_IsReadAgainAtEachConnection(t *testing.T) {
	r := devstack.TestRedis(t)
	plain := newClient(t, Options{Addr: r.Addr()}, Calls)
	ctx := within(t, 60*time.Second)
	setPassword := func(c rueidis.Client, password string) {
		require.NoError(t, c.Do(ctx, c.B().Arbitrary("ACL", "SETUSER", "gateway", "reset", "on", ">"+password, "+@all", "~*").Build()).Error())
	}
	setPassword(plain, "first")
	file := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(file, []byte("first\n"), 0o600))
	o := Options{Addr: r.Addr(), Username: "gateway", PasswordFile: file}
	c := newClient(t, o, Calls)
	who := func() string {
		name, _ := c.Do(ctx, c.B().AclWhoami().Build()).ToString()
		return name
	}
	require.Equal(t, "gateway", who())

	setPassword(plain, "second")
	_, err := o.Client(Calls)
	require.ErrorContains(t, err, `redis refused user "gateway"`)
	require.ErrorContains(t, err, "--redis-password-file")
	require.NotContains(t, err.Error(), "first")

	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	require.NoError(t, plain.Do(ctx, plain.B().Arbitrary("CLIENT", "KILL", "USER", "gateway").Build()).Error())
	require.Eventually(t, func() bool { return who() == "gateway" }, 20*time.Second, 10*time.Millisecond)
}

func TestPassword_ErrorsNameTheFile(t *testing.T) {
	r := devstack.TestRedis(t)
	dir := t.TempDir()
	empty, long := filepath.Join(dir, "empty"), filepath.Join(dir, "long")
	require.NoError(t, os.WriteFile(empty, []byte("\n"), 0o600))
	require.NoError(t, os.WriteFile(long, bytes.Repeat([]byte("x"), maxPasswordBytes+1), 0o600))
	for _, path := range []string{filepath.Join(dir, "absent"), empty, long} {
		_, err := Options{Addr: r.Addr(), PasswordFile: path}.Client(Calls)
		require.ErrorContains(t, err, path)
	}
}

func TestPassword_MissingReadsClearly(t *testing.T) {
	r := devstack.TestRedis(t, devstack.RedisOptions{})
	c := newClient(t, Options{Addr: r.Addr()}, Calls)
	require.NoError(t, c.Do(within(t, 20*time.Second), c.B().ConfigSet().ParameterValue().ParameterValue("requirepass", "x").Build()).Error())
	_, err := Options{Addr: r.Addr()}.Client(Calls)
	require.ErrorContains(t, err, "give --redis-password-file")
}

func TestTLS_TrustsItsCAOnlyAndReadsClearly(t *testing.T) {
	dir := t.TempDir()
	ca, cert, key := issue(t, dir, "server")
	otherCA, _, _ := issue(t, dir, "other")
	tlsAddr := freeAddr(t)
	_, port, err := net.SplitHostPort(tlsAddr)
	require.NoError(t, err)
	r := devstack.TestRedis(t, devstack.RedisOptions{Args: []string{
		"--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca,
	}})

	mutual := Options{Addr: tlsAddr, TLS: true, TLSCAFile: ca, TLSCertFile: cert, TLSKeyFile: key}
	require.NoError(t, ping(within(t, 20*time.Second), newClient(t, mutual, Calls)))

	for want, change := range map[string]func(*Options){
		"is not trusted":         func(o *Options) { o.TLSCAFile = otherCA },
		"--redis-tls-ca-file":    func(o *Options) { o.TLSServerName = "elsewhere" },
		"no answer to the TLS":   func(o *Options) { o.Addr = r.Addr() },
		"want --redis-tls":       func(o *Options) { *o = Options{Addr: tlsAddr} },
		"holds no certificate":   func(o *Options) { o.TLSCAFile = key },
		"client certificate":     func(o *Options) { o.TLSCertFile = filepath.Join(dir, "absent") },
		"no such file":           func(o *Options) { o.TLSCAFile = filepath.Join(dir, "absent") },
		"connecting to redis at": func(o *Options) { o.TLSCertFile, o.TLSKeyFile = "", "" },
	} {
		o := mutual
		change(&o)
		_, err := o.Client(Calls)
		require.ErrorContains(t, err, want)
	}
}

// issue writes a CA and a certificate for 127.0.0.1 signed by it.
func issue(t *testing.T, dir, name string) (caFile, certFile, keyFile string) {
	t.Helper()
	save := func(suffix, kind string, der []byte) string {
		path := filepath.Join(dir, name+suffix)
		require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
		return path
	}
	template := func(cn string) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: cn},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		}
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	ca := template(name + " CA")
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign
	caDER, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	require.NoError(t, err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	leaf := template(name)
	leaf.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	leaf.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	require.NoError(t, err)
	keyDER, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	return save("-ca.pem", "CERTIFICATE", caDER), save(".pem", "CERTIFICATE", der), save("-key.pem", "EC PRIVATE KEY", keyDER)
}
