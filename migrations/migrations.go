// Package migrations holds the database schema as numbered SQL files and
// brings a database to it, under a lock, so that any number of processes may
// try at once.
//
// One statement per file: DDL commits by itself in MySQL and MariaDB, so a
// crash between two statements of one file would leave it half applied.
package migrations

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// Latest is the version of the newest migration in this package. A test
// compares it with the files.
const Latest int64 = 9

// Timings of the table lock. The holder renews its lease every second, so a
// holder that was killed delays the next one by the lease at most; a waiter
// looks every 200 ms and gives up after 150 looks, 30 s, which is far longer
// than all migrations take on an empty database.
const (
	lockLease     = 10 * time.Second
	lockHeartbeat = time.Second
	lockRetry     = 200 * time.Millisecond
	lockTries     = 150
)

// errNoSuchTable is the server's answer where goose_db_version does not exist.
const errNoSuchTable = 1146

//go:embed sql/*.sql
var files embed.FS

// Up applies every migration that the database has not seen yet, in order. It
// may run in several processes at once: one migrates, the others wait and then
// find nothing to do. After a crash it goes on where it stopped.
func Up(ctx context.Context, db *sql.DB, log *slog.Logger) error {
	p, err := provider(db, log)
	if err != nil {
		return err
	}
	_, err = p.Up(ctx)
	if errors.Is(err, mysql.ErrInvalidConn) || errors.Is(err, driver.ErrBadConn) {
		// Goose keeps one connection idle while it waits for the lock, and the
		// server may have hung up by then. Whatever was applied is on record.
		_, err = p.Up(ctx)
	}
	if err != nil {
		return fmt.Errorf("migrating up: %w", err)
	}
	return nil
}

// Down takes back every migration, and with it all data. It is for tests and
// for a person who means it.
func Down(ctx context.Context, db *sql.DB, log *slog.Logger) error {
	p, err := provider(db, log)
	if err != nil {
		return err
	}
	if _, err := p.DownTo(ctx, 0); err != nil {
		return fmt.Errorf("migrating down: %w", err)
	}
	return nil
}

// Version returns the version that the database is at, 0 where no migration
// was ever applied. It only reads.
func Version(ctx context.Context, db *sql.DB) (int64, error) {
	// A migration that was taken back has its row deleted, so the greatest
	// version is the current one.
	const query = `SELECT COALESCE(MAX(version_id), 0) FROM goose_db_version WHERE is_applied`
	var version int64
	err := db.QueryRowContext(ctx, query).Scan(&version)
	if e := (*mysql.MySQLError)(nil); errors.As(err, &e) && e.Number == errNoSuchTable {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("reading the schema version: %w", err)
	}
	return version, nil
}

// Current returns the version that the database is at and the one that this
// program was built with. A lower version means that migrations are missing; a
// higher one that a newer program has migrated already.
func Current(ctx context.Context, db *sql.DB) (version, latest int64, err error) {
	version, err = Version(ctx, db)
	return version, Latest, err
}

func provider(db *sql.DB, log *slog.Logger) (*goose.Provider, error) {
	dir, err := fs.Sub(files, "sql")
	if err != nil {
		return nil, fmt.Errorf("opening the embedded migrations: %w", err)
	}
	locker, err := lock.NewMySQLTableLocker(
		lock.WithTableLeaseDuration(lockLease),
		lock.WithTableHeartbeatInterval(lockHeartbeat),
		lock.WithTableLockTimeout(lockRetry, lockTries),
		lock.WithTableLogger(log),
	)
	if err != nil {
		return nil, fmt.Errorf("preparing the migration lock: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectMySQL, db, dir,
		goose.WithLocker(locker),
		goose.WithSlog(log),
		goose.WithDisableGlobalRegistry(true),
	)
	if err != nil {
		return nil, fmt.Errorf("reading the migrations: %w", err)
	}
	return p, nil
}
