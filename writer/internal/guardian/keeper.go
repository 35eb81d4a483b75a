package guardian

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// stepTimeout bounds one look at a partition; its calls take milliseconds.
	stepTimeout = 10 * time.Second
	// lookFor is how much of it the books may take; vouchers that are left have
	// their turn at the next look.
	lookFor = 3 * time.Second
	// checkTimeout bounds the proof of a ledger that Redis brought back: one
	// count per run of orders, about a second for some million of them.
	checkTimeout = 2 * time.Minute
	// lockPing is how often the guardian makes sure that it still is; the
	// database drops the lock of a connection that was silent for 15 s.
	lockPing = 3 * time.Second
	// lockTry is how often the others try to become guardian: what a takeover
	// may take. Each try is a connection.
	lockTry = 3 * time.Second
	// recheckMax is how long a partition whose check failed waits for the next
	// one at most: an operator may have brought back what was missing.
	recheckMax = 30 * time.Second
	// calmLooks is how many intervals lie between two looks of an onlooker at a
	// partition that is open: its guardian looks at every one, and a fleet of
	// idle writers must cost next to nothing.
	calmLooks = 3
	// quietLooks is the same for the guardian of a partition that sold nothing since
	// its last look, in which nothing is in flight and nothing was wrong: a number
	// that somebody changes by hand is still named within 5 s.
	quietLooks = 2
)

// keeper is this process's part in one partition: its guardian if it holds the
// lock, else an onlooker that reports what it sees.
type keeper struct {
	*Guardian
	partition int
	log       *slog.Logger

	lock     *orderstore.Lock
	lockNext time.Time
	// recheck is when a failed check may be repeated, after recheckWait.
	recheck     time.Time
	recheckWait time.Duration

	// faults are reasons to close, from writers and gateways. One is enough.
	faults chan string
	// faulty is such a reason until the partition is closed for it.
	faulty string
	// watcher is used while this process is guardian.
	watcher *books.Watcher
	// nextTend is when the next round of housekeeping is, orphansAfter the entry
	// behind which it looks for orphans, orphan the one that the last round found.
	nextTend             time.Time
	orphansAfter, orphan string
	telling              telling

	// admitted is what the partition had admitted at the last look; quiet, that
	// nothing came of it since. See quietLooks.
	admitted int64
	quiet    bool

	mu     sync.Mutex
	status Status
}

func newKeeper(g *Guardian, partition int) *keeper {
	k := &keeper{
		Guardian: g, partition: partition,
		log:    g.Logger.With(telemetry.KeyPartition, partition),
		faults: make(chan string, 1),
		status: Status{Partition: partition, Reason: "not looked at yet"},
	}
	k.forget()
	return k
}

// forget begins anew to watch and tend, where what was seen may be of a ledger
// as it was before somebody put it right.
func (k *keeper) forget() {
	k.watcher = &books.Watcher{
		Store: k.Store, Client: k.Client, Partition: k.partition, AlarmAge: k.AlarmAge, Now: time.Now, LookFor: lookFor,
	}
	k.orphan, k.orphansAfter, k.telling = "", "", telling{}
}

func (k *keeper) run(ctx context.Context) {
	defer func() {
		if k.lock != nil {
			releaseCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			k.lock.Release(releaseCtx)
		}
	}()
	for ctx.Err() == nil {
		k.look(ctx)
		wait := k.Interval
		switch {
		case k.lock == nil && k.status.Open:
			wait *= calmLooks
		case k.quiet:
			wait *= quietLooks
		}
		timer := time.NewTimer(time.Duration(float64(wait) * (0.9 + 0.2*rand.Float64())))
		select {
		case <-ctx.Done():
		case <-timer.C:
		case reason := <-k.faults:
			k.faulty = ledger.FaultPrefix + reason
		}
		timer.Stop()
	}
}

// look is one round.
func (k *keeper) look(ctx context.Context) {
	k.quiet = false
	stepCtx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	if k.faulty != "" {
		k.close(ctx)
	}
	guardian := k.hold(stepCtx)
	var status Status
	var err error
	if guardian {
		status, err = k.guard(ctx, stepCtx)
	}
	if !guardian || err != nil {
		// A guardian that cannot read the database still sees what gateways see, and
		// tells what the books said before it failed.
		reason, alarm := "", status.Alarm
		if err != nil {
			reason = reasonOf(err)
		}
		seen, seeErr := k.observe(ctx)
		status, err = seen, errors.Join(err, seeErr)
		status.Reason, status.Alarm = cmp.Or(status.Reason, reason), alarm
		if seeErr != nil {
			status.Open, status.Reason = false, cmp.Or(reason, reasonOf(seeErr))
		}
	}
	if ctx.Err() != nil {
		return
	}
	status.Partition, status.Guardian = k.partition, guardian
	k.publish(status, err)
}

