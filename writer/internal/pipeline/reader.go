package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
)

// reader takes one partition's entries: new ones, and those of consumers that
// died. It never reads ahead of free slots: an entry grows idle from its
// delivery on, wherever it waits.
type reader struct {
	*Pipeline
	partition int
	log       *slog.Logger
	// epoch of the ledger that is being read, 0 for none.
	epoch    atomic.Int64
	nextScan time.Time
	// nextGlance is when to look for what peers have handed back.
	nextGlance time.Time
	// idle is how long the next read waits for an entry, 0 after one that brought
	// some.
	idle time.Duration
	// admitted is the highest seq that the ledger was seen to have admitted, by
	// voucher, in this epoch.
	admitted map[int64]int64
	waiting  *waiting // nil until it waits

	mu     sync.Mutex
	inHand map[string]bool
	state  string
}

// What a reader's health may be.
const (
	stateReading = "reading"
	stateNone    = "no ledger"
	stateBroken  = "unreadable"
)

func newReader(p *Pipeline, partition int) *reader {
	return &reader{
		Pipeline: p, partition: partition, inHand: map[string]bool{}, state: "starting",
		log: p.Logger.With(telemetry.KeyPartition, partition),
	}
}

// run reads until ctx ends. Every error backs off, up to retryMax.
func (r *reader) run(ctx context.Context) {
	defer r.hangUp()
	retry := newBackOff()
	for ctx.Err() == nil {
		err := r.turn(ctx)
		if err == nil {
			retry.Reset()
			continue
		}
		if ctx.Err() != nil {
			return
		}
		wait(ctx, retry.NextBackOff())
	}
}

// turn is one round: look at meta, take over if it is time, read.
func (r *reader) turn(ctx context.Context) error {
	callCtx, cancel := context.WithTimeout(ctx, readMargin)
	meta, err := ledger.ReadMeta(callCtx, r.Client, r.partition)
	cancel()
	switch {
	case err != nil:
		return r.broken(err)
	case !meta.Exists:
		r.epoch.Store(0)
		r.setState(stateNone)
		return fmt.Errorf("partition %d: %w", r.partition, ledger.ErrMissing)
	}
	// Another epoch is another stream: what was left in the old one is the
	// guardian's matter.
	if old := r.epoch.Swap(meta.Epoch); old != meta.Epoch {
		r.nextScan, r.idle = time.Time{}, 0
		r.admitted = map[int64]int64{}
		r.log.Info("reading a ledger", telemetry.KeyEpoch, meta.Epoch)
	}
	if !r.database.up() {
		// Claiming now would only take from others what cannot be written, and
		// raise delivery counts. New entries are as well off in the stream.
		return wait(ctx, retryMax/4)
	}
	if now := time.Now(); now.After(r.nextScan) || r.handedBack(ctx, meta.Epoch, now) {
		if err := r.takeOver(ctx, meta.Epoch); err != nil {
			return r.broken(err)
		}
		r.nextScan = now.Add(scanPause(r.MinIdle))
	}
	if err := r.readNew(ctx, meta.Epoch); err != nil {
		return r.broken(err)
	}
	r.setState(stateReading)
	return nil
}

const (
	// glanceEvery is the least time between two looks for what peers have handed
	// back: one cheap call. A read that waits puts it off by blockMost at most.
	glanceEvery = 2 * time.Second
	// blockMost is how long a read waits where nothing has come for a while: it
	// keeps an idle fleet from asking all the time. An entry ends the wait at once,
	// and so does the end of its stream, with which another epoch begins.
	blockMost = 4 * time.Second
	// readMost is how many entries one read takes at most. Each may hold
	// ledger.MaxBatch orders, and slots are reserved for that.
	readMost = 16
)

// readNew takes what is there at once; where there is nothing it waits for one
// entry, with one entry's slots, so that idle partitions do not hold slots that
// busy ones could use. Each wait in vain doubles the next one, which yet ends
// when the next scan is due.
func (r *reader) readNew(ctx context.Context, epoch int64) error {
	idle := r.idle
	r.idle = 0
	if idle == 0 {
		n, err := r.read(ctx, epoch, readMost)
		if err != nil || n > 0 {
			return err
		}
		idle = r.Block
	}
	n, err := r.await(ctx, epoch, waitFor(idle, r.Block, time.Until(r.nextScan)))
	if err == nil && n == 0 {
		r.idle = min(2*idle, max(r.Block, blockMost))
	}
	return err
}

