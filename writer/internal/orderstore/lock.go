package orderstore

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"fmt"
	"time"
)

const (
	// lockSessionTimeout is the wait_timeout of a lock's session: how long a lock
	// outlives a holder that was cut off from the network, or is hung and sends
	// no Ping. A holder that was killed loses it at once, with its connection.
	lockSessionTimeout = 15 * time.Second

	// A name given to the server is 24 + 1 + 39 characters at most; MySQL takes 64.
	lockPrefixLength = 24
	lockNameLength   = 39
)

const (
	sqlDatabase    = `SELECT DATABASE()`
	sqlGetLock     = `SELECT GET_LOCK(?, 0)`
	sqlHoldsLock   = `SELECT IS_USED_LOCK(?) = CONNECTION_ID()`
	sqlReleaseLock = `SELECT RELEASE_LOCK(?)`
)

// Lock is a named lock that one session at a time holds. It is for order, not
// for safety: a holder that was paused may not know yet that it lost the lock,
// so whatever it does must be harmless. It is void where the server is a member
// of a multi-primary cluster, which keeps such locks per node.
type Lock struct {
	conn *sql.Conn
	name string
}

// TryLock takes the lock of this name within this database, or tells at once
// that another session has it. Names are told apart without regard to case.
func (s *Store) TryLock(ctx context.Context, name string) (*Lock, bool, error) {
	conn, err := s.locks.Conn(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("taking lock %q: %w", name, err)
	}
	l := &Lock{conn: conn}
	got, err := l.take(ctx, name)
	if err != nil || !got {
		l.drop()
		if err != nil {
			err = fmt.Errorf("taking lock %q: %w", name, err)
		}
		return nil, false, err
	}
	return l, true, nil
}

func (l *Lock) take(ctx context.Context, name string) (bool, error) {
	var database string
	if err := l.conn.QueryRowContext(ctx, sqlDatabase).Scan(&database); err != nil {
		return false, err
	}
	// Locks are one name space per server: another database must not collide.
	sum := sha256.Sum256([]byte(database))
	l.name = "seckill:" + hex.EncodeToString(sum[:])[:lockPrefixLength-len("seckill:")] + ":" + shorten(name)
	var got sql.NullInt64
	if err := l.conn.QueryRowContext(ctx, sqlGetLock, l.name).Scan(&got); err != nil {
		return false, err
	}
	if !got.Valid {
		return false, fmt.Errorf("the server could not tell")
	}
	return got.Int64 == 1, nil
}

// shorten keeps a name that fits and hashes one that does not.
func shorten(name string) string {
	if len(name) <= lockNameLength {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:])[:lockNameLength]
}

// Ping keeps the session alive and asks the server whether it still holds the
// lock. Any error means: not the holder any more, also where the server just
// did not answer in time. Then Release it and begin with TryLock.
func (l *Lock) Ping(ctx context.Context) error {
	var holds sql.NullBool
	if err := l.conn.QueryRowContext(ctx, sqlHoldsLock, l.name).Scan(&holds); err != nil {
		return fmt.Errorf("%w: %w", ErrLockLost, err)
	}
	if !holds.Bool {
		return ErrLockLost
	}
	return nil
}

// Release gives the lock back and closes its connection. Where the server does
// not answer, closing the connection has to do.
func (l *Lock) Release(ctx context.Context) {
	// An answer of any kind adds nothing: the connection is closed either way.
	_, _ = l.conn.ExecContext(ctx, sqlReleaseLock, l.name)
	l.drop()
}

func (l *Lock) drop() {
	discard(l.conn)
	_ = l.conn.Close()
}
