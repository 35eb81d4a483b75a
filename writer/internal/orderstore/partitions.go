package orderstore

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"gorm.io/gorm"
)

const (
	// maxPartitions bounds P: each is a guardian, a lock connection and a stream.
	maxPartitions = 1024
	// firstEpoch is the epoch that every partition begins with.
	firstEpoch = 1

	settingPartitions = "partitions"
	settingKeyPrefix  = "order_key_"
)

const (
	sqlSetting    = `SELECT value FROM settings WHERE name = ?`
	sqlSettings   = `SELECT name, value FROM settings WHERE name LIKE ? ORDER BY name`
	sqlAddSetting = `INSERT INTO settings (name, value) VALUES (?, ?)`

	sqlPartition    = `SELECT id, epoch, open_epoch FROM partitions WHERE id = ?`
	sqlAddPartition = `INSERT INTO partitions (id, epoch, open_epoch) VALUES (?, ?, 0)`
	sqlMarkOpened   = `UPDATE partitions SET open_epoch = ? WHERE id = ? AND epoch = ?`
)

// Partitions returns P, the number of partitions that the database was set up
// with. It is ErrNotMigrated where that did not happen.
func (s *Store) Partitions(ctx context.Context) (int, error) {
	return partitions(s.read(ctx))
}

func partitions(db *gorm.DB) (int, error) {
	var values []string
	if err := db.Raw(sqlSetting, settingPartitions).Scan(&values).Error; err != nil {
		if isServerError(err, errNoSuchTable) {
			return 0, ErrNotMigrated
		}
		return 0, fmt.Errorf("reading the number of partitions: %w", err)
	}
	if len(values) == 0 {
		return 0, ErrNotMigrated
	}
	n, err := strconv.Atoi(values[0])
	if err != nil || n < 1 || n > maxPartitions {
		return 0, fmt.Errorf("reading the number of partitions: %q is not a number from 1 to %d", values[0], maxPartitions)
	}
	return n, nil
}

// InitPartitions fixes P for ever and creates the partitions' rows with epoch 1,
// all in one transaction. The same number again changes nothing; another one is
// an error that names both. It may run in several processes at once.
func (s *Store) InitPartitions(ctx context.Context, n int) error {
	if n < 1 || n > maxPartitions {
		return fmt.Errorf("setting up partitions: %d is not a number from 1 to %d", n, maxPartitions)
	}
	err := s.inTx(ctx, func(tx *gorm.DB) error {
		// The first of several processes gets past this statement; the others
		// wait for its COMMIT and find a duplicate.
		if err := tx.Exec(sqlAddSetting, settingPartitions, strconv.Itoa(n)).Error; err != nil {
			return err
		}
		for id := range n {
			if err := tx.Exec(sqlAddPartition, id, firstEpoch).Error; err != nil {
				return err
			}
		}
		return nil
	})
	switch {
	case err == nil:
		return nil
	case isServerError(err, errNoSuchTable):
		return ErrNotMigrated
	case !isServerError(err, errDuplicate):
		return fmt.Errorf("setting up partitions: %w", err)
	}
	stored, err := s.Partitions(ctx)
	if err != nil {
		return err
	}
	if stored != n {
		return fmt.Errorf("setting up partitions: the database was set up with %d partitions, %d were asked for; the number cannot change", stored, n)
	}
	return nil
}

// RegisterKeys registers the fingerprints of order_id keys by number and returns
// all that are registered. Where one of them differs from what is registered,
// nothing is: the caller compares and refuses to start.
func (s *Store) RegisterKeys(ctx context.Context, fingerprints map[int]string) (map[int]string, error) {
	var registered map[int]string
	register := func(tx *gorm.DB) (err error) {
		if registered, err = registeredKeys(tx); err != nil {
			return err
		}
		for number, fingerprint := range fingerprints {
			if have, ok := registered[number]; ok && have != fingerprint {
				return nil
			}
		}
		for _, number := range slices.Sorted(maps.Keys(fingerprints)) {
			if _, ok := registered[number]; ok {
				continue
			}
			err := tx.Exec(sqlAddSetting, settingKeyPrefix+strconv.Itoa(number), fingerprints[number]).Error
			if err != nil {
				return err
			}
			registered[number] = fingerprints[number]
		}
		return nil
	}
	err := s.inTx(ctx, register)
	if isServerError(err, errDuplicate) {
		// Another process registered meanwhile. Rows never change: once more is enough.
		err = s.inTx(ctx, register)
	}
	if isServerError(err, errNoSuchTable) {
		return nil, ErrNotMigrated
	}
	if err != nil {
		return nil, fmt.Errorf("registering order_id keys: %w", err)
	}
	return registered, nil
}

func registeredKeys(db *gorm.DB) (map[int]string, error) {
	var rows []struct{ Name, Value string }
	if err := db.Raw(sqlSettings, strings.ReplaceAll(settingKeyPrefix, "_", `\_`)+"%").Scan(&rows).Error; err != nil {
		return nil, err
	}
	keys := make(map[int]string, len(rows))
	for _, row := range rows {
		number, err := strconv.Atoi(strings.TrimPrefix(row.Name, settingKeyPrefix))
		if err != nil {
			return nil, fmt.Errorf("setting %q: not a key number", row.Name)
		}
		keys[number] = row.Value
	}
	return keys, nil
}

// Partition returns the row of partition p.
func (s *Store) Partition(ctx context.Context, p int) (Partition, error) {
	var rows []Partition
	if err := s.read(ctx).Raw(sqlPartition, p).Scan(&rows).Error; err != nil {
		if isServerError(err, errNoSuchTable) {
			return Partition{}, ErrNotMigrated
		}
		return Partition{}, fmt.Errorf("reading partition %d: %w", p, err)
	}
	if len(rows) == 0 {
		return Partition{}, fmt.Errorf("reading partition %d: there is no such partition", p)
	}
	return rows[0], nil
}

// MarkOpened records that epoch is about to be open in partition p, so that the
// ledger is never again created from nothing. It is ErrEpochMoved where the
// partition has another epoch by now. Again is harmless.
func (s *Store) MarkOpened(ctx context.Context, p int, epoch int64) error {
	res := s.read(ctx).Exec(sqlMarkOpened, epoch, p, epoch)
	if res.Error != nil {
		return fmt.Errorf("marking partition %d as opened: %w", p, res.Error)
	}
	if res.RowsAffected != 1 {
		return fmt.Errorf("marking partition %d as opened in epoch %d: %w", p, epoch, ErrEpochMoved)
	}
	return nil
}
