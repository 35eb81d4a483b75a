package orderstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/seckill/seckill/migrations"
)

const (
	sqlColumns = `
SELECT TABLE_NAME AS table_name, COLUMN_NAME AS column_name, DATA_TYPE AS data_type,
       COALESCE(DATETIME_PRECISION, 0) AS time_precision, COALESCE(COLLATION_NAME, '') AS collation
FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE()`

	sqlKeys = `
SELECT TABLE_NAME AS table_name, INDEX_NAME AS index_name,
       GROUP_CONCAT(COLUMN_NAME ORDER BY SEQ_IN_INDEX) AS columns_named
FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = DATABASE() AND NON_UNIQUE = 0
GROUP BY TABLE_NAME, INDEX_NAME`

	sqlChecks = `
SELECT CONSTRAINT_NAME FROM information_schema.TABLE_CONSTRAINTS
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'vouchers' AND CONSTRAINT_TYPE = 'CHECK'`

	sqlEngines = `
SELECT TABLE_NAME FROM information_schema.TABLES
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ? AND ENGINE <> 'InnoDB'`

	sqlVariables = `
SHOW GLOBAL VARIABLES WHERE Variable_name IN (
  'innodb_flush_log_at_trx_commit', 'log_bin', 'sync_binlog', 'binlog_format',
  'innodb_rollback_on_timeout', 'innodb_doublewrite', 'read_only')`
)

// columnTypes are the tables and columns that this package reads and writes.
var columnTypes = map[string]map[string]string{
	"settings":   {"name": "varchar", "value": "varchar"},
	"partitions": {"id": "int", "epoch": "int", "open_epoch": "int"},
	"vouchers": {
		"id": "bigint", "partition_id": "int", "title": "varchar", "total": "bigint", "stock": "bigint", "sold": "bigint",
		"epoch": "int", "ledger_epoch": "int", "state": "varchar", "rev": "bigint", "applied_at": "datetime",
		"begin_at": "datetime", "end_at": "datetime", "created_at": "datetime", "updated_at": "datetime",
	},
	"orders": {
		"voucher_id": "bigint", "epoch": "int", "seq": "bigint", "user_id": "bigint", "reference": "varchar",
		"admitted_at": "datetime", "persisted_at": "datetime",
	},
	"order_outcomes": {
		"voucher_id": "bigint", "epoch": "int", "seq": "bigint", "user_id": "bigint", "kind": "varchar",
		"standing_epoch": "int", "standing_seq": "bigint", "reference": "varchar", "reason": "varchar", "entry_id": "varchar",
		"admitted_at": "datetime", "persisted_at": "datetime", "applied_at": "datetime",
		"raw": "mediumblob", "of_entry": "tinyint", "tries": "int", "first_seen_at": "datetime", "last_seen_at": "datetime",
	},
	"dead_entries": {
		"partition_id": "int", "epoch": "int", "entry_id": "varchar", "units": "int", "voucher_id": "bigint", "first_seq": "bigint",
		"raw": "mediumblob", "reason": "varchar", "first_seen_at": "datetime", "last_seen_at": "datetime", "tries": "int",
		"state": "varchar", "resolved_at": "datetime",
	},
	"operator_actions": {
		"id": "bigint", "at": "datetime", "operator": "varchar", "action": "varchar", "reason": "varchar", "target": "varchar",
		"result": "varchar", "detail": "varchar",
	},
	"ledger_updates": {
		"voucher_id": "bigint", "epoch": "int", "seq": "bigint", "partition_id": "int", "user_id": "bigint", "verdict": "varchar",
		"standing_epoch": "int", "standing_seq": "bigint", "created_at": "datetime",
	},
}

// uniqueKeys are the keys that the promises stand on, by table: the columns, and
// the name where a statement mentions it.
var uniqueKeys = []struct{ table, name, columns, why string }{
	{"settings", "PRIMARY", "name", "settings are written once"},
	{"partitions", "PRIMARY", "id", "a partition has one epoch"},
	{"vouchers", "PRIMARY", "id", "a voucher has one stock"},
	{"orders", "PRIMARY", "voucher_id,epoch,seq", "an order is its position"},
	{"orders", "orders_user_voucher", "user_id,voucher_id", "one order per user and voucher"},
	{"order_outcomes", "PRIMARY", "voucher_id,epoch,seq", "a position has one outcome"},
	{"dead_entries", "PRIMARY", "partition_id,epoch,entry_id", "an entry is one dead letter"},
	{"ledger_updates", "PRIMARY", "voucher_id,epoch,seq", "a decision reaches the ledger once"},
}

// requiredChecks are the CHECK constraints of vouchers.
var requiredChecks = []string{"vouchers_stock", "vouchers_sold"}

// CheckSchema refuses a database that is not what the promises stand on, and
// names everything that is missing. It is ErrNotMigrated where migrations are.
// A schema that is newer than this program passes if it still has all of it.
func (s *Store) CheckSchema(ctx context.Context) error {
	version, latest, err := migrations.Current(ctx, s.db)
	if err != nil {
		return err
	}
	if version < latest {
		return fmt.Errorf("%w (it is at version %d of %d)", ErrNotMigrated, version, latest)
	}
	faults, err := s.columnFaults(ctx)
	if err != nil {
		return err
	}
	more, err := s.keyFaults(ctx)
	if err != nil {
		return err
	}
	if faults = append(faults, more...); len(faults) > 0 {
		return errors.New("the database schema is not the one migrated: " + strings.Join(faults, "; "))
	}
	return nil
}

