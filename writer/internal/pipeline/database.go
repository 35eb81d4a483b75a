package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// errSlow means that the database works and yet could not do this in the time
// of a batch: somebody holds a row, or it is too much for it.
var errSlow = errors.New("not done within the batch timeout")

// decide runs something in the database until it has decided, however long that
// takes: an outage is not the orders' fault. Each run has BatchTimeout. It gives
// up when the process stops, after one more run at once, where waiting would
// not help, and with errSlow where others need not wait for it.
func (p *Pipeline) decide(working, stopping context.Context, run func(context.Context) error) error {
	retry := newBackOff()
	for last := false; ; {
		runCtx, cancel := context.WithTimeout(working, p.BatchTimeout)
		err := run(runCtx)
		late := runCtx.Err() != nil && working.Err() == nil
		cancel()
		if err == nil {
			p.database.set(nil)
			p.limit.grow()
			return nil
		}
		if errors.Is(err, orderstore.ErrEpochMoved) {
			p.database.set(nil)
			return err
		}
		p.metrics.transient.Inc()
		if late {
			p.limit.shrink()
		}
		if (late || orderstore.Locked(err)) && p.answers(working) {
			p.database.set(nil)
			return fmt.Errorf("%w: %w", errSlow, err)
		}
		// One lost deadlock is no outage: readers stop only when it goes on.
		if p.database.set(err) {
			p.Logger.Warn("the database cannot decide, trying on", telemetry.KeyErr, err)
		}
		if last || working.Err() != nil {
			return err
		}
		last = wait(stopping, retry.NextBackOff()) != nil
	}
}

// answers tells whether the database does, within a moment.
func (p *Pipeline) answers(ctx context.Context) bool {
	if p.Ping == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return p.Ping(ctx) == nil
}

// pingTimeout is far above the time of a ping to a database that works.
const pingTimeout = time.Second

// database is what the last runs said of it.
type database struct {
	mu     sync.Mutex
	failed int
	gauge  prometheus.Gauge
}

// outage is the number of failed runs in a row from which on the database
// counts as unavailable.
const outage = 3

// set notes a run and tells whether this one began an outage.
func (d *database) set(err error) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	defer func() { d.show(d.failed < outage) }()
	if err == nil {
		d.failed = 0
		return false
	}
	d.failed++
	return d.failed == outage
}

func (d *database) up() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed < outage
}

func (d *database) show(available bool) {
	if available {
		d.gauge.Set(1)
		return
	}
	d.gauge.Set(0)
}

func (d *database) part() telemetry.Part {
	if d.up() {
		return telemetry.Part{Name: "database", Serving: true, State: "available"}
	}
	return telemetry.Part{Name: "database", State: "unavailable", Reason: "batches cannot be written; they stay pending and are tried on"}
}

const (
	retryMin = 50 * time.Millisecond
	// retryMax keeps a writer that cannot read or write from being a load, and
	// is what a recovery may take longer than it must.
	retryMax = 2 * time.Second
)

func newBackOff() *backoff.ExponentialBackOff {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval, b.RandomizationFactor = retryMin, retryMax, 0.3
	b.Reset()
	return b
}

// wait waits for d or until ctx ends.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
