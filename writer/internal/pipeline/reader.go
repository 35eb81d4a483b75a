package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
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
	// admitted is the highest seq that the ledger was seen to have admitted, by
	// voucher, in this epoch.
	admitted map[int64]int64

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
		r.nextScan = time.Time{}
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
		// Jitter keeps a fleet that started together from scanning together.
		r.nextScan = now.Add(time.Duration(float64(r.MinIdle) * (0.4 + 0.2*rand.Float64())))
	}
	if err := r.readNew(ctx, meta.Epoch); err != nil {
		return r.broken(err)
	}
	r.setState(stateReading)
	return nil
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

// glanceEvery is the time between two looks for what peers have handed back: one
// cheap call.
const glanceEvery = 2 * time.Second

// readMost is how many entries one read takes at most. Each may hold
// ledger.MaxBatch orders, and slots are reserved for that.
const readMost = 16

// readNew takes what is there at once; where there is nothing it waits for one
// entry, with one entry's slots, so that idle partitions do not hold slots that
// busy ones could use.
func (r *reader) readNew(ctx context.Context, epoch int64) error {
	n, err := r.read(ctx, epoch, readMost, 0)
	if err != nil || n > 0 {
		return err
	}
	_, err = r.read(ctx, epoch, 1, r.Block)
	return err
}

func (r *reader) read(ctx context.Context, epoch int64, most int, block time.Duration) (int, error) {
	reserved, err := r.slots.reserve(ctx, ledger.MaxBatch, most*ledger.MaxBatch)
	if err != nil {
		return 0, err
	}
	// A stop does not cancel a read: an entry delivered in that moment would lie
	// in our name until somebody takes it over.
	readCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), block+readMargin)
	defer cancel()
	client := r.Client
	if block > 0 {
		client = r.Reader
	}
	raw, err := ledger.ReadNew(readCtx, client, r.partition, epoch, r.Consumer, int64(reserved/ledger.MaxBatch), block)
	if len(raw) > 0 {
		faultpoint.Reach(faultpoint.WriterAfterRead)
	}
	orders := r.take(ctx, epoch, raw, reserved)
	r.metrics.read.Add(float64(orders))
	return len(raw), err
}

