package orderstore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"gorm.io/gorm"
	"gorm.io/gorm/clause"
)

const (
	// maxRawOrder and maxRawEntry bound what is kept of what the stream carried,
	// in bytes. An honest order has some 200, an honest entry of 256 orders 50 KB;
	// a longer one is cut, for it must become a dead letter all the same.
	maxRawOrder = 16 << 10
	maxRawEntry = 1 << 20
	// rawCut divides the server's max_allowed_packet, since binary data doubles at
	// worst when it is quoted and there are other columns; and the bound again
	// where the server refuses a statement for its size all the same. After at most
	// 10 times nothing of raw is left.
	rawCut = 4
)

const (
	sqlHeldAgain = `
UPDATE order_outcomes SET tries = tries + 1, last_seen_at = CURRENT_TIMESTAMP(3)
WHERE voucher_id = ? AND epoch = ? AND seq IN ? AND kind = 'HELD'`

	sqlEntryState = `SELECT state FROM dead_entries WHERE partition_id = ? AND epoch = ? AND entry_id = ? FOR UPDATE`

	sqlEntryAgain = `
UPDATE dead_entries SET tries = tries + 1, last_seen_at = CURRENT_TIMESTAMP(3)
WHERE partition_id = ? AND epoch = ? AND entry_id = ? AND state = 'HELD'`
)

// Hold records orders that cannot be stored as they are as dead letters: HELD
// outcomes, for an operator to requeue or cancel. No stock is touched. The first
// verdict wins: an order whose position is a row, or has an outcome, keeps that.
// There is a verdict for each order, in the order of the input:
//
//   - Ended, with Outcome HELD, where it is held, be it by this call or an earlier
//     one, which is then counted as one more try; with another Outcome where that
//     stands.
//   - Persisted, where the position is the user's row.
//   - SamePosition, where it is another user's row or outcome.
//   - Stale, where the epoch is over: nothing was written.
//   - Unstorable, where the position is none: hold its entry instead.
//
// Where an order names no user, UserID below 1, and something stands already, the
// verdict's UserID is whose it is. A voucher that does not exist is no obstacle.
//
// What no column takes is bent until it fits, such as a reference that is too
// long; raw has the truth, and a requeue stores what fitted.
//
// An error is transient, as with Persist, and so is what to do then.
func (s *Store) Hold(ctx context.Context, held []Held) ([]Verdict, error) {
	b := &batch{orders: make([]Order, len(held)), verdicts: make([]Verdict, len(held))}
	for i := range held {
		b.orders[i] = held[i].Order
		if err := checkPosition(held[i].Position); err != nil {
			b.verdicts[i] = Verdict{Kind: Unstorable, Err: err}
		}
	}
	keys, members := b.groups(b.undecided())
	for _, g := range keys {
		for picked := range slices.Chunk(members[g], inList) {
			var decided map[int]Verdict
			err := s.cutToFit(ctx, maxRawOrder, func(tx *gorm.DB, limit int) (err error) {
				decided, err = holdLocked(tx, held, b, g, picked, limit)
				return err
			})
			if err != nil {
				return b.verdicts, s.transientError("holding orders", err)
			}
			for i, v := range decided {
				b.verdicts[i] = v
			}
		}
	}
	return b.verdicts, nil
}

// cutToFit runs do in a transaction, and again with less of raw where the server
// refuses a statement for its size: what cannot be stored in full must not stay
// in the stream for ever.
func (s *Store) cutToFit(ctx context.Context, limit int, do func(tx *gorm.DB, limit int) error) error {
	for {
		err := s.inTx(ctx, func(tx *gorm.DB) error {
			limit = min(limit, packetOf(tx)/rawCut)
			return do(tx, limit)
		})
		if err == nil || limit == 0 || classify(err) != tooLarge {
			return err
		}
		limit /= rawCut
	}
}

