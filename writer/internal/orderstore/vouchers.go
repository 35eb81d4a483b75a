package orderstore

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
)

const (
	// givenIDBits bounds the ids that the store gives: below 2^53, so that they
	// survive every tool that keeps numbers as doubles.
	givenIDBits = 53
	// givenIDTries bounds the search for a free id. A second try is needed once
	// in 2^53 / vouchers.
	givenIDTries = 5
	// maxPage bounds a page of Vouchers.
	maxPage = 1000
)

const (
	sqlPartitionEpochForUpdate = `SELECT epoch FROM partitions WHERE id = ? FOR UPDATE`

	sqlTransition = `UPDATE vouchers SET state = ?, rev = rev + 1, applied_at = NULL WHERE id = ?`

	sqlMarkLedgerCreated = `UPDATE vouchers SET ledger_epoch = ? WHERE id = ? AND epoch = ?`

	// The first time stays: the guardian may repeat itself.
	sqlMarkApplied = `UPDATE vouchers SET applied_at = COALESCE(applied_at, CURRENT_TIMESTAMP(3)) WHERE id = ? AND rev = ?`
)

// transitions are the steps of a voucher's life: from, and what may follow.
var transitions = map[string][]string{
	StateDraft:    {StateOpen},
	StateOpen:     {StatePaused, StateClosed},
	StatePaused:   {StateOpen, StateClosed},
	StateClosed:   {StateArchived},
	StateArchived: nil,
}

// voucherRow is a row of vouchers. Columns that the database fills are read only.
type voucherRow struct {
	ID          int64 `gorm:"primaryKey;autoIncrement:false"`
	PartitionID int
	Title       string
	Total       int64
	Stock       int64
	Sold        int64
	Epoch       int64
	LedgerEpoch *int64
	State       string
	Rev         int64
	AppliedAt   *time.Time
	BeginAt     time.Time
	EndAt       time.Time
	CreatedAt   time.Time `gorm:"->;autoCreateTime:false"`
	UpdatedAt   time.Time `gorm:"->;autoUpdateTime:false"`
}

// TableName is the table of a voucherRow.
func (voucherRow) TableName() string { return "vouchers" }

func (r voucherRow) voucher() Voucher {
	v := Voucher{
		ID: r.ID, Title: r.Title, PartitionID: r.PartitionID,
		Total: r.Total, Stock: r.Stock, Sold: r.Sold,
		Epoch: r.Epoch, State: r.State, Rev: r.Rev,
		BeginAt: r.BeginAt, EndAt: r.EndAt, CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt,
	}
	if r.LedgerEpoch != nil {
		v.LedgerEpoch = *r.LedgerEpoch
	}
	if r.AppliedAt != nil {
		v.AppliedAt = *r.AppliedAt
	}
	return v
}

// CreateVoucher stores a voucher as a DRAFT and returns it as stored. Of v it
// takes ID, Title, Total, BeginAt and EndAt, the times to the millisecond; the
// partition follows from the id, the epoch from the partition.
//
// An id of 0 asks for one: a random number below 2^53, since a counter would
// tell how many vouchers there are and two callers would race for it. Such a
// call creates a new voucher each time. With an id of the caller's the same
// content again returns the stored voucher, whatever became of it since; other
// content is ErrVoucherExists.
func (s *Store) CreateVoucher(ctx context.Context, v Voucher) (Voucher, error) {
	v.BeginAt = v.BeginAt.UTC().Truncate(time.Millisecond)
	v.EndAt = v.EndAt.UTC().Truncate(time.Millisecond)
	if err := checkVoucher(v); err != nil {
		return Voucher{}, err
	}
	given := v.ID == 0
	for try := 1; ; try++ {
		if given {
			v.ID = randomID()
		}
		err := s.insertVoucher(ctx, v)
		if isServerError(err, errDuplicate) && given && try < givenIDTries {
			continue
		}
		if err == nil || isServerError(err, errDuplicate) && !given {
			break
		}
		if classify(err) == data {
			return Voucher{}, fmt.Errorf("creating voucher %d: %w: %w", v.ID, ErrInvalidVoucher, err)
		}
		return Voucher{}, fmt.Errorf("creating voucher %d: %w", v.ID, err)
	}
	stored, err := s.Voucher(ctx, v.ID)
	if err != nil {
		return Voucher{}, err
	}
	if stored.Title != v.Title || stored.Total != v.Total || !stored.BeginAt.Equal(v.BeginAt) || !stored.EndAt.Equal(v.EndAt) {
		return Voucher{}, fmt.Errorf("creating voucher %d: %w", v.ID, ErrVoucherExists)
	}
	return stored, nil
}

// checkVoucher refuses what the driver could not send or would bend; the rest is
// for the constraints of the table.
func checkVoucher(v Voucher) error {
	if v.ID < 0 {
		return fmt.Errorf("creating voucher %d: %w: the id is negative", v.ID, ErrInvalidVoucher)
	}
	for _, t := range []time.Time{v.BeginAt, v.EndAt} {
		if !storable(t) {
			return fmt.Errorf("creating voucher %d: %w: the year %d cannot be stored", v.ID, ErrInvalidVoucher, t.Year())
		}
	}
	return nil
}

