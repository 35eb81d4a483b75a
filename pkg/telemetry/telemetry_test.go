package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLogSettings_WriteTheirFormatFromTheirLevelOn(t *testing.T) {
	var b bytes.Buffer
	log, err := LogSettings{Level: "WARN"}.Logger(&b)
	require.NoError(t, err)
	log.Info("quiet")
	log.Warn("loud", KeyVoucherID, int64(1)<<60)
	dec := json.NewDecoder(&b)
	dec.UseNumber()
	var raw map[string]any
	require.NoError(t, dec.Decode(&raw))
	require.Equal(t, "loud", raw["msg"])
	require.Equal(t, json.Number("1152921504606846976"), raw["voucher_id"])
	require.Zero(t, b.Len(), "the line below the level")

	b.Reset()
	log, err = LogSettings{Format: "text"}.Logger(&b)
	require.NoError(t, err)
	log.Debug("below the default")
	log.Info("shown")
	require.Contains(t, b.String(), "msg=shown")
	require.NotContains(t, b.String(), "below")
}

func TestLogSettings_RefuseWhatTheyDoNotKnow(t *testing.T) {
	_, err := LogSettings{Format: "xml"}.Logger(io.Discard)
	require.ErrorContains(t, err, "xml")
	_, err = LogSettings{Level: "loud"}.Logger(io.Discard)
	require.ErrorContains(t, err, "loud")
}

func TestVersionOf(t *testing.T) {
	commit := debug.BuildSetting{Key: "vcs.revision", Value: "0123456789abcdef0123"}
	dirty := debug.BuildSetting{Key: "vcs.modified", Value: "true"}
	for want, info := range map[string]*debug.BuildInfo{
		"devel":                    {},
		"v1.2.3":                   {Main: debug.Module{Version: "v1.2.3"}},
		"devel-0123456789ab":       {Main: debug.Module{Version: "(devel)"}, Settings: []debug.BuildSetting{commit}},
		"devel-0123456789ab+dirty": {Main: debug.Module{Version: "(devel)"}, Settings: []debug.BuildSetting{dirty, commit}},
		"v0.0.0-2026-0123456789ab": {Main: debug.Module{Version: "v0.0.0-2026-0123456789ab"}, Settings: []debug.BuildSetting{commit}},
	} {
		require.Equal(t, want, versionOf(info))
	}
	require.NotEmpty(t, BuildVersion())
}

// startAdmin runs an Admin and returns its base URL, and a function that ends it
// and returns what Run returned.
func startAdmin(t *testing.T, a *Admin) (string, func() error) {
	t.Helper()
	require.NoError(t, a.Listen())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	var result error
	ended := false
	stop := func() error {
		if !ended {
			cancel()
			select {
			case result = <-done:
			case <-time.After(20 * time.Second):
				t.Error("admin did not end")
			}
			ended = true
		}
		return result
	}
	t.Cleanup(func() { stop(); http.DefaultClient.CloseIdleConnections() })
	return "http://" + a.Addr(), stop
}

func get(t *testing.T, url string) (int, string, http.Header) {
	t.Helper()
	resp, err := http.Get(url)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(body), resp.Header
}

func TestAdmin_ShowsMetricsProfilesAndAnIndex(t *testing.T) {
	reg := NewRegistry("gateway", "v1")
	url, stop := startAdmin(t, NewAdmin("127.0.0.1:0", reg, func() Health { return Health{} }, nil))

	code, body, _ := get(t, url+"/metrics")
	require.Equal(t, 200, code)
	require.Regexp(t, `seckill_build_info\{go_version="go[^"]+",service="gateway",version="v1"\} 1`, body)
	require.Contains(t, body, "go_goroutines ")

	code, body, _ = get(t, url+"/debug/pprof/goroutine?debug=1")
	require.Equal(t, 200, code)
	require.Contains(t, body, "goroutine profile")

	code, body, _ = get(t, url+"/")
	require.Equal(t, 200, code)
	for _, path := range []string{"/healthz", "/metrics", "/debug/pprof/"} {
		require.Contains(t, body, path)
		code, _, _ := get(t, url+path)
		require.NotEqual(t, 404, code, path)
	}
	code, _, _ = get(t, url+"/nothing")
	require.Equal(t, 404, code)
	require.NoError(t, stop())
	_, err := http.Get(url + "/")
	require.Error(t, err, "still listening")
}

type brokenCollector struct{}

func (brokenCollector) Describe(ch chan<- *prometheus.Desc) { ch <- brokenDesc }
func (brokenCollector) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.NewInvalidMetric(brokenDesc, fmt.Errorf("database away"))
}

var brokenDesc = prometheus.NewDesc("broken", "fails", nil, nil)

