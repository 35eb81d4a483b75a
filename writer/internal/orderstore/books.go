package orderstore

import (
	"context"
	"fmt"
	"strings"

	"gorm.io/gorm"
)

// missingChunk is how many positions are looked at by one statement of
// MissingSeqs: some milliseconds, and 8 bytes a position in memory.
const missingChunk = 10_000

const (
	sqlCounters = `SELECT total, stock, sold FROM vouchers WHERE id = ?`

	// One statement is one snapshot: sold and the counted rows are of the same
	// moment, while orders go on being committed.
	sqlRecount = `
SELECT 'total' AS what, total AS n FROM vouchers WHERE id = @id
UNION ALL SELECT 'stock', stock FROM vouchers WHERE id = @id
UNION ALL SELECT 'sold', sold FROM vouchers WHERE id = @id
UNION ALL SELECT 'untold', COUNT(*) FROM ledger_updates WHERE voucher_id = @id
UNION ALL SELECT 'orders', COUNT(*) FROM orders WHERE voucher_id = @id
UNION ALL SELECT CONCAT('outcome ', kind), COUNT(*) FROM order_outcomes WHERE voucher_id = @id GROUP BY kind`

	sqlMaxSeq = `
SELECT GREATEST(
  COALESCE((SELECT MAX(seq) FROM orders WHERE voucher_id = @id AND epoch = @epoch), 0),
  COALESCE((SELECT MAX(seq) FROM order_outcomes WHERE voucher_id = @id AND epoch = @epoch), 0))`

	sqlCountPositions = `
SELECT (SELECT COUNT(*) FROM orders WHERE voucher_id = @id AND epoch = @epoch AND seq BETWEEN @from AND @to)
     + (SELECT COUNT(*) FROM order_outcomes WHERE voucher_id = @id AND epoch = @epoch AND seq BETWEEN @from AND @to)`

	sqlSeqs = `
SELECT seq FROM orders WHERE voucher_id = @id AND epoch = @epoch AND seq BETWEEN @from AND @to
UNION ALL
SELECT seq FROM order_outcomes WHERE voucher_id = @id AND epoch = @epoch AND seq BETWEEN @from AND @to`
)

// Read returns the database's side of a voucher's books at one moment. With
// recount it counts the rows as well, which costs about a second for some
// million orders.
func (s *Store) Read(ctx context.Context, voucherID int64, recount bool) (Reading, error) {
	if !recount {
		var rows []struct{ Total, Stock, Sold int64 }
		if err := s.read(ctx).Raw(sqlCounters, voucherID).Scan(&rows).Error; err != nil {
			return Reading{}, fmt.Errorf("reading the books of voucher %d: %w", voucherID, err)
		}
		if len(rows) == 0 {
			return Reading{}, fmt.Errorf("voucher %d: %w", voucherID, ErrVoucherNotFound)
		}
		return Reading{Total: rows[0].Total, Stock: rows[0].Stock, Sold: rows[0].Sold}, nil
	}
	var rows []struct {
		What string
		N    int64
	}
	if err := s.read(ctx).Raw(sqlRecount, map[string]any{"id": voucherID}).Scan(&rows).Error; err != nil {
		return Reading{}, fmt.Errorf("recounting voucher %d: %w", voucherID, err)
	}
	r := Reading{OutcomeByKind: make(map[string]int64)}
	found := false
	for _, row := range rows {
		switch row.What {
		case "total":
			r.Total, found = row.N, true
		case "stock":
			r.Stock = row.N
		case "sold":
			r.Sold = row.N
		case "orders":
			r.Orders = row.N
		case "untold":
			r.Untold = row.N
		default:
			r.OutcomeByKind[strings.TrimPrefix(row.What, "outcome ")] = row.N
			r.Outcomes += row.N
		}
	}
	if !found {
		return Reading{}, fmt.Errorf("voucher %d: %w", voucherID, ErrVoucherNotFound)
	}
	return r, nil
}

// MaxSeq returns the highest seq of the voucher in this epoch that is a row or
// an outcome, 0 where there is none.
func (s *Store) MaxSeq(ctx context.Context, voucherID, epoch int64) (int64, error) {
	n, err := number(s.read(ctx).Raw(sqlMaxSeq, map[string]any{"id": voucherID, "epoch": epoch}))
	if err != nil {
		return 0, fmt.Errorf("reading the highest seq of voucher %d: %w", voucherID, err)
	}
	return n, nil
}

// CountPositions counts the rows and outcomes with a seq in [from, to].
func (s *Store) CountPositions(ctx context.Context, voucherID, epoch, from, to int64) (int64, error) {
	n, err := number(s.read(ctx).Raw(sqlCountPositions, span(voucherID, epoch, from, to)))
	if err != nil {
		return 0, fmt.Errorf("counting the positions of voucher %d: %w", voucherID, err)
	}
	return n, nil
}

// MissingSeqs returns the seqs in [from, to] that are neither a row nor an
// outcome, ascending, limit at most. It reads in chunks: an order that is
// committed meanwhile may be reported or not.
func (s *Store) MissingSeqs(ctx context.Context, voucherID, epoch, from, to int64, limit int) ([]int64, error) {
	var missing []int64
	from = max(from, 1)
	for from <= to && len(missing) < limit {
		// to - from, not from + chunk: the latter may overflow.
		last := to
		if to-from >= missingChunk {
			last = from + missingChunk - 1
		}
		n, err := s.CountPositions(ctx, voucherID, epoch, from, last)
		if err != nil {
			return nil, err
		}
		width := last - from + 1
		if n < width {
			var seqs []int64
			if err := s.read(ctx).Raw(sqlSeqs, span(voucherID, epoch, from, last)).Scan(&seqs).Error; err != nil {
				return nil, fmt.Errorf("reading the seqs of voucher %d: %w", voucherID, err)
			}
			missing = appendMissing(missing, seqs, from, width, limit)
		}
		if last == to {
			break
		}
		from = last + 1
	}
	return missing, nil
}

// appendMissing appends what of from, from+1, ... is not in seqs.
func appendMissing(missing, seqs []int64, from, width int64, limit int) []int64 {
	present := make([]bool, width)
	for _, seq := range seqs {
		present[seq-from] = true
	}
	for i, ok := range present {
		if !ok && len(missing) < limit {
			missing = append(missing, from+int64(i))
		}
	}
	return missing
}

func span(voucherID, epoch, from, to int64) map[string]any {
	return map[string]any{"id": voucherID, "epoch": epoch, "from": from, "to": to}
}

// number scans a statement that returns one number.
func number(query *gorm.DB) (int64, error) {
	var n int64
	err := query.Scan(&n).Error
	return n, err
}