func (s *Store) insertVoucher(ctx context.Context, v Voucher) error {
	return s.inTx(ctx, func(tx *gorm.DB) error {
		n, err := partitions(tx)
		if err != nil {
			return err
		}
		p := int(v.ID % int64(n))
		// The lock keeps a rebuild, which raises the epoch of the partition and of
		// its vouchers in one transaction, from missing this one.
		var epochs []int64
		if err := tx.Raw(sqlPartitionEpochForUpdate, p).Scan(&epochs).Error; err != nil {
			return err
		}
		if len(epochs) == 0 {
			return fmt.Errorf("partition %d: %w", p, ErrNotMigrated)
		}
		return tx.Create(&voucherRow{
			ID: v.ID, PartitionID: p, Title: v.Title,
			Total: v.Total, Stock: v.Total, Epoch: epochs[0],
			State: StateDraft, BeginAt: v.BeginAt, EndAt: v.EndAt,
		}).Error
	})
}

// randomID returns a number from 1 to 2^53-1.
func randomID() int64 {
	for {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		if id := int64(binary.BigEndian.Uint64(b[:]) >> (64 - givenIDBits)); id > 0 {
			return id
		}
	}
}

// Voucher returns the voucher of this id, or ErrVoucherNotFound.
func (s *Store) Voucher(ctx context.Context, id int64) (Voucher, error) {
	row, err := takeVoucher(s.read(ctx), id)
	return row.voucher(), err
}

func takeVoucher(db *gorm.DB, id int64) (voucherRow, error) {
	var row voucherRow
	err := db.Where("id = ?", id).Take(&row).Error
	switch {
	case err == nil:
		return row, nil
	case errors.Is(err, gorm.ErrRecordNotFound):
		return voucherRow{}, fmt.Errorf("voucher %d: %w", id, ErrVoucherNotFound)
	case isServerError(err, errNoSuchTable):
		return voucherRow{}, ErrNotMigrated
	default:
		return voucherRow{}, fmt.Errorf("reading voucher %d: %w", id, err)
	}
}

// Vouchers returns up to limit vouchers with ids above after, ascending: the
// last one's id is the after of the next page. The limit is at most 1,000.
func (s *Store) Vouchers(ctx context.Context, after int64, limit int) ([]Voucher, error) {
	var rows []voucherRow
	limit = max(1, min(limit, maxPage))
	if err := s.read(ctx).Where("id > ?", after).Order("id").Limit(limit).Find(&rows).Error; err != nil {
		return nil, fmt.Errorf("listing vouchers: %w", err)
	}
	return vouchers(rows), nil
}

// LiveVouchers returns the vouchers of a partition that its ledger knows or must
// be told of, ascending by id: all but drafts, and archived ones until the
// ledger has taken that over.
func (s *Store) LiveVouchers(ctx context.Context, partition int) ([]Voucher, error) {
	var rows []voucherRow
	err := s.read(ctx).
		Where("partition_id = ? AND state <> ? AND NOT (state = ? AND applied_at IS NOT NULL)", partition, StateDraft, StateArchived).
		Order("id").Find(&rows).Error
	if err != nil {
		return nil, fmt.Errorf("listing the vouchers of partition %d: %w", partition, err)
	}
	return vouchers(rows), nil
}

func vouchers(rows []voucherRow) []Voucher {
	list := make([]Voucher, len(rows))
	for i, row := range rows {
		list[i] = row.voucher()
	}
	return list
}

// Transition takes a voucher to another state, with rev + 1 and nothing applied,
// and returns it. A voucher that is there already is returned as it is: a retry
// changes nothing. Where the voucher's state is not in from, or no such step
// exists, the error is a *StateError.
func (s *Store) Transition(ctx context.Context, id int64, from []string, to string) (Voucher, error) {
	var row voucherRow
	err := s.inTx(ctx, func(tx *gorm.DB) (err error) {
		if row, err = takeVoucher(tx.Clauses(clause.Locking{Strength: "UPDATE"}), id); err != nil {
			return err
		}
		if row.State == to {
			return nil
		}
		if !slices.Contains(from, row.State) || !slices.Contains(transitions[row.State], to) {
			return &StateError{State: row.State, To: to}
		}
		if err := tx.Exec(sqlTransition, to, id).Error; err != nil {
			return fmt.Errorf("taking voucher %d to %s: %w", id, to, err)
		}
		row, err = takeVoucher(tx, id)
		return err
	})
	if err != nil {
		return Voucher{}, err
	}
	return row.voucher(), nil
}

// MarkLedgerCreated records that the voucher's ledger was created in epoch, as a
// draft that sells nothing: only after this may it be brought on sale, and it is
// never created again in that epoch. It is ErrEpochMoved where the
// voucher has another epoch by now. Again is harmless.
func (s *Store) MarkLedgerCreated(ctx context.Context, id, epoch int64) error {
	return s.mark(ctx, sqlMarkLedgerCreated, ErrEpochMoved, id, epoch, id, epoch)
}

// MarkApplied records that the ledger has taken over rev. It is ErrRevMoved
// where the voucher has another rev by now, which is then the one to apply.
// Again is harmless.
func (s *Store) MarkApplied(ctx context.Context, id, rev int64) error {
	return s.mark(ctx, sqlMarkApplied, ErrRevMoved, id, id, rev)
}

// mark runs an UPDATE of one voucher and tells a guard that did not hold from a
// voucher that does not exist.
func (s *Store) mark(ctx context.Context, query string, moved error, id int64, args ...any) error {
	res := s.read(ctx).Exec(query, args...)
	if res.Error != nil {
		return fmt.Errorf("marking voucher %d: %w", id, res.Error)
	}
	if res.RowsAffected == 1 {
		return nil
	}
	if _, err := s.Voucher(ctx, id); err != nil {
		return err
	}
	return fmt.Errorf("marking voucher %d: %w", id, moved)
}

// storable tells whether a DATETIME can hold t and the driver can send it.
func storable(t time.Time) bool {
	year := t.UTC().Year()
	return year >= 1000 && year <= 9999
}
