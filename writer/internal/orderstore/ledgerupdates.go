package orderstore

import (
	"context"
	"fmt"

	"gorm.io/gorm"

	"github.com/seckill/seckill/pkg/orderid"
)

const (
	sqlLedgerUpdates = `
SELECT voucher_id, epoch, seq, user_id, verdict, standing_epoch, standing_seq
FROM ledger_updates FORCE INDEX (ledger_updates_partition)
WHERE partition_id = ? ORDER BY created_at, voucher_id, epoch, seq LIMIT ?`

	sqlOutcomeApplied = `
UPDATE order_outcomes SET applied_at = CURRENT_TIMESTAMP(3)
WHERE voucher_id = ? AND epoch = ? AND seq = ? AND kind = ? AND applied_at IS NULL`

	sqlUpdateTold = `DELETE FROM ledger_updates WHERE voucher_id = ? AND epoch = ? AND seq = ? AND verdict = ?`
)

// LedgerUpdate is what an operator decided about a held order and the ledger must
// still be told.
type LedgerUpdate struct {
	Position orderid.Position
	// UserID is 0 where it could not be read.
	UserID int64
	// Outcome is ResultPersisted, ResultConflict or ResultCancelled.
	Outcome string
	// Standing is the user's order that stands, with ResultConflict.
	Standing orderid.Position
}

// updateRow is a row of ledger_updates; created_at is the database's.
type updateRow struct {
	VoucherID     int64 `gorm:"primaryKey;autoIncrement:false"`
	Epoch         int64 `gorm:"primaryKey;autoIncrement:false"`
	Seq           int64 `gorm:"primaryKey;autoIncrement:false"`
	PartitionID   int
	UserID        int64
	Verdict       string
	StandingEpoch *int64
	StandingSeq   *int64
}

// TableName is the table of an updateRow.
func (updateRow) TableName() string { return "ledger_updates" }

// tellLater records that the ledger must be told of a decision.
func tellLater(tx *gorm.DB, locked lockedVoucher, held heldRow, verdict string, standing orderid.Position) error {
	row := updateRow{
		VoucherID: held.position.VoucherID, Epoch: held.position.Epoch, Seq: held.position.Seq,
		PartitionID: locked.partition, UserID: held.UserID, Verdict: verdict,
	}
	if standing != (orderid.Position{}) {
		row.StandingEpoch, row.StandingSeq = &standing.Epoch, &standing.Seq
	}
	if err := tx.Create(&row).Error; err != nil {
		return fmt.Errorf("recording what the ledger must be told: %w", err)
	}
	return nil
}

// LedgerUpdates returns what the ledger of a partition must still be told, oldest
// first, up to limit, at most 1,000. Whoever tells it calls MarkTold once the
// ledger shows the verdict. A ledger that does not hold the order yet is no such
// thing: a writer may have read the verdict HELD before the decision and settle
// after it.
func (s *Store) LedgerUpdates(ctx context.Context, partition, limit int) ([]LedgerUpdate, error) {
	var rows []updateRow
	if err := s.read(ctx).Raw(sqlLedgerUpdates, partition, max(1, min(limit, maxPage))).Scan(&rows).Error; err != nil {
		return nil, fmt.Errorf("listing what the ledger of partition %d must be told: %w", partition, err)
	}
	list := make([]LedgerUpdate, len(rows))
	for i, row := range rows {
		list[i] = LedgerUpdate{
			Position: orderid.Position{VoucherID: row.VoucherID, Epoch: row.Epoch, Seq: row.Seq},
			UserID:   row.UserID, Outcome: row.Verdict,
		}
		if row.StandingEpoch != nil && row.StandingSeq != nil {
			list[i].Standing = orderid.Position{VoucherID: row.VoucherID, Epoch: *row.StandingEpoch, Seq: *row.StandingSeq}
		}
	}
	return list, nil
}

// MarkTold records that the ledger has an update: it is listed no more, and the
// outcome, where there is one, is applied. Again is harmless.
func (s *Store) MarkTold(ctx context.Context, u LedgerUpdate) error {
	p := u.Position
	err := s.inTx(ctx, func(tx *gorm.DB) error {
		// In the order in which decisions take their locks.
		if err := tx.Exec(sqlOutcomeApplied, p.VoucherID, p.Epoch, p.Seq, u.Outcome).Error; err != nil {
			return err
		}
		return tx.Exec(sqlUpdateTold, p.VoucherID, p.Epoch, p.Seq, u.Outcome).Error
	})
	if err != nil {
		return fmt.Errorf("marking order (%d, %d, %d) as told: %w", p.VoucherID, p.Epoch, p.Seq, err)
	}
	return nil
}
