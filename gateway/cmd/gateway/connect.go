package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/rueidis"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/redisconn"
	"github.com/seckill/seckill/pkg/retry"
	"github.com/seckill/seckill/pkg/telemetry"
)

// layoutTimeout bounds one read.
const layoutTimeout = 2 * time.Second

// backend is what answers calls once Redis and its layout are found.
type backend struct {
	client   rueidis.Client
	admitter *admit.Admitter
}

// connect waits for Redis and for the layout that a writer makes there, and
// refuses one that this gateway cannot serve. It returns nil and nil where ctx
// ends first.
func connect(ctx context.Context, cfg settings, codec *orderid.Codec, reg prometheus.Registerer, health *health, log *slog.Logger) (*backend, error) {
	health.waiting("connecting", "waiting for redis at "+cfg.Redis.Addr)
	client, err := cfg.Redis.Connect(ctx, redisconn.Calls, log)
	if err != nil {
		if ctx.Err() != nil {
			return nil, nil
		}
		return nil, err
	}
	health.waiting("waiting", "waiting for a writer to lay out the ledger in redis")
	layout, err := awaitLayout(ctx, client, log)
	if err == nil {
		err = checkLayout(layout, codec)
	}
	if err == nil {
		log.Info("layout found", "partitions", layout.Partitions)
		var admitter *admit.Admitter
		if admitter, err = admit.New(admit.Config{
			Client: client, Partitions: layout.Partitions, Logger: log, Registerer: reg,
			MaxWaiting: cfg.MaxWaiting, MaxInFlight: cfg.MaxInFlight, MaxBatch: cfg.MaxBatch, Deadline: cfg.DefaultDeadline,
			OnStatus: health.update,
		}); err == nil {
			return &backend{client: client, admitter: admitter}, nil
		}
	}
	client.Close()
	if ctx.Err() != nil {
		return nil, nil
	}
	return nil, err
}

// awaitLayout reads the layout until there is one.
func awaitLayout(ctx context.Context, client rueidis.Client, log *slog.Logger) (ledger.Layout, error) {
	return retry.Until(ctx, log, "waiting for the layout of the ledger, which a writer makes", func() (ledger.Layout, error) {
		bounded, cancel := context.WithTimeout(ctx, layoutTimeout)
		defer cancel()
		return ledger.ReadLayout(bounded, client)
	})
}

// checkLayout refuses a ledger whose order ids were made with other keys, and
// entries of a form that this gateway does not write.
func checkLayout(layout ledger.Layout, codec *orderid.Codec) error {
	var problems []error
	if layout.EntryVersion != ledger.EntryVersion {
		problems = append(problems, fmt.Errorf("redis holds entries of version %q, this gateway writes %q: upgrade writers first, then gateways",
			layout.EntryVersion, ledger.EntryVersion))
	}
	if err := codec.CheckFingerprints(layout.Keys); err != nil {
		problems = append(problems, fmt.Errorf("the order key file is not the one of the writers: %w", err))
	}
	// A key that no writer has registered would make ids that nobody else reads.
	if _, known := layout.Keys[codec.Current()]; !known {
		problems = append(problems, fmt.Errorf("order key %d of the order key file is not registered: start the writers with it first", codec.Current()))
	}
	return errors.Join(problems...)
}

// close waits for calls whose callers have left and closes the client.
func (b *backend) close(log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), settleTimeout)
	defer cancel()
	if err := b.admitter.Close(ctx); err != nil {
		log.Warn("calls without callers were cut off", telemetry.KeyErr, err)
	}
	b.client.Close()
}
