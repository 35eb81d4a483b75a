package main

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
)

// settings are the flags of serve, and of check-config, which checks them.
type settings struct {
	Listen string `env:"SECKILL_LISTEN" default:":7071" help:"Where VoucherService, WriterService, health and reflection are served."`
	Admin  string `env:"SECKILL_ADMIN" default:"127.0.0.1:7081" help:"Where /metrics, /healthz and pprof are served; it knows no users."`

	databaseSettings `embed:""`
	DatabaseConns    int               `env:"SECKILL_DATABASE_CONNS" default:"16" help:"Most connections to the database, at least --committers + 3; one for each partition it is guardian of comes on top."`
	Redis            redisconn.Options `embed:"" prefix:"redis-"`
	OrderKeyFile     string            `env:"SECKILL_ORDER_KEY_FILE" type:"path" placeholder:"FILE" help:"File with the order key, from writer keygen; the same on every gateway and writer."`

	Consumer     string        `env:"SECKILL_CONSUMER" placeholder:"NAME" help:"Name in the consumer groups. Must differ between processes; the default is made of host, process id and a random part."`
	Committers   int           `env:"SECKILL_COMMITTERS" default:"3" help:"Transactions in flight."`
	BatchSize    int           `env:"SECKILL_BATCH_SIZE" default:"1000" help:"Orders that one transaction inserts, about."`
	Slots        int           `env:"SECKILL_SLOTS" default:"0" help:"Most orders in hand, at least --batch-size and 256 a partition; 0: four batches a committer and 256 a partition."`
	BatchTimeout time.Duration `env:"SECKILL_BATCH_TIMEOUT" default:"5s" help:"Bound on one run of a transaction."`
	LockWait     time.Duration `env:"SECKILL_LOCK_WAIT" default:"0s" help:"innodb_lock_wait_timeout of the writer's sessions, in whole seconds, less than --batch-timeout; 0s: as many as fit below it, at most 5s."`
	MinIdle      time.Duration `env:"SECKILL_MIN_IDLE" default:"30s" help:"Pending for that long, an entry is taken over from its writer; more than twice --batch-timeout."`
	Block        time.Duration `env:"SECKILL_BLOCK" default:"1s" help:"How long a read waits for a new entry; where none comes for a while, up to 4s."`

	Durability       string        `env:"SECKILL_DURABILITY" enum:"strict,fast" default:"strict" help:"Least durability that Redis must really have for a partition to be opened: strict (appendfsync always) or fast (everysec)."`
	MaxInFlight      int64         `env:"SECKILL_MAX_IN_FLIGHT" default:"1000000" help:"Most orders of a partition admitted and not yet settled; beyond it Grabs are refused."`
	ConsumerIdle     time.Duration `env:"SECKILL_CONSUMER_IDLE" default:"15m" help:"A consumer that holds nothing and has not read for that long is removed as dead; more than --min-idle."`
	GuardianInterval time.Duration `env:"SECKILL_GUARDIAN_INTERVAL" default:"1s" help:"How often the guardian looks at each partition."`

	DefaultDeadline time.Duration `env:"SECKILL_DEFAULT_DEADLINE" default:"10s" help:"Time for a call whose caller set none."`
	MaxDeadline     time.Duration `env:"SECKILL_MAX_DEADLINE" default:"2m" help:"Most time that a caller may ask for; GetBooks of millions of orders takes seconds."`
	DrainDelay      time.Duration `env:"SECKILL_DRAIN_DELAY" default:"0s" help:"After SIGTERM, how long calls are still taken while health says NOT_SERVING."`
	DrainTimeout    time.Duration `env:"SECKILL_DRAIN_TIMEOUT" default:"20s" help:"After SIGTERM, how long work in hand may take to finish, --drain-delay included."`

	Server rpcserver.Settings    `embed:""`
	Log    telemetry.LogSettings `embed:"" prefix:"log-"`
}

// databaseSettings say where the database is. The DSN holds a password, so it
// has no flag: what is on a command line everybody on the machine can read.
type databaseSettings struct {
	DatabaseDSNFile string `name:"database-dsn-file" env:"SECKILL_DATABASE_DSN_FILE" type:"path" placeholder:"FILE" help:"File with the database's DSN, user:password@tcp(host:port)/database. For development the DSN itself may be in the environment variable SECKILL_DATABASE_DSN."`
	DatabaseDSN     string `name:"database-dsn" env:"SECKILL_DATABASE_DSN" secret:"" hidden:""`
}

// AfterApply refuses the DSN as a flag, which it must be for kong to read its
// environment variable.
func (databaseSettings) AfterApply(parsed *kong.Context) error {
	for _, step := range parsed.Path {
		if step.Flag != nil && step.Flag.Name == "database-dsn" {
			return errors.New("--database-dsn would show a password to everybody on this machine: set --database-dsn-file, or the environment variable SECKILL_DATABASE_DSN")
		}
	}
	return nil
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
	return 4*s.BatchSize*s.Committers + ledger.MaxBatch*partitions
}

