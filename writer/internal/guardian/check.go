package guardian

import (
	"context"
	"fmt"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// checkError is a check that failed: the ledger may not be opened as it is.
type checkError struct{ reason string }

func (e *checkError) Error() string { return e.reason }

func failed(format string, args ...any) error {
	return &checkError{reason: fmt.Sprintf(format, args...)}
}

// check proves a ledger that a server brought back: it is the one that was
// last open, every voucher that the database ever opened is there with books
// that hold, every order that it admitted is a row, an outcome or in the
// stream, and the database knows of none that it does not.
//
// It proves nothing where the server restarted in fast durability: the end of
// the ledger may be gone, with the orders that only it knew.
func (k *keeper) check(ctx context.Context, client rueidis.CoreClient, row orderstore.Partition, meta ledger.Meta, server ledger.Server, durability ledger.Durability) error {
	switch {
	case !meta.Exists:
		return failed("the ledger is missing")
	case meta.Epoch != row.Epoch:
		return failed("the ledger is of epoch %d, the database of %d", meta.Epoch, row.Epoch)
	case row.OpenEpoch != row.Epoch:
		return failed("epoch %d was never opened, the last open one was %d", row.Epoch, row.OpenEpoch)
	}
	if meta.RunID != "" && meta.RunID != server.RunID && (durability != ledger.DurabilityStrict || meta.Durability == ledger.DurabilityFast) {
		return failed("redis restarted in fast durability: acknowledged orders may be lost")
	}
	vouchers, err := k.Store.LiveVouchers(ctx, k.partition)
	if err != nil {
		return err
	}
	seqs := map[int64]int64{}
	var inFlight int64
	for _, voucher := range vouchers {
		if voucher.LedgerEpoch != row.Epoch {
			continue
		}
		ahead, err := k.Store.MaxSeq(ctx, voucher.ID, row.Epoch)
		if err != nil {
			return err
		}
		reading, err := ledger.ReadBooks(ctx, client, k.partition, row.Epoch, voucher.ID)
		if err != nil {
			return err
		}
		if violations := books.Moment(reading); len(violations) > 0 {
			return failed("voucher %d: %s", voucher.ID, violations[0])
		}
		if reading.State == ledger.VoucherArchived {
			continue
		}
		if reading.Rev > voucher.Rev {
			return failed("voucher %d: the ledger has rev %d, the database only %d", voucher.ID, reading.Rev, voucher.Rev)
		}
		if ahead > reading.Seq {
			return failed("voucher %d: the database has seq %d, the ledger only %d", voucher.ID, ahead, reading.Seq)
		}
		db, err := k.Store.Read(ctx, voucher.ID, false)
		if err != nil {
			return err
		}
		if db.Stock+db.Sold != db.Total {
			return failed("voucher %d: stock %d + sold %d is not total %d", voucher.ID, db.Stock, db.Sold, db.Total)
		}
		seqs[voucher.ID] = reading.Seq
		inFlight += reading.InFlight()
	}
	// The stream must be there, also when it is empty: else the next admission
	// would find none.
	if err := ledger.EnsureGroup(ctx, client, k.partition, row.Epoch); err != nil {
		return err
	}
	missing, err := books.Missing(ctx, k.Store, client, k.partition, row.Epoch, seqs, books.MissingMax)
	if err != nil {
		return err
	}
	for voucherID, lost := range missing {
		return failed("voucher %d: %d or more orders are lost, the first is seq %d", voucherID, len(lost), lost[0])
	}
	after, err := ledger.ReadMeta(ctx, client, k.partition)
	if err != nil {
		return err
	}
	// Nothing is admitted meanwhile, but writers settle: in flight only falls.
	if after.InFlight() > inFlight {
		return failed("%d orders are in flight, the vouchers' ledgers know of %d", after.InFlight(), inFlight)
	}
	return nil
}