// takeOver scans the whole pending list once for entries that lay idle for
// MinIdle, page by page to its end: empty pages on the way mean nothing.
func (r *reader) takeOver(ctx context.Context, epoch int64) error {
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

// work is an entry on its way: its orders, or what is held of an entry that
// cannot be read.
type work struct {
	entry ledger.Entry
	dead  *orderstore.DeadEntry
}

// voucher is whose orders it carries, 0 where nobody can tell.
func (w work) voucher() int64 {
	if w.dead != nil {
		return w.dead.VoucherID
	}
	return w.entry.VoucherID
}

// size is how many slots it takes.
func (w work) size() int { return max(1, len(w.entry.Orders)) }

// take decodes entries, brings the reservation to what came and passes them
// on. Entries that are in hand already are left out: a scan finds our own, too.
func (r *reader) take(ctx context.Context, epoch int64, raw []ledger.RawEntry, reserved int) int {
	// One bound for all lookups: a Redis that does not answer is not asked again
	// for each entry.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readMargin)
	defer cancel()
	orders, slots := 0, 0
	taken := make([]work, 0, len(raw))
	for _, e := range raw {
		if !r.hold(e.ID) {
			continue
		}
		w, err := r.decode(ctx, epoch, e)
		if err != nil && !errors.Is(err, ledger.ErrVersion) {
			// Nobody can tell now what it stands for: it comes again.
			r.metrics.readErrors.Inc()
			r.log.Warn("entry left pending", telemetry.KeyEntryID, e.ID, telemetry.KeyErr, err)
			r.letGo(e.ID)
			continue
		}
		if err != nil {
			// A newer writer may know its version: it stays pending for one.
			r.metrics.unknownVersions.Inc()
			r.log.Error("entry left pending", telemetry.KeyEntryID, e.ID, telemetry.KeyErr, err)
			r.letGo(e.ID)
			continue
		}
		taken = append(taken, w)
		orders += len(w.entry.Orders)
		slots += w.size()
	}
	r.slots.correct(reserved, slots)
	for _, w := range taken {
		r.entries <- w
	}
	return orders
}

// wasAdmitted tells whether the ledger has admitted a voucher's order seq. It is
// asked only beyond what it was seen to have admitted, which for new entries is
// once for each page and voucher.
func (r *reader) wasAdmitted(ctx context.Context, epoch, voucherID, seq int64) (bool, error) {
	if seq <= r.admitted[voucherID] {
		return true, nil
	}
	admitted, err := ledger.AdmittedSeq(ctx, r.Client, r.partition, epoch, voucherID)
	if err != nil {
		return false, err
	}
	if len(r.admitted) >= admittedMost {
		clear(r.admitted)
	}
	r.admitted[voucherID] = admitted
	return seq <= admitted, nil
}

// admittedMost bounds the vouchers whose seq is remembered, some 100 bytes each;
// beyond it all are asked for anew.
const admittedMost = 10_000

// decode is an error for an entry that may be another writer's to read, which is
// ledger.ErrVersion, and for one that cannot be read while the ledger does not
// tell whether the positions that it names were admitted. What was not admitted
// stands for nothing. An order that can be read goes on where the ledger does not
// tell: it must not wait for a lookup that nearly always says yes.
func (r *reader) decode(ctx context.Context, epoch int64, raw ledger.RawEntry) (work, error) {
	entry, err := ledger.DecodeEntry(r.partition, raw.ID, raw.Fields)
	dead := &orderstore.DeadEntry{PartitionID: r.partition, Epoch: epoch, EntryID: raw.ID}
	var malformed *ledger.MalformedError
	switch {
	case errors.As(err, &malformed):
		dead.Reason = malformed.Reason
		if malformed.Units > 0 && malformed.Epoch == epoch && ledger.Partition(malformed.VoucherID, r.Partitions) == r.partition {
			last := malformed.FirstSeq + malformed.Units - 1
			admitted, err := r.wasAdmitted(ctx, epoch, malformed.VoucherID, last)
			if err != nil {
				return work{}, fmt.Errorf("decoding an entry: %w: %w", malformed, err)
			}
			if admitted {
				dead.VoucherID, dead.FirstSeq, dead.Units = malformed.VoucherID, malformed.FirstSeq, malformed.Units
			} else {
				dead.Reason += fmt.Sprintf("; seq %d of voucher %d was never admitted", last, malformed.VoucherID)
			}
		}
	case err != nil:
		return work{}, err
	case entry.Epoch != epoch:
		dead.Reason = fmt.Sprintf("an entry of epoch %d in the stream of epoch %d", entry.Epoch, epoch)
	case ledger.Partition(entry.VoucherID, r.Partitions) != r.partition:
		dead.Reason = fmt.Sprintf("voucher %d is not of partition %d", entry.VoucherID, r.partition)
	default:
		last := entry.Orders[len(entry.Orders)-1].Seq
		if admitted, err := r.wasAdmitted(ctx, epoch, entry.VoucherID, last); err != nil || admitted {
			return work{entry: entry}, nil
		}
		dead.Reason = fmt.Sprintf("seq %d of voucher %d was never admitted", last, entry.VoucherID)
	}
	dead.Raw = raw.Encode()
	return work{entry: ledger.Entry{ID: raw.ID, Partition: r.partition, Epoch: epoch}, dead: dead}, nil
}

func (r *reader) hold(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.inHand[id] {
		return false
	}
	r.inHand[id] = true
	return true
}

// drop ends the holding of an entry, settled or left pending.
func (r *reader) drop(w work) {
	r.letGo(w.entry.ID)
	r.slots.release(w.size())
}

func (r *reader) letGo(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.inHand, id)
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
