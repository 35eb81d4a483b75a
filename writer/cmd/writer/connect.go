package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// The first retry comes soon, since at a common start a server is often only
	// a moment late; the longest wait is what an operator bears after a repair.
	firstWait, longestWait = 100 * time.Millisecond, 5 * time.Second
	// pingTimeout bounds one look at whether a server answers.
	pingTimeout = 2 * time.Second
	// checkTimeout bounds one round of checks on a server that answers.
	checkTimeout = 30 * time.Second
	// refusals is how often a check must fail on a server that answers before it
	// counts: a server that is just going down, or has no connection left,
	// brings errors that say nothing about the schema.
	refusals = 3
)

// await repeats reach, and check behind it, with backoff until both succeed or
// ctx ends. Where reach succeeds and check fails several times in a row, the
// error of check is final. One attempt in 1, 2, 4, 8, ... is logged, and each
// that fails in a new way.
func await(ctx context.Context, log *slog.Logger, what string, reach, check func(context.Context) error) error {
	waits := backoff.NewExponentialBackOff()
	waits.InitialInterval, waits.MaxInterval, waits.Multiplier, waits.RandomizationFactor = firstWait, longestWait, 2, 0.5
	attempt, nextLogged, refused := 0, 1, 0
	var last error
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		attempt++
		if err := bounded(ctx, pingTimeout, reach); err != nil {
			refused = 0
			return struct{}{}, err
		}
		if check == nil {
			return struct{}{}, nil
		}
		err := bounded(ctx, checkTimeout, check)
		if err == nil {
			return struct{}{}, nil
		}
		if refused++; refused >= refusals {
			err = backoff.Permanent(err)
		}
		return struct{}{}, err
	},
		backoff.WithBackOff(waits),
		backoff.WithMaxElapsedTime(0), // ctx is the bound
		backoff.WithNotify(func(err error, wait time.Duration) {
			if attempt >= nextLogged || last == nil || err.Error() != last.Error() {
				log.Warn("waiting for "+what, telemetry.KeyErr, err, telemetry.KeyAttempt, attempt, telemetry.KeyRetryInMS, wait.Milliseconds())
			}
			for nextLogged <= attempt {
				nextLogged *= 2
			}
			last = err
		}))
	if err != nil && last != nil && ctx.Err() != nil {
		return fmt.Errorf("waiting for %s: %w, the last attempt: %w", what, ctx.Err(), last)
	}
	if err == nil && attempt > 1 {
		log.Info("reached "+what, telemetry.KeyAttempt, attempt)
	}
	return err
}

func bounded(ctx context.Context, timeout time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return do(ctx)
}

func ping(ctx context.Context, store *orderstore.Store) error { return store.Ping(ctx) }

// database is what the database told about itself.
type database struct {
	partitions int
	// keys are the fingerprints of the order keys by number, as registered.
	keys     map[int]string
	warnings []string
}

// checkDatabase refuses a database that the promises cannot stand on, and one
// whose order ids were made with other keys. With register it records keys that
// are new.
func checkDatabase(ctx context.Context, store *orderstore.Store, codec *orderid.Codec, register bool) (database, error) {
	if err := store.CheckSchema(ctx); err != nil {
		return database{}, fmt.Errorf("checking the database: %w", err)
	}
	warnings, err := store.CheckServer(ctx)
	if err != nil {
		return database{}, fmt.Errorf("checking the database: %w", err)
	}
	partitions, err := store.Partitions(ctx)
	if err != nil {
		return database{}, fmt.Errorf("checking the database: %w", err)
	}
	// First without new ones: a file with a wrong key must not register another.
	keys, err := store.RegisterKeys(ctx, nil)
	if err == nil {
		if err := codec.CheckFingerprints(keys); err != nil {
			return database{}, fmt.Errorf("the order key file is not the one that this database's order ids were made with: %w", err)
		}
		if register {
			keys, err = store.RegisterKeys(ctx, codec.Fingerprints())
		}
	}
	if err != nil {
		return database{}, fmt.Errorf("checking the database: %w", err)
	}
	if err := codec.CheckFingerprints(keys); err != nil {
		return database{}, fmt.Errorf("another writer registered an order key of the same number meanwhile: %w", err)
	}
	return database{partitions: partitions, keys: keys, warnings: warnings}, nil
}

// compareLayout refuses a Redis that holds the ledger of another database, or
// entries of a form that this program does not write.
func compareLayout(layout ledger.Layout, db database) error {
	var problems []error
	if layout.Partitions != db.partitions {
		problems = append(problems, fmt.Errorf("redis holds a ledger of %d partitions, the database has %d", layout.Partitions, db.partitions))
	}
	if layout.EntryVersion != ledger.EntryVersion {
		problems = append(problems, fmt.Errorf("redis holds entries of version %q, this program writes %q", layout.EntryVersion, ledger.EntryVersion))
	}
	for number, fingerprint := range layout.Keys {
		if have, ok := db.keys[number]; !ok || have != fingerprint {
			problems = append(problems, fmt.Errorf("redis knows order key %d by fingerprint %s, the database by %q", number, fingerprint, have))
		}
	}
	if len(problems) > 0 {
		return fmt.Errorf("this redis belongs to another database: %w", errors.Join(problems...))
	}
	return nil
}

// awaitLayout writes the layout where none is and compares it where one is.
func awaitLayout(ctx context.Context, client rueidis.Client, db database, log *slog.Logger) error {
	var layout ledger.Layout
	write := func(ctx context.Context) (err error) {
		layout, err = ledger.WriteLayout(ctx, client, ledger.Layout{
			Partitions: db.partitions, Keys: db.keys, EntryVersion: ledger.EntryVersion,
		})
		return err
	}
	return await(ctx, log, "redis", write, func(context.Context) error { return compareLayout(layout, db) })
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
