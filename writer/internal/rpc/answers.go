package rpc

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// retryAfter is when a call that met a database, a Redis or a ledger that was
// not there may be repeated: about as often as the guardian looks.
const retryAfter = time.Second

// maxViolationsInMessage bounds what a message quotes; GetBooks has them all.
const maxViolationsInMessage = 3

// databaseError is the status for an error of the database. The text of the
// driver goes to the log, once, and nowhere else.
func (s *Service) databaseError(ctx context.Context, doing string, id int64, err error) error {
	var state *orderstore.StateError
	switch {
	case errors.Is(err, orderstore.ErrVoucherNotFound):
		return rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND,
			fmt.Sprintf("there is no voucher %d", id))
	case errors.Is(err, orderstore.ErrVoucherExists):
		return rpcserver.Error(codes.AlreadyExists, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_EXISTS,
			fmt.Sprintf("voucher %d exists with another title, total or window", id))
	case errors.As(err, &state):
		return rpcserver.Error(codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_STATE,
			fmt.Sprintf("voucher %d is %s and cannot become %s", id, state.State, state.To),
			rpcserver.WithMetadata("state", state.State))
	case gone(ctx):
		return status.FromContextError(ctx.Err()).Err()
	}
	s.log.ErrorContext(ctx, "database error in a call", "doing", doing, telemetry.KeyVoucherID, id, telemetry.KeyErr, err)
	if errors.Is(err, orderstore.ErrInvalidVoucher) {
		// Validation should have said so by field: a gap in it, not the caller's fault.
		return rpcserver.Error(codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL, "the database refuses these values")
	}
	return databaseStatus(err)
}

// databaseStatus is for an error of the database that is nothing of the above.
func databaseStatus(err error) error {
	msg := "the database cannot answer now"
	if errors.Is(err, orderstore.ErrNotMigrated) {
		msg = "the database is not migrated"
	}
	return rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_DATABASE_UNREACHABLE, msg,
		rpcserver.WithRetryAfter(retryAfter))
}

// redisError is the status for an error of Redis or of the ledger in it.
func (s *Service) redisError(ctx context.Context, doing string, id int64, err error) error {
	if gone(ctx) {
		return status.FromContextError(ctx.Err()).Err()
	}
	s.log.ErrorContext(ctx, "ledger error in a call", "doing", doing, telemetry.KeyVoucherID, id, telemetry.KeyErr, err)
	return redisStatus(err)
}

func redisStatus(err error) error {
	reason, msg := ledgerReason(err)
	return rpcserver.Error(codes.Unavailable, reason, msg, rpcserver.WithRetryAfter(retryAfter))
}

// ledgerReason names what is wrong with the ledger, in words of ours.
func ledgerReason(err error) (seckillv1.ErrorReason, string) {
	switch {
	case errors.Is(err, ledger.ErrMissing), errors.Is(err, ledger.ErrStaleEpoch), errors.Is(err, orderstore.ErrEpochMoved):
		return seckillv1.ErrorReason_ERROR_REASON_REBUILDING, "the ledger of the voucher's partition is not there or of another epoch"
	case errors.Is(err, ledger.ErrFault):
		return seckillv1.ErrorReason_ERROR_REASON_LEDGER_FAULT, "the ledger holds what it never should"
	case errors.Is(err, ledger.ErrRefused):
		return seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE, "redis refuses calls now"
	default:
		return seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE, "redis did not answer"
	}
}

