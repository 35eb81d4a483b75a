package guardian

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// stepTimeout bounds one look at a partition; its calls take milliseconds.
	stepTimeout = 10 * time.Second
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
)

// keeper is this process's part in one partition: its guardian if it holds the
// lock, else an onlooker that reports what it sees.
type keeper struct {
	*Guardian
	partition int
	log       *slog.Logger

	lock     *orderstore.Lock
	lockNext time.Time
	// suspicion counts looks in a row at which a rule did not hold.
	suspicion int
	// recheck is when a failed check may be repeated, after recheckWait.
	recheck     time.Time
	recheckWait time.Duration

	// faults are reasons to close, from writers and gateways. One is enough.
	faults chan string

	mu     sync.Mutex
	status Status
}

func newKeeper(g *Guardian, partition int) *keeper {
	return &keeper{
		Guardian: g, partition: partition,
		log:    g.Logger.With(telemetry.KeyPartition, partition),
		faults: make(chan string, 1),
		status: Status{Partition: partition, Reason: "not looked at yet"},
	}
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
		timer := time.NewTimer(time.Duration(float64(k.Interval) * (0.9 + 0.2*rand.Float64())))
		select {
		case <-ctx.Done():
		case <-timer.C:
		case reason := <-k.faults:
			k.close(ctx, ledger.FaultPrefix+reason)
		}
		timer.Stop()
	}
}

