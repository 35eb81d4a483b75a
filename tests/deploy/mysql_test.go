package deploy_test

import (
	"context"
	"database/sql"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
)

// The names of mysql.cnf under which the running server shows something else.
var shownAs = map[string]string{"default_time_zone": "time_zone", "transaction_isolation": "tx_isolation"}

// Settings that only say how large a server is; a test's is small.
var sizes = []string{"--innodb-buffer-pool-size=64M", "--loose-innodb-log-file-size=48M", "--loose-innodb-redo-log-capacity=48M"}

// startDatabase starts a real server with the settings that are deployed. One
// that it does not know ends it at the start.
func startDatabase(t testing.TB) (*devstack.Database, map[string]string) {
	t.Helper()
	settings := settingsOf(t, "deploy/mysql.cnf", "=")
	if !devstack.TestBinaries(t).MariaDB {
		// A fresh MySQL knows its administrator by the name of localhost only.
		delete(settings, "skip_name_resolve")
	}
	var args []string
	for name, value := range settings {
		args = append(args, "--"+name+"="+strings.Trim(value, "'"))
	}
	return devstack.TestDatabaseServer(t, devstack.DatabaseOptions{Args: append(args, sizes...)}), settings
}

func openDatabase(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func TestMySQLConf_IsWhatTheServerRunsWith(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	server, settings := startDatabase(t)
	rows, err := openDatabase(t, server.DSN("")).QueryContext(ctx, "SHOW GLOBAL VARIABLES")
	require.NoError(t, err)
	defer rows.Close()
	running := map[string]string{}
	for rows.Next() {
		var name, value string
		require.NoError(t, rows.Scan(&name, &value))
		running[name] = value
	}
	require.NoError(t, rows.Err())
	for name, want := range settings {
		if strings.HasSuffix(name, "_size") || strings.HasSuffix(name, "_capacity") {
			continue // a test's server is small
		}
		name, loose := strings.CutPrefix(name, "loose_")
		have, known := running[name]
		if !known {
			have, known = running[shownAs[name]]
		}
		if loose && !known {
			continue
		}
		require.True(t, known, "the server shows no %s", name)
		want = strings.Trim(want, "'")
		if n, isSize := strings.CutSuffix(want, "M"); isSize {
			mb, err := strconv.Atoi(n)
			require.NoError(t, err)
			want = strconv.Itoa(mb << 20)
		}
		// Lists have an order of the server's own.
		require.ElementsMatch(t, strings.Split(want, ","), strings.Split(have, ","), name)
	}
}

// apply runs a file of SQL as an administrator, through the script that is
// deployed: its mysql is one that hands the statements to the test.
func apply(t testing.TB, server *devstack.Database, secrets, file string) {
	t.Helper()
	env, args, stdin := fake(t, "mysql")
	out, code := run(t, append(env, "SECRETS_DIR="+secrets, "MYSQL_HOST=db"), "sh", path(t, "deploy/mysql-apply.sh"), file)
	require.Zero(t, code, out)
	require.Regexp(t, `^--defaults-extra-file=\S+\n--host=db\n$`, content(t, args))
	text := content(t, stdin)
	require.NotContains(t, text, "@MIGRATOR_PASSWORD@")
	require.NotContains(t, text, "@WRITER_PASSWORD@")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := openDatabase(t, server.DSN("")+"?multiStatements=true").ExecContext(ctx, text)
	require.NoError(t, err)
}

// dsnFile is a DSN of the secrets, for a server that is elsewhere.
func dsnFile(t testing.TB, server *devstack.Database, secrets, user string) string {
	t.Helper()
	dsn := strings.TrimSpace(content(t, filepath.Join(secrets, user+"_dsn")))
	require.Contains(t, dsn, "@tcp(mysql:3306)/seckill")
	file := filepath.Join(t.TempDir(), user+"_dsn")
	require.NoError(t, os.WriteFile(file, []byte(strings.Replace(dsn, "mysql:3306", server.Addr(), 1)+"\n"), 0o600))
	return file
}

func openAs(t testing.TB, server *devstack.Database, secrets, user string) *sql.DB {
	t.Helper()
	return openDatabase(t, strings.TrimSpace(content(t, dsnFile(t, server, secrets, user)))+"?parseTime=true")
}

func TestDatabaseUsers_MigratorMigratesAndWriterCannot(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	server, _ := startDatabase(t)
	secrets := makeSecrets(t)
	apply(t, server, secrets, "users.sql")
	apply(t, server, secrets, "users.sql") // as often as one likes

	writer := openAs(t, server, secrets, "writer")
	var count int
	require.Error(t, writer.QueryRowContext(ctx, "SELECT COUNT(*) FROM settings").Scan(&count), "before the grants")

	migrator := openAs(t, server, secrets, "migrator")
	require.NoError(t, migrations.Up(ctx, migrator, slog.New(slog.DiscardHandler)))
	apply(t, server, secrets, "grants.sql")
	apply(t, server, secrets, "grants.sql")

	require.NoError(t, writer.QueryRowContext(ctx, "SELECT COUNT(*) FROM settings").Scan(&count))
	for _, allowed := range []string{
		"UPDATE order_outcomes SET kind = 'CONFLICT', standing_epoch = 1, standing_seq = 1, reason = '', applied_at = NULL WHERE seq = 0",
		"UPDATE order_outcomes SET tries = tries + 1, last_seen_at = CURRENT_TIMESTAMP(3) WHERE seq = 0",
		"UPDATE dead_entries SET state = 'CANCELLED', resolved_at = CURRENT_TIMESTAMP(3) WHERE epoch = 0",
		"DELETE FROM order_outcomes WHERE seq = 0", "DELETE FROM ledger_updates WHERE seq = 0",
	} {
		_, err := writer.ExecContext(ctx, allowed)
		require.NoError(t, err, allowed)
	}
	for _, refused := range []string{
		"UPDATE vouchers SET total = 1", "UPDATE vouchers SET id = 1", "UPDATE vouchers SET begin_at = end_at", "DELETE FROM vouchers",
		"UPDATE orders SET user_id = 1", "DELETE FROM orders", "TRUNCATE TABLE orders", "REPLACE INTO settings (name, value) VALUES ('a', 'b')",
		"UPDATE order_outcomes SET user_id = 1", "UPDATE order_outcomes SET raw = ''", "UPDATE order_outcomes SET first_seen_at = NOW()",
		"UPDATE dead_entries SET raw = ''", "UPDATE dead_entries SET reason = ''", "DELETE FROM dead_entries",
		"UPDATE ledger_updates SET verdict = 'CANCELLED'", "UPDATE operator_actions SET operator = 'nobody'", "DELETE FROM operator_actions",
		"TRUNCATE TABLE operator_actions",
		"INSERT INTO partitions (id, epoch) VALUES (99, 1)", "UPDATE partitions SET epoch = 9", "DELETE FROM partitions",
		"UPDATE settings SET value = '1'", "DELETE FROM settings",
		"CREATE TABLE t (a INT)", "DROP TABLE orders", "ALTER TABLE orders DROP KEY orders_user_voucher", "CREATE INDEX i ON orders (reference)",
		"SELECT * FROM mysql.user", "SELECT 1 INTO OUTFILE '/tmp/seckill-never'", "SET GLOBAL innodb_flush_log_at_trx_commit = 2",
		"CREATE USER someone", "GRANT ALL ON *.* TO someone", "SHUTDOWN",
	} {
		_, err := writer.ExecContext(ctx, refused)
		var denied *mysql.MySQLError
		require.ErrorAs(t, err, &denied, refused)
		require.Contains(t, []uint16{1044, 1045, 1142, 1143, 1227}, denied.Number, "%s: %v", refused, err)
	}
}

func TestMySQLApply_RefusesAPasswordThatWouldEndItsString(t *testing.T) {
	for _, bad := range []string{"", "a'b", `a\b`, "a b", "a/b", "a&b"} {
		secrets := makeSecrets(t)
		file := filepath.Join(secrets, "mysql_writer_password")
		require.NoError(t, os.Remove(file))
		require.NoError(t, os.WriteFile(file, []byte(bad+"\n"), 0o600))
		env, _, stdin := fake(t, "mysql")
		out, code := run(t, append(env, "SECRETS_DIR="+secrets), "sh", path(t, "deploy/mysql-apply.sh"), "users.sql")
		require.NotZero(t, code, "took %q", bad)
		require.Contains(t, out, "mysql_writer_password")
		require.NoFileExists(t, stdin)
	}
}

func TestSecrets_StayWhenTheyAreThere(t *testing.T) {
	dir := makeSecrets(t)
	names, err := os.ReadDir(dir)
	require.NoError(t, err)
	before := map[string]string{}
	for _, name := range names {
		before[name.Name()] = content(t, filepath.Join(dir, name.Name()))
		require.NotEmpty(t, strings.TrimSpace(before[name.Name()]), name.Name())
	}
	require.Len(t, before, 8)
	require.NotEqual(t, before["mysql_writer_password"], before["mysql_migrator_password"])
	out, code := run(t, []string{"SECRETS_DIR=" + dir}, "sh", path(t, "deploy/secrets.sh"))
	require.Zero(t, code, out)
	require.Empty(t, out)
	for name, text := range before {
		require.Equal(t, text, content(t, filepath.Join(dir, name)), name)
	}
	info, err := os.Stat(dir)
	require.NoError(t, err)
	require.Zero(t, info.Mode().Perm()&0o077, "the folder is for its owner alone")
}