func holdLocked(tx *gorm.DB, held []Held, b *batch, g group, picked []int, limit int) (map[int]Verdict, error) {
	locked, err := lockVoucher(tx, g.voucherID)
	if err != nil {
		return nil, err
	}
	decided := make(map[int]Verdict, len(picked))
	if locked.epoch != g.epoch {
		for _, i := range picked {
			decided[i] = Verdict{Kind: Stale}
		}
		return decided, nil
	}
	stands, err := readPositions(tx, g, b.seqs(picked))
	if err != nil {
		return nil, err
	}
	var again []int64
	var inserts []outcomeInsert
	fresh := make(map[int64]bool) // seqs of this very call
	for _, i := range picked {
		o := &b.orders[i]
		if v, ok := stands.verdict(g, o.Seq, o.UserID); ok {
			decided[i] = v
			if v.Kind == Ended && v.Outcome == OutcomeHeld {
				again = append(again, o.Seq)
			}
			continue
		}
		decided[i] = Verdict{Kind: Ended, Outcome: OutcomeHeld}
		if !fresh[o.Seq] {
			fresh[o.Seq] = true
			inserts = append(inserts, newHeld(&held[i], limit))
		}
	}
	for chunk := range slices.Chunk(again, listLength(tx)) {
		if err := tx.Exec(sqlHeldAgain, g.voucherID, g.epoch, chunk).Error; err != nil {
			return nil, fmt.Errorf("counting tries: %w", err)
		}
	}
	return decided, insertOutcomes(tx, inserts, limit)
}

// HoldEntry records an entry that cannot be read as a whole as one dead letter.
// Where it stands for positions, each of them that is neither a row nor has an
// outcome becomes a HELD outcome of user 0 in the same transaction, listed and
// resolved through the entry; the verdicts are those of the positions, FirstSeq
// first, as Hold gives them for orders that name no user. Where it stands for
// none there are no verdicts.
//
// Again is harmless and counts one more try; an entry that was cancelled stays
// so. It is ErrEpochMoved, and nothing written, where the epoch is over. Any
// other error is transient but for what the caller got wrong: positions out of
// range, or of a voucher of another partition, which must never be held in its
// name.
func (s *Store) HoldEntry(ctx context.Context, e DeadEntry) ([]Verdict, error) {
	if err := checkEntry(e); err != nil {
		return nil, fmt.Errorf("holding entry %s of partition %d: %w", e.EntryID, e.PartitionID, err)
	}
	var verdicts []Verdict
	err := s.cutToFit(ctx, maxRawEntry, func(tx *gorm.DB, limit int) (err error) {
		verdicts, err = holdEntryLocked(tx, e, limit)
		return err
	})
	switch {
	case err == nil:
		return verdicts, nil
	case errors.Is(err, ErrEpochMoved), errors.Is(err, errOtherPartition), errors.Is(err, ErrNotMigrated):
		return nil, fmt.Errorf("holding entry %s of partition %d: %w", e.EntryID, e.PartitionID, err)
	default:
		return nil, s.transientError("holding an entry", err)
	}
}

var errOtherPartition = errors.New("its voucher is of another partition")

func holdEntryLocked(tx *gorm.DB, e DeadEntry, limit int) ([]Verdict, error) {
	epoch, partition := int64(0), e.PartitionID
	if e.Units > 0 {
		locked, err := lockVoucher(tx, e.VoucherID)
		if err != nil {
			return nil, err
		}
		epoch, partition = locked.epoch, locked.partition
	} else {
		var err error
		if epoch, err = lockPartition(tx, e.PartitionID); err != nil {
			return nil, err
		}
	}
	switch {
	case partition != e.PartitionID:
		return nil, errOtherPartition
	case epoch != e.Epoch:
		return nil, ErrEpochMoved
	}
	var states []string
	if err := tx.Raw(sqlEntryState, e.PartitionID, e.Epoch, e.EntryID).Scan(&states).Error; err != nil {
		return nil, fmt.Errorf("reading the dead entry: %w", err)
	}
	if len(states) > 0 {
		if err := tx.Exec(sqlEntryAgain, e.PartitionID, e.Epoch, e.EntryID).Error; err != nil {
			return nil, fmt.Errorf("counting tries: %w", err)
		}
	} else if err := tx.Create(newDeadEntry(e, limit)).Error; err != nil {
		return nil, fmt.Errorf("inserting the dead entry: %w", err)
	}
	if e.Units == 0 {
		return nil, nil
	}
	g := group{e.VoucherID, e.Epoch}
	seqs := make([]int64, e.Units)
	for i := range seqs {
		seqs[i] = e.FirstSeq + int64(i)
	}
	stands, err := readPositions(tx, g, seqs)
	if err != nil {
		return nil, err
	}
	verdicts := make([]Verdict, len(seqs))
	var inserts []outcomeInsert
	for i, seq := range seqs {
		v, ok := stands.verdict(g, seq, 0)
		if !ok {
			v = Verdict{Kind: Ended, Outcome: OutcomeHeld}
			inserts = append(inserts, outcomeInsert{
				VoucherID: e.VoucherID, Epoch: e.Epoch, Seq: seq,
				Kind: OutcomeHeld, EntryID: e.EntryID, Reason: clip(e.Reason, maxReason), Tries: 1,
				// An entry that was cancelled lists and resolves no more.
				OfEntry: len(states) == 0 || states[0] == OutcomeHeld,
			})
		}
		verdicts[i] = v
	}
	return verdicts, insertOutcomes(tx, inserts, limit)
}

