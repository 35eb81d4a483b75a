package ledger

import (
	"context"
	"fmt"
	"strconv"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/orderid"
)

// Positions are those that an entry says it stands for, by its numbers alone:
// units positions from first on, of a voucher in an epoch. All are 0 where one
// of the numbers is not sound. For entries that cannot be decoded, of whatever
// version: their orders are not lost, though nobody here can read them.
func (e RawEntry) Positions() (voucherID, epoch, first, units int64) {
	number := func(name string, up int64) int64 {
		value, err := strconv.ParseInt(e.Fields[name], 10, 64)
		if err != nil || value < 1 || value > up {
			return 0
		}
		return value
	}
	voucherID, epoch = number("voucher", 1<<63-1), number("epoch", orderid.MaxEpoch)
	first, units = number("first", orderid.MaxSeq), number("n", MaxBatch)
	if voucherID == 0 || epoch == 0 || first == 0 || units == 0 || first+units-1 > orderid.MaxSeq {
		return 0, 0, 0, 0
	}
	return voucherID, epoch, first, units
}

// AdmittedSeq is the highest seq that was admitted of a voucher in an epoch. What
// an entry says of a position beyond it is a stranger's: admission moves both as
// one. Errors: ErrMissing where the voucher has no ledger, ErrFault, ErrRefused,
// ErrUnknown.
func AdmittedSeq(ctx context.Context, client rueidis.CoreClient, partition int, epoch, voucherID int64) (int64, error) {
	text, err := client.Do(ctx, client.B().Hget().Key(VoucherKey(partition, epoch, voucherID)).Field("seq").Build()).ToString()
	if rueidis.IsRedisNil(err) {
		return 0, fmt.Errorf("reading seq of voucher %d: %w", voucherID, ErrMissing)
	}
	if err != nil {
		return 0, fmt.Errorf("reading seq of voucher %d: %w", voucherID, classify(err))
	}
	seq, err := strconv.ParseInt(text, 10, 64)
	if err != nil || seq < 0 {
		return 0, fmt.Errorf("%w: voucher %d: seq %q is not a whole number", ErrFault, voucherID, text)
	}
	return seq, nil
}
