package orderstore_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

func TestOpen_NeitherConnectsNorShowsTheDSN(t *testing.T) {
	for _, dsn := range []string{
		"root:hunter2@tcp(127.0.0.1:1)",
		"root:hunter2@tcp(127.0.0.1:1)/",
		"root:hunter2@hunter2net/db",
		"root:hunter2@tcp(127.0.0.1:1)/db?tls=hunter2&parseTime=hunter2",
		"hunter2",
	} {
		_, err := orderstore.Open(t.Context(), orderstore.Options{DSN: dsn})
		require.Error(t, err, dsn)
		require.NotContains(t, err.Error(), "hunter2")
	}
	s, err := orderstore.Open(t.Context(), orderstore.Options{DSN: "root:hunter2@tcp(127.0.0.1:1)/db"})
	require.NoError(t, err, "a server that is down is for Ping to tell")
	defer s.Close()
	err = s.Ping(t.Context())
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")
	_, err = orderstore.Open(t.Context(), orderstore.Options{DSN: "root@tcp(127.0.0.1:1)/db", MaxConns: 1})
	require.ErrorContains(t, err, "too few")
}

func TestOpen_SessionsHaveTheSettingsThatCorrectnessDependsOn(t *testing.T) {
	f := newFixture(t)
	s := f.open(f.dsn+"?innodb_lock_wait_timeout=50&clientFoundRows=false&sql_mode=''&time_zone='%2B05:00'", 1500*time.Millisecond)
	var zone, mode, isolation, collation string
	var wait int
	require.NoError(t, s.DB().QueryRow(`SELECT @@time_zone, @@sql_mode, @@innodb_lock_wait_timeout, @@collation_connection`).Scan(&zone, &mode, &wait, &collation))
	require.Equal(t, "+00:00", zone)
	require.Contains(t, mode, "STRICT_TRANS_TABLES")
	require.Equal(t, 2, wait, "rounded up")
	require.Equal(t, "utf8mb4_bin", collation)
	var name string // tx_isolation in MariaDB, transaction_isolation in MySQL
	require.NoError(t, s.DB().QueryRow(`SHOW SESSION VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')`).Scan(&name, &isolation))
	require.Equal(t, "READ-COMMITTED", isolation)
	res, err := s.DB().Exec("UPDATE partitions SET epoch = epoch WHERE id = 0")
	require.NoError(t, err)
	n, err := res.RowsAffected()
	require.NoError(t, err)
	require.EqualValues(t, 1, n, "matched, not changed")
}

