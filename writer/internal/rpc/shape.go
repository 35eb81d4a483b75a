package rpc

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

var voucherStates = map[string]seckillv1.VoucherState{
	orderstore.StateDraft:    seckillv1.VoucherState_VOUCHER_STATE_DRAFT,
	orderstore.StateOpen:     seckillv1.VoucherState_VOUCHER_STATE_OPEN,
	orderstore.StatePaused:   seckillv1.VoucherState_VOUCHER_STATE_PAUSED,
	orderstore.StateClosed:   seckillv1.VoucherState_VOUCHER_STATE_CLOSED,
	orderstore.StateArchived: seckillv1.VoucherState_VOUCHER_STATE_ARCHIVED,
}

var booksVerdicts = map[books.Verdict]seckillv1.BooksVerdict{
	books.Proven:   seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN,
	books.InFlight: seckillv1.BooksVerdict_BOOKS_VERDICT_IN_FLIGHT,
	books.Violated: seckillv1.BooksVerdict_BOOKS_VERDICT_VIOLATED,
}

func shapeVoucher(v orderstore.Voucher) *seckillv1.Voucher {
	return &seckillv1.Voucher{
		VoucherId:  v.ID,
		Title:      v.Title,
		Total:      v.Total,
		Stock:      v.Stock,
		Sold:       v.Sold,
		State:      voucherStates[v.State],
		BeginTime:  timestamppb.New(v.BeginAt),
		EndTime:    timestamppb.New(v.EndAt),
		Rev:        v.Rev,
		Applied:    v.Applied(),
		CreateTime: timestamppb.New(v.CreatedAt),
		UpdateTime: timestamppb.New(v.UpdatedAt),
	}
}

func (s *Service) shapeBooks(b books.Books) *seckillv1.Books {
	shaped := &seckillv1.Books{
		VoucherId: b.VoucherID,
		Verdict:   booksVerdicts[b.Verdict],
		InFlight:  b.InFlight,
		Ledger:    shapeLedger(b.Ledger),
		Database: &seckillv1.DatabaseReading{
			Total: b.Database.Total,
			Stock: b.Database.Stock,
			Sold:  b.Database.Sold,
		},
		ReadTime: timestamppb.New(b.ReadAt),
	}
	// 0 where nothing was counted would be a figure that nobody found.
	if b.Database.OutcomeByKind != nil {
		shaped.Database.Orders, shaped.Database.Outcomes = &b.Database.Orders, &b.Database.Outcomes
	}
	for _, v := range b.Violations {
		violation := &seckillv1.Violation{Rule: v.Rule, Detail: v.Detail}
		for _, position := range v.Orders[:min(len(v.Orders), maxViolationOrders)] {
			// A position out of range has no id; the detail speaks of it.
			if id := s.orderIDs.Encode(position); id != "" {
				violation.OrderIds = append(violation.OrderIds, id)
			}
		}
		shaped.Violations = append(shaped.Violations, violation)
	}
	return shaped
}

// shapeLedger leaves the reading out where there is no ledger: for a draft, and
// for an archived voucher, of which only a tombstone is left.
func shapeLedger(b *ledger.Books) *seckillv1.LedgerReading {
	if b == nil || !b.Exists || b.State == ledger.VoucherArchived {
		return nil
	}
	return &seckillv1.LedgerReading{
		Epoch:    b.Meta.Epoch,
		Stock:    b.Stock,
		Opening:  b.Opening,
		Returned: b.Returned,
		Admitted: b.Seq,
		Settled:  b.Settled,
		Buyers:   b.Buyers,
	}
}
