package orderstore

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/seckill/seckill/pkg/orderid"
)

// maxOrders bounds a page of OrdersOfVoucher and OrdersOfUser.
const maxOrders = 10_000

const (
	foundOrder = `
SELECT voucher_id, epoch, seq, user_id, reference, admitted_at, persisted_at,
       '' AS kind, '' AS reason, '' AS entry_id, 0 AS of_entry, NULL AS standing_epoch, NULL AS standing_seq
FROM orders`
	foundOutcome = `
SELECT voucher_id, epoch, seq, user_id, reference, admitted_at, persisted_at,
       kind, reason, entry_id, of_entry, standing_epoch, standing_seq
FROM order_outcomes`

	// One statement is one snapshot: an order that a requeue moves from one table
	// to the other is found in exactly one.
	sqlFindByPosition = `
(` + foundOrder + ` WHERE voucher_id = @voucher AND epoch = @epoch AND seq = @seq)
UNION ALL
(` + foundOutcome + ` WHERE voucher_id = @voucher AND epoch = @epoch AND seq = @seq)`

	// Of several outcomes the last one counts.
	sqlFindByUser = `
(` + foundOrder + ` FORCE INDEX (orders_user_voucher) WHERE user_id = @user AND voucher_id = @voucher)
UNION ALL
(` + foundOutcome + ` FORCE INDEX (order_outcomes_user) WHERE user_id = @user AND voucher_id = @voucher
 ORDER BY epoch DESC, seq DESC LIMIT 1)`

	// Two ranges of the primary key, so that a page costs its rows. Hints, for
	// statistics may be from before the sale.
	sqlOrdersOfVoucher = foundOrder + ` FORCE INDEX (PRIMARY)
WHERE (voucher_id = @voucher AND epoch = @epoch AND seq > @seq) OR (voucher_id = @voucher AND epoch > @epoch)
ORDER BY voucher_id, epoch, seq LIMIT @limit`

	sqlOrdersOfUser = foundOrder + ` FORCE INDEX (orders_user_voucher)
WHERE user_id = @user AND voucher_id > @voucher ORDER BY voucher_id LIMIT @limit`

	// Only an action that came to what was found: another one may have followed.
	sqlActionOn = `
SELECT operator, action, reason, at FROM operator_actions
WHERE target = ? AND result = ? ORDER BY id DESC LIMIT 1`
)

// foundRow is a row of orders or order_outcomes.
type foundRow struct {
	VoucherID, Epoch, Seq, UserID int64
	Reference                     string
	AdmittedAt                    *time.Time
	PersistedAt                   time.Time
	Kind, Reason, EntryID         string
	OfEntry                       bool
	StandingEpoch, StandingSeq    *int64
}

func (r foundRow) found() Found {
	f := Found{
		Order: Order{
			Position: orderid.Position{VoucherID: r.VoucherID, Epoch: r.Epoch, Seq: r.Seq},
			UserID:   r.UserID, Reference: r.Reference, EntryID: r.EntryID,
		},
		PersistedAt: r.PersistedAt, Outcome: r.Kind, Reason: r.Reason, OfEntry: r.OfEntry,
	}
	if r.AdmittedAt != nil {
		f.AdmittedAt = *r.AdmittedAt
	}
	if r.StandingEpoch != nil && r.StandingSeq != nil {
		f.Standing = orderid.Position{VoucherID: r.VoucherID, Epoch: *r.StandingEpoch, Seq: *r.StandingSeq}
	}
	return f
}

// FindByPosition returns the order at a position, however it ended, or
// ErrOrderNotFound, also while it is in flight.
func (s *Store) FindByPosition(ctx context.Context, p orderid.Position) (Found, error) {
	found, err := s.find(ctx, sqlFindByPosition, map[string]any{"voucher": p.VoucherID, "epoch": p.Epoch, "seq": p.Seq})
	if err == nil && len(found) == 0 {
		err = ErrOrderNotFound
	}
	if err != nil {
		return Found{}, fmt.Errorf("finding order (%d, %d, %d): %w", p.VoucherID, p.Epoch, p.Seq, err)
	}
	return found[0], nil
}

// FindByUser returns the user's order of a voucher: the row of orders where there
// is one, else the last outcome; or ErrOrderNotFound.
func (s *Store) FindByUser(ctx context.Context, userID, voucherID int64) (Found, error) {
	found, err := s.find(ctx, sqlFindByUser, map[string]any{"user": userID, "voucher": voucherID})
	if err == nil && len(found) == 0 {
		err = ErrOrderNotFound
	}
	if err != nil {
		return Found{}, fmt.Errorf("finding the order of a user of voucher %d: %w", voucherID, err)
	}
	best := found[0]
	for _, f := range found {
		if f.Outcome == "" {
			best = f
		}
	}
	return best, nil
}

// ActionOn returns the last action of an operator that came to what was found, of
// the order or of the entry that held it; nil where there is none.
func (s *Store) ActionOn(ctx context.Context, f Found) (*OperatorAction, error) {
	id := DeadLetterID{Position: f.Position}
	if f.OfEntry {
		n, err := partitions(s.read(ctx))
		if err != nil {
			return nil, err
		}
		id = DeadLetterID{PartitionID: int(f.VoucherID % int64(n)), Epoch: f.Epoch, EntryID: f.EntryID}
	}
	var actions []OperatorAction
	err := s.read(ctx).Raw(sqlActionOn, id.target(), cmp.Or(f.Outcome, ResultPersisted)).Scan(&actions).Error
	if err != nil {
		return nil, fmt.Errorf("finding what operators decided about %s: %w", id.target(), err)
	}
	if len(actions) == 0 {
		return nil, nil
	}
	return &actions[0], nil
}

// OrdersOfVoucher returns up to limit rows of orders behind after, ascending by
// epoch and seq: the last one's position is the after of the next page, the zero
// value asks for the first. The limit is at most 10,000.
func (s *Store) OrdersOfVoucher(ctx context.Context, voucherID int64, after orderid.Position, limit int) ([]Found, error) {
	found, err := s.find(ctx, sqlOrdersOfVoucher, map[string]any{
		"voucher": voucherID, "epoch": after.Epoch, "seq": after.Seq, "limit": max(1, min(limit, maxOrders)),
	})
	if err != nil {
		return nil, fmt.Errorf("listing the orders of voucher %d: %w", voucherID, err)
	}
	return found, nil
}

// OrdersOfUser returns up to limit rows of orders of a user, of vouchers above
// afterVoucher, ascending. The limit is at most 10,000.
func (s *Store) OrdersOfUser(ctx context.Context, userID, afterVoucher int64, limit int) ([]Found, error) {
	found, err := s.find(ctx, sqlOrdersOfUser, map[string]any{
		"user": userID, "voucher": afterVoucher, "limit": max(1, min(limit, maxOrders)),
	})
	if err != nil {
		return nil, fmt.Errorf("listing the orders of a user: %w", err)
	}
	return found, nil
}

func (s *Store) find(ctx context.Context, query string, args map[string]any) ([]Found, error) {
	var rows []foundRow
	if err := s.read(ctx).Raw(query, args).Scan(&rows).Error; err != nil {
		return nil, err
	}
	list := make([]Found, len(rows))
	for i, row := range rows {
		list[i] = row.found()
	}
	return list, nil
}