func (s *Store) columnFaults(ctx context.Context) (faults []string, err error) {
	var columns []struct {
		TableName, ColumnName, DataType, Collation string
		TimePrecision                              int
	}
	if err := s.read(ctx).Raw(sqlColumns).Scan(&columns).Error; err != nil {
		return nil, fmt.Errorf("reading the schema's columns: %w", err)
	}
	found := make(map[string]string)
	for _, c := range columns {
		name := c.TableName + "." + c.ColumnName
		found[name] = c.DataType
		if columnTypes[c.TableName][c.ColumnName] == "" {
			continue
		}
		if c.DataType == "datetime" && c.TimePrecision != 3 {
			faults = append(faults, name+" does not hold milliseconds")
		}
		if c.Collation != "" && !strings.HasSuffix(c.Collation, "_bin") {
			faults = append(faults, name+" does not compare by bytes")
		}
	}
	for _, table := range slices.Sorted(maps.Keys(columnTypes)) {
		for _, column := range slices.Sorted(maps.Keys(columnTypes[table])) {
			want, name := columnTypes[table][column], table+"."+column
			switch have := found[name]; have {
			case want:
			case "":
				faults = append(faults, "no column "+name)
			default:
				faults = append(faults, fmt.Sprintf("%s is %s instead of %s", name, have, want))
			}
		}
	}
	var other []string
	if err := s.read(ctx).Raw(sqlEngines, slices.Collect(maps.Keys(columnTypes))).Scan(&other).Error; err != nil {
		return nil, fmt.Errorf("reading the tables' engines: %w", err)
	}
	for _, table := range other {
		faults = append(faults, table+" is not an InnoDB table, so nothing in it is transactional")
	}
	return faults, nil
}

func (s *Store) keyFaults(ctx context.Context) (faults []string, err error) {
	var keys []struct{ TableName, IndexName, ColumnsNamed string }
	if err := s.read(ctx).Raw(sqlKeys).Scan(&keys).Error; err != nil {
		return nil, fmt.Errorf("reading the schema's keys: %w", err)
	}
	for _, want := range uniqueKeys {
		ok := false
		for _, k := range keys {
			ok = ok || k.TableName == want.table && k.IndexName == want.name && k.ColumnsNamed == want.columns
		}
		if !ok {
			faults = append(faults, fmt.Sprintf("no unique key %s (%s) on %s: %s", want.name, want.columns, want.table, want.why))
		}
	}
	var checks []string
	if err := s.read(ctx).Raw(sqlChecks).Scan(&checks).Error; err != nil {
		return nil, fmt.Errorf("reading the schema's constraints: %w", err)
	}
	for _, want := range requiredChecks {
		if !slices.Contains(checks, want) {
			faults = append(faults, "no CHECK "+want+" on vouchers: the last guard against overselling")
		}
	}
	return faults, nil
}

// CheckServer refuses a server whose settings let a committed order be lost, and
// warns of those that are only unwise. It asks for the running values.
func (s *Store) CheckServer(ctx context.Context) (warnings []string, err error) {
	var rows []struct{ VariableName, Value string }
	if err := s.read(ctx).Raw(sqlVariables).Scan(&rows).Error; err != nil {
		return nil, fmt.Errorf("reading the server's settings: %w", err)
	}
	value := make(map[string]string, len(rows))
	for _, row := range rows {
		value[strings.ToLower(row.VariableName)] = strings.ToUpper(row.Value)
	}
	var faults []string
	if v := value["innodb_flush_log_at_trx_commit"]; v != "1" {
		faults = append(faults, "innodb_flush_log_at_trx_commit is "+v+" and must be 1: a crash would lose committed orders")
	}
	if value["log_bin"] == "ON" {
		if v := value["sync_binlog"]; v != "1" {
			faults = append(faults, "sync_binlog is "+v+" and must be 1 while log_bin is on: a crash would lose committed orders")
		}
		if value["binlog_format"] == "STATEMENT" {
			faults = append(faults, "binlog_format is STATEMENT, which refuses READ COMMITTED transactions: set ROW")
		}
	}
	if value["innodb_rollback_on_timeout"] != "ON" {
		warnings = append(warnings, "innodb_rollback_on_timeout is off; the writer rolls back by itself, other clients may not")
	}
	if value["innodb_doublewrite"] == "OFF" {
		warnings = append(warnings, "innodb_doublewrite is off; a power loss may tear a page")
	}
	if v := value["read_only"]; v != "" && v != "OFF" {
		warnings = append(warnings, "read_only is on; nothing can be persisted until it is off")
	}
	if len(faults) > 0 {
		return warnings, errors.New("the database server is not safe to use: " + strings.Join(faults, "; "))
	}
	return warnings, nil
}
