package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/redis/rueidis"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/pipeline"
	"github.com/seckill/seckill/writer/internal/rpc"
)

// stopGrace is what a stop may take beyond the drain timeout: a last settlement,
// the locks, the connections. What still hangs then is left behind.
const stopGrace = 5 * time.Second

type serveCommand struct {
	settings `embed:""`
}

// Run checks the settings and serves until ctx ends.
func (c *serveCommand) Run(ctx context.Context, std command.Streams) error {
	log, err := c.Log.Logger(std.Err)
	if err != nil {
		return err
	}
	c.complete()
	if err := c.check().Err(); err != nil {
		return err
	}
	return run(ctx, c.settings, log)
}

// run wires a writer in the order in which data moves, and stops it in this
// one when ctx ends or a part fails:
//
//  1. health says NOT_SERVING, and running calls finish; the pipeline reads no
//     more, finishes what is in hand, settles it and removes its consumers;
//  2. the guardian gives its locks back, so that another writer takes over;
//  3. the admin port closes;
//  4. the connections to Redis and to the database close.
//
// The first step has the drain timeout, all of it together stopGrace more.
func run(ctx context.Context, cfg settings, log *slog.Logger) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	log = log.With(telemetry.KeyService, "writer", telemetry.KeyVersion, telemetry.BuildVersion())
	log.Info("writer starting")
	telemetry.PrintSettings(log, cfg)
	registry := telemetry.NewRegistry("writer", telemetry.BuildVersion())

	codec, err := orderid.LoadAndWarn(cfg.OrderKeyFile, log)
	if err != nil {
		return err
	}
	dsn, err := cfg.dsn()
	if err != nil {
		return err
	}
	store, err := orderstore.Open(ctx, orderstore.Options{DSN: dsn, MaxConns: cfg.DatabaseConns, LockWait: cfg.LockWait, Logger: log})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := registry.Register(collectors.NewDBStatsCollector(store.DB(), "seckill")); err != nil {
		return fmt.Errorf("registering the pool's metrics: %w", err)
	}

	service := rpc.New(rpc.Options{Vouchers: store, OrderIDs: codec, Logger: log})
	server, err := newServer(cfg, log, registry)
	if err != nil {
		return err
	}
	operators := rpc.NewWriter(rpc.WriterOptions{Store: store, OrderIDs: codec, Logger: log, Draining: server.Draining()})
	seckillv1.RegisterVoucherServiceServer(server.GRPC(), service)
	seckillv1.RegisterWriterServiceServer(server.GRPC(), operators)
	monitor := newMonitor(server)
	admin := telemetry.NewAdmin(cfg.Admin, registry, monitor.report, log)
	if err := errors.Join(server.Listen(), admin.Listen()); err != nil {
		return err
	}

	// front ends with ctx; what it still needs then ends after it, in its turn.
	front, frontCtx := errgroup.WithContext(ctx)
	keep, stopKeep := context.WithCancel(context.WithoutCancel(ctx))
	defer stopKeep()
	show, stopShow := context.WithCancel(context.WithoutCancel(ctx))
	defer stopShow()
	var keeping, showing errgroup.Group
	start := func(group *errgroup.Group, ctx context.Context, part func(context.Context) error) {
		group.Go(func() error {
			defer stop() // a part that ends by itself ends the process
			return part(ctx)
		})
	}
	start(&showing, show, admin.Run)
	start(front, frontCtx, server.Run)

	redis, err := connect(frontCtx, cfg, store, codec, monitor, log)
	defer redis.close()
	switch {
	case err == nil:
		parts, partsErr := newParts(cfg, store, redis, log, registry)
		if err = partsErr; err != nil {
			break
		}
		service.Bind(rpc.Ledger{
			Client: redis.calls, Partitions: redis.db.partitions, Carrier: parts.guardian, Reckoner: parts.reckoner,
		})
		operators.Bind(rpc.WriterLedger{
			Client: redis.calls, Partitions: redis.db.partitions, Guardian: parts.guardian, Pipeline: parts.pipeline,
		})
		monitor.working.Store(&working{guardian: parts.guardian, pipeline: parts.pipeline})
		start(&keeping, keep, parts.guardian.Run)
		start(front, frontCtx, parts.pipeline.Run)
		start(&showing, show, func(ctx context.Context) error {
			return monitor.watch(ctx, store.Ping, func(ctx context.Context) error {
				return redis.calls.Do(ctx, redis.calls.B().Ping().Build()).Error()
			})
		})
		log.Info("writing", telemetry.KeyConsumer, cfg.Consumer, "partitions", redis.db.partitions)
	case ctx.Err() != nil:
		err = nil // told to stop, or a part that failed says why
	}
	if err != nil {
		stop()
	}

	<-frontCtx.Done()
	stop()
	log.Info("stopping", "drain_timeout_ms", cfg.DrainTimeout.Milliseconds())
	ended := make(chan error, 1)
	go func() {
		errs := []error{err, front.Wait()} // 1
		stopKeep()
		errs = append(errs, keeping.Wait()) // 2
		stopShow()
		errs = append(errs, showing.Wait()) // 3
		ended <- errors.Join(errs...)
	}()
	timer := time.NewTimer(cfg.DrainTimeout + stopGrace)
	defer timer.Stop()
	select {
	case err := <-ended:
		if err == nil {
			log.Info("stopped")
		}
		return err
	case <-timer.C:
		return fmt.Errorf("stopping: not done %s after the drain timeout of %s; what was in hand stays pending and is taken over",
			stopGrace, cfg.DrainTimeout)
	}
}

