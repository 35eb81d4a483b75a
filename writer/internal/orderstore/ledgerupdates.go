package orderstore

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/seckill/seckill/pkg/orderid"
)

const (
	sqlLedgerUpdates = `
SELECT voucher_id, epoch, seq, user_id, verdict, standing_epoch, standing_seq, created_at
FROM ledger_updates FORCE INDEX (ledger_updates_partition)
WHERE partition_id = @partition AND created_at >= @at
  AND (created_at > @at OR voucher_id > @voucher OR (voucher_id = @voucher AND (epoch > @epoch OR (epoch = @epoch AND seq > @seq))))
ORDER BY created_at, voucher_id, epoch, seq LIMIT @limit`

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

// UpdateCursor is a place in the list of a partition's updates; the zero value
// is before the oldest.
type UpdateCursor struct {
	at       time.Time
	position orderid.Position
}

// updateRow is a row of ledger_updates.
type updateRow struct {
	VoucherID     int64 `gorm:"primaryKey;autoIncrement:false"`
	Epoch         int64 `gorm:"primaryKey;autoIncrement:false"`
	Seq           int64 `gorm:"primaryKey;autoIncrement:false"`
	PartitionID   int
	UserID        int64
	Verdict       string
	StandingEpoch *int64
	StandingSeq   *int64
	// CreatedAt is the database's.
	CreatedAt time.Time `gorm:"<-:false"`
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
// first behind a place in the list, up to limit, at most 1,000, and the place to
// go on behind, which is the zero value at the end. Whoever tells it calls
// MarkTold once the ledger shows the verdict. A ledger that does not hold the
// order yet is no such thing: a writer may have read the verdict HELD before the
// decision and settle after it.
func (s *Store) LedgerUpdates(ctx context.Context, partition int, after UpdateCursor, limit int) ([]LedgerUpdate, UpdateCursor, error) {
	limit = max(1, min(limit, maxPage))
	if after.at.IsZero() {
		after.at = time.UnixMilli(0).UTC() // the database has no year 1
	}
	var rows []updateRow
	if err := s.read(ctx).Raw(sqlLedgerUpdates, map[string]any{
		"partition": partition, "at": after.at, "limit": limit,
		"voucher": after.position.VoucherID, "epoch": after.position.Epoch, "seq": after.position.Seq,
	}).Scan(&rows).Error; err != nil {
		return nil, UpdateCursor{}, fmt.Errorf("listing what the ledger of partition %d must be told: %w", partition, err)
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
	var next UpdateCursor
	if len(rows) == limit {
		next = UpdateCursor{at: rows[limit-1].CreatedAt, position: list[limit-1].Position}
	}
	return list, next, nil
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
