package limits

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Insert is a run of plain INSERTs: the writer's statements in its order, batch
// size and connections, with nothing around them, into tables of the same form in
// a database of their own: rows that no ledger knows of must not be in seckill's.
type Insert struct {
	DSN         string // of the database of their own
	From        string // name of the database whose tables are copied
	VoucherID   int64  // a new one for each run
	Rows        int64
	Batch       int
	Connections int
}

// copyForm makes the tables, empty, where they are not there.
func copyForm(ctx context.Context, db *sql.DB, from string) error {
	for _, statement := range []string{
		"CREATE TABLE IF NOT EXISTS orders LIKE `" + from + "`.orders",
		"CREATE TABLE IF NOT EXISTS vouchers LIKE `" + from + "`.vouchers",
	} {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("copying the form of the tables: %w", err)
		}
	}
	return nil
}

// prepare makes the tables and adds the voucher.
func (i Insert) prepare(ctx context.Context, db *sql.DB) error {
	if err := copyForm(ctx, db, i.From); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, `INSERT INTO vouchers (id, partition_id, total, stock, epoch, state, begin_at, end_at)
		VALUES (?, 0, ?, ?, ?, 'OPEN', '2000-01-01', '2100-01-01')`, i.VoucherID, i.Rows, i.Rows, epoch); err != nil {
		return fmt.Errorf("adding a voucher: %w", err)
	}
	return nil
}

// Copy adds the orders of a voucher to the plain table: rows are cheaper to add
// to a small table, so this one must be as large as seckill's.
func Copy(ctx context.Context, db *sql.DB, from string, voucherID int64) error {
	if err := copyForm(ctx, db, from); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, "INSERT INTO orders SELECT * FROM `"+from+"`.orders WHERE voucher_id = ?", voucherID); err != nil {
		return fmt.Errorf("copying the orders of voucher %d: %w", voucherID, err)
	}
	return nil
}

const epoch = 1

// pool opens connections whose sessions are as the writer's are.
func (i Insert) pool() (*sql.DB, error) {
	cfg, err := mysql.ParseDSN(i.DSN)
	if err != nil {
		return nil, fmt.Errorf("opening the database: %w", err)
	}
	cfg.InterpolateParams, cfg.ClientFoundRows, cfg.Collation = true, true, "utf8mb4_bin"
	cfg.Params = map[string]string{"time_zone": "'+00:00'"}
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(i.Connections)
	db.SetMaxIdleConns(i.Connections)
	return db, nil
}

// Run inserts and returns how long it took.
func (i Insert) Run(ctx context.Context) (time.Duration, error) {
	db, err := i.pool()
	if err != nil {
		return 0, err
	}
	defer db.Close()
	if err := i.prepare(ctx, db); err != nil {
		return 0, err
	}
	var next atomic.Int64
	errs := make([]error, i.Connections)
	var all sync.WaitGroup
	began := time.Now()
	for c := range i.Connections {
		all.Go(func() {
			var conn *sql.Conn
			if conn, errs[c] = db.Conn(ctx); errs[c] != nil {
				return
			}
			defer conn.Close()
			_, errs[c] = conn.ExecContext(ctx, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
			for errs[c] == nil {
				first := next.Add(int64(i.Batch)) - int64(i.Batch) + 1
				if first > i.Rows {
					return
				}
				errs[c] = i.batch(ctx, conn, first, min(int64(i.Batch), i.Rows-first+1))
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	for _, err := range errs {
		if err != nil {
			return took, fmt.Errorf("inserting plainly: %w", err)
		}
	}
	return took, nil
}

// batch is one transaction. Users come to seqs as they do behind a gateway,
// nearly in order; rows are sorted by user, as the writer's are.
func (i Insert) batch(ctx context.Context, conn *sql.Conn, first, n int64) error {
	users := make([]int64, n)
	for k := range users {
		users[k] = (first + int64(k)) ^ 5
	}
	order := make([]int, n)
	for k := range order {
		order[k] = k
	}
	slices.SortFunc(order, func(x, y int) int { return int(users[x] - users[y]) })
	statement := make([]byte, 0, 64*n)
	statement = append(statement, "INSERT INTO orders (voucher_id,epoch,seq,user_id,reference,admitted_at) VALUES "...)
	at := time.Now().UTC().Format("'2006-01-02 15:04:05.000'")
	for k, row := range order {
		if k > 0 {
			statement = append(statement, ',')
		}
		statement = append(statement, '(')
		for _, number := range []int64{i.VoucherID, epoch, first + int64(row), users[row]} {
			statement = strconv.AppendInt(statement, number, 10)
			statement = append(statement, ',')
		}
		statement = append(statement, "'',"...)
		statement = append(statement, at...)
		statement = append(statement, ')')
	}
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	if _, err := tx.ExecContext(ctx, string(statement)); err != nil {
		return err
	}
	result, err := tx.ExecContext(ctx, "UPDATE vouchers SET stock = stock - ?, sold = sold + ? WHERE id = ? AND epoch = ? AND stock >= ?",
		n, n, i.VoucherID, epoch, n)
	if err != nil {
		return err
	}
	if rows, err := result.RowsAffected(); err != nil || rows != 1 {
		return fmt.Errorf("the UPDATE matched %d rows: %w", rows, err)
	}
	return tx.Commit()
}
