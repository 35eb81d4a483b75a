package books

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
)

// Positions tells which orders have reached a verdict in the database.
type Positions interface {
	// CountPositions counts rows and outcomes with seq in [from, to].
	CountPositions(ctx context.Context, voucherID, epoch, from, to int64) (int64, error)
	// MissingSeqs lists what has neither in [from, to], ascending, up to limit.
	MissingSeqs(ctx context.Context, voucherID, epoch, from, to int64, limit int) ([]int64, error)
}

// scanPage is how many entries are read at a time: up to 256 orders each, so
// some hundred kilobytes.
const scanPage = 256

// Range is seqs of a voucher, both ends included.
type Range struct{ From, To int64 }

// Missing names, of ranges of some vouchers of a partition, the orders that are neither a row, nor an outcome, nor in a stream
// entry: lost ones. Up to limit each.
//
// The stream is read first. An entry that is settled meanwhile left its rows
// behind before it went, so whatever the stream did not show any more the
// database shows. Also what cannot be decoded is there.
func Missing(ctx context.Context, positions Positions, client rueidis.CoreClient, partition int, epoch int64, ranges map[int64]Range, limit int) (map[int64][]int64, error) {
	streamed := map[int64][]Range{}
	from := "-"
	for {
		page, err := ledger.Scan(ctx, client, partition, epoch, from, scanPage)
		if err != nil {
			return nil, err
		}
		for _, raw := range page {
			voucherID, of, first, units := raw.Positions()
			if units > 0 && of == epoch {
				streamed[voucherID] = append(streamed[voucherID], Range{first, first + units - 1})
			}
		}
		if len(page) < scanPage {
			break
		}
		from = "(" + page[len(page)-1].ID
	}

	missing := map[int64][]int64{}
	for voucherID, asked := range ranges {
		for _, gap := range gaps(streamed[voucherID], asked) {
			n, err := positions.CountPositions(ctx, voucherID, epoch, gap.From, gap.To)
			if err != nil {
				return nil, fmt.Errorf("counting orders of voucher %d: %w", voucherID, err)
			}
			if n == gap.To-gap.From+1 || len(missing[voucherID]) >= limit {
				continue
			}
			lost, err := positions.MissingSeqs(ctx, voucherID, epoch, gap.From, gap.To, limit-len(missing[voucherID]))
			if err != nil {
				return nil, fmt.Errorf("naming missing orders of voucher %d: %w", voucherID, err)
			}
			missing[voucherID] = append(missing[voucherID], lost...)
		}
	}
	return missing, nil
}

// gaps is what some ranges leave uncovered of the asked one. Positions are
// dense, so between two entries that are still in the stream lies a run of
// settled ones: one count proves a whole run.
func gaps(covered []Range, asked Range) []Range {
	slices.SortFunc(covered, func(a, b Range) int { return cmp.Compare(a.From, b.From) })
	var open []Range
	next := asked.From
	for _, c := range covered {
		if c.From > next && next <= asked.To {
			open = append(open, Range{next, min(c.From-1, asked.To)})
		}
		next = max(next, c.To+1)
	}
	if next <= asked.To {
		open = append(open, Range{next, asked.To})
	}
	return open
}
