package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/telemetry"
)

// settings are the flags of serve, and of check-config, which checks them.
type settings struct {
	Listen string `env:"SECKILL_LISTEN" default:":7071" help:"Where VoucherService, health and reflection are served."`
	Admin  string `env:"SECKILL_ADMIN" default:"127.0.0.1:7081" help:"Where /metrics, /healthz and pprof are served; it knows no users."`

	databaseSettings `embed:""`
	DatabaseConns    int               `env:"SECKILL_DATABASE_CONNS" default:"16" help:"Most connections to the database, at least --committers + 3; one for each partition it is guardian of comes on top."`
	Redis            redisconn.Options `embed:"" prefix:"redis-"`
	OrderKeyFile     string            `env:"SECKILL_ORDER_KEY_FILE" type:"path" placeholder:"FILE" help:"File with the order key, from writer keygen; the same on every gateway and writer."`

	Consumer     string        `env:"SECKILL_CONSUMER" placeholder:"NAME" help:"Name in the consumer groups. Must differ between processes; the default is made of host, process id and a random part."`
	Committers   int           `env:"SECKILL_COMMITTERS" default:"3" help:"Transactions in flight."`
	BatchSize    int           `env:"SECKILL_BATCH_SIZE" default:"1000" help:"Orders that one transaction inserts, about."`
	Slots        int           `env:"SECKILL_SLOTS" default:"0" help:"Most orders in hand; 0: two batches a committer and one stream entry a partition."`
	BatchTimeout time.Duration `env:"SECKILL_BATCH_TIMEOUT" default:"5s" help:"Bound on one run of a transaction."`
	LockWait     time.Duration `env:"SECKILL_LOCK_WAIT" default:"0s" help:"innodb_lock_wait_timeout of the writer's sessions, in whole seconds, less than --batch-timeout; 0s: as many as fit below it, at most 5s."`
	MinIdle      time.Duration `env:"SECKILL_MIN_IDLE" default:"30s" help:"Pending for that long, an entry is taken over from its writer; more than twice --batch-timeout."`
	Block        time.Duration `env:"SECKILL_BLOCK" default:"1s" help:"How long a read waits for a new entry."`

	Durability       string        `env:"SECKILL_DURABILITY" enum:"strict,fast" default:"strict" help:"Least durability that Redis must really have for a partition to be opened: strict (appendfsync always) or fast (everysec)."`
	MaxInFlight      int64         `env:"SECKILL_MAX_IN_FLIGHT" default:"1000000" help:"Most orders of a partition admitted and not yet settled; beyond it Grabs are refused."`
	GuardianInterval time.Duration `env:"SECKILL_GUARDIAN_INTERVAL" default:"1s" help:"How often the guardian looks at each partition."`

	DefaultDeadline time.Duration `env:"SECKILL_DEFAULT_DEADLINE" default:"10s" help:"Time for a call whose caller set none."`
	MaxDeadline     time.Duration `env:"SECKILL_MAX_DEADLINE" default:"2m" help:"Most time that a caller may ask for; GetBooks of millions of orders takes seconds."`
	DrainDelay      time.Duration `env:"SECKILL_DRAIN_DELAY" default:"0s" help:"After SIGTERM, how long calls are still taken while health says NOT_SERVING."`
	DrainTimeout    time.Duration `env:"SECKILL_DRAIN_TIMEOUT" default:"20s" help:"After SIGTERM, how long work in hand may take to finish, --drain-delay included."`
	Reflection      bool          `env:"SECKILL_REFLECTION" default:"true" negatable:"" help:"Serve gRPC reflection."`
	TLSCertFile     string        `name:"tls-cert-file" env:"SECKILL_TLS_CERT_FILE" type:"path" placeholder:"FILE" help:"Certificate (PEM) of the API port; switches TLS on."`
	TLSKeyFile      string        `name:"tls-key-file" env:"SECKILL_TLS_KEY_FILE" type:"path" placeholder:"FILE" help:"Its key (PEM)."`
	TLSClientCAFile string        `name:"tls-client-ca-file" env:"SECKILL_TLS_CLIENT_CA_FILE" type:"path" placeholder:"FILE" help:"CA (PEM) that callers' certificates must come from; without it callers need none."`

	logSettings `embed:""`
}