func TestCheckSchema_NamesWhatIsMissing(t *testing.T) {
	dsn := devstack.TestDatabase(t)
	s, err := orderstore.Open(t.Context(), orderstore.Options{DSN: dsn})
	require.NoError(t, err)
	defer s.Close()
	require.ErrorIs(t, s.CheckSchema(t.Context()), orderstore.ErrNotMigrated)
	_, err = s.Partitions(t.Context())
	require.ErrorIs(t, err, orderstore.ErrNotMigrated)
	_, err = s.Partition(t.Context(), 0)
	require.ErrorIs(t, err, orderstore.ErrNotMigrated)
	require.ErrorIs(t, s.InitPartitions(t.Context(), 8), orderstore.ErrNotMigrated)
	_, err = s.Voucher(t.Context(), 1)
	require.ErrorIs(t, err, orderstore.ErrNotMigrated)
	require.NoError(t, migrations.Up(t.Context(), s.DB(), quiet))
	_, err = s.Partitions(t.Context())
	require.ErrorIs(t, err, orderstore.ErrNotMigrated, "migrated, but no partitions")
	require.NoError(t, s.CheckSchema(t.Context()))

	for name, c := range map[string]struct{ spoil, says string }{
		"the unique index":   {"ALTER TABLE orders DROP INDEX orders_user_voucher", "one order per user and voucher"},
		"a weaker index":     {"ALTER TABLE orders DROP INDEX orders_user_voucher, ADD INDEX orders_user_voucher (user_id, voucher_id)", "one order per user and voucher"},
		"a wider index":      {"ALTER TABLE orders DROP INDEX orders_user_voucher, ADD UNIQUE INDEX orders_user_voucher (user_id, voucher_id, seq)", "one order per user and voucher"},
		"the primary key":    {"ALTER TABLE orders DROP PRIMARY KEY", "an order is its position"},
		"the check":          {"ALTER TABLE vouchers DROP CONSTRAINT vouchers_stock", "vouchers_stock"},
		"a column":           {"ALTER TABLE order_outcomes DROP COLUMN applied_at", "no column order_outcomes.applied_at"},
		"a table":            {"DROP TABLE settings", "no column settings.name"},
		"milliseconds":       {"ALTER TABLE orders MODIFY admitted_at DATETIME NOT NULL", "orders.admitted_at does not hold milliseconds"},
		"a type":             {"ALTER TABLE vouchers MODIFY rev INT NOT NULL", "vouchers.rev is int instead of bigint"},
		"a binary collation": {"ALTER TABLE orders MODIFY reference VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci NOT NULL", "orders.reference does not compare by bytes"},
		"transactions":       {"ALTER TABLE order_outcomes ENGINE = MyISAM", "order_outcomes is not an InnoDB table"},
	} {
		f := newFixture(t)
		require.NoError(t, f.CheckSchema(f.ctx), name)
		f.exec(c.spoil)
		require.ErrorContains(t, f.CheckSchema(f.ctx), c.says, name)
	}
	f := newFixture(t)
	f.exec("DELETE FROM goose_db_version WHERE version_id = ?", migrations.Latest)
	require.ErrorIs(t, f.CheckSchema(f.ctx), orderstore.ErrNotMigrated)
}

