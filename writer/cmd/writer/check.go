package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

type checkCommand struct {
	settings `embed:""`
	Connect  bool `help:"Also connect to the database and to Redis, and check them as serve would."`
}

// Run prints the effective settings and everything that is wrong with them, or
// with the servers. It changes nothing, there neither.
func (c *checkCommand) Run(ctx context.Context, std streams) error {
	c.complete()
	for _, setting := range telemetry.Settings(c.settings) {
		fmt.Fprintf(std.out, "%s: %v\n", setting.Key, setting.Value)
	}
	codec, problems := c.files()
	if err := c.check(); err != nil {
		problems = append([]error{err}, problems...)
	}
	if c.Connect && len(problems) == 0 {
		problems = c.servers(ctx, codec, std.out)
	}
	if len(problems) > 0 {
		return fmt.Errorf("the settings do not fit:\n%w", errors.Join(problems...))
	}
	fmt.Fprintln(std.out, "ok")
	return nil
}

// files reads every file that is named.
func (c *checkCommand) files() (codec *orderid.Codec, problems []error) {
	if c.OrderKeyFile != "" {
		var err error
		if codec, err = orderid.Load(c.OrderKeyFile); err != nil {
			problems = append(problems, err)
		}
	}
	if c.DatabaseDSNFile == "" && c.DatabaseDSN == "" {
		// The check of the settings says so.
	} else if dsn, err := c.dsn(); err != nil {
		problems = append(problems, err)
	} else if store, err := orderstore.Open(context.Background(), orderstore.Options{DSN: dsn}); err != nil {
		problems = append(problems, err)
	} else {
		problems = append(problems, nonNil(store.Close())...)
	}
	for _, file := range []struct{ flag, path string }{
		{"--redis-password-file", c.Redis.PasswordFile},
		{"--redis-tls-ca-file", c.Redis.TLSCAFile},
		{"--redis-tls-cert-file", c.Redis.TLSCertFile},
		{"--redis-tls-key-file", c.Redis.TLSKeyFile},
		{"--tls-cert-file", c.TLSCertFile},
		{"--tls-key-file", c.TLSKeyFile},
		{"--tls-client-ca-file", c.TLSClientCAFile},
	} {
		if file.path == "" {
			continue
		}
		if f, err := os.Open(file.path); err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", file.flag, err))
		} else {
			f.Close()
		}
	}
	return codec, problems
}

func nonNil(err error) []error {
	if err == nil {
		return nil
	}
	return []error{err}
}

// servers checks the running servers, each once.
func (c *checkCommand) servers(ctx context.Context, codec *orderid.Codec, out io.Writer) (problems []error) {
	dsn, err := c.dsn()
	if err != nil {
		return nonNil(err)
	}
	store, err := orderstore.Open(ctx, orderstore.Options{DSN: dsn})
	if err != nil {
		return nonNil(err)
	}
	defer store.Close()
	var db database
	err = bounded(ctx, checkTimeout, func(ctx context.Context) (err error) {
		if err := store.Ping(ctx); err != nil {
			return err
		}
		db, err = checkDatabase(ctx, store, codec, false)
		return err
	})
	problems = append(problems, nonNil(err)...)
	if err == nil {
		fmt.Fprintf(out, "database: answers, %d partitions\n", db.partitions)
	}
	for _, warning := range db.warnings {
		fmt.Fprintf(out, "database: warning: %s\n", warning)
	}

	client, err := c.Redis.Client(redisconn.Calls)
	if err != nil {
		return append(problems, err)
	}
	defer client.Close()
	return append(problems, c.redis(ctx, client, db, out)...)
}

func (c *checkCommand) redis(ctx context.Context, client rueidis.Client, db database, out io.Writer) (problems []error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	server, err := ledger.ReadServer(ctx, client)
	if err != nil {
		return nonNil(err)
	}
	best, found := server.Durability()
	fmt.Fprintf(out, "redis: version %s, %s, durability %s, %d bytes left\n", server.Version, server.Role, named(best), server.LeftMemory())
	if best != ledger.DurabilityStrict && (best == "" || c.Durability == string(ledger.DurabilityStrict)) {
		for _, text := range found {
			problems = append(problems, errors.New("redis: "+text))
		}
	}
	layout, err := ledger.ReadLayout(ctx, client)
	switch {
	case errors.Is(err, ledger.ErrMissing):
		fmt.Fprintln(out, "redis: holds no ledger yet")
	case err != nil:
		problems = append(problems, err)
	case db.partitions > 0:
		problems = append(problems, nonNil(compareLayout(layout, db))...)
	}
	return problems
}

func named(d ledger.Durability) string {
	if d == "" {
		return "none"
	}
	return string(d)
}
