package orderstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/go-sql-driver/mysql"
	gormmysql "gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
)

const (
	// defaultMaxConns bounds the pool where the caller names no number: a few
	// batches in flight, the guardians' reads and an operator's calls. Two are
	// the least, for migrating needs one for the lock and one for the work.
	defaultMaxConns = 16
	minMaxConns     = 2
	// defaultLockWait is how long a statement waits for a row lock.
	defaultLockWait = 5 * time.Second

	// Bounds of the network: a server that hangs is noticed even by a call whose
	// context has no deadline. readTimeout bounds the longest statement, which is
	// a recount of a large voucher.
	dialTimeout  = 5 * time.Second
	readTimeout  = 60 * time.Second
	writeTimeout = 10 * time.Second

	// connLifetime spreads connections over servers behind a load balancer again
	// after a failover; idle ones are given back to the server sooner.
	connLifetime = 10 * time.Minute
	connIdleTime = sessionTimeout / 2

	// sessionTimeout is the wait_timeout of a session: how long the server waits
	// for the next statement before it rolls back and hangs up. A process that is
	// paused, or a machine that is gone without a word, in the middle of a
	// transaction holds its row locks until then, and nobody else can write these
	// orders. Between two statements of ours lie microseconds.
	sessionTimeout = 10 * time.Second

	// rollbackTimeout bounds the ROLLBACK after an error. If it passes, the
	// connection is closed, which makes the server roll back.
	rollbackTimeout = 2 * time.Second

	// sqlMode makes the server refuse what it would otherwise bend into shape.
	sqlMode = "STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ZERO_DATE,NO_ZERO_IN_DATE,NO_ENGINE_SUBSTITUTION"
)

// Options are the settings of a Store.
type Options struct {
	// DSN in the form of go-sql-driver, user:password@tcp(host:port)/database.
	// It holds a password and is never printed. Parameters that correctness
	// depends on are overridden; TLS and timeouts may be set.
	DSN string
	// MaxConns bounds the pool of connections, 0 for the default of 16. The
	// connections of locks come on top, one a lock.
	MaxConns int
	// LockWait is innodb_lock_wait_timeout, in whole seconds, rounded up; 0 for
	// the default of 5 s.
	LockWait time.Duration
	// Logger hears of driver errors that this package does not know. Nil
	// discards.
	Logger *slog.Logger
}

// Store is the database. Its methods may be called from any number of goroutines.
type Store struct {
	db *sql.DB
	// locks opens the connections of Locks: never pooled, never shared.
	locks *sql.DB
	gorm  *gorm.DB
	log   *slog.Logger
}

// Open prepares a Store. It does not connect: a server that is down is no error
// here; Ping tells. An error never contains the DSN.
func Open(_ context.Context, o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.MaxConns == 0 {
		o.MaxConns = defaultMaxConns
	}
	if o.MaxConns < minMaxConns {
		return nil, fmt.Errorf("opening the database: %d connections are too few, at least %d are needed", o.MaxConns, minMaxConns)
	}
	if o.LockWait == 0 {
		o.LockWait = defaultLockWait
	}
	if o.LockWait < 0 {
		return nil, fmt.Errorf("opening the database: the lock wait of %v is negative", o.LockWait)
	}
	cfg, err := driverConfig(o.DSN, o.LockWait)
	if err != nil {
		return nil, err
	}
	db, err := openPool(cfg)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(o.MaxConns)
	db.SetMaxIdleConns(o.MaxConns)
	db.SetConnMaxLifetime(connLifetime)
	db.SetConnMaxIdleTime(connIdleTime)

	lockCfg := cfg.Clone()
	lockCfg.Params["wait_timeout"] = strconv.Itoa(int(lockSessionTimeout / time.Second))
	locks, err := openPool(lockCfg)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	// A closed lock connection must be closed in truth. Their number needs no
	// bound of its own: a process takes one lock per partition.
	locks.SetMaxIdleConns(-1)

	g, err := gorm.Open(gormmysql.New(gormmysql.Config{
		Conn: db,
		// Asking for the version would connect; nothing here depends on it.
		SkipInitializeWithVersion: true,
		// RETURNING exists in MariaDB only: both servers run the same statements.
		DisableWithReturning: true,
	}), &gorm.Config{
		SkipDefaultTransaction: true,
		DisableAutomaticPing:   true,
		QueryFields:            true, // columns listed, never *
		Logger:                 logger.Discard,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("opening gorm: %w", err), db.Close(), locks.Close())
	}
	return &Store{db: db, locks: locks, gorm: g, log: o.Logger}, nil
}

