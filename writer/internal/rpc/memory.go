package rpc

import (
	"context"
	"math"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// checkMemory tells whether a voucher fits into what Redis has left beside what
// the vouchers on sale may still come to need. The database is only read. A
// Redis that fills up in the middle of a sale refuses every Grab, also of the
// other vouchers: this is the moment to say no.
func (s *Service) checkMemory(ctx, call context.Context, l *Ledger, v orderstore.Voucher) error {
	server, err := ledger.ReadServer(call, l.Client)
	if err != nil {
		return s.redisError(ctx, "reading redis' memory", v.ID, err)
	}
	promised := int64(0)
	for p := range l.Partitions {
		live, err := s.vouchers.LiveVouchers(call, p)
		if err != nil {
			return s.databaseError(ctx, "listing live vouchers", v.ID, err)
		}
		for _, other := range live {
			if other.ID != v.ID && (other.State == orderstore.StateOpen || other.State == orderstore.StatePaused) {
				promised = plus(promised, times(other.Stock, ledger.BytesPerOrder))
			}
		}
	}
	need := times(v.Total, ledger.BytesPerOrder)
	left := max(0, server.LeftMemory()-promised)
	if need > left {
		return outOfMemory(v, need, left, promised, server)
	}
	return nil
}

// times and plus stop at the largest number instead of wrapping: 2^40 units of
// some thousand vouchers are more bytes than fit.
func times(a, b int64) int64 {
	if a > math.MaxInt64/b {
		return math.MaxInt64
	}
	return a * b
}

func plus(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}
