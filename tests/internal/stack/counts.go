package stack

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
)

// Row is an order as the database holds it.
type Row struct {
	Position  orderid.Position
	UserID    int64
	Reference string
}

// Rows counts the orders of a voucher in the database.
func (s *Stack) Rows(ctx context.Context, voucherID int64) (int64, error) {
	return s.count(ctx, "SELECT COUNT(*) FROM orders WHERE voucher_id = ?", voucherID)
}

// Outcomes counts the orders of a voucher that ended otherwise than as a row.
func (s *Stack) Outcomes(ctx context.Context, voucherID int64) (int64, error) {
	return s.count(ctx, "SELECT COUNT(*) FROM order_outcomes WHERE voucher_id = ?", voucherID)
}

// DuplicateBuyers counts the users that have more than one order of a voucher
// in the database.
func (s *Stack) DuplicateBuyers(ctx context.Context, voucherID int64) (int64, error) {
	// IGNORE INDEX: the count must not trust the index that is to prevent them.
	return s.count(ctx, `SELECT COUNT(*) FROM (
		SELECT user_id FROM orders IGNORE INDEX (orders_user_voucher) WHERE voucher_id = ? GROUP BY user_id HAVING COUNT(*) > 1
	) AS more_than_one`, voucherID)
}

// Total, Stock and Sold of a voucher in the database.
func (s *Stack) Total(ctx context.Context, voucherID int64) (total, stock, sold int64, err error) {
	err = s.db.QueryRowContext(ctx, "SELECT total, stock, sold FROM vouchers WHERE id = ?", voucherID).Scan(&total, &stock, &sold)
	if err != nil {
		return 0, 0, 0, fmt.Errorf("reading voucher %d: %w", voucherID, err)
	}
	return total, stock, sold, nil
}

func (s *Stack) count(ctx context.Context, query string, args ...any) (n int64, err error) {
	if err := s.db.QueryRowContext(ctx, query, args...).Scan(&n); err != nil {
		return 0, fmt.Errorf("counting in the database: %w", err)
	}
	return n, nil
}

// Orders reads the orders of a voucher from the database, by position.
func (s *Stack) Orders(ctx context.Context, voucherID int64) ([]Row, error) {
	rows, err := s.db.QueryContext(ctx, "SELECT epoch, seq, user_id, reference FROM orders WHERE voucher_id = ? ORDER BY epoch, seq", voucherID)
	if err != nil {
		return nil, fmt.Errorf("reading orders of voucher %d: %w", voucherID, err)
	}
	defer rows.Close()
	var orders []Row
	for rows.Next() {
		row := Row{Position: orderid.Position{VoucherID: voucherID}}
		if err := rows.Scan(&row.Position.Epoch, &row.Position.Seq, &row.UserID, &row.Reference); err != nil {
			return nil, fmt.Errorf("reading orders of voucher %d: %w", voucherID, err)
		}
		orders = append(orders, row)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("reading orders of voucher %d: %w", voucherID, err)
	}
	return orders, nil
}

// Ledger reads a voucher's figures from Redis, all of one moment.
func (s *Stack) Ledger(ctx context.Context, voucherID int64) (ledger.Books, error) {
	partition, epoch, err := s.place(ctx, voucherID)
	if err != nil {
		return ledger.Books{}, err
	}
	return ledger.ReadBooks(ctx, s.client, partition, epoch, voucherID)
}

// Pending lists what each consumer of a voucher's partition holds.
func (s *Stack) Pending(ctx context.Context, voucherID int64) ([]ledger.Pending, error) {
	partition, epoch, err := s.place(ctx, voucherID)
	if err != nil {
		return nil, err
	}
	return ledger.PendingByConsumer(ctx, s.client, partition, epoch)
}

// heldMax bounds how many entries of one consumer Held looks at; a writer has a
// few thousand orders in hand at most.
const heldMax = 100_000

// Held counts the entries that a consumer holds of a voucher's partition, and
// the orders in them.
func (s *Stack) Held(ctx context.Context, voucherID int64, consumer string) (entries, orders int64, err error) {
	partition, epoch, err := s.place(ctx, voucherID)
	if err != nil {
		return 0, 0, err
	}
	key := ledger.OrdersKey(partition, epoch)
	pending, err := s.client.Do(ctx, s.client.B().Xpending().Key(key).Group(ledger.Group).Start("-").End("+").Count(heldMax).Consumer(consumer).Build()).ToArray()
	if err != nil && !rueidis.IsRedisNil(err) {
		return 0, 0, fmt.Errorf("reading what %s holds: %w", consumer, err)
	}
	var commands rueidis.Commands
	for i := range pending {
		fields, err := pending[i].ToArray()
		if err != nil || len(fields) == 0 {
			return 0, 0, fmt.Errorf("reading what %s holds: unexpected answer: %w", consumer, err)
		}
		id, err := fields[0].ToString()
		if err != nil {
			return 0, 0, fmt.Errorf("reading what %s holds: %w", consumer, err)
		}
		commands = append(commands, s.client.B().Xrange().Key(key).Start(id).End(id).Build())
	}
	for _, reply := range s.client.DoMulti(ctx, commands...) {
		found, err := reply.AsXRange()
		if err != nil {
			return 0, 0, fmt.Errorf("reading what %s holds: %w", consumer, err)
		}
		for _, raw := range found { // none: settled since
			entry, err := ledger.DecodeEntry(partition, raw.ID, raw.FieldValues)
			if err != nil {
				return 0, 0, fmt.Errorf("reading what %s holds: %w", consumer, err)
			}
			entries++
			orders += int64(len(entry.Orders))
		}
	}
	return entries, orders, nil
}

// AwaitSettled returns when no order of a voucher is in flight, by the ledger,
// and its partition's stream is empty.
func (s *Stack) AwaitSettled(ctx context.Context, voucherID int64) error {
	for {
		books, err := s.Ledger(ctx, voucherID)
		if err == nil && books.Exists && books.InFlight() == 0 && books.Entries == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("voucher %d still has %d orders in flight in %d entries: %w (%v)", voucherID, books.InFlight(), books.Entries, ctx.Err(), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// place finds the partition of a voucher and the epoch of its ledger.
func (s *Stack) place(ctx context.Context, voucherID int64) (partition int, epoch int64, err error) {
	partition = ledger.Partition(voucherID, s.opt.Partitions)
	meta, err := ledger.ReadMeta(ctx, s.client, partition)
	if err != nil {
		return 0, 0, err
	}
	if !meta.Exists {
		return 0, 0, fmt.Errorf("partition %d: %w", partition, ledger.ErrMissing)
	}
	return partition, meta.Epoch, nil
}

// HoldVoucherRow locks a voucher's row in the database until release is called
// or ctx ends, as a slow transaction of somebody else would: a writer that has
// read orders of the voucher cannot commit them meanwhile, and so holds them.
func (s *Stack) HoldVoucherRow(ctx context.Context, voucherID int64) (release func(), err error) {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return nil, fmt.Errorf("holding voucher %d: %w", voucherID, err)
	}
	var id int64
	if err := tx.QueryRowContext(ctx, "SELECT id FROM vouchers WHERE id = ? FOR UPDATE", voucherID).Scan(&id); err != nil {
		_ = tx.Rollback()
		return nil, fmt.Errorf("holding voucher %d: %w", voucherID, err)
	}
	return func() { _ = tx.Rollback() }, nil
}
