package books

import (
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

type interval struct{ from, to int64 }

// Missing names, for each of some vouchers of a partition with its highest
// seq, the orders that are neither a row, nor an outcome, nor in a stream
// entry: lost ones. Up to limit each.
//
// The stream is read first. An entry that is settled meanwhile left its rows
// behind before it went, so whatever the stream did not show any more the
// database shows. What does not decode stands for nothing.
func Missing(ctx context.Context, positions Positions, client rueidis.CoreClient, partition int, epoch int64, seqs map[int64]int64, limit int) (map[int64][]int64, error) {
	streamed := map[int64][]interval{}
	from := "-"
	for {
		page, err := ledger.Scan(ctx, client, partition, epoch, from, scanPage)
		if err != nil {
			return nil, err
		}
		for _, raw := range page {
			entry, err := ledger.DecodeEntry(partition, raw.ID, raw.Fields)
			if err != nil || entry.Epoch != epoch {
				continue
			}
			first := entry.Orders[0].Seq
			streamed[entry.VoucherID] = append(streamed[entry.VoucherID], interval{first, first + int64(len(entry.Orders)) - 1})
		}
		if len(page) < scanPage {
			break
		}
		from = "(" + page[len(page)-1].ID
	}

	missing := map[int64][]int64{}
	for voucherID, last := range seqs {
		for _, gap := range gaps(streamed[voucherID], last) {
			n, err := positions.CountPositions(ctx, voucherID, epoch, gap.from, gap.to)
			if err != nil {
				return nil, fmt.Errorf("counting orders of voucher %d: %w", voucherID, err)
			}
			if n == gap.to-gap.from+1 || len(missing[voucherID]) >= limit {
				continue
			}
			lost, err := positions.MissingSeqs(ctx, voucherID, epoch, gap.from, gap.to, limit-len(missing[voucherID]))
			if err != nil {
				return nil, fmt.Errorf("naming missing orders of voucher %d: %w", voucherID, err)
			}
			missing[voucherID] = append(missing[voucherID], lost...)
		}
	}
	return missing, nil
}

// gaps is what some intervals leave uncovered of [1, last]. Positions are dense,
// so between two entries that are still in the stream lies a run of settled
// ones: one count proves a whole run.
func gaps(covered []interval, last int64) []interval {
	slices.SortFunc(covered, func(a, b interval) int { return int(a.from - b.from) })
	var open []interval
	next := int64(1)
	for _, c := range covered {
		if c.from > next && next <= last {
			open = append(open, interval{next, min(c.from-1, last)})
		}
		next = max(next, c.to+1)
	}
	if next <= last {
		open = append(open, interval{next, last})
	}
	return open
}