// hold keeps the lock, or tries to get it. Losing it costs nothing: whoever
// gets it begins from what the ledger and the database say.
func (k *keeper) hold(ctx context.Context) bool {
	now := time.Now()
	if now.Before(k.lockNext) {
		return k.lock != nil
	}
	if k.lock != nil {
		k.lockNext = now.Add(lockPing)
		if err := k.lock.Ping(ctx); err != nil {
			k.log.Warn("no longer guardian", telemetry.KeyErr, err)
			k.lock.Release(ctx)
			k.lock = nil
		}
		return k.lock != nil
	}
	k.lockNext = now.Add(time.Duration(float64(lockTry) * (0.7 + 0.6*rand.Float64())))
	lock, ok, err := k.Store.TryLock(ctx, fmt.Sprintf("guardian:%d", k.partition))
	if err != nil || !ok {
		return false
	}
	k.lock, k.recheck, k.recheckWait = lock, time.Time{}, 0
	k.forget()
	k.lockNext = now.Add(lockPing)
	k.log.Info("guardian of this partition")
	return true
}

// observe reports what the ledger says of itself, and closes it where the
// server has become unfit: that needs neither lock nor database.
func (k *keeper) observe(ctx context.Context) (Status, error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	// Also where nothing is open: whoever becomes guardian must have seen the
	// server before.
	if _, err := k.configuration(ctx); err != nil {
		return Status{}, err
	}
	meta, err := ledger.ReadMeta(ctx, k.Client, k.partition)
	if err != nil {
		return Status{}, err
	}
	if !meta.Exists {
		return Status{Reason: "ledger is missing"}, nil
	}
	loaded, err := ledger.ScriptLoaded(ctx, k.Client, cmp.Or(meta.AdmitSHA, ledger.AdmitSHA(k.partition, meta.Epoch)))
	if err != nil {
		return Status{}, err
	}
	status := Status{Epoch: meta.Epoch, Open: meta.Open && loaded, Reason: meta.Reason}
	status.Stray = k.measure(ctx, meta)
	if meta.Open && !loaded {
		status.Reason = "ledger is not proven yet"
	}
	if !status.Open {
		return status, nil
	}
	worse, err := k.weakened(ctx, meta)
	if err != nil {
		return status, err
	}
	if worse != "" {
		return k.shut(ctx, status, worse)
	}
	// The bound is the guardian's to set: writers may differ while it is changed.
	return status, k.tune(ctx, meta, meta.Bound)
}

// guard is the round of the guardian.
func (k *keeper) guard(ctx, stepCtx context.Context) (Status, error) {
	row, err := k.Store.Partition(stepCtx, k.partition)
	if err != nil {
		return Status{}, err
	}
	status := Status{Epoch: row.Epoch}
	if k.partition == 0 {
		if err := k.keepLayout(stepCtx); err != nil {
			k.log.Warn("keeping the layout", telemetry.KeyErr, err)
		}
	}
	meta, err := ledger.ReadMeta(stepCtx, k.Client, k.partition)
	if errors.Is(err, ledger.ErrFault) {
		// Admission needs less of it than settling: it must not go on alone.
		return k.shut(stepCtx, status, ledger.FaultPrefix+"the ledger's meta cannot be read")
	}
	if err != nil {
		return status, err
	}
	if meta.Exists && meta.Epoch > row.Epoch {
		// The database was put back to an older state: what the ledger promised
		// since then it does not know.
		reason := fmt.Sprintf("the ledger is of epoch %d, the database only of %d", meta.Epoch, row.Epoch)
		if meta.Open {
			err = ledger.ClosePartition(stepCtx, k.Client, k.partition, meta.Epoch, reason)
		}
		status.Reason = reason
		return status, err
	}
	if row.OpenEpoch == 0 {
		return k.first(ctx, row)
	}
	if meta.Exists && !meta.Open && strings.HasPrefix(meta.Reason, ledger.FaultPrefix) {
		status.Reason, status.Stray = meta.Reason, k.measure(stepCtx, meta)
		return k.nurse(stepCtx, row, status)
	}
	loaded, err := ledger.AdmitLoaded(stepCtx, k.Client, k.partition, row.Epoch)
	if err != nil {
		return status, err
	}
	if meta.Exists && meta.Open && meta.Epoch == row.Epoch && loaded {
		unchanged := meta.Admitted == k.admitted && meta.InFlight() == 0
		k.admitted = meta.Admitted
		status, err := k.watch(stepCtx, row, meta)
		k.quiet = unchanged && err == nil && status.Open && status.Alarm == "" && status.Stray == ""
		return status, err
	}
	if meta.Exists && meta.Open && meta.Epoch == row.Epoch {
		if adopted, err := k.adopt(ctx, row, meta); adopted || err != nil {
			return Status{Epoch: row.Epoch, Open: adopted}, err
		}
	}
	if meta.Exists && meta.Epoch == row.Epoch {
		// Whatever the proof says, what is in flight comes to an end.
		k.tidy(stepCtx, row.Epoch)
	}
	return k.prove(ctx, row, meta)
}