func TestCheckServer_RefusesASettingThatLosesOrders(t *testing.T) {
	server := devstack.TestDatabaseServer(t)
	require.NoError(t, server.CreateDatabase(t.Context(), "settings"))
	f := fixtureAt(t, server.DSN("settings"))
	warnings, err := f.CheckServer(f.ctx)
	require.NoError(t, err)
	require.Empty(t, warnings)
	f.exec("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
	_, err = f.CheckServer(f.ctx)
	require.ErrorContains(t, err, "innodb_flush_log_at_trx_commit is 2")
	f.exec("SET GLOBAL innodb_flush_log_at_trx_commit = 1")

	require.NoError(t, server.Stop())
	require.NoError(t, server.Restart(f.ctx, "--log-bin", "--sync-binlog=0", "--binlog-format=STATEMENT", "--innodb-rollback-on-timeout=OFF"))
	require.Eventually(t, func() bool { return f.Ping(f.ctx) == nil }, 30*time.Second, 50*time.Millisecond)
	warnings, err = f.CheckServer(f.ctx)
	if strings.EqualFold(f.variable("log_bin"), "ON") {
		require.ErrorContains(t, err, "sync_binlog is 0")
		require.ErrorContains(t, err, "STATEMENT")
	} else {
		t.Log("the server did not take --log-bin")
	}
	require.Contains(t, fmt.Sprint(warnings), "innodb_rollback_on_timeout")
}

func (f *fixture) variable(name string) string {
	var value string
	require.NoError(f.t, f.sql.QueryRow("SELECT @@"+name).Scan(&value))
	if value == "1" {
		return "ON"
	}
	return value
}

func TestPartitions_AreSetUpOnceForEver(t *testing.T) {
	dsn := devstack.TestDatabase(t)
	s, err := orderstore.Open(t.Context(), orderstore.Options{DSN: dsn})
	require.NoError(t, err)
	defer s.Close()
	ctx := t.Context()
	require.NoError(t, migrations.Up(ctx, s.DB(), quiet))
	require.Error(t, s.InitPartitions(ctx, 0))
	require.Error(t, s.InitPartitions(ctx, 1<<20))
	var g errgroup.Group
	for range 4 {
		g.Go(func() error { return s.InitPartitions(ctx, 8) })
	}
	require.NoError(t, g.Wait())
	n, err := s.Partitions(ctx)
	require.NoError(t, err)
	require.Equal(t, 8, n)
	err = s.InitPartitions(ctx, 4)
	require.ErrorContains(t, err, "8 partitions")
	require.ErrorContains(t, err, "4 were asked for")
	for p := range 8 {
		row, err := s.Partition(ctx, p)
		require.NoError(t, err)
		require.Equal(t, orderstore.Partition{ID: p, Epoch: 1, OpenEpoch: 0}, row)
	}
	_, err = s.Partition(ctx, 8)
	require.Error(t, err)

	require.ErrorIs(t, s.MarkOpened(ctx, 3, 2), orderstore.ErrEpochMoved)
	require.NoError(t, s.MarkOpened(ctx, 3, 1))
	require.NoError(t, s.MarkOpened(ctx, 3, 1), "again")
	row, err := s.Partition(ctx, 3)
	require.NoError(t, err)
	require.EqualValues(t, 1, row.OpenEpoch)
}

func TestRegisterKeys_FirstOneStands(t *testing.T) {
	f := newFixture(t)
	f.exec("INSERT INTO settings (name, value) VALUES ('orderXkeyX9', 'not a key')")
	got, err := f.RegisterKeys(f.ctx, nil)
	require.NoError(t, err)
	require.Empty(t, got)
	var g errgroup.Group
	for range 4 {
		g.Go(func() error {
			_, err := f.RegisterKeys(f.ctx, map[int]string{0: "aa", 1: "bb"})
			return err
		})
	}
	require.NoError(t, g.Wait())
	got, err = f.RegisterKeys(f.ctx, map[int]string{1: "other", 2: "cc"})
	require.NoError(t, err)
	require.Equal(t, map[int]string{0: "aa", 1: "bb"}, got, "a file with a wrong key registers nothing")
	got, err = f.RegisterKeys(f.ctx, map[int]string{2: "cc"})
	require.NoError(t, err)
	require.Equal(t, map[int]string{0: "aa", 1: "bb", 2: "cc"}, got)
}

func TestLock_OneSessionAtATime(t *testing.T) {
	f := newFixture(t)
	other := f.open(f.dsn, 0)
	l, ok, err := f.TryLock(f.ctx, "partition-0")
	require.NoError(t, err)
	require.True(t, ok)
	require.NoError(t, l.Ping(f.ctx))
	_, ok, err = other.TryLock(f.ctx, "partition-0")
	require.NoError(t, err)
	require.False(t, ok)
	_, ok, err = f.TryLock(f.ctx, "partition-0")
	require.NoError(t, err)
	require.False(t, ok, "nor does the same process get it twice")

	long := strings.Repeat("partition-", 20)
	l2, ok, err := other.TryLock(f.ctx, long)
	require.NoError(t, err)
	require.True(t, ok, "another name, longer than the server takes")
	require.NoError(t, l2.Ping(f.ctx))
	l2.Release(f.ctx)

	elsewhere := newFixture(t)
	l3, ok, err := elsewhere.TryLock(f.ctx, "partition-0")
	require.NoError(t, err)
	require.True(t, ok, "another database on the same server")
	l3.Release(f.ctx)

	l.Release(f.ctx)
	l4, ok, err := other.TryLock(f.ctx, "partition-0")
	require.NoError(t, err)
	require.True(t, ok)
	require.ErrorIs(t, l.Ping(f.ctx), orderstore.ErrLockLost)
	l4.Release(f.ctx)
}

func TestLock_KilledSessionLosesIt(t *testing.T) {
	f := newFixture(t)
	l, ok, err := f.TryLock(f.ctx, "partition-0")
	require.NoError(t, err)
	require.True(t, ok)
	// The holder's is the newest session of this database.
	holder := f.number("SELECT MAX(ID) FROM information_schema.PROCESSLIST WHERE DB = DATABASE()")
	f.exec(fmt.Sprintf("KILL %d", holder))
	require.ErrorIs(t, l.Ping(f.ctx), orderstore.ErrLockLost)
	var again *orderstore.Lock
	require.Eventually(t, func() bool {
		again, ok, err = f.TryLock(f.ctx, "partition-0")
		return err == nil && ok
	}, 20*time.Second, 20*time.Millisecond)
	again.Release(f.ctx)
	l.Release(f.ctx)
}

func TestBooks_ReadCountAndName(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	_, err := f.Read(f.ctx, 8, false)
	require.ErrorIs(t, err, orderstore.ErrVoucherNotFound)
	_, err = f.Read(f.ctx, 8, true)
	require.ErrorIs(t, err, orderstore.ErrVoucherNotFound)
	top, err := f.MaxSeq(f.ctx, 7, 1)
	require.NoError(t, err)
	require.Zero(t, top)
	missing, err := f.MissingSeqs(f.ctx, 7, 1, 1, 5, 10)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 3, 4, 5}, missing)

	f.persist(append(run(7, 1, 3, 0), run(7, 6, 9, 0)...)...)
	f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 5, 5, 'LOST'), (7, 1, 12, 12, 'HELD'), (7, 2, 40, 1, 'HELD'), (6, 1, 40, 1, 'HELD')")
	r, err := f.Read(f.ctx, 7, true)
	require.NoError(t, err)
	require.Equal(t, orderstore.Reading{Total: 100, Stock: 93, Sold: 7, Orders: 7, Outcomes: 3,
		OutcomeByKind: map[string]int64{"LOST": 1, "HELD": 2}}, r)
	r, err = f.Read(f.ctx, 7, false)
	require.NoError(t, err)
	require.Equal(t, orderstore.Reading{Total: 100, Stock: 93, Sold: 7}, r)
	top, err = f.MaxSeq(f.ctx, 7, 1)
	require.NoError(t, err)
	require.EqualValues(t, 12, top)
	n, err := f.CountPositions(f.ctx, 7, 1, 2, 12)
	require.NoError(t, err)
	require.EqualValues(t, 8, n)
	for _, c := range []struct {
		from, to int64
		limit    int
		want     []int64
	}{
		{1, 12, 10, []int64{4, 10, 11}}, {1, 12, 2, []int64{4, 10}}, {5, 9, 10, nil}, {9, 5, 10, nil}, {1, 12, 0, nil},
		{0, 4, 10, []int64{4}}, {math.MinInt64, 4, 10, []int64{4}}, {13, math.MaxInt64, 2, []int64{13, 14}},
		{math.MaxInt64, math.MaxInt64, 2, []int64{math.MaxInt64}},
	} {
		missing, err := f.MissingSeqs(f.ctx, 7, 1, c.from, c.to, c.limit)
		require.NoError(t, err)
		require.Equal(t, c.want, missing, "%+v", c)
	}
}

func TestMissingSeqs_CrossesChunks(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 30_000)
	for from := int64(1); from <= 25_000; from += 5000 {
		f.persist(run(7, from, from+4999, 0)...)
	}
	f.exec("DELETE FROM orders WHERE seq IN (1, 10000, 10001, 24999)")
	missing, err := f.MissingSeqs(f.ctx, 7, 1, 1, 25_001, 100)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 10_000, 10_001, 24_999, 25_001}, missing)
}

// While orders are committed, one reading is of one moment.
func TestRead_RecountIsOneSnapshot(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100_000)
	ctx, cancel := context.WithCancel(f.ctx)
	var g errgroup.Group
	g.Go(func() error {
		for seq := int64(1); ctx.Err() == nil; seq += 5 {
			if _, err := f.Persist(f.ctx, run(7, seq, seq+4, 0)); err != nil {
				return err
			}
		}
		return nil
	})
	for range 100 {
		r, err := f.Read(f.ctx, 7, true)
		require.NoError(t, err)
		require.Equal(t, r.Sold, r.Orders)
		require.Equal(t, r.Total, r.Stock+r.Sold)
	}
	cancel()
	require.NoError(t, g.Wait())
}