func TestAdmin_OneBrokenCollectorDoesNotHideTheOthers(t *testing.T) {
	reg := NewRegistry("writer", "v1")
	reg.MustRegister(brokenCollector{})
	url, _ := startAdmin(t, NewAdmin("127.0.0.1:0", reg, func() Health { return Health{} }, nil))
	code, body, _ := get(t, url+"/metrics")
	require.Equal(t, 200, code)
	require.Contains(t, body, "seckill_build_info")
}

func TestAdmin_HealthNamesEachPart(t *testing.T) {
	health := Health{Serving: true}
	url, _ := startAdmin(t, NewAdmin("127.0.0.1:0", NewRegistry("x", "y"), func() Health { return health }, nil))
	code, body, _ := get(t, url+"/healthz")
	require.Equal(t, 200, code)
	require.JSONEq(t, `{"status":"serving","parts":[]}`, body)

	health = Health{Parts: []Part{
		{Name: "redis", Serving: true, State: "connected"},
		{Name: "partition 3", State: "closed", Reason: "row beyond the ledger"},
	}}
	code, body, header := get(t, url+"/healthz")
	require.Equal(t, 503, code)
	require.Equal(t, "application/json", header.Get("Content-Type"))
	require.JSONEq(t, `{"status":"not_serving","parts":[
		{"name":"redis","serving":true,"state":"connected"},
		{"name":"partition 3","serving":false,"state":"closed","reason":"row beyond the ledger"}]}`, body)
}

func TestAdmin_AStuckRequestDoesNotHoldUpTheEnd(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	url, stop := startAdmin(t, NewAdmin("127.0.0.1:0", NewRegistry("x", "y"), func() Health {
		close(entered)
		<-release
		return Health{}
	}, nil))
	failed := make(chan error, 1)
	go func() {
		resp, err := http.Get(url + "/healthz")
		if err == nil {
			resp.Body.Close()
		}
		failed <- err
	}()
	<-entered
	require.NoError(t, stop())
	require.Error(t, <-failed, "cut off")
	close(release)
}

func TestAdmin_APortInUseIsAnError(t *testing.T) {
	first := NewAdmin("127.0.0.1:0", NewRegistry("x", "y"), nil, nil)
	_, _ = startAdmin(t, first)
	second := NewAdmin(first.Addr(), NewRegistry("x", "y"), nil, nil)
	require.ErrorContains(t, second.Listen(), first.Addr())
	require.Error(t, second.Run(t.Context()))
}

type nestedOptions struct {
	Addr       string        `default:"127.0.0.1:1"`
	Wait       time.Duration `default:"2s"`
	HTTP2Port  int
	TLSKeyFile string
}

type shared struct{ LogLevel string }

type config struct {
	shared
	Redis     nestedOptions `embed:"" prefix:"redis-"`
	Other     nestedOptions `kong:"embed,prefix='other-'"`
	Named     string        `name:"by-name"`
	Token     string        `secret:""`
	NoToken   string        `secret:""`
	TokenFile string
	Vouchers  []int64
	Maybe     *int
	Skipped   string `kong:"-"`
	internal  string
}

func TestSettings_ShowsFlagNamesAndHidesSecrets(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("file secret"), 0o600))
	cfg := config{Token: "hush", TokenFile: file, Vouchers: []int64{1, 2}, Skipped: "skipped", internal: "internal"}
	cfg.LogLevel = "info"
	cfg.Redis.Wait = 1500 * time.Millisecond
	got := map[string]any{}
	for _, a := range Settings(&cfg) {
		got[a.Key] = a.Value.Any()
	}
	require.Equal(t, map[string]any{
		"log-level":  "info",
		"redis-addr": "", "redis-wait": "1.5s", "redis-http-2-port": int64(0), "redis-tls-key-file": "",
		"other-addr": "", "other-wait": "0s", "other-http-2-port": int64(0), "other-tls-key-file": "",
		"by-name": "", "token": "***", "no-token": "", "token-file": file, "vouchers": "[1 2]", "maybe": "",
	}, got)

	var b bytes.Buffer
	WriteSettings(&b, &cfg)
	require.Contains(t, b.String(), "redis-wait: 1.5s\n")
	require.Contains(t, b.String(), "token: ***\n")

	b.Reset()
	PrintSettings(slog.New(slog.NewTextHandler(&b, nil)), cfg)
	require.Equal(t, 1, strings.Count(b.String(), "\n"))
	require.Contains(t, b.String(), "settings.redis-wait=1.5s")
	require.NotContains(t, b.String(), "hush")
	require.NotContains(t, b.String(), "file secret")
}

func TestSettings_UsesTheNamesOfKong(t *testing.T) {
	var cfg config
	parser, err := kong.New(&cfg)
	require.NoError(t, err)
	var want, got []string
	for _, f := range parser.Model.Flags {
		if f.Name != "help" {
			want = append(want, f.Name)
		}
	}
	for _, a := range Settings(cfg) {
		got = append(got, a.Key)
	}
	require.ElementsMatch(t, want, got)
}
