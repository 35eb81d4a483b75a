package main

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/rpc"
	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
)

// settleTimeout bounds the wait for calls whose callers have left, after the
// drain. Cut off, they end as whatever the ledger decides.
const settleTimeout = 2 * time.Second

// serveCommand is serve.
type serveCommand struct {
	settings `embed:""`
}

// Run runs a gateway until ctx ends.
func (c *serveCommand) Run(ctx context.Context, std command.Streams) error {
	c.complete()
	log, err := c.Log.Logger(std.Err)
	if err != nil {
		return err
	}
	if err := c.check().Err(); err != nil {
		return err
	}
	return run(ctx, c.settings, log)
}

// run wires a gateway in the order in which a Grab moves, from the port to the
// ledger, and takes it apart in the same order.
func run(parent context.Context, cfg settings, log *slog.Logger) error {
	log = log.With(telemetry.KeyService, "gateway", telemetry.KeyVersion, telemetry.BuildVersion())
	log.Info("gateway starting")
	telemetry.PrintSettings(log, cfg)

	codec, err := orderid.LoadAndWarn(cfg.OrderKeyFile, log)
	if err != nil {
		return err
	}
	registry := telemetry.NewRegistry("gateway", telemetry.BuildVersion())

	// The port, health and metrics are there from the first moment: a gateway
	// that waits for Redis says so instead of refusing connections.
	server, err := rpcserver.New(rpcserver.Options{
		Addr: cfg.Listen, Settings: cfg.Server, DefaultDeadline: cfg.DefaultDeadline, MaxDeadline: cfg.MaxDeadline,
		DrainDelay: cfg.DrainDelay, DrainTimeout: cfg.DrainTimeout, Logger: log, Registerer: registry,
		Uncounted: []string{seckillv1.SeckillService_Grab_FullMethodName},
	})
	if err != nil {
		return err
	}
	health := newHealth(server)
	admin := telemetry.NewAdmin(cfg.Admin, registry, health.report, log)
	service, err := rpc.New(rpc.Options{
		OrderIDs: codec, DefaultDeadline: cfg.DefaultDeadline, MaxDeadline: cfg.MaxDeadline,
		Draining: server.Draining(), Registerer: registry,
	})
	if err != nil {
		return err
	}
	seckillv1.RegisterSeckillServiceServer(server.GRPC(), service)
	if err := errors.Join(server.Listen(), admin.Listen()); err != nil {
		return err
	}

	// Each part has a context of its own, ended in the order of shutdown below.
	// A part that fails takes the others with it.
	ctx, fail := context.WithCancelCause(parent)
	defer fail(nil)
	adminCtx, stopAdmin := context.WithCancel(context.WithoutCancel(ctx))
	defer stopAdmin()
	lookCtx, stopLooking := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLooking()

	var adminDone, serverDone, looking sync.WaitGroup
	adminDone.Go(func() {
		if err := admin.Run(adminCtx); err != nil {
			fail(err)
		}
	})
	serverDone.Go(func() {
		if err := server.Run(ctx); err != nil {
			fail(err)
		}
	})

	backend, err := connect(ctx, cfg, codec, registry, health, log)
	switch {
	case err != nil:
		fail(err)
	case backend != nil:
		service.Use(backend.admitter)
		looking.Go(func() { backend.admitter.Run(lookCtx) })
		log.Info("gateway serving", telemetry.KeyAddr, server.Addr())
		<-ctx.Done()
	}

	// Shutdown:
	// 1. health says NOT_SERVING, new calls are refused, running ones get their
	//    answers, streams those to what was read of them; partitions are watched
	//    and calls reach Redis meanwhile;
	serverDone.Wait()
	// 2. the admitter waits for calls whose callers have left;
	stopLooking()
	looking.Wait()
	if backend != nil {
		backend.close(log)
	}
	// 3. metrics and /healthz go last.
	stopAdmin()
	adminDone.Wait()
	log.Info("gateway stopped")

	if cause := context.Cause(ctx); cause != context.Cause(parent) {
		return cause
	}
	return nil // it was asked to stop
}
