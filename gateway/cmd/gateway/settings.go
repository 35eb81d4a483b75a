package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
)

// settings are the flags of serve, and of check-config, which checks them.
type settings struct {
	Listen string `env:"SECKILL_LISTEN" default:":7070" placeholder:"HOST:PORT" help:"Where SeckillService, health and reflection are served."`
	Admin  string `env:"SECKILL_ADMIN" default:"127.0.0.1:7080" placeholder:"HOST:PORT" help:"Where /metrics, /healthz and pprof are served; it knows no users."`

	Redis        redisconn.Options `embed:"" prefix:"redis-"`
	OrderKeyFile string            `env:"SECKILL_ORDER_KEY_FILE" type:"path" placeholder:"FILE" help:"File with the order key, from writer keygen; the same on every gateway and writer."`

	MaxWaiting  int `env:"SECKILL_MAX_WAITING" default:"20000" help:"Most Grabs waiting for their answer; beyond it they are refused at once."`
	MaxBatch    int `env:"SECKILL_MAX_BATCH" default:"256" help:"Most Grabs that one call carries to the ledger, 1 to 256."`
	MaxInFlight int `env:"SECKILL_MAX_BATCHES" name:"max-batches" default:"256" help:"Most calls to the ledger in flight over all vouchers (4 for one)."`

	DefaultDeadline time.Duration `env:"SECKILL_DEFAULT_DEADLINE" default:"2s" help:"Time for a call whose caller set none."`
	MaxDeadline     time.Duration `env:"SECKILL_MAX_DEADLINE" default:"10s" help:"Most time that a caller may ask for."`
	DrainDelay      time.Duration `env:"SECKILL_DRAIN_DELAY" default:"0s" help:"After SIGTERM, how long calls are still taken while health says NOT_SERVING, for load balancers to notice."`
	DrainTimeout    time.Duration `env:"SECKILL_DRAIN_TIMEOUT" default:"15s" help:"After that, how long running calls may take to finish."`
	Reflection      bool          `env:"SECKILL_REFLECTION" default:"true" negatable:"" help:"Serve gRPC reflection."`
	TLSCertFile     string        `name:"tls-cert-file" env:"SECKILL_TLS_CERT_FILE" type:"path" placeholder:"FILE" help:"Certificate (PEM) of the API port; switches TLS on."`
	TLSKeyFile      string        `name:"tls-key-file" env:"SECKILL_TLS_KEY_FILE" type:"path" placeholder:"FILE" help:"Its key (PEM)."`
	TLSClientCAFile string        `name:"tls-client-ca-file" env:"SECKILL_TLS_CLIENT_CA_FILE" type:"path" placeholder:"FILE" help:"CA (PEM) that callers' certificates must come from; without it callers need none."`

	LogFormat string `env:"SECKILL_LOG_FORMAT" enum:"json,text" default:"json" help:"Form of the log: json or text."`
	LogLevel  string `env:"SECKILL_LOG_LEVEL" enum:"debug,info,warn,error" default:"info" help:"Least level that is logged: debug, info, warn or error."`
}

func (s *settings) logger(w io.Writer) (*slog.Logger, error) {
	return telemetry.NewLogger(telemetry.LogOptions{Format: s.LogFormat, Level: s.LogLevel, Writer: w})
}

// complete fills in what follows from other settings.
func (s *settings) complete() {
	if s.Redis.ClientName == "" {
		s.Redis.ClientName = "seckill-gateway"
	}
}

// check names everything that contradicts itself, with the values. It opens no
// connection and reads no file.
func (s *settings) check() error {
	var problems []error
	problem := func(bad bool, format string, args ...any) {
		if bad {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	for _, addr := range []struct{ name, value string }{{"--listen", s.Listen}, {"--admin", s.Admin}} {
		_, _, err := net.SplitHostPort(addr.value)
		problem(err != nil, "%s %q is not HOST:PORT", addr.name, addr.value)
	}
	if err := s.Redis.Validate(); err != nil {
		problems = append(problems, err)
	}
	problem(s.OrderKeyFile == "", "no order key is given: set --order-key-file (writer keygen makes one)")
	problem(s.MaxBatch < 1 || s.MaxBatch > ledger.MaxBatch, "--max-batch %d: must be from 1 to %d", s.MaxBatch, ledger.MaxBatch)
	// Beyond it a stalled Redis would fill the queue of a connection, and then
	// calls no longer end by their deadline.
	problem(s.MaxInFlight < 1 || s.MaxInFlight > 1000, "--max-batches %d: must be from 1 to 1000", s.MaxInFlight)
	problem(s.MaxWaiting < 1, "--max-waiting %d: must be at least 1", s.MaxWaiting)
	problem(s.DefaultDeadline < 10*time.Millisecond || s.DefaultDeadline > s.MaxDeadline,
		"--default-deadline %s must be from 10ms to --max-deadline %s", s.DefaultDeadline, s.MaxDeadline)
	problem(s.DrainDelay < 0, "--drain-delay %s is negative", s.DrainDelay)
	problem(s.DrainTimeout < s.MaxDeadline,
		"--drain-timeout %s must be at least --max-deadline %s: a call in hand could not finish", s.DrainTimeout, s.MaxDeadline)
	problem((s.TLSCertFile == "") != (s.TLSKeyFile == ""), "--tls-cert-file and --tls-key-file must be given together")
	problem(s.TLSClientCAFile != "" && s.TLSCertFile == "", "--tls-client-ca-file needs --tls-cert-file")
	return errors.Join(problems...)
}

func (s *settings) server(log *slog.Logger, reg prometheus.Registerer) (*rpcserver.Server, error) {
	return rpcserver.New(rpcserver.Options{
		Addr: s.Listen, Reflection: s.Reflection, DefaultDeadline: s.DefaultDeadline, MaxDeadline: s.MaxDeadline,
		DrainDelay: s.DrainDelay, DrainTimeout: s.DrainTimeout,
		TLSCertFile: s.TLSCertFile, TLSKeyFile: s.TLSKeyFile, TLSClientCAFile: s.TLSClientCAFile,
		Logger: log, Registerer: reg,
	})
}

// loadOrderKeys reads the key file and warns of one that others may read.
func loadOrderKeys(path string, log *slog.Logger) (*orderid.Codec, error) {
	codec, err := orderid.Load(path)
	if err != nil {
		return nil, err
	}
	if mode, exposed := codec.Exposed(); exposed {
		log.Warn("the order key file may be read by others", "file", path, "file_mode", mode.String())
	}
	return codec, nil
}
