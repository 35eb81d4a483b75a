package guardian

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// watch is the round of the guardian of an open partition: the server is still
// what it was, every voucher is carried over and its books hold, nothing is
// stuck.
func (k *keeper) watch(ctx context.Context, row orderstore.Partition, meta ledger.Meta) (Status, error) {
	status := Status{Epoch: row.Epoch, Open: true}
	if worse, err := k.weakened(ctx, meta); err != nil || worse != "" {
		if worse != "" {
			return k.shut(ctx, status, worse)
		}
		return status, err
	}
	if err := k.tune(ctx, meta, k.Bound); err != nil {
		return status, err
	}
	if err := ledger.EnsureGroup(ctx, k.Client, k.partition, row.Epoch); err != nil {
		if errors.Is(err, ledger.ErrNoGroup) {
			return k.shut(ctx, status, ledger.FaultPrefix+"the orders stream is missing")
		}
		return status, err
	}
	status.Stray = k.measure(ctx, meta)

	vouchers, err := k.Store.LiveVouchers(ctx, k.partition)
	if err != nil {
		return status, err
	}
	var carried, waiting []orderstore.Voucher
	for _, voucher := range vouchers {
		if voucher.State != orderstore.StateArchived && voucher.Applied() {
			carried = append(carried, voucher)
		} else {
			waiting = append(waiting, voucher)
		}
	}
	// The books first: nothing that follows may keep them from stopping a sale.
	violations, lookErr := k.watcher.Look(ctx, row.Epoch, carried)
	if status, err = k.act(ctx, status, k.bringForward(ctx, carried, violations)); err != nil || !status.Open {
		return status, err
	}
	for _, voucher := range waiting {
		if err := k.carryOne(ctx, voucher); err != nil {
			if errors.Is(err, ledger.ErrMissing) && voucher.LedgerEpoch == row.Epoch {
				return k.shut(ctx, status, fmt.Sprintf("%svoucher %d: its ledger is missing", ledger.FaultPrefix, voucher.ID))
			}
			k.log.Warn("carrying a voucher over to its ledger", telemetry.KeyVoucherID, voucher.ID, telemetry.KeyErr, err)
		}
	}
	k.tend(ctx, row.Epoch)
	// Books that cannot be read, perhaps those of one voucher, end nothing else.
	return status, lookErr
}

// nurse is the round of the guardian of a partition that a fault closed: what
// is in flight still comes to an end, and the books say what is wrong.
func (k *keeper) nurse(ctx context.Context, row orderstore.Partition, status Status) (Status, error) {
	if err := ledger.EnsureGroup(ctx, k.Client, k.partition, row.Epoch); err != nil && !errors.Is(err, ledger.ErrNoGroup) {
		return status, err
	}
	vouchers, err := k.Store.LiveVouchers(ctx, k.partition)
	if err != nil {
		return status, err
	}
	var made []orderstore.Voucher
	for _, voucher := range vouchers {
		if voucher.LedgerEpoch == row.Epoch && voucher.State != orderstore.StateArchived {
			made = append(made, voucher)
		}
	}
	k.tend(ctx, row.Epoch)
	violations, err := k.watcher.Look(ctx, row.Epoch, made)
	k.show(&status, violations)
	return status, err
}

// carryTimeout keeps one voucher whose row is locked from taking a whole look.
const carryTimeout = 2 * time.Second

func (k *keeper) carryOne(ctx context.Context, voucher orderstore.Voucher) error {
	ctx, cancel := context.WithTimeout(ctx, carryTimeout)
	defer cancel()
	return k.Carry(ctx, voucher)
}

// weakened tells why the server may not go on holding the ledger: its
// configuration gives less than what gateways promise.
func (k *keeper) weakened(ctx context.Context, meta ledger.Meta) (reason string, err error) {
	server, err := k.configuration(ctx)
	if err != nil {
		return "", err
	}
	k.reading.mu.Lock()
	unsure := k.reading.unsure != nil
	k.reading.mu.Unlock()
	if unsure && meta.Open && meta.RunID == server.RunID && meta.Durability == ledger.DurabilityStrict {
		// This process has just come and cannot tell; whoever opened the partition on
		// this server could.
		server.AOFComplete = true
	}
	if _, err := k.judge(server); err != nil {
		return err.Error(), nil
	}
	return "", nil
}

