package ledger

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/rueidis"
	"github.com/seckill/seckill/pkg/orderid"
)

// Resolution is what was decided about a held order, committed in the
// database.
type Resolution struct {
	Partition int
	// Position of the held order; its epoch is the ledger's.
	orderid.Position
	// UserID, 0 where no user could be read from the order.
	UserID int64
	// Verdict is VerdictPersisted (requeued: it is a row now), VerdictConflict or
	// VerdictCancelled.
	Verdict Verdict
	// Standing is the order that stands, with VerdictConflict.
	Standing orderid.Position
}

// ErrInFlight means that an order is not settled yet, so that there is nothing
// to resolve in the ledger. No effect; to be repeated when it is.
var ErrInFlight = errors.New("order is not settled yet")

// Resolve tells the ledger what was decided about a held order, and tells
// whether this call changed it: false where the ledger had been told before,
// which makes it safe to repeat. Errors: ErrInFlight, ErrStaleEpoch,
// ErrRefused, ErrFault (no effect) and ErrUnknown (repeat it: the held outcome
// is the token, so it counts once).
func Resolve(ctx context.Context, client rueidis.CoreClient, r Resolution) (done bool, err error) {
	standing := ""
	if r.Verdict == VerdictConflict {
		standing = formatPosition(r.Standing.Epoch, r.Standing.Seq)
	}
	reply, err := resolve.run(ctx, client, []string{
		MetaKey(r.Partition), VoucherKey(r.Partition, r.Epoch, r.VoucherID),
		BuyersKey(r.Partition, r.Epoch, r.VoucherID), OutcomesKey(r.Partition, r.Epoch, r.VoucherID),
	}, []string{
		strconv.FormatInt(r.Epoch, 10), strconv.FormatInt(r.UserID, 10), strconv.FormatInt(r.Seq, 10), string(rune(r.Verdict)), standing,
	})
	if err != nil {
		return false, err
	}
	name, _, err := status(reply)
	switch {
	case err != nil:
		return false, err
	case name == "RESOLVED":
		return true, nil
	case name == "NO_TOKEN":
		return false, nil
	case name == "IN_FLIGHT":
		return false, fmt.Errorf("resolving order %d of voucher %d: %w", r.Seq, r.VoucherID, ErrInFlight)
	}
	return false, fmt.Errorf("resolving order %d of voucher %d: %w", r.Seq, r.VoucherID, expect(reply, nil))
}
