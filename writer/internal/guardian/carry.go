package guardian

import (
	"context"
	"fmt"
	"strings"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// Carry brings a voucher's ledger to what its row says, and notes in the row
// that it did. Any writer may do it, at any time, again and again: only a
// greater rev changes anything.
//
// A ledger is made in three steps: as a draft, which sells nothing; the note in
// the database that it was made; the wanted state. A crash before the note
// makes it again, which is harmless as nothing could be sold; after the note a
// missing ledger is a lost one, and is never made again.
//
// Errors: ledger.ErrMissing, ErrStaleEpoch, ErrRefused, ErrUnknown, ErrFault and
// ErrVoucherBusy; those of the store.
func (g *Guardian) Carry(ctx context.Context, row orderstore.Voucher) error {
	if row.LedgerEpoch != row.Epoch {
		// The caller may have read the row before another writer made the ledger.
		var err error
		if row, err = g.Store.Voucher(ctx, row.ID); err != nil {
			return err
		}
	}
	voucher := ledger.Voucher{
		Partition: row.PartitionID,
		Epoch:     row.Epoch,
		VoucherID: row.ID,
		Rev:       row.Rev,
		State:     ledger.VoucherState(strings.ToLower(row.State)),
		// In the first epoch of a voucher its ledger begins with all units.
		Opening: row.Total,
		Begin:   row.BeginAt,
		End:     row.EndAt,
	}
	if row.LedgerEpoch != row.Epoch {
		if err := ledger.CreateVoucher(ctx, g.Client, voucher); err != nil {
			return fmt.Errorf("making the ledger of voucher %d: %w", row.ID, err)
		}
		if err := g.Store.MarkLedgerCreated(ctx, row.ID, row.Epoch); err != nil {
			return fmt.Errorf("noting the ledger of voucher %d: %w", row.ID, err)
		}
	}
	if err := ledger.ApplyVoucher(ctx, g.Client, voucher); err != nil {
		return fmt.Errorf("applying rev %d of voucher %d: %w", row.Rev, row.ID, err)
	}
	if err := g.Store.MarkApplied(ctx, row.ID, row.Rev); err != nil {
		return fmt.Errorf("noting rev %d of voucher %d: %w", row.Rev, row.ID, err)
	}
	return nil
}