func newServer(cfg settings, log *slog.Logger, registerer prometheus.Registerer) (*rpcserver.Server, error) {
	return rpcserver.New(rpcserver.Options{
		Addr:            cfg.Listen,
		Settings:        cfg.Server,
		DefaultDeadline: cfg.DefaultDeadline,
		MaxDeadline:     cfg.MaxDeadline,
		DrainDelay:      cfg.DrainDelay,
		DrainTimeout:    cfg.DrainTimeout - cfg.DrainDelay,
		Logger:          log,
		Registerer:      registerer,
	})
}

// connected are the clients of Redis, and what the database said before.
type connected struct {
	calls, blocking rueidis.Client
	db              database
}

func (c connected) close() {
	for _, client := range []rueidis.Client{c.blocking, c.calls} {
		if client != nil {
			client.Close()
		}
	}
}

// connect waits for the database and then for Redis, for as long as it takes,
// and refuses what does not fit. The clients that it returns are to be closed
// also beside an error.
func connect(ctx context.Context, cfg settings, store *orderstore.Store, codec *orderid.Codec, m *monitor, log *slog.Logger) (c connected, err error) {
	reach := func(ctx context.Context) error {
		err := store.Ping(ctx)
		m.set(partDatabase, "connecting", err)
		return err
	}
	check := func(ctx context.Context) (err error) {
		c.db, err = checkDatabase(ctx, store, codec, true)
		return err
	}
	if err := await(ctx, log, "the database", reach, check); err != nil {
		return c, err
	}
	for _, warning := range c.db.warnings {
		log.Warn("database setting", telemetry.KeyReason, warning)
	}
	m.set(partDatabase, "answers", nil)

	m.set(partRedis, "connecting", errors.New("not reached yet"))
	options := cfg.Redis
	// One blocked read a partition, and one in reserve for a reader that begins
	// anew while its old connection is still being given up.
	options.BlockingPoolSize = c.db.partitions + 1
	if c.calls, err = options.Connect(ctx, redisconn.Calls, log); err != nil {
		return c, err
	}
	if c.blocking, err = options.Connect(ctx, redisconn.Blocking, log); err != nil {
		return c, err
	}
	if err := awaitLayout(ctx, c.calls, c.db, log); err != nil {
		return c, err
	}
	m.set(partRedis, "answers", nil)
	return c, nil
}

// parts are what works on orders and partitions.
type parts struct {
	guardian *guardian.Guardian
	pipeline *pipeline.Pipeline
	reckoner *books.Reckoner
}

func newParts(cfg settings, store *orderstore.Store, redis connected, log *slog.Logger, registerer prometheus.Registerer) (parts, error) {
	if err := cfg.checkSlots(redis.db.partitions); err != nil {
		return parts{}, err
	}
	keeper := guardian.New(guardian.Options{
		Store:        store,
		Client:       redis.calls,
		Partitions:   redis.db.partitions,
		Bound:        cfg.MaxInFlight,
		Durability:   ledger.Durability(cfg.Durability),
		Interval:     cfg.GuardianInterval,
		ConsumerIdle: cfg.ConsumerIdle,
		OrderKeys:    redis.db.keys,
		Logger:       log,
		Registerer:   registerer,
	})
	line, err := pipeline.New(pipeline.Options{
		Reader:       redis.blocking,
		Client:       redis.calls,
		Store:        store,
		Holder:       store,
		Ping:         store.Ping,
		Alarm:        keeper,
		Partitions:   redis.db.partitions,
		Consumer:     cfg.Consumer,
		Committers:   cfg.Committers,
		BatchMax:     cfg.BatchSize,
		BatchTimeout: cfg.BatchTimeout,
		MinIdle:      cfg.MinIdle,
		Block:        cfg.Block,
		DrainTimeout: cfg.DrainTimeout,
		SlotsMax:     cfg.slots(redis.db.partitions),
		Logger:       log,
		Registerer:   registerer,
	})
	if err != nil {
		return parts{}, err
	}
	return parts{
		guardian: keeper,
		pipeline: line,
		reckoner: &books.Reckoner{Store: store, Client: redis.calls, Now: time.Now},
	}, nil
}
