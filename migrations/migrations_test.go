package migrations_test

import (
	"context"
	"database/sql"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

func TestUp_DownToNothingAndUpAgainIsTheSameSchema(t *testing.T) {
	ctx, db := open(t)
	log := slog.New(slog.DiscardHandler)

	version, latest, err := migrations.Current(ctx, db)
	require.NoError(t, err)
	require.Zero(t, version, "an empty database is at no version")
	require.Equal(t, migrations.Latest, latest)

	require.NoError(t, migrations.Up(ctx, db, log))
	first := schema(t, ctx, db)
	require.Subset(t, keys(first), []string{
		"settings", "partitions", "vouchers", "orders", "order_outcomes", "dead_entries", "operator_actions", "ledger_updates",
	})
	version, err = migrations.Version(ctx, db)
	require.NoError(t, err)
	require.Equal(t, migrations.Latest, version, "Latest is the newest file")

	require.NoError(t, migrations.Down(ctx, db, log))
	version, err = migrations.Version(ctx, db)
	require.NoError(t, err)
	require.Zero(t, version)
	for table := range schema(t, ctx, db) {
		require.True(t, strings.HasPrefix(table, "goose_"), "%s is left over", table)
	}

	require.NoError(t, migrations.Up(ctx, db, log))
	require.Equal(t, first, schema(t, ctx, db))
	require.NoError(t, migrations.Up(ctx, db, log), "once more is nothing to do")
}

func TestUp_FourAtOnceOnAnEmptyDatabase(t *testing.T) {
	ctx, db := open(t)
	var g errgroup.Group
	for range 4 {
		g.Go(func() error { return migrations.Up(ctx, db, slog.New(slog.DiscardHandler)) })
	}
	require.NoError(t, g.Wait())

	var applied, distinct int
	require.NoError(t, db.QueryRow("SELECT COUNT(*), COUNT(DISTINCT version_id) FROM goose_db_version WHERE version_id > 0").Scan(&applied, &distinct))
	require.EqualValues(t, migrations.Latest, applied)
	require.EqualValues(t, migrations.Latest, distinct)
}

func TestSchema_RefusesStockThatDoesNotAddUp(t *testing.T) {
	ctx, db := migrated(t)
	insertVoucher(t, ctx, db, 1)
	for name, update := range map[string]string{
		"stock below zero":        "UPDATE vouchers SET stock = stock - 11, sold = sold + 11 WHERE id = 1",
		"sold below zero":         "UPDATE vouchers SET stock = stock + 1, sold = sold - 1 WHERE id = 1",
		"stock without sold":      "UPDATE vouchers SET stock = stock - 1 WHERE id = 1",
		"total of 2^40":           "UPDATE vouchers SET total = 1099511627776, stock = 1099511627776 WHERE id = 1",
		"end before begin":        "UPDATE vouchers SET end_at = begin_at WHERE id = 1",
		"unknown state":           "UPDATE vouchers SET state = 'open' WHERE id = 1",
		"open beyond its epoch":   "INSERT INTO partitions (id, epoch, open_epoch) VALUES (0, 1, 2)",
		"outcome of unknown kind": "INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (1, 1, 1, 1, 'SOLD')",
		"entry of unknown state":  "INSERT INTO dead_entries (partition_id, epoch, entry_id, units, state) VALUES (0, 1, '1-1', 0, 'LOST')",
		"update to what is held":  "INSERT INTO ledger_updates (voucher_id, epoch, seq, partition_id, user_id, verdict) VALUES (1, 1, 1, 0, 1, 'HELD')",
	} {
		_, err := db.ExecContext(ctx, update)
		var e *mysql.MySQLError
		require.ErrorAs(t, err, &e, name)
		require.Contains(t, []uint16{3819, 4025}, e.Number, "%s: %v", name, err)
	}
	_, err := db.ExecContext(ctx, "UPDATE vouchers SET stock = stock - 10, sold = sold + 10 WHERE id = 1")
	require.NoError(t, err, "the last unit can be taken")
}

func TestSchema_ComparesIdentifiersByBytes(t *testing.T) {
	ctx, db := migrated(t)
	for _, name := range []string{"order_key_a", "order_key_A", "order_key_ä", "order_key_å"} {
		_, err := db.ExecContext(ctx, "INSERT INTO settings (name, value) VALUES (?, ?)", name, name)
		require.NoError(t, err, name)
	}
	rows, err := db.QueryContext(ctx, `
SELECT CONCAT(TABLE_NAME, '.', COLUMN_NAME), COLLATION_NAME FROM information_schema.COLUMNS
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME NOT LIKE 'goose%' AND COLLATION_NAME IS NOT NULL`)
	require.NoError(t, err)
	defer rows.Close()
	n := 0
	for rows.Next() {
		var column, collation string
		require.NoError(t, rows.Scan(&column, &collation))
		require.True(t, strings.HasSuffix(collation, "_bin"), "%s is %s", column, collation)
		n++
	}
	require.NoError(t, rows.Err())
	require.Greater(t, n, 5)
}

func TestSchema_KeepsMillisecondsEverywhere(t *testing.T) {
	ctx, db := migrated(t)
	rows, err := db.QueryContext(ctx, `
SELECT CONCAT(TABLE_NAME, '.', COLUMN_NAME), DATA_TYPE, DATETIME_PRECISION FROM information_schema.COLUMNS
WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME NOT LIKE 'goose%' AND DATETIME_PRECISION IS NOT NULL`)
	require.NoError(t, err)
	defer rows.Close()
	n := 0
	for rows.Next() {
		var column, kind string
		var precision int
		require.NoError(t, rows.Scan(&column, &kind, &precision))
		require.Equal(t, "datetime", kind, column)
		require.Equal(t, 3, precision, column)
		n++
	}
	require.NoError(t, rows.Err())
	require.Greater(t, n, 8)
}

func TestFiles_HoldOneStatementEach(t *testing.T) {
	comment := regexp.MustCompile(`(?m)^--.*$`)
	entries, err := os.ReadDir("sql")
	require.NoError(t, err)
	require.Len(t, entries, int(migrations.Latest))
	for _, entry := range entries {
		text, err := os.ReadFile("sql/" + entry.Name())
		require.NoError(t, err)
		up, down, ok := strings.Cut(string(text), "-- +goose Down")
		require.True(t, ok, entry.Name())
		require.Equal(t, 1, strings.Count(comment.ReplaceAllString(up, ""), ";"), "%s, up", entry.Name())
		require.Equal(t, 1, strings.Count(comment.ReplaceAllString(down, ""), ";"), "%s, down", entry.Name())
	}
}

func open(t *testing.T) (context.Context, *sql.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cfg, err := mysql.ParseDSN(devstack.TestDatabase(t))
	require.NoError(t, err)
	cfg.ParseTime = true
	c, err := mysql.NewConnector(cfg)
	require.NoError(t, err)
	db := sql.OpenDB(c)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return ctx, db
}

func migrated(t *testing.T) (context.Context, *sql.DB) {
	t.Helper()
	ctx, db := open(t)
	require.NoError(t, migrations.Up(ctx, db, slog.New(slog.DiscardHandler)))
	return ctx, db
}

func insertVoucher(t *testing.T, ctx context.Context, db *sql.DB, id int64) {
	t.Helper()
	_, err := db.ExecContext(ctx, `
INSERT INTO vouchers (id, partition_id, total, stock, epoch, state, begin_at, end_at)
VALUES (?, 0, 10, 10, 1, 'DRAFT', '2030-01-01', '2030-01-02')`, id)
	require.NoError(t, err)
}

// schema returns SHOW CREATE TABLE of every table.
func schema(t *testing.T, ctx context.Context, db *sql.DB) map[string]string {
	t.Helper()
	rows, err := db.QueryContext(ctx, "SHOW TABLES")
	require.NoError(t, err)
	defer rows.Close()
	var tables []string
	for rows.Next() {
		var table string
		require.NoError(t, rows.Scan(&table))
		tables = append(tables, table)
	}
	require.NoError(t, rows.Err())
	autoIncrement := regexp.MustCompile(` AUTO_INCREMENT=\d+`)
	all := make(map[string]string)
	for _, table := range tables {
		var name, create string
		require.NoError(t, db.QueryRowContext(ctx, "SHOW CREATE TABLE `"+table+"`").Scan(&name, &create))
		all[table] = autoIncrement.ReplaceAllString(create, "")
	}
	return all
}

func keys(m map[string]string) []string {
	var list []string
	for k := range m {
		list = append(list, k)
	}
	slices.Sort(list)
	return list
}
