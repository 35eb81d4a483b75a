package guardian

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// checkError is a check that failed: the ledger may not be opened as it is.
type checkError struct{ reason string }

func (e *checkError) Error() string { return e.reason }

func failed(format string, args ...any) error {
	return &checkError{reason: fmt.Sprintf(format, args...)}
}

func rank(v books.Violation) int {
	if v.Rule == books.RuleOrdersMissing {
		return 0
	}
	return 1
}

// check proves a ledger that a server brought back: it is the one that was
// last open, every voucher that the database ever opened is there with books
// that hold, every order that it admitted is a row, an outcome or in the
// stream, and the database knows of none that it does not. It answers the
// vouchers that must be carried over before the door may open.
//
// It proves nothing where the server restarted in fast durability: the end of
// the ledger may be gone, with the orders that only it knew.
func (k *keeper) check(ctx context.Context, client rueidis.CoreClient, row orderstore.Partition, meta ledger.Meta, server ledger.Server, durability ledger.Durability) ([]orderstore.Voucher, error) {
	switch {
	case !meta.Exists:
		return nil, failed("the ledger is missing")
	case meta.Epoch != row.Epoch:
		return nil, failed("the ledger is of epoch %d, the database of %d", meta.Epoch, row.Epoch)
	case row.OpenEpoch != row.Epoch:
		return nil, failed("epoch %d was never opened, the last open one was %d", row.Epoch, row.OpenEpoch)
	}
	if meta.RunID != "" && meta.RunID != server.RunID && (durability != ledger.DurabilityStrict || meta.Durability == ledger.DurabilityFast) {
		return nil, failed("redis restarted in fast durability: acknowledged orders may be lost")
	}
	// The stream must be there, also when it is empty: else the next admission
	// would find none.
	if err := ledger.EnsureGroup(ctx, client, k.partition, row.Epoch); err != nil {
		return nil, err
	}
	vouchers, err := k.Store.LiveVouchers(ctx, k.partition)
	if err != nil {
		return nil, err
	}
	var made, behind []orderstore.Voucher
	for _, voucher := range vouchers {
		if !voucher.Applied() {
			behind = append(behind, voucher)
		}
		if voucher.LedgerEpoch == row.Epoch {
			made = append(made, voucher)
		}
	}
	// With no patience every order is looked for now, in the stream if it has no
	// row.
	watcher := books.Watcher{Store: k.Store, Client: client, Partition: k.partition, Now: time.Now}
	violations, err := watcher.Look(ctx, row.Epoch, made)
	if err != nil {
		return nil, err
	}
	// What names orders says more than what only says that something is missing.
	slices.SortStableFunc(violations, func(a, b books.Violation) int {
		return cmp.Compare(rank(a), rank(b))
	})
	for _, violation := range violations {
		if violation.Drift == books.Undersell {
			// No reason to close an open partition, so none to keep this one closed.
			k.log.Error("books violated", telemetry.KeyReason, violation.String())
			continue
		}
		if violation.Rule != books.RuleLedgerBehind {
			return nil, failed("%s", violation)
		}
		for _, voucher := range made {
			if voucher.ID == violation.VoucherID && voucher.Applied() {
				behind = append(behind, voucher)
			}
		}
	}
	for _, voucher := range made {
		reading, err := ledger.ReadBooks(ctx, client, k.partition, row.Epoch, voucher.ID)
		if err != nil {
			return nil, err
		}
		if reading.Rev > voucher.Rev {
			return nil, failed("voucher %d: the ledger has rev %d, the database only %d", voucher.ID, reading.Rev, voucher.Rev)
		}
	}
	after, err := ledger.ReadMeta(ctx, client, k.partition)
	if err != nil {
		return nil, err
	}
	// Nothing is admitted meanwhile, but writers settle: in flight only falls.
	if after.InFlight() > watcher.InFlight() {
		return nil, failed("%d orders are in flight, the vouchers' ledgers know of %d", after.InFlight(), watcher.InFlight())
	}
	return behind, nil
}