// look is one round.
func (k *keeper) look(ctx context.Context) {
	stepCtx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	guardian := k.hold(stepCtx)
	var status Status
	var err error
	if guardian {
		status, err = k.guard(ctx, stepCtx)
	} else {
		status, err = k.observe(stepCtx)
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		status.Open, status.Reason = false, reasonOf(err)
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
	k.lock, k.suspicion, k.recheck, k.recheckWait = lock, 0, time.Time{}, 0
	k.lockNext = now.Add(lockPing)
	k.log.Info("guardian of this partition")
	return true
}

// observe reports what the ledger says of itself.
func (k *keeper) observe(ctx context.Context) (Status, error) {
	meta, err := ledger.ReadMeta(ctx, k.Client, k.partition)
	if err != nil {
		return Status{}, err
	}
	if !meta.Exists {
		return Status{Reason: "ledger is missing"}, nil
	}
	loaded, err := ledger.AdmitLoaded(ctx, k.Client, k.partition, meta.Epoch)
	status := Status{Epoch: meta.Epoch, Open: meta.Open && loaded, Reason: meta.Reason}
	if meta.Open && !loaded {
		status.Reason = "ledger is not proven yet"
	}
	return status, err
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
			return status, err
		}
	}
	meta, err := ledger.ReadMeta(stepCtx, k.Client, k.partition)
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
		status.Reason = meta.Reason
		return status, nil
	}
	loaded, err := ledger.AdmitLoaded(stepCtx, k.Client, k.partition, row.Epoch)
	if err != nil {
		return status, err
	}
	if meta.Exists && meta.Open && meta.Epoch == row.Epoch && loaded {
		return k.watch(stepCtx, row, meta)
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

// first makes the ledger of a partition that never was open, and opens it.
// Every step may be repeated after a crash; the note in the database comes
// before anything can be sold.
func (k *keeper) first(ctx context.Context, row orderstore.Partition) (Status, error) {
	status := Status{Epoch: row.Epoch}
	err := k.dedicated(ctx, func(ctx context.Context, client rueidis.CoreClient) error {
		server, durability, err := k.server(ctx, client)
		if err != nil {
			return err
		}
		if err := ledger.CreatePartition(ctx, client, k.partition, row.Epoch, k.Bound); err != nil {
			return err
		}
		if err := k.Store.MarkOpened(ctx, k.partition, row.Epoch); err != nil {
			return err
		}
		return k.open(ctx, client, row.Epoch, durability, server.RunID)
	})
	if err != nil {
		return status, err
	}
	k.log.Info("partition opened for the first time", telemetry.KeyEpoch, row.Epoch)
	status.Open = true
	return status, nil
}

// prove checks a ledger on which the door is shut, and opens it if the check
// passes. A ledger that fails it stays closed until it is rebuilt, or until
// somebody brings back what is missing.
func (k *keeper) prove(ctx context.Context, row orderstore.Partition, meta ledger.Meta) (Status, error) {
	status := Status{Epoch: row.Epoch, Reason: k.current().Reason}
	if time.Now().Before(k.recheck) {
		return status, nil
	}
	err := k.dedicated(ctx, func(ctx context.Context, client rueidis.CoreClient) error {
		server, durability, err := k.server(ctx, client)
		if err != nil {
			return err
		}
		if err := k.check(ctx, client, row, meta, server, durability); err != nil {
			return err
		}
		return k.open(ctx, client, row.Epoch, durability, server.RunID)
	})
	var failed *checkError
	switch {
	case err == nil:
		k.log.Info("ledger proven, partition opened", telemetry.KeyEpoch, row.Epoch)
		k.recheckWait = 0
		return Status{Epoch: row.Epoch, Open: true}, nil
	case errors.As(err, &failed):
		k.recheckWait = min(max(2*k.recheckWait, time.Second), recheckMax)
		k.recheck = time.Now().Add(k.recheckWait)
		status.Reason = failed.Error()
		closeCtx, cancel := context.WithTimeout(ctx, stepTimeout)
		defer cancel()
		if err := ledger.ClosePartition(closeCtx, k.Client, k.partition, row.Epoch, status.Reason); err != nil && !errors.Is(err, ledger.ErrMissing) {
			k.log.Warn("closing a partition whose check failed", telemetry.KeyErr, err)
		}
		// The rebuild of the ledger from the database has its place here.
		return status, nil
	}
	return status, err
}

// open is the last thing: meta first, the admission script last. All on the
// connection on which the ledger was proven, so to the server that was proven.
func (k *keeper) open(ctx context.Context, client rueidis.CoreClient, epoch int64, durability ledger.Durability, runID string) error {
	if err := ledger.EnsureGroup(ctx, client, k.partition, epoch); err != nil {
		return err
	}
	if err := ledger.LoadWriterScripts(ctx, client); err != nil {
		return err
	}
	if err := ledger.OpenPartition(ctx, client, k.partition, epoch, k.Bound, durability, runID); err != nil {
		return err
	}
	return ledger.LoadAdmit(ctx, client, k.partition, epoch)
}

// dedicated runs a proof on one connection. If that breaks the proof is void,
// for what answers next may be another server.
func (k *keeper) dedicated(ctx context.Context, do func(context.Context, rueidis.CoreClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	client, release := k.Client.Dedicate()
	defer release()
	return do(ctx, client)
}

// server reads what the server is and whether it may hold a ledger.
func (k *keeper) server(ctx context.Context, client rueidis.CoreClient) (ledger.Server, ledger.Durability, error) {
	server, err := ledger.ReadServer(ctx, client)
	if err != nil {
		return server, "", err
	}
	durability, problems := server.Durability()
	if durability == "" || (k.Durability == ledger.DurabilityStrict && durability != ledger.DurabilityStrict) {
		return server, "", &checkError{reason: "redis is not configured for " + string(k.Durability) + " durability: " + strings.Join(problems, "; ")}
	}
	return server, durability, nil
}

// watch looks at an open partition: carries what is not carried yet, and holds
// every voucher against the rules. A voucher whose ledger is gone closes the
// partition at once; another contradiction when two looks agree.
func (k *keeper) watch(ctx context.Context, row orderstore.Partition, meta ledger.Meta) (Status, error) {
	status := Status{Epoch: row.Epoch, Open: true}
	if _, durability, err := k.server(ctx, k.Client); err != nil {
		if failed := (*checkError)(nil); errors.As(err, &failed) {
			return k.shut(ctx, status, failed.Error())
		}
		return status, err
	} else if durability != meta.Durability {
		if err := ledger.OpenPartition(ctx, k.Client, k.partition, row.Epoch, k.Bound, durability, meta.RunID); err != nil {
			return status, err
		}
		k.log.Warn("durability changed", telemetry.KeyMode, durability)
	}
	if err := ledger.EnsureGroup(ctx, k.Client, k.partition, row.Epoch); err != nil {
		if errors.Is(err, ledger.ErrNoGroup) {
			return k.shut(ctx, status, ledger.FaultPrefix+"the orders stream is missing")
		}
		return status, err
	}
	k.metrics.inFlight.WithLabelValues(k.label()).Set(float64(meta.InFlight()))
	k.metrics.oldest.WithLabelValues(k.label()).Set(k.oldest(ctx, row.Epoch).Seconds())

	vouchers, err := k.Store.LiveVouchers(ctx, k.partition)
	if err != nil {
		return status, err
	}
	var violations []books.Violation
	for _, voucher := range vouchers {
		if voucher.State == orderstore.StateArchived || !voucher.Applied() {
			if err := k.Carry(ctx, voucher); err != nil {
				if errors.Is(err, ledger.ErrMissing) && voucher.LedgerEpoch == row.Epoch {
					return k.shut(ctx, status, fmt.Sprintf("%svoucher %d: its ledger is missing", ledger.FaultPrefix, voucher.ID))
				}
				k.log.Warn("carrying a voucher over to its ledger", telemetry.KeyVoucherID, voucher.ID, telemetry.KeyErr, err)
			}
			continue
		}
		reading, err := ledger.ReadBooks(ctx, k.Client, k.partition, row.Epoch, voucher.ID)
		if err != nil && !errors.Is(err, ledger.ErrFault) {
			return status, err
		}
		if err != nil {
			violations = append(violations, books.Violation{Rule: books.RuleLedgerFault, Detail: err.Error()})
			continue
		}
		if !reading.Exists {
			return k.shut(ctx, status, fmt.Sprintf("%svoucher %d: its ledger is missing", ledger.FaultPrefix, voucher.ID))
		}
		for _, violation := range books.Moment(reading) {
			violation.Detail = fmt.Sprintf("voucher %d: %s", voucher.ID, violation.Detail)
			violations = append(violations, violation)
		}
	}
	if len(violations) == 0 {
		k.suspicion = 0
		return status, nil
	}
	if k.suspicion++; k.suspicion < 2 {
		return status, nil
	}
	return k.shut(ctx, status, "books violated: "+violations[0].String())
}

// oldest is the age of the oldest entry that is not settled, by the Redis clock
// at its admission and this machine's now.
func (k *keeper) oldest(ctx context.Context, epoch int64) time.Duration {
	entries, err := ledger.Scan(ctx, k.Client, k.partition, epoch, "-", 1)
	if err != nil || len(entries) == 0 {
		return 0
	}
	at, err := ledger.EntryTime(entries[0].ID)
	if err != nil {
		return 0
	}
	return max(0, time.Since(at))
}

// shut closes the partition and says why.
func (k *keeper) shut(ctx context.Context, status Status, reason string) (Status, error) {
	k.suspicion = 0
	status.Open, status.Reason = false, reason
	err := ledger.ClosePartition(ctx, k.Client, k.partition, status.Epoch, reason)
	if errors.Is(err, ledger.ErrMissing) {
		err = nil
	}
	return status, err
}

// close closes the partition for a fault that somebody met.
func (k *keeper) close(ctx context.Context, reason string) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	row, err := k.Store.Partition(ctx, k.partition)
	if err == nil {
		_, err = k.shut(ctx, Status{Epoch: row.Epoch}, reason)
	}
	if err != nil {
		k.log.Error("closing a partition", telemetry.KeyReason, reason, telemetry.KeyErr, err)
	}
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
func (k *keeper) report(text string) {
	if strings.HasPrefix(text, string(ledger.AdmitRewound)) {
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
	k.metrics.guardian.WithLabelValues(k.label()).Set(gauge(status.Guardian))
	if !status.Guardian {
		k.metrics.inFlight.DeleteLabelValues(k.label())
		k.metrics.oldest.DeleteLabelValues(k.label())
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
