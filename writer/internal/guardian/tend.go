package guardian

import (
	"context"
	"errors"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
)

const (
	// tendEvery is the time between two rounds of housekeeping of a stream.
	tendEvery = 5 * time.Second
	// orphansPage is how many entries one call looks at for orphans, a millisecond
	// of Redis, and orphansPages how many calls one round makes: a backlog of
	// 100,000 orders in batches of 100 is gone through once a round.
	orphansPage  = 100
	orphansPages = 10
)

// tend tells decisions of operators to the ledger, and keeps the stream tidy. What
// fails is tried again at the next look.
func (k *keeper) tend(ctx context.Context, epoch int64) {
	if err := k.tell(ctx); err != nil && ctx.Err() == nil {
		k.log.Warn("telling the ledger what became of dead letters", telemetry.KeyErr, err)
	}
	k.tidy(ctx, epoch)
}

// tidy has entries that belong to nobody delivered again, and removes consumers
// that are dead and hold nothing. It is right for a ledger that is not proven, too.
func (k *keeper) tidy(ctx context.Context, epoch int64) {
	now := time.Now()
	if now.Before(k.nextTend) {
		return
	}
	k.nextTend = now.Add(min(tendEvery, 10*k.Interval))
	err := k.adoptOrphans(ctx, epoch)
	if errors.Is(err, ledger.ErrNoGroup) {
		return // there is nothing to keep tidy, and others say so
	}
	if err != nil && ctx.Err() == nil {
		k.log.Warn("looking for entries that belong to nobody", telemetry.KeyErr, err)
	}
	if err := k.removeDead(ctx, epoch); err != nil && ctx.Err() == nil {
		k.log.Warn("removing idle consumers", telemetry.KeyErr, err)
	}
}

// adoptOrphans brings back entries that were delivered and belong to nobody, for
// instance since somebody removed a consumer with what it held. Two rounds must
// agree; delivering all again is harmless. Each round goes on where the last one
// stopped.
func (k *keeper) adoptOrphans(ctx context.Context, epoch int64) error {
	for range orphansPages {
		orphans, next, err := ledger.Orphans(ctx, k.Client, k.partition, epoch, k.orphansAfter, orphansPage)
		if err != nil {
			return err
		}
		if len(orphans) == 0 {
			k.orphan, k.orphansAfter = "", next
			if next == "" {
				return nil
			}
			continue
		}
		if orphans[0] != k.orphan {
			k.orphan = orphans[0] // the next round looks at the same page
			return nil
		}
		k.orphan = ""
		k.metrics.orphans.Add(float64(len(orphans)))
		k.log.Error("entries belong to no consumer; all are delivered again", telemetry.KeyEntries, len(orphans), telemetry.KeyEntryID, orphans[0])
		return ledger.RedeliverAll(ctx, k.Client, k.partition, epoch)
	}
	return nil
}

// removeDead removes consumers that hold nothing and have not read for a long
// time. On Redis before 7.2 that may be a live one which found nothing to read:
// it is there again with its next entry.
func (k *keeper) removeDead(ctx context.Context, epoch int64) error {
	idle, err := ledger.IdleConsumers(ctx, k.Client, k.partition, epoch, k.ConsumerIdle)
	if err != nil {
		return err
	}
	for _, consumer := range idle {
		removed, err := ledger.RemoveIdleConsumer(ctx, k.Client, k.partition, epoch, consumer.Consumer, k.ConsumerIdle)
		if err != nil {
			return err
		}
		if removed {
			k.log.Info("idle consumer removed", telemetry.KeyConsumer, consumer.Consumer)
		}
	}
	return nil
}