// keepLayout writes the layout again where it was lost. It holds nothing that
// was sold, and a gateway that starts needs it to tell its callers that the
// partitions are closed.
func (k *keeper) keepLayout(ctx context.Context) error {
	_, err := ledger.ReadLayout(ctx, k.Client)
	if errors.Is(err, ledger.ErrMissing) {
		_, err = ledger.WriteLayout(ctx, k.Client, ledger.Layout{
			Partitions: k.Partitions, Keys: k.OrderKeys, EntryVersion: ledger.EntryVersion,
		})
	}
	return err
}

// shut closes the partition and says why.
func (k *keeper) shut(ctx context.Context, status Status, reason string) (Status, error) {
	status.Open, status.Reason = false, reason
	err := ledger.ClosePartition(ctx, k.Client, k.partition, status.Epoch, reason)
	if errors.Is(err, ledger.ErrMissing) {
		err = nil
	}
	return status, err
}

// close closes the partition for a fault that somebody met. That needs no
// database: what the ledger is of is what must be closed.
func (k *keeper) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	meta, err := ledger.ReadMeta(ctx, k.Client, k.partition)
	epoch := meta.Epoch
	if errors.Is(err, ledger.ErrFault) {
		var row orderstore.Partition
		row, err = k.Store.Partition(ctx, k.partition)
		epoch = row.Epoch
	}
	if err == nil && epoch != 0 {
		_, err = k.shut(ctx, Status{Epoch: epoch}, k.faulty)
	}
	if err != nil {
		k.log.Error("closing a partition; trying on", telemetry.KeyReason, k.faulty, telemetry.KeyErr, err)
		return
	}
	k.faulty = ""
}

// fault asks for the partition to be closed.
func (k *keeper) fault(reason string) {
	select {
	case k.faults <- reason:
	default:
	}
}

// report hears a gateway. A ledger that went back behind what it had answered
// has lost orders, which no figure in it shows. Anything else the next look
// sees by itself.
func (k *keeper) report(kind ledger.FaultKind, text string) {
	if kind == ledger.FaultRewound {
		k.fault("a gateway met a ledger that went back: " + text)
	}
}

func (k *keeper) current() Status {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.status
}

// publish notes the status and logs what changed.
func (k *keeper) publish(status Status, err error) {
	k.mu.Lock()
	old := k.status
	k.status = status
	k.mu.Unlock()
	k.metrics.open.WithLabelValues(k.label()).Set(gauge(status.Open))
	k.metrics.setClosed(k.label(), status.Reason, status.Open)
	k.metrics.guardian.WithLabelValues(k.label()).Set(gauge(status.Guardian))
	if old.Alarm != status.Alarm && status.Alarm != "" {
		k.log.Error("books violated", telemetry.KeyEpoch, status.Epoch, telemetry.KeyReason, status.Alarm)
	}
	if old.Open == status.Open && old.Reason == status.Reason {
		return
	}
	switch {
	case status.Open:
		k.log.Info("partition is open", telemetry.KeyEpoch, status.Epoch)
	case err != nil:
		k.log.Warn("partition cannot be looked at", telemetry.KeyReason, status.Reason, telemetry.KeyErr, err)
	case status.Guardian:
		k.log.Error("partition is closed", telemetry.KeyEpoch, status.Epoch, telemetry.KeyReason, status.Reason)
	default:
		// Whether that is an alarm the guardian knows.
		k.log.Warn("partition is closed", telemetry.KeyEpoch, status.Epoch, telemetry.KeyReason, status.Reason)
	}
}

// reasonOf is what health may show of an error: no driver text.
func reasonOf(err error) string {
	var failed *checkError
	switch {
	case errors.As(err, &failed):
		return failed.Error()
	case errors.Is(err, ledger.ErrFaulty):
		return "a fault closed it"
	case errors.Is(err, ledger.ErrLedgerInUse):
		return "never opened by the database, but a ledger is there that was in use"
	case errors.Is(err, ledger.ErrNoGroup):
		return "the orders stream or its group is missing"
	case errors.Is(err, ledger.ErrRefused), errors.Is(err, ledger.ErrUnknown):
		return "redis cannot be reached or refuses"
	case errors.Is(err, ledger.ErrFault):
		return "the ledger has a fault; the log tells which"
	}
	return "the database cannot be reached"
}

func (k *keeper) label() string { return fmt.Sprint(k.partition) }

func gauge(on bool) float64 {
	if on {
		return 1
	}
	return 0
}
