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
	// UserID, 0 where no user could be read from the order. Once Holders has found
	// him, it may be told again with his name: his mark goes, and nothing else
	// happens twice.
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

// Holders looks for the users of a voucher whose marks hold some orders of the
// epoch, for orders whose user nobody could read. It looks at about count marks
// from a cursor on, 0 at first, and answers user by seq, and the cursor to go on
// from, 0 at the end. What holds such a mark from the first call to the last is
// found. For rare use: a mark costs about a microsecond. Errors: ErrRefused,
// ErrUnknown, ErrFault.
func Holders(ctx context.Context, client rueidis.CoreClient, partition int, epoch, voucherID int64, seqs map[int64]bool, cursor uint64, count int64) (users map[int64]int64, next uint64, err error) {
	page, err := client.Do(ctx, client.B().Hscan().Key(BuyersKey(partition, epoch, voucherID)).Cursor(cursor).Count(count).Build()).AsScanEntry()
	if err != nil {
		return nil, 0, fmt.Errorf("looking through the marks of voucher %d: %w", voucherID, classify(err))
	}
	users = map[int64]int64{}
	for i := 0; i+1 < len(page.Elements); i += 2 {
		mark, err := ParseMark(page.Elements[i+1])
		if err != nil || mark.Epoch != epoch || !seqs[mark.Seq] {
			continue // a mark that cannot be read holds no order that is looked for
		}
		user, err := strconv.ParseInt(page.Elements[i], 10, 64)
		if err != nil {
			return nil, 0, fmt.Errorf("%w: voucher %d: a mark of %q", ErrFault, voucherID, page.Elements[i])
		}
		users[mark.Seq] = user
	}
	return users, page.Cursor, nil
}