// driverConfig parses the DSN and forces what correctness depends on.
func driverConfig(dsn string, lockWait time.Duration) (*mysql.Config, error) {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		// The driver's text may quote a part of the DSN: not passed on.
		return nil, errors.New("opening the database: the DSN is not of the form user:password@tcp(host:port)/database")
	}
	if cfg.DBName == "" {
		return nil, errors.New("opening the database: the DSN names no database")
	}
	cfg.ParseTime = true
	cfg.Loc = time.UTC
	// Matched, not changed, rows: what a guarded UPDATE is judged by.
	cfg.ClientFoundRows = true
	// One round trip a statement instead of three.
	cfg.InterpolateParams = true
	// A primary that became read-only is left for a new connection.
	cfg.RejectReadOnly = true
	cfg.MultiStatements = false
	cfg.AllowAllFiles = false
	cfg.CheckConnLiveness = true
	// Ask the server: a statement that is too long is then refused before it is
	// sent, with a clear error, instead of by a closed connection.
	cfg.MaxAllowedPacket = 0
	cfg.Collation = "utf8mb4_bin"
	// The driver would print to standard error what it returns as well.
	cfg.Logger = &mysql.NopLogger{}
	if cfg.Timeout <= 0 {
		cfg.Timeout = dialTimeout
	}
	if cfg.ReadTimeout <= 0 {
		cfg.ReadTimeout = readTimeout
	}
	if cfg.WriteTimeout <= 0 {
		cfg.WriteTimeout = writeTimeout
	}
	if cfg.Params == nil {
		cfg.Params = make(map[string]string)
	}
	cfg.Params["time_zone"] = "'+00:00'"
	cfg.Params["sql_mode"] = "'" + sqlMode + "'"
	cfg.Params["autocommit"] = "1"
	cfg.Params["wait_timeout"] = strconv.Itoa(int(sessionTimeout / time.Second))
	seconds := (lockWait + time.Second - 1) / time.Second
	cfg.Params["innodb_lock_wait_timeout"] = strconv.FormatInt(int64(seconds), 10)
	return cfg, nil
}

func openPool(cfg *mysql.Config) (*sql.DB, error) {
	c, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, errors.New("opening the database: the DSN's parameters do not go together")
	}
	return sql.OpenDB(connector{c}), nil
}

// connector makes every new session READ COMMITTED. No system variable for
// it has the same name in MySQL and MariaDB, hence a statement of its own; it
// costs a round trip a connection instead of one a transaction. Another one
// reads max_allowed_packet.
type connector struct{ driver.Connector }

// Connect opens a session.
func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	d, ok := conn.(driverConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("the driver's %T is no connection for this", conn), conn.Close())
	}
	if _, err := d.ExecContext(ctx, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", nil); err != nil {
		return nil, errors.Join(fmt.Errorf("setting the isolation level: %w", err), conn.Close())
	}
	s, err := newSession(ctx, d)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return s, nil
}

// Ping tells whether the server answers.
func (s *Store) Ping(ctx context.Context) error {
	if err := s.db.PingContext(ctx); err != nil {
		return fmt.Errorf("reaching the database: %w", err)
	}
	return nil
}

// Close closes every connection, those of locks included.
func (s *Store) Close() error {
	return errors.Join(s.db.Close(), s.locks.Close())
}

// DB is the pool, for the migrations and the pool's metrics. The Store keeps it.
func (s *Store) DB() *sql.DB { return s.db }

// read returns a GORM session on the pool, for single statements.
func (s *Store) read(ctx context.Context) *gorm.DB { return s.gorm.WithContext(ctx) }

// inTx runs do in one transaction and commits it. An error of do, or of COMMIT,
// means ROLLBACK; after an error of COMMIT it is unknown whether the
// transaction stands.
//
// It sends the statements itself instead of using sql.Tx, whose Commit heeds no
// context: a server that hangs in COMMIT would hold the batch beyond its
// deadline.
func (s *Store) inTx(ctx context.Context, do func(tx *gorm.DB) error) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("taking a connection: %w", err)
	}
	open := true
	defer func() {
		if open && !rollback(ctx, conn) {
			// Never back into the pool with a transaction that may be open: the
			// next user would find itself inside it.
			discard(conn)
		}
		// Its only error says that the connection is gone already.
		_ = conn.Close()
	}()
	if _, err := conn.ExecContext(ctx, "START TRANSACTION"); err != nil {
		return fmt.Errorf("starting a transaction: %w", err)
	}
	tx := s.gorm.WithContext(ctx)
	if tx.Statement.ConnPool, err = newTxConn(conn); err != nil {
		return fmt.Errorf("looking at the connection: %w", err)
	}
	if err := do(tx); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, "COMMIT"); err != nil {
		return &commitError{err}
	}
	open = false
	return nil
}

// commitError is the error of a COMMIT: the transaction may stand or not.
type commitError struct{ err error }

func (e *commitError) Error() string { return "committing (outcome unknown): " + e.err.Error() }
func (e *commitError) Unwrap() error { return e.err }

// rollback rolls back also where ctx has ended, and tells whether it succeeded.
func rollback(ctx context.Context, conn *sql.Conn) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	_, err := conn.ExecContext(ctx, "ROLLBACK")
	return err == nil
}

// discard has the pool close the connection.
func discard(conn *sql.Conn) {
	// The error is the one that is returned inside, by contract.
	_ = conn.Raw(func(any) error { return driver.ErrBadConn })
}
