package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/command"
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
func (c *checkCommand) Run(ctx context.Context, std command.Streams) error {
	c.complete()
	telemetry.WriteSettings(std.Out, c.settings)
	problems := c.check()
	codec := c.files(&problems)
	command.WarnExposed(std.Out,
		command.SecretFile{Flag: "--order-key-file", Path: c.OrderKeyFile},
		command.SecretFile{Flag: "--database-dsn-file", Path: c.DatabaseDSNFile},
		command.SecretFile{Flag: "--redis-password-file", Path: c.Redis.PasswordFile},
		command.SecretFile{Flag: "--redis-tls-key-file", Path: c.Redis.TLSKeyFile},
		command.SecretFile{Flag: "--tls-key-file", Path: c.Server.TLSKeyFile})
	if c.Connect && len(problems) == 0 {
		c.servers(ctx, codec, std.Out, &problems)
	}
	if err := problems.Err(); err != nil {
		return err
	}
	fmt.Fprintln(std.Out, "ok")
	return nil
}

// files reads every file that is named.
func (c *checkCommand) files(problems *command.Problems) (codec *orderid.Codec) {
	if c.OrderKeyFile != "" {
		var err error
		codec, err = orderid.Load(c.OrderKeyFile)
		problems.Add(err)
	}
	if c.DatabaseDSNFile == "" && c.DatabaseDSN == "" {
		// The check of the settings says so.
	} else if dsn, err := c.dsn(); err != nil {
		problems.Add(err)
	} else if store, err := orderstore.Open(context.Background(), orderstore.Options{DSN: dsn}); err != nil {
		problems.Add(err)
	} else {
		problems.Add(store.Close())
	}
	problems.Add(c.Redis.CheckFiles(), c.Server.CheckFiles())
	return codec
}

// servers checks the running servers, each once.
func (c *checkCommand) servers(ctx context.Context, codec *orderid.Codec, out io.Writer, problems *command.Problems) {
	dsn, err := c.dsn()
	if err != nil {
		problems.Add(err)
		return
	}
	store, err := orderstore.Open(ctx, orderstore.Options{DSN: dsn})
	if err != nil {
		problems.Add(err)
		return
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
	problems.Add(err)
	if err == nil {
		fmt.Fprintf(out, "database: answers, %d partitions\n", db.partitions)
		problems.Add(c.checkSlots(db.partitions))
	}
	for _, warning := range db.warnings {
		fmt.Fprintf(out, "database: warning: %s\n", warning)
	}

	client, err := c.Redis.Client(redisconn.Calls)
	if err != nil {
		problems.Add(err)
		return
	}
	defer client.Close()
	c.redis(ctx, client, db, out, problems)
}

func (c *checkCommand) redis(ctx context.Context, client rueidis.Client, db database, out io.Writer, problems *command.Problems) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	server, err := ledger.ReadServer(ctx, client)
	if err != nil {
		problems.Add(err)
		return
	}
	best, found := server.Durability()
	fmt.Fprintf(out, "redis: version %s, %s, durability %s, %d bytes left\n", server.Version, server.Role, named(best), server.LeftMemory())
	if best != ledger.DurabilityStrict && (best == "" || c.Durability == string(ledger.DurabilityStrict)) {
		for _, text := range found {
			problems.Add(errors.New("redis: " + text))
		}
	}
	layout, err := ledger.ReadLayout(ctx, client)
	switch {
	case errors.Is(err, ledger.ErrMissing):
		fmt.Fprintln(out, "redis: holds no ledger yet")
	case err != nil:
		problems.Add(err)
	case db.partitions > 0:
		problems.Add(compareLayout(layout, db))
	}
}

func named(d ledger.Durability) string {
	if d == "" {
		return "none"
	}
	return string(d)
}