// check names everything that contradicts itself, with the values. It opens no
// connection and reads no file.
func (s *settings) check() (problems command.Problems) {
	problems.HostPort("--listen", s.Listen)
	problems.HostPort("--admin", s.Admin)
	problems.Add(s.Redis.Validate())
	// The guardian proves a ledger on one connection, to one server.
	problems.If(s.Redis.Cluster, "--redis-cluster: a writer cannot yet prove a ledger that lies on several servers; give it one server")
	problems.If(s.DatabaseDSNFile == "" && s.DatabaseDSN == "", "no database is given: set --database-dsn-file")
	problems.If(s.OrderKeyFile == "", "no order key is given: set --order-key-file (writer keygen makes one)")
	problems.If(s.Committers < 1 || s.Committers > 64, "--committers %d: must be from 1 to 64", s.Committers)
	problems.If(s.BatchSize < 1 || s.BatchSize > 10_000, "--batch-size %d: must be from 1 to 10000", s.BatchSize)
	// How many partitions there are the database says: here it is held against one,
	// by serve and check-config --connect against all.
	problems.Add(s.checkSlots(1))
	problems.If(s.DatabaseConns < s.Committers+otherConns, "--database-conns %d: must be at least --committers %d and %d more",
		s.DatabaseConns, s.Committers, otherConns)
	problems.If(s.MaxInFlight < ledger.MaxBatch, "--max-in-flight %d: must be at least one batch of %d", s.MaxInFlight, ledger.MaxBatch)

	// An interval of the guardian is also how late a change reaches the ledger
	// when the first try failed.
	problems.If(s.GuardianInterval < 10*time.Millisecond || s.GuardianInterval > time.Minute,
		"--guardian-interval %s: must be from 10ms to 1m", s.GuardianInterval)
	problems.If(s.BatchTimeout <= time.Second, "--batch-timeout %s: must be more than 1s, which is the shortest lock wait", s.BatchTimeout)
	problems.If(s.LockWait%time.Second != 0 || s.LockWait < 0, "--lock-wait %s: must be whole seconds", s.LockWait)
	problems.If(s.BatchTimeout > time.Second && s.LockWait >= s.BatchTimeout,
		"--lock-wait %s must be less than --batch-timeout %s: a transaction would be cut off while it waits for a lock", s.LockWait, s.BatchTimeout)
	problems.If(2*s.BatchTimeout >= s.MinIdle,
		"2 x --batch-timeout %s must be less than --min-idle %s: entries would be taken over while they are worked on", s.BatchTimeout, s.MinIdle)
	problems.If(s.Block < time.Millisecond, "--block %s: must be at least 1ms", s.Block)
	problems.If(s.Block >= s.MinIdle, "--block %s must be less than --min-idle %s: what dead writers left is looked for between two reads", s.Block, s.MinIdle)
	problems.If(s.BatchTimeout >= s.DrainTimeout,
		"--batch-timeout %s must be less than --drain-timeout %s: a batch in hand could not finish", s.BatchTimeout, s.DrainTimeout)
	problems.If(s.DrainDelay < 0 || s.DrainDelay >= s.DrainTimeout, "--drain-delay %s must be less than --drain-timeout %s", s.DrainDelay, s.DrainTimeout)
	problems.If(s.DefaultDeadline <= 0 || s.DefaultDeadline > s.MaxDeadline,
		"--default-deadline %s must be more than 0 and at most --max-deadline %s", s.DefaultDeadline, s.MaxDeadline)

	problems.Add(s.Server.Check())
	for _, r := range s.Consumer {
		if r <= ' ' || r > '~' {
			problems.If(true, "--consumer %q: must be printable ASCII without spaces", s.Consumer)
			break
		}
	}
	problems.If(s.Consumer == ledger.Group, "--consumer %q: is the name of the group", s.Consumer)
	problems.If(s.Consumer == ledger.ReleasedConsumer, "--consumer %q: is the name of what holds entries that writers handed back", s.Consumer)
	return problems
}

// checkSlots refuses slots that a batch and one stream entry of each partition
// do not fit into: a reader might wait for slots that never come.
func (s *settings) checkSlots(partitions int) error {
	if least := s.BatchSize + ledger.MaxBatch*partitions; s.Slots != 0 && s.Slots < least {
		return fmt.Errorf("--slots %d: must be 0, or at least %d: --batch-size %d and one stream entry of %d for each partition (partitions: %d)",
			s.Slots, least, s.BatchSize, ledger.MaxBatch, partitions)
	}
	return nil
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
