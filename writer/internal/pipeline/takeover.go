package pipeline

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
)

// scanPause is the time between two scans: about half of minIdle. Jitter keeps a
// fleet that started together from scanning together.
func scanPause(minIdle time.Duration) time.Duration {
	return time.Duration(float64(minIdle) * (0.4 + 0.2*rand.Float64()))
}

// handedBack tells whether a peer that stopped has left entries, which may be
// taken over at once.
func (r *reader) handedBack(ctx context.Context, epoch int64, now time.Time) bool {
	if now.Before(r.nextGlance) {
		return false
	}
	r.nextGlance = now.Add(glanceEvery)
	callCtx, cancel := context.WithTimeout(ctx, readMargin)
	defer cancel()
	ids, err := ledger.PendingIDs(callCtx, r.Client, r.partition, epoch, ledger.ReleasedConsumer, 1)
	return err == nil && len(ids) > 0
}

// takeOver scans the whole pending list once for entries that lay idle for
// MinIdle, page by page to its end: empty pages on the way mean nothing.
func (r *reader) takeOver(ctx context.Context, epoch int64) error {
	// What was seen of a voucher may be archived by now: entries that come again
	// and again are judged anew.
	clear(r.admitted)
	cursor := ledger.ClaimEnd
	var taken int
	defer func() {
		if taken > 0 {
			r.log.Info("took over orders", telemetry.KeyOrders, taken)
		}
	}()
	for ctx.Err() == nil {
		reserved, err := r.slots.reserve(ctx, ledger.MaxBatch, readMost*ledger.MaxBatch)
		if err != nil {
			return err
		}
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readMargin)
		claimed, err := ledger.Claim(callCtx, r.Client, r.partition, epoch, r.Consumer, r.MinIdle, cursor, int64(reserved/ledger.MaxBatch))
		cancel()
		if len(claimed.Entries) > 0 {
			faultpoint.Reach(faultpoint.WriterAfterClaim)
		}
		orders := r.take(ctx, epoch, claimed.Entries, reserved)
		taken += orders
		r.metrics.reclaimed.Add(float64(orders))
		if err != nil {
			return err
		}
		if len(claimed.Lost) > 0 {
			r.metrics.lostEntries.Add(float64(len(claimed.Lost)))
			r.log.Error("pending entries are no longer in the stream", telemetry.KeyEntryID, strings.Join(claimed.Lost, " "))
			r.Alarm.PartitionFault(r.partition, "entries were removed from the stream before they were settled: "+strings.Join(claimed.Lost, " "))
		}
		if claimed.Next == ledger.ClaimEnd {
			return nil
		}
		cursor = claimed.Next
	}
	return ctx.Err()
}