// waitFor ends a long wait when the next scan is due.
func waitFor(idle, block, untilScan time.Duration) time.Duration {
	return min(idle, max(block, untilScan))
}

// read takes up to some entries and does not wait for any.
func (r *reader) read(ctx context.Context, epoch int64, most int) (int, error) {
	reserved, err := r.slots.reserve(ctx, ledger.MaxBatch, most*ledger.MaxBatch)
	if err != nil {
		return 0, err
	}
	// A stop waits for it: it takes no time.
	callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readMargin)
	defer cancel()
	raw, err := ledger.ReadNew(callCtx, r.Client, r.partition, epoch, r.Consumer, int64(reserved/ledger.MaxBatch), 0)
	return r.arrived(ctx, epoch, raw, reserved), err
}

// await waits up to block for one entry. A stop ends the wait.
func (r *reader) await(ctx context.Context, epoch int64, block time.Duration) (int, error) {
	reserved, err := r.slots.reserve(ctx, ledger.MaxBatch, ledger.MaxBatch)
	if err != nil {
		return 0, err
	}
	// A timer instead of a deadline: where a context has one, the client waits for
	// it and heeds no cancellation.
	readCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer time.AfterFunc(block+readMargin, cancel).Stop()
	raw, err := r.awaitOn(ctx, readCtx, cancel, epoch, block)
	if err != nil && ctx.Err() == nil && readCtx.Err() != nil {
		err = fmt.Errorf("reading entries: no answer %v after a wait of %v", readMargin, block)
	}
	return r.arrived(ctx, epoch, raw, reserved), err
}

func (r *reader) awaitOn(ctx, readCtx context.Context, giveUp func(), epoch int64, block time.Duration) ([]ledger.RawEntry, error) {
	if r.waiting == nil {
		w := new(waiting)
		var err error
		w.conn, w.release = r.Reader.Dedicate()
		if w.id, err = ledger.ConnectionID(readCtx, w.conn); err != nil {
			w.release()
			return nil, err
		}
		r.waiting = w
	}
	answered := make(chan struct{})
	defer close(answered)
	id := r.waiting.id
	defer context.AfterFunc(ctx, func() { r.unblock(id, answered, giveUp) })()
	raw, err := ledger.ReadNew(readCtx, r.waiting.conn, r.partition, epoch, r.Consumer, 1, block)
	if err != nil {
		r.hangUp()
	}
	return raw, err
}

// waiting is the connection on which a reader waits, and the server's name of it.
type waiting struct {
	conn    rueidis.DedicatedClient
	release func()
	id      int64
}

// hangUp gives the connection back; the next wait takes another one.
func (r *reader) hangUp() {
	if r.waiting != nil {
		r.waiting.release()
		r.waiting = nil
	}
}

// unblock ends the wait of a read, and tries again until it has: the read may be
// on its way to the server yet. Where the server does not hear of it the read is
// given up; an entry that is delivered then is handed back, or taken over in time.
func (r *reader) unblock(id int64, answered <-chan struct{}, giveUp func()) {
	defer giveUp()
	ctx, cancel := context.WithTimeout(context.Background(), readMargin)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if err := ledger.Unblock(ctx, r.Client, id); err != nil {
			r.log.Warn("ending a read that waits; it is given up", telemetry.KeyErr, err)
			return
		}
		select {
		case <-answered:
			return
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (r *reader) arrived(ctx context.Context, epoch int64, raw []ledger.RawEntry, reserved int) int {
	if len(raw) > 0 {
		faultpoint.Reach(faultpoint.WriterAfterRead)
	}
	r.metrics.read.Add(float64(r.take(ctx, epoch, raw, reserved)))
	return len(raw)
}

// broken notes why nothing can be read. The guardian watches the ledger by
// itself, so a missing group needs no message to it.
func (r *reader) broken(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	r.metrics.readErrors.Inc()
	if r.setState(stateBroken) {
		r.log.Warn("reading entries", telemetry.KeyErr, err)
	}
	return err
}

// setState tells whether the state is a new one.
func (r *reader) setState(state string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed := r.state != state
	r.state = state
	return changed
}

func (r *reader) part() telemetry.Part {
	r.mu.Lock()
	defer r.mu.Unlock()
	return telemetry.Part{
		Name:    fmt.Sprintf("reader.%d", r.partition),
		Serving: r.state == stateReading,
		State:   r.state,
	}
}
