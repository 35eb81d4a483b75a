package baseline

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// The tutorial's two tables, as far as an order touches them.
var schema = []string{
	`CREATE TABLE IF NOT EXISTS tb_seckill_voucher (
		voucher_id BIGINT NOT NULL PRIMARY KEY, stock INT NOT NULL,
		begin_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, end_time DATETIME NOT NULL,
		create_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
		update_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP
	) ENGINE = InnoDB`,
	`CREATE TABLE IF NOT EXISTS tb_voucher_order (
		id BIGINT NOT NULL PRIMARY KEY, user_id BIGINT NOT NULL, voucher_id BIGINT NOT NULL,
		pay_type TINYINT NOT NULL DEFAULT 1, status TINYINT NOT NULL DEFAULT 1,
		create_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
		update_time TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP,
		KEY user_voucher (user_id, voucher_id)
	) ENGINE = InnoDB`,
}

var (
	errOrdered = errors.New("the user has an order already")
	errSoldOut = errors.New("no stock is left")
)

type order struct{ id, userID, voucherID int64 }

// Prepare makes the tables and puts a voucher with its stock into them.
func Prepare(ctx context.Context, db *sql.DB, voucherID, stock int64) error {
	for _, statement := range schema {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("making the baseline's tables: %w", err)
		}
	}
	now := time.Now().UTC()
	if _, err := db.ExecContext(ctx, `INSERT INTO tb_seckill_voucher (voucher_id, stock, begin_time, end_time) VALUES (?, ?, ?, ?)`,
		voucherID, stock, now.Add(-time.Hour), now.Add(24*time.Hour)); err != nil {
		return fmt.Errorf("adding baseline voucher %d: %w", voucherID, err)
	}
	return nil
}

// checkVoucher is stage sync's first look: window and stock.
func checkVoucher(ctx context.Context, db *sql.DB, voucherID int64) error {
	var stock int64
	var begun, over bool
	if err := db.QueryRowContext(ctx, `SELECT stock, begin_time <= UTC_TIMESTAMP(), end_time < UTC_TIMESTAMP() FROM tb_seckill_voucher WHERE voucher_id = ?`,
		voucherID).Scan(&stock, &begun, &over); err != nil {
		return fmt.Errorf("reading voucher %d: %w", voucherID, err)
	}
	if !begun || over || stock < 1 {
		return errSoldOut
	}
	return nil
}

// createOrder writes one order: the transaction that all three stages share.
func createOrder(ctx context.Context, db *sql.DB, o order) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	var n int64
	if err := tx.QueryRowContext(ctx, `SELECT COUNT(*) FROM tb_voucher_order WHERE user_id = ? AND voucher_id = ?`, o.userID, o.voucherID).Scan(&n); err != nil {
		return err
	}
	if n > 0 {
		return errOrdered
	}
	taken, err := tx.ExecContext(ctx, `UPDATE tb_seckill_voucher SET stock = stock - 1 WHERE voucher_id = ? AND stock > 0`, o.voucherID)
	if err != nil {
		return err
	}
	if n, err := taken.RowsAffected(); err != nil || n != 1 {
		return errors.Join(errSoldOut, err)
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO tb_voucher_order (id, user_id, voucher_id) VALUES (?, ?, ?)`, o.id, o.userID, o.voucherID); err != nil {
		return err
	}
	return tx.Commit()
}
