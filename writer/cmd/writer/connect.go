package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/retry"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// pingTimeout bounds one look at whether a server answers.
	pingTimeout = 2 * time.Second
	// checkTimeout bounds one round of checks on a server that answers.
	checkTimeout = 30 * time.Second
	// refusals is how often a check must fail on a server that answers before it
	// counts: a server that is just going down, or has no connection left,
	// brings errors that say nothing about the schema.
	refusals = 3
	// refusalPause is the time between two of them.
	refusalPause = 200 * time.Millisecond
)

// await repeats reach, and check behind it, until both succeed or ctx ends.
// Where what is reached is refused by check several times in a row, the error
// of check is final.
func await(ctx context.Context, log *slog.Logger, what string, reach, check func(context.Context) error) error {
	for refused := 1; ; refused++ {
		attempts := 0
		if _, err := retry.Until(ctx, log, "waiting for "+what, func() (struct{}, error) {
			attempts++
			return struct{}{}, bounded(ctx, pingTimeout, reach)
		}); err != nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
		if attempts > 1 {
			log.Info("reached "+what, telemetry.KeyAttempt, attempts)
			refused = 1 // it was away since
		}
		if check == nil {
			return nil
		}
		err := bounded(ctx, checkTimeout, check)
		if err == nil || refused == refusals {
			return err
		}
		log.Warn(what+" is refused", telemetry.KeyErr, err, telemetry.KeyAttempt, refused, telemetry.KeyRetryInMS, refusalPause.Milliseconds())
		select {
		case <-ctx.Done():
			return fmt.Errorf("checking %s: %w, the last refusal: %w", what, ctx.Err(), err)
		case <-time.After(refusalPause):
		}
	}
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