// tune brings bound and durability of an open partition to what they are now.
func (k *keeper) tune(ctx context.Context, meta ledger.Meta, bound int64) error {
	server, err := k.configuration(ctx)
	if err != nil {
		return err
	}
	durability, err := k.judge(server)
	if failed := (*checkError)(nil); errors.As(err, &failed) {
		return nil // weakened has judged it
	}
	if err != nil || (durability == meta.Durability && meta.Bound == bound) {
		return err
	}
	if err := ledger.TunePartition(ctx, k.Client, k.partition, meta.Epoch, bound, durability); err != nil {
		return err
	}
	k.log.Warn("durability or bound changed", telemetry.KeyMode, durability, telemetry.KeyOrders, bound)
	return nil
}

// bringForward carries vouchers over again whose ledgers are behind what was
// noted: the ledger went back, and perhaps sells what was closed. What it cured
// is no violation any more.
func (k *keeper) bringForward(ctx context.Context, vouchers []orderstore.Voucher, violations []books.Violation) []books.Violation {
	left := violations[:0]
	for _, violation := range violations {
		cured := false
		if violation.Rule == books.RuleLedgerBehind {
			for _, voucher := range vouchers {
				if voucher.ID == violation.VoucherID {
					err := k.Carry(ctx, voucher)
					cured = err == nil
					k.log.Error("a voucher's ledger went back", telemetry.KeyVoucherID, voucher.ID, telemetry.KeyReason, violation.Detail, telemetry.KeyErr, err)
				}
			}
		}
		if !cured {
			left = append(left, violation)
		}
	}
	return left
}

// act does what violations ask for. A ledger that is gone, and a drift towards
// overselling, close the partition at once; a drift towards underselling is an
// alarm while the sale goes on; the rest closes it when two readings of a voucher
// agree, for the two sides are read one after the other.
func (k *keeper) act(ctx context.Context, status Status, violations []books.Violation) (Status, error) {
	k.show(&status, violations)
	for _, v := range violations {
		switch {
		case v.Rule == books.RuleLedgerMissing:
			return k.shut(ctx, status, fmt.Sprintf("%svoucher %d: its ledger is missing", ledger.FaultPrefix, v.VoucherID))
		case v.Drift == books.Oversell:
			return k.shut(ctx, status, "books violated: "+v.String())
		}
	}
	for _, v := range violations {
		if v.Drift == books.Unclear && v.Again {
			return k.shut(ctx, status, "books violated: "+v.String())
		}
	}
	return status, nil
}

// show makes violations seen: the one that names orders, or the first, as the
// alarm of the status, all as metrics.
func (k *keeper) show(status *Status, violations []books.Violation) {
	counts := map[string]int{}
	for _, v := range violations {
		counts[v.Rule]++
		if status.Alarm == "" || (v.Rule == books.RuleOrdersMissing && counts[v.Rule] == 1) {
			status.Alarm = v.String()
		}
	}
	k.metrics.setViolations(k.label(), counts)
}

// measure shows the backlog, and names the oldest entry if it is of a version
// that nobody here can read: all else vanishes, so such a one ends up there.
// Every writer does, also while the database is away and nobody is guardian.
func (k *keeper) measure(ctx context.Context, meta ledger.Meta) (stray string) {
	k.metrics.inFlight.WithLabelValues(k.label()).Set(float64(meta.InFlight()))
	entries, err := ledger.Scan(ctx, k.Client, k.partition, meta.Epoch, "-", 1)
	if err != nil {
		return ""
	}
	age := 0.0
	if len(entries) > 0 {
		if at, err := ledger.EntryTime(entries[0].ID); err == nil {
			age = max(0, time.Since(at).Seconds())
		}
		if entries[0].Fields["v"] != ledger.EntryVersion {
			stray = fmt.Sprintf("entry %s is of an unknown version and left to a newer writer", entries[0].ID)
		}
	}
	k.metrics.oldest.WithLabelValues(k.label()).Set(age)
	return stray
}