// databaseSettings say where the database is. The DSN holds a password, so it
// has no flag: what is on a command line everybody on the machine can read.
type databaseSettings struct {
	DatabaseDSNFile string `name:"database-dsn-file" env:"SECKILL_DATABASE_DSN_FILE" type:"path" placeholder:"FILE" help:"File with the database's DSN, user:password@tcp(host:port)/database. For development the DSN itself may be in the environment variable SECKILL_DATABASE_DSN."`
	DatabaseDSN     string `name:"database-dsn" env:"SECKILL_DATABASE_DSN" secret:"" hidden:""`
}

type logSettings struct {
	LogFormat string `env:"SECKILL_LOG_FORMAT" enum:"json,text" default:"json" help:"Form of the log: json or text."`
	LogLevel  string `env:"SECKILL_LOG_LEVEL" enum:"debug,info,warn,error" default:"info" help:"Least level that is logged: debug, info, warn or error."`
}

func (l logSettings) logger(w io.Writer) (*slog.Logger, error) {
	return telemetry.NewLogger(telemetry.LogOptions{Format: l.LogFormat, Level: l.LogLevel, Writer: w})
}

// maxDSNBytes bounds what is read of a DSN file, which may be some other file
// by mistake.
const maxDSNBytes = 4 << 10

// dsn returns the DSN. No error quotes it.
func (d databaseSettings) dsn() (string, error) {
	switch {
	case d.DatabaseDSNFile == "" && d.DatabaseDSN == "":
		return "", errors.New("no database is given: set --database-dsn-file")
	case d.DatabaseDSNFile == "":
		return d.DatabaseDSN, nil
	case d.DatabaseDSN != "":
		return "", errors.New("the database is given twice, by --database-dsn-file and by SECKILL_DATABASE_DSN: set one")
	}
	f, err := os.Open(d.DatabaseDSNFile)
	if err != nil {
		return "", fmt.Errorf("reading the database DSN: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxDSNBytes+1))
	if err != nil {
		return "", fmt.Errorf("reading the database DSN: %w", err)
	}
	// Editors and echo end a file with a newline.
	dsn := strings.TrimSpace(string(text))
	if dsn == "" || len(text) > maxDSNBytes || strings.ContainsAny(dsn, "\r\n") {
		return "", fmt.Errorf("reading the database DSN: %s does not hold one line of at most %d bytes", d.DatabaseDSNFile, maxDSNBytes)
	}
	return dsn, nil
}

const (
	// lockWaitMax is the longest lock wait by default. A row lock is held for
	// milliseconds; who waits for seconds waits for something that is stuck.
	lockWaitMax = 5 * time.Second
	// otherConns is what the pool needs beside the committers: the guardian, a
	// call and a look at health.
	otherConns = 3
)

// complete fills in what follows from other settings.
func (s *settings) complete() {
	if s.LockWait == 0 {
		// Whole seconds, and the wait must end before the transaction does: then
		// the server says what it waited for, and the connection stays.
		s.LockWait = min(lockWaitMax, (s.BatchTimeout - 1).Truncate(time.Second))
	}
	if s.Consumer == "" {
		s.Consumer = consumerName()
	}
	if s.Redis.ClientName == "" {
		s.Redis.ClientName = "seckill-writer"
	}
}

// slots is how many orders may be in hand, which depends on the partitions.
func (s *settings) slots(partitions int) int {
	if s.Slots > 0 {
		return s.Slots
	}
	return 2*s.BatchSize*s.Committers + ledger.MaxBatch*partitions
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
	problem(s.DatabaseDSNFile == "" && s.DatabaseDSN == "", "no database is given: set --database-dsn-file")
	problem(s.OrderKeyFile == "", "no order key is given: set --order-key-file (writer keygen makes one)")
	problem(s.Committers < 1 || s.Committers > 64, "--committers %d: must be from 1 to 64", s.Committers)
	problem(s.BatchSize < 1 || s.BatchSize > 10_000, "--batch-size %d: must be from 1 to 10000", s.BatchSize)
	problem(s.Slots != 0 && s.Slots < s.BatchSize+ledger.MaxBatch, "--slots %d: must be 0, or at least --batch-size %d and one stream entry of %d",
		s.Slots, s.BatchSize, ledger.MaxBatch)
	problem(s.DatabaseConns < s.Committers+otherConns, "--database-conns %d: must be at least --committers %d and %d more",
		s.DatabaseConns, s.Committers, otherConns)
	problem(s.MaxInFlight < ledger.MaxBatch, "--max-in-flight %d: must be at least one batch of %d", s.MaxInFlight, ledger.MaxBatch)

	// An interval of the guardian is also how late a change reaches the ledger
	// when the first try failed.
	problem(s.GuardianInterval < 10*time.Millisecond || s.GuardianInterval > time.Minute,
		"--guardian-interval %s: must be from 10ms to 1m", s.GuardianInterval)
	problem(s.BatchTimeout <= time.Second, "--batch-timeout %s: must be more than 1s, which is the shortest lock wait", s.BatchTimeout)
	problem(s.LockWait%time.Second != 0 || s.LockWait < 0, "--lock-wait %s: must be whole seconds", s.LockWait)
	problem(s.BatchTimeout > time.Second && s.LockWait >= s.BatchTimeout,
		"--lock-wait %s must be less than --batch-timeout %s: a transaction would be cut off while it waits for a lock", s.LockWait, s.BatchTimeout)
	problem(2*s.BatchTimeout >= s.MinIdle,
		"2 x --batch-timeout %s must be less than --min-idle %s: entries would be taken over while they are worked on", s.BatchTimeout, s.MinIdle)
	problem(s.Block < time.Millisecond, "--block %s: must be at least 1ms", s.Block)
	problem(s.Block >= s.DrainTimeout, "--block %s must be less than --drain-timeout %s: a reader that waits would outlast the drain", s.Block, s.DrainTimeout)
	problem(s.BatchTimeout >= s.DrainTimeout,
		"--batch-timeout %s must be less than --drain-timeout %s: a batch in hand could not finish", s.BatchTimeout, s.DrainTimeout)
	problem(s.DrainDelay < 0 || s.DrainDelay >= s.DrainTimeout, "--drain-delay %s must be less than --drain-timeout %s", s.DrainDelay, s.DrainTimeout)
	problem(s.DefaultDeadline <= 0 || s.DefaultDeadline > s.MaxDeadline,
		"--default-deadline %s must be more than 0 and at most --max-deadline %s", s.DefaultDeadline, s.MaxDeadline)

	problem((s.TLSCertFile == "") != (s.TLSKeyFile == ""), "--tls-cert-file and --tls-key-file must be given together")
	problem(s.TLSClientCAFile != "" && s.TLSCertFile == "", "--tls-client-ca-file needs --tls-cert-file")
	for _, r := range s.Consumer {
		if r <= ' ' || r > '~' {
			problem(true, "--consumer %q: must be printable ASCII without spaces", s.Consumer)
			break
		}
	}
	problem(s.Consumer == ledger.Group, "--consumer %q: is the name of the group", s.Consumer)
	return errors.Join(problems...)
}

// consumerName differs between processes also where host names and process ids
// do not, as in containers.
func consumerName() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "writer"
	}
	host = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, host)
	var random [4]byte
	rand.Read(random[:]) // never fails
	return host + "-" + strconv.Itoa(os.Getpid()) + "-" + hex.EncodeToString(random[:])
}
