package rpc

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	defaultOrders, maxOrders           = 1_000, 10_000
	defaultDeadLetters, maxDeadLetters = 100, 1_000

	// In characters, as the database counts them.
	maxOperator = 64
	maxReason   = 255
	// maxDeadLetterID is beyond every id that was ever given.
	maxDeadLetterID = 128
)

func (v *violations) checkID(field string, id int64) {
	if id < 1 {
		v.add(field, "must be from 1 to 2^63-1, is %d", id)
	}
}

// checkSize returns the size of a page.
func (v *violations) checkSize(size int32, preset, most int) int {
	switch {
	case size == 0:
		return preset
	case size < 0 || int(size) > most:
		v.add("page_size", "must be from 1 to %d, or 0 for %d, is %d", most, preset, size)
	}
	return int(size)
}

// checkText wants text that says something.
func (v *violations) checkText(field, text string, most int) {
	switch n := utf8.RuneCountInString(text); {
	case !utf8.ValidString(text):
		v.add(field, "must be UTF-8")
	case strings.TrimSpace(text) == "":
		v.add(field, "is required")
	case n > most:
		v.add(field, "must have at most %d characters, has %d", most, n)
	}
}

func checkFindOrder(req *seckillv1.FindOrderRequest) error {
	var bad violations
	switch key := req.GetKey().(type) {
	case *seckillv1.FindOrderRequest_OrderId:
		if !orderIDForm(key.OrderId) {
			bad.add("order_id", "must be %d characters of 0-9 and A-Z without I, L, O and U", orderid.Length)
		}
	case *seckillv1.FindOrderRequest_UserVoucher:
		bad.checkID("user_voucher.user_id", key.UserVoucher.GetUserId())
		bad.checkID("user_voucher.voucher_id", key.UserVoucher.GetVoucherId())
	default:
		bad.add("key", "one of order_id and user_voucher is required")
	}
	return rpcserver.InvalidFields(bad)
}

func orderIDForm(id string) bool {
	return len(id) == orderid.Length && strings.Trim(id, "0123456789ABCDEFGHJKMNPQRSTVWXYZ") == ""
}

// ordersQuery is one page of ListOrders.
type ordersQuery struct {
	// One of the two is set.
	voucherID, userID int64
	// after is the order that the page begins behind; the zero value for none.
	after orderid.Position
	size  int
}

func newOrdersQuery(req *seckillv1.ListOrdersRequest) (q ordersQuery, err error) {
	var bad violations
	switch of := req.GetOf().(type) {
	case *seckillv1.ListOrdersRequest_VoucherId:
		q.voucherID = of.VoucherId
		bad.checkID("voucher_id", of.VoucherId)
	case *seckillv1.ListOrdersRequest_UserId:
		q.userID = of.UserId
		bad.checkID("user_id", of.UserId)
	default:
		bad.add("of", "one of voucher_id and user_id is required")
	}
	q.size = bad.checkSize(req.GetPageSize(), defaultOrders, maxOrders)
	if token := req.GetPageToken(); token != "" {
		place, ok := readCursor(token, q.name())
		if ok {
			q.after, ok = q.parsePlace(place)
		}
		if !ok {
			bad.add("page_token", notOfThisQuery)
		}
	}
	return q, rpcserver.InvalidFields(bad)
}

// name is what a token is bound to.
func (q ordersQuery) name() string { return fmt.Sprintf("orders %d %d", q.voucherID, q.userID) }

func (q ordersQuery) token() string {
	return cursor(q.name(), fmt.Sprintf("%d %d %d", q.after.VoucherID, q.after.Epoch, q.after.Seq))
}

func (q ordersQuery) parsePlace(place string) (p orderid.Position, ok bool) {
	_, err := fmt.Sscanf(place, "%d %d %d", &p.VoucherID, &p.Epoch, &p.Seq)
	return p, err == nil && p.VoucherID > 0
}

