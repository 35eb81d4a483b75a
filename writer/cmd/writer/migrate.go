package main

import (
	"context"
	"fmt"
	"time"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

type migrateCommand struct {
	databaseSettings `embed:""`
	Partitions       int                   `env:"SECKILL_PARTITIONS" default:"8" help:"Number of partitions. Fixed by the first migration, for ever."`
	Wait             time.Duration         `env:"SECKILL_MIGRATE_WAIT" default:"1m" help:"How long to wait for the database to answer."`
	Log              telemetry.LogSettings `embed:"" prefix:"log-"`
}

// Run migrates. What is done already is found done.
func (c *migrateCommand) Run(ctx context.Context, std command.Streams) error {
	log, err := c.Log.Logger(std.Err)
	if err != nil {
		return err
	}
	log = log.With(telemetry.KeyService, "writer", telemetry.KeyVersion, telemetry.BuildVersion())
	dsn, err := c.dsn()
	if err != nil {
		return err
	}
	store, err := orderstore.Open(ctx, orderstore.Options{DSN: dsn, Logger: log})
	if err != nil {
		return err
	}
	defer store.Close()

	waiting, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	if err := await(waiting, log, "the database", func(ctx context.Context) error { return ping(ctx, store) }, nil); err != nil {
		if ctx.Err() == nil && waiting.Err() != nil {
			return fmt.Errorf("the database did not answer within --wait %s: %w", c.Wait, err)
		}
		return err
	}
	before, latest, err := migrations.Current(ctx, store.DB())
	if err != nil {
		return err
	}
	if before > latest {
		return fmt.Errorf("the database is at version %d, this program knows only %d: a newer program has migrated it", before, latest)
	}
	if err := migrations.Up(ctx, store.DB(), log); err != nil {
		return err
	}
	if err := store.InitPartitions(ctx, c.Partitions); err != nil {
		return err
	}
	if err := store.CheckSchema(ctx); err != nil {
		return fmt.Errorf("migrated, but: %w", err)
	}
	fmt.Fprintf(std.Out, "migrated: version %d -> %d, %d partitions\n", before, latest, c.Partitions)
	return nil
}
