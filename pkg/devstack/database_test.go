package devstack

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"
)

func openDatabase(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func TestDatabase_RunsWithDurableCommitsAndWholeRollback(t *testing.T) {
	db := openDatabase(t, TestDatabase(t))
	var flush, logBin, rollback, zone, charset string
	require.NoError(t, db.QueryRow("SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@innodb_rollback_on_timeout, @@time_zone, @@character_set_database").
		Scan(&flush, &logBin, &rollback, &zone, &charset))
	require.Equal(t, []string{"1", "0", "1", "+00:00", "utf8mb4"}, []string{flush, logBin, rollback, zone, charset})
}

func TestDatabase_EachTestGetsItsOwn(t *testing.T) {
	first, second := openDatabase(t, TestDatabase(t)), openDatabase(t, TestDatabase(t))
	_, err := first.Exec("CREATE TABLE x (a INT)")
	require.NoError(t, err)
	_, err = second.Exec("CREATE TABLE x (a INT)")
	require.NoError(t, err)
}

func TestDatabaseServer_KeepsCommitsOverKillAndPauseHangs(t *testing.T) {
	d := TestDatabaseServer(t, DatabaseOptions{Args: []string{"--max-connections=17"}})
	require.NoError(t, d.CreateDatabase(t.Context(), "shop"))
	require.Error(t, d.CreateDatabase(t.Context(), "shop"))
	require.Error(t, d.CreateDatabase(t.Context(), "x; DROP DATABASE shop"))
	db := openDatabase(t, d.DSN("shop"))
	_, err := db.Exec("CREATE TABLE x (a INT)")
	require.NoError(t, err)
	_, err = db.Exec("INSERT INTO x VALUES (7)")
	require.NoError(t, err)
	d.Kill()
	require.Error(t, db.Ping())
	require.NoError(t, d.Restart(t.Context()))
	var a, connections int
	require.NoError(t, db.QueryRow("SELECT a, @@max_connections FROM x").Scan(&a, &connections))
	require.Equal(t, []int{7, 17}, []int{a, connections})

	require.NoError(t, d.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, db.PingContext(ctx), context.DeadlineExceeded)
	require.NoError(t, d.Resume())
	eventually(t, func() bool { return db.Ping() == nil }, "a resumed server answers")

	require.NoError(t, d.Stop())
	require.NoError(t, d.Restart(t.Context(), "--read-only=ON"))
	var readOnly int
	require.NoError(t, db.QueryRow("SELECT @@read_only").Scan(&readOnly))
	require.Equal(t, 1, readOnly)
}

func TestDatabase_StartsInAFolderWithALongPath(t *testing.T) {
	// Longer than the path of a Unix socket may be.
	d := TestDatabaseServer(t, DatabaseOptions{Dir: filepath.Join(t.TempDir(), strings.Repeat("long", 40), "data")})
	require.NoError(t, openDatabase(t, d.DSN("")).Ping())
}

type lines struct {
	sync.Mutex
	all []string
}

func (l *lines) Print(v ...any) {
	l.Lock()
	defer l.Unlock()
	l.all = append(l.all, fmt.Sprint(v...))
}

func TestDatabase_ProbingAServerThatHangsUpPrintsNothing(t *testing.T) {
	var printed lines
	require.NoError(t, mysql.SetLogger(&printed))
	t.Cleanup(func() { require.NoError(t, mysql.SetLogger(log.New(os.Stderr, "[mysql] ", log.Ldate|log.Ltime))) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	require.Error(t, (&Database{dir: t.TempDir()}).answers(t.Context(), port))
	require.Empty(t, printed.all)
	// The same without the silence, so that this test can fail.
	require.Error(t, openDatabase(t, dsn(port, "")).Ping())
	require.NotEmpty(t, printed.all)
}
