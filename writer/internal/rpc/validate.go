package rpc

import (
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// maxTotal is the highest seq, and so the most units that can be admitted.
	maxTotal = orderid.MaxSeq
	// maxTitle is in characters, as the database counts them.
	maxTitle = 200
	// firstYear and lastYear bound a window: Redis counts milliseconds from 1970,
	// and the database's dates have four digits.
	firstYear, lastYear = 1970, 9999

	defaultPageSize = 100
	maxPageSize     = 1000
)

// violations gathers all that is wrong with a request.
type violations []rpcserver.FieldViolation

func (v *violations) add(field, format string, args ...any) {
	*v = append(*v, rpcserver.FieldViolation{Field: field, Description: fmt.Sprintf(format, args...)})
}

func checkVoucherID(id int64) error {
	var bad violations
	if id < 1 {
		bad.add("voucher_id", "must be from 1 to 2^63-1, is %d", id)
	}
	return rpcserver.InvalidFields(bad)
}

// newVoucher checks every field of a request and returns what to create.
func newVoucher(req *seckillv1.CreateVoucherRequest) (orderstore.Voucher, error) {
	var bad violations
	if req.GetVoucherId() < 0 {
		bad.add("voucher_id", "must be from 0 (the server gives one) to 2^63-1, is %d", req.GetVoucherId())
	}
	switch title := req.GetTitle(); {
	case !utf8.ValidString(title):
		bad.add("title", "must be UTF-8")
	case utf8.RuneCountInString(title) > maxTitle:
		bad.add("title", "must have at most %d characters, has %d", maxTitle, utf8.RuneCountInString(title))
	}
	if total := req.GetTotal(); total < 1 || total > maxTotal {
		bad.add("total", "must be from 1 to 2^40-1, is %d", total)
	}
	begin, beginOK := checkTime(&bad, "begin_time", req.GetBeginTime())
	end, endOK := checkTime(&bad, "end_time", req.GetEndTime())
	if beginOK && endOK && !begin.Before(end) {
		bad.add("end_time", "must be after begin_time by a millisecond or more: begin_time is %s, end_time is %s",
			begin.Format(time.RFC3339Nano), end.Format(time.RFC3339Nano))
	}
	if err := rpcserver.InvalidFields(bad); err != nil {
		return orderstore.Voucher{}, err
	}
	return orderstore.Voucher{ID: req.GetVoucherId(), Title: req.GetTitle(), Total: req.GetTotal(), BeginAt: begin, EndAt: end}, nil
}

// checkTime returns the time cut to the millisecond.
func checkTime(bad *violations, field string, ts *timestamppb.Timestamp) (time.Time, bool) {
	if ts == nil {
		bad.add(field, "is required")
		return time.Time{}, false
	}
	if ts.CheckValid() != nil {
		bad.add(field, "is no valid timestamp: seconds %d, nanos %d", ts.GetSeconds(), ts.GetNanos())
		return time.Time{}, false
	}
	t := ts.AsTime().Truncate(time.Millisecond)
	if t.Year() < firstYear || t.Year() > lastYear {
		bad.add(field, "must be in the years %d to %d, is in %d", firstYear, lastYear, t.Year())
		return time.Time{}, false
	}
	return t, true
}

// checkPage returns the id that the page begins behind, and its size.
func checkPage(req *seckillv1.ListVouchersRequest) (after int64, size int, err error) {
	var bad violations
	size = int(req.GetPageSize())
	switch {
	case size == 0:
		size = defaultPageSize
	case size < 0 || size > maxPageSize:
		bad.add("page_size", "must be from 1 to %d, or 0 for %d, is %d", maxPageSize, defaultPageSize, size)
	}
	if token := req.GetPageToken(); token != "" {
		var ok bool
		if after, ok = parsePageToken(token); !ok {
			bad.add("page_token", "must be empty or the next_page_token of an earlier answer")
		}
	}
	return after, size, rpcserver.InvalidFields(bad)
}