// lockedVoucher is a voucher whose row is locked, or, where there is none, whose
// partition's row is: creating a voucher needs that lock, so that none appears
// meanwhile.
type lockedVoucher struct {
	row       voucherRow
	exists    bool
	partition int
	// epoch is the current one.
	epoch int64
}

// lockVoucher must come first in a transaction that writes an outcome.
func lockVoucher(tx *gorm.DB, id int64) (lockedVoucher, error) {
	locking := clause.Locking{Strength: "UPDATE"}
	row, err := takeVoucher(tx.Clauses(locking), id)
	if err == nil {
		return lockedVoucher{row, true, row.PartitionID, row.Epoch}, nil
	}
	if !errors.Is(err, ErrVoucherNotFound) {
		return lockedVoucher{}, err
	}
	n, err := partitions(tx)
	if err != nil {
		return lockedVoucher{}, err
	}
	partition := int(id % int64(n))
	epoch, err := lockPartition(tx, partition)
	if err != nil {
		return lockedVoucher{}, err
	}
	// It may have been created before the partition was locked.
	row, err = takeVoucher(tx.Clauses(locking), id)
	switch {
	case err == nil:
		return lockedVoucher{row, true, row.PartitionID, row.Epoch}, nil
	case errors.Is(err, ErrVoucherNotFound):
		return lockedVoucher{partition: partition, epoch: epoch}, nil
	default:
		return lockedVoucher{}, err
	}
}

// lockPartition locks the row of a partition and returns its epoch.
func lockPartition(tx *gorm.DB, partition int) (int64, error) {
	var epochs []int64
	if err := tx.Raw(sqlPartitionEpochForUpdate, partition).Scan(&epochs).Error; err != nil {
		return 0, fmt.Errorf("locking partition %d: %w", partition, err)
	}
	if len(epochs) == 0 {
		return 0, fmt.Errorf("partition %d: %w", partition, ErrNotMigrated)
	}
	return epochs[0], nil
}

// positions is what stands at some positions of a group, by seq.
type positions struct {
	orders   map[int64]storedOrder
	outcomes map[int64]outcomeRow
}

// readPositions is only the whole truth while the voucher is locked.
func readPositions(tx *gorm.DB, g group, seqs []int64) (positions, error) {
	p := positions{orders: make(map[int64]storedOrder)}
	var err error
	if p.outcomes, err = readOutcomes(tx, g, seqs); err != nil {
		return p, err
	}
	for chunk := range slices.Chunk(seqs, listLength(tx)) {
		var rows []storedOrder
		if err := tx.Raw(sqlOrdersByPosition, g.voucherID, g.epoch, chunk).Scan(&rows).Error; err != nil {
			return p, fmt.Errorf("reading orders by position: %w", err)
		}
		for _, row := range rows {
			p.orders[row.Seq] = row
		}
	}
	return p, nil
}

// verdict is what stands at seq for a user, who is not known where below 1.
func (p positions) verdict(g group, seq, userID int64) (Verdict, bool) {
	unknown := userID < 1
	if row, ok := p.orders[seq]; ok {
		switch {
		case unknown:
			return Verdict{Kind: Persisted, UserID: row.UserID}, true
		case row.UserID == userID:
			return Verdict{Kind: Persisted}, true
		default:
			return Verdict{Kind: SamePosition}, true
		}
	}
	row, ok := p.outcomes[seq]
	if !ok {
		return Verdict{}, false
	}
	v := row.verdict(g, userID)
	if unknown {
		v.UserID = row.UserID
	}
	return v, true
}