// ledgerError tells whether an error is one of the ledger and not of the
// database: what is given both has to ask.
func ledgerError(err error) bool {
	for _, known := range []error{
		ledger.ErrMissing, ledger.ErrStaleEpoch, ledger.ErrFault, ledger.ErrRefused,
		ledger.ErrUnknown, ledger.ErrNoScript, ledger.ErrVoucherBusy, ledger.ErrNoGroup, orderstore.ErrEpochMoved,
	} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// carryError is the status where a change is recorded but the ledger was not
// brought to it, or the database could not note that it was.
func (s *Service) carryError(ctx context.Context, v orderstore.Voucher, err error) error {
	const doing = "carrying a voucher to the ledger"
	switch {
	case gone(ctx):
		return status.FromContextError(ctx.Err()).Err()
	case errors.Is(err, ledger.ErrVoucherBusy):
		return notCarried(v, rpcserver.Error(codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_BOOKS_NOT_PROVEN,
			"the ledger still has orders in flight"))
	case ledgerError(err):
		return notCarried(v, s.redisError(ctx, doing, v.ID, err))
	default:
		return notCarried(v, s.databaseError(ctx, doing, v.ID, err))
	}
}

// notCarried adds to a status that the change is recorded all the same.
func notCarried(v orderstore.Voucher, err error) error {
	st := status.Convert(err).Proto()
	st.Message = fmt.Sprintf("voucher %d is recorded as %s (rev %d) and will be carried to the ledger; repeat the call to wait for it: %s",
		v.ID, v.State, v.Rev, st.Message)
	return status.FromProto(st).Err()
}

func notConnected() error {
	return rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE,
		"the writer has no connection to redis yet", rpcserver.WithRetryAfter(retryAfter))
}

// busyOpening is for a call whose time went by behind other openings.
func (s *Service) busyOpening(ctx context.Context) error {
	if gone(ctx) {
		return status.FromContextError(ctx.Err()).Err()
	}
	return rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE,
		"other vouchers are being opened, and the look at redis' memory did not come to this one; nothing was changed",
		rpcserver.WithRetryAfter(retryAfter))
}

func windowOver(v orderstore.Voucher) error {
	return rpcserver.Error(codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_STATE,
		fmt.Sprintf("voucher %d cannot be opened: its end_time %s has passed", v.ID, v.EndAt.UTC().Format(time.RFC3339Nano)),
		rpcserver.WithMetadata("state", v.State))
}

func outOfMemory(v orderstore.Voucher, need, left, promised int64, server ledger.Server) error {
	limit := "the machine's memory"
	total := server.SystemMemory
	if server.MaxMemory > 0 {
		limit, total = "maxmemory", server.MaxMemory
	}
	return rpcserver.Error(codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_LEDGER_MEMORY,
		fmt.Sprintf("voucher %d needs %d bytes of redis' memory (%d units x %d), %d are left: %s is %d, in use are %d, vouchers on sale may need %d more",
			v.ID, need, v.Total, ledger.BytesPerOrder, left, limit, total, server.UsedMemory, promised),
		rpcserver.WithMetadata("need_bytes", strconv.FormatInt(need, 10)),
		rpcserver.WithMetadata("left_bytes", strconv.FormatInt(left, 10)))
}

func notProven(b books.Books) error {
	msg := fmt.Sprintf("voucher %d has %d orders in flight", b.VoucherID, b.InFlight)
	if b.Verdict == books.Violated {
		rules := make([]string, 0, maxViolationsInMessage)
		for _, v := range b.Violations[:min(len(b.Violations), maxViolationsInMessage)] {
			rules = append(rules, v.Rule+" ("+v.Detail+")")
		}
		msg = fmt.Sprintf("the books of voucher %d do not hold: %s", b.VoucherID, strings.Join(rules, "; "))
	}
	return rpcserver.Error(codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_BOOKS_NOT_PROVEN, msg,
		rpcserver.WithMetadata("verdict", booksVerdicts[b.Verdict].String()),
		rpcserver.WithMetadata("in_flight", strconv.FormatInt(b.InFlight, 10)))
}

// reckonError is the status for books that could not be reckoned.
func (s *Service) reckonError(ctx context.Context, id int64, err error) error {
	if ledgerError(err) {
		return s.redisError(ctx, "reckoning books", id, err)
	}
	return s.databaseError(ctx, "reckoning books", id, err)
}

// gone tells that the call itself has ended, not some step within it.
func gone(ctx context.Context) bool { return ctx.Err() != nil }