func (q ordersQuery) read(ctx context.Context, from lister, size int) ([]orderstore.Found, error) {
	if q.userID != 0 {
		return from.OrdersOfUser(ctx, q.userID, q.after.VoucherID, size)
	}
	return from.OrdersOfVoucher(ctx, q.voucherID, q.after, size)
}

// deadLettersQuery is one page of ListDeadLetters.
type deadLettersQuery struct {
	filter orderstore.DeadLetterFilter
	after  orderstore.DeadLetterID
	size   int
}

func newDeadLettersQuery(req *seckillv1.ListDeadLettersRequest) (q deadLettersQuery, err error) {
	var bad violations
	q.filter = bad.checkFilter(req.GetFilter())
	q.size = bad.checkSize(req.GetPageSize(), defaultDeadLetters, maxDeadLetters)
	if token := req.GetPageToken(); token != "" {
		place, ok := readCursor(token, q.name())
		if ok {
			q.after, err = orderstore.ParseDeadLetterID(place)
			ok = err == nil
		}
		if !ok {
			bad.add("page_token", notOfThisQuery)
		}
	}
	return q, rpcserver.InvalidFields(bad)
}

func (q deadLettersQuery) name() string {
	return fmt.Sprintf("dead letters %d %d %q %s", q.filter.VoucherID, q.filter.UserID, q.filter.ReasonPrefix, q.filter.SeenBefore.Format(time.RFC3339Nano))
}

func (q deadLettersQuery) token() string { return cursor(q.name(), q.after.String()) }

func (v *violations) checkFilter(f *seckillv1.DeadLetterFilter) orderstore.DeadLetterFilter {
	checked := orderstore.DeadLetterFilter{VoucherID: f.GetVoucherId(), UserID: f.GetUserId(), ReasonPrefix: f.GetReasonPrefix()}
	if checked.VoucherID < 0 {
		v.add("filter.voucher_id", "must be from 0 (all) to 2^63-1, is %d", checked.VoucherID)
	}
	if checked.UserID < 0 {
		v.add("filter.user_id", "must be from 0 (all) to 2^63-1, is %d", checked.UserID)
	}
	switch n := utf8.RuneCountInString(checked.ReasonPrefix); {
	case !utf8.ValidString(checked.ReasonPrefix):
		v.add("filter.reason_prefix", "must be UTF-8")
	case n > maxReason:
		v.add("filter.reason_prefix", "must have at most %d characters, has %d", maxReason, n)
	}
	if at := f.GetSeenBefore(); at != nil {
		checked.SeenBefore, _ = checkTime(v, "filter.seen_before", at)
	}
	return checked
}

func newDecision(req *seckillv1.ResolveDeadLetterRequest) (d decision, err error) {
	var bad violations
	missing := false
	switch which := req.GetWhich().(type) {
	case *seckillv1.ResolveDeadLetterRequest_DeadLetterId:
		if which.DeadLetterId == "" || len(which.DeadLetterId) > maxDeadLetterID {
			bad.add("dead_letter_id", "must have 1 to %d bytes, has %d", maxDeadLetterID, len(which.DeadLetterId))
			break
		}
		id, err := orderstore.ParseDeadLetterID(which.DeadLetterId)
		d.id, missing = &id, err != nil
	case *seckillv1.ResolveDeadLetterRequest_Filter:
		filter := bad.checkFilter(which.Filter)
		d.filter = &filter
	default:
		bad.add("which", "one of dead_letter_id and filter is required")
	}
	switch d.action = req.GetAction(); d.action {
	case seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL:
	default:
		bad.add("action", "must be DEAD_LETTER_ACTION_REQUEUE or DEAD_LETTER_ACTION_CANCEL, is %s", d.action)
	}
	d.operator, d.reason = req.GetOperator(), req.GetReason()
	bad.checkText("operator", d.operator, maxOperator)
	bad.checkText("reason", d.reason, maxReason)
	if err := rpcserver.InvalidFields(bad); err != nil {
		return d, err
	}
	if missing {
		return d, deadLetterNotFound() // no id of that form was ever given
	}
	return d, nil
}
