package main

import (
	"time"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
)

// settings are the flags of serve, and of check-config, which checks them.
type settings struct {
	Listen string `env:"SECKILL_LISTEN" default:":7070" help:"Where SeckillService, health and reflection are served."`
	Admin  string `env:"SECKILL_ADMIN" default:"127.0.0.1:7080" help:"Where /metrics, /healthz and pprof are served; it knows no users."`

	Redis        redisconn.Options `embed:"" prefix:"redis-"`
	OrderKeyFile string            `env:"SECKILL_ORDER_KEY_FILE" type:"path" placeholder:"FILE" help:"File with the order key, from writer keygen; the same on every gateway and writer."`

	MaxWaiting  int `env:"SECKILL_MAX_WAITING" default:"20000" help:"Most Grabs waiting for their answer; beyond it they are refused at once."`
	MaxBatch    int `env:"SECKILL_MAX_BATCH" default:"256" help:"Most Grabs that one call carries to the ledger, 1 to 256."`
	MaxInFlight int `env:"SECKILL_MAX_BATCHES" name:"max-batches" default:"256" help:"Most calls to the ledger in flight over all vouchers (4 for one)."`

	DefaultDeadline time.Duration `env:"SECKILL_DEFAULT_DEADLINE" default:"2s" help:"Time for a call whose caller set none."`
	MaxDeadline     time.Duration `env:"SECKILL_MAX_DEADLINE" default:"10s" help:"Most time that a caller may ask for."`
	DrainDelay      time.Duration `env:"SECKILL_DRAIN_DELAY" default:"0s" help:"After SIGTERM, how long calls are still taken while health says NOT_SERVING, for load balancers to notice."`
	DrainTimeout    time.Duration `env:"SECKILL_DRAIN_TIMEOUT" default:"15s" help:"After that, how long running calls may take to finish."`

	Server rpcserver.Settings    `embed:""`
	Log    telemetry.LogSettings `embed:"" prefix:"log-"`
}

// complete fills in what follows from other settings.
func (s *settings) complete() {
	if s.Redis.ClientName == "" {
		s.Redis.ClientName = "seckill-gateway"
	}
}

// check names everything that contradicts itself, with the values. It opens no
// connection and reads no file.
func (s *settings) check() (problems command.Problems) {
	problems.HostPort("--listen", s.Listen)
	problems.HostPort("--admin", s.Admin)
	problems.Add(s.Redis.Validate())
	problems.If(s.OrderKeyFile == "", "no order key is given: set --order-key-file (writer keygen makes one)")
	problems.If(s.MaxBatch < 1 || s.MaxBatch > ledger.MaxBatch, "--max-batch %d: must be from 1 to %d", s.MaxBatch, ledger.MaxBatch)
	// Beyond it a stalled Redis would fill the queue of a connection, and then
	// calls no longer end by their deadline.
	problems.If(s.MaxInFlight < 1 || s.MaxInFlight > 1000, "--max-batches %d: must be from 1 to 1000", s.MaxInFlight)
	problems.If(s.MaxWaiting < 1, "--max-waiting %d: must be at least 1", s.MaxWaiting)
	problems.If(s.DefaultDeadline < 10*time.Millisecond || s.DefaultDeadline > s.MaxDeadline,
		"--default-deadline %s must be from 10ms to --max-deadline %s", s.DefaultDeadline, s.MaxDeadline)
	problems.If(s.DrainDelay < 0, "--drain-delay %s is negative", s.DrainDelay)
	problems.If(s.DrainTimeout < s.MaxDeadline,
		"--drain-timeout %s must be at least --max-deadline %s: a call in hand could not finish", s.DrainTimeout, s.MaxDeadline)
	problems.Add(s.Server.Check())
	return problems
}
