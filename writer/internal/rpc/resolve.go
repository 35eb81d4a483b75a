package rpc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// maxResolved is how many dead letters one call decides: some minutes of work,
	// and some 15 MB for their names.
	maxResolved = 100_000
	// maxDeciding is how many decisions run at once in this process. Decisions
	// about one voucher wait for each other in any case.
	maxDeciding = 2
	// resolveTimeout bounds a call, whatever deadline its caller set.
	resolveTimeout = 15 * time.Minute
	// resolvePatience is how long a call waits for a database that cannot decide:
	// longer than a restart takes.
	resolvePatience = 30 * time.Second
	// decideTimeout bounds one try, which may wait for the voucher's row.
	decideTimeout = 10 * time.Second
	// The waits between two tries, from the length of a deadlock to what an
	// operator bears after a repair.
	firstRetry, longestRetry = 50 * time.Millisecond, 2 * time.Second
)

// decision is what an operator wants with what.
type decision struct {
	// One of the two is set.
	id     *orderstore.DeadLetterID
	filter *orderstore.DeadLetterFilter

	action           seckillv1.DeadLetterAction
	operator, reason string
}

// ResolveDeadLetter decides dead letters one by one and tells of each as soon as
// the database has it; the guardian tells the ledger within its interval. Where a
// call ends before it is done, the same call goes on: what is decided is not
// named by the filter any more, and a single one answers what it came to.
func (s *WriterService) ResolveDeadLetter(req *seckillv1.ResolveDeadLetterRequest, stream grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
	d, err := newDecision(req)
	if err != nil {
		return err
	}
	ctx := stream.Context()
	whole, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	call, cancelCall := bounded(whole)
	defer cancelCall()

	var ids []orderstore.DeadLetterID
	if d.id != nil {
		ids = append(ids, *d.id)
	} else if ids, err = s.named(ctx, call, *d.filter); err != nil {
		return err
	}
	for i, id := range ids {
		switch {
		case s.stopping():
			return rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN,
				fmt.Sprintf("the writer is shutting down; %d of %d are resolved, the same call goes on with the others", i, len(ids)),
				rpcserver.WithRetryAfter(retryAfter))
		case gone(ctx):
			return status.FromContextError(ctx.Err()).Err()
		case gone(call):
			return status.Errorf(codes.DeadlineExceeded, "%d of %d are resolved in the time there was; the same call goes on with the others", i, len(ids))
		}
		came, err := s.decide(ctx, call, d, id)
		if err != nil {
			return err
		}
		if err := stream.Send(&seckillv1.ResolveDeadLetterResponse{
			DeadLetterId: id.String(), Result: deadLetterResults[came.Result], Detail: came.Detail,
			Done: int64(i + 1), Total: int64(len(ids)),
		}); err != nil {
			return err
		}
	}
	return nil
}

// named lists what a filter names now, oldest first. What becomes a dead letter
// meanwhile lies behind it and is left alone.
func (s *WriterService) named(ctx, call context.Context, f orderstore.DeadLetterFilter) ([]orderstore.DeadLetterID, error) {
	total := int64(0)
	err := s.patiently(call, func(ctx context.Context) (err error) {
		total, err = s.store.CountDeadLetters(ctx, f)
		return err
	})
	if err != nil {
		return nil, s.databaseError(ctx, "counting dead letters", err)
	}
	if total > maxResolved {
		return nil, rpcserver.InvalidField("filter", fmt.Sprintf("names %d dead letters, more than the %d of one call: narrow it, for instance by seen_before", total, maxResolved))
	}
	ids := make([]orderstore.DeadLetterID, 0, total)
	after := orderstore.DeadLetterID{}
	for int64(len(ids)) < total {
		var part []orderstore.DeadLetter
		err := s.patiently(call, func(ctx context.Context) (err error) {
			part, err = s.store.DeadLetters(ctx, f, after, int(min(total-int64(len(ids)), deadLettersAtOnce)))
			return err
		})
		if err != nil {
			return nil, s.databaseError(ctx, "listing dead letters", err)
		}
		if len(part) == 0 {
			break // somebody else resolved some
		}
		for _, letter := range part {
			ids = append(ids, letter.ID)
		}
		after = ids[len(ids)-1]
	}
	return ids, nil
}

// decide carries one decision out.
func (s *WriterService) decide(ctx, call context.Context, d decision, id orderstore.DeadLetterID) (orderstore.Resolution, error) {
	do := s.store.Requeue
	if d.action == seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL {
		do = s.store.Cancel
	}
	var came orderstore.Resolution
	err := s.patiently(call, func(ctx context.Context) (err error) {
		came, err = do(ctx, id, d.operator, d.reason)
		if err != nil && !errors.Is(err, orderstore.ErrTransient) {
			return backoff.Permanent(err)
		}
		return err
	})
	if err == nil {
		s.log.InfoContext(ctx, "dead letter resolved", "dead_letter", id.String(), "action", d.action.String(), "operator", d.operator, telemetry.KeyVerdict, came.Result)
		return came, nil
	}
	known := errors.Is(err, orderstore.ErrTransient) || errors.Is(err, orderstore.ErrDeadLetterNotFound) ||
		errors.Is(err, orderstore.ErrNotMigrated) || gone(call)
	if !known {
		s.log.ErrorContext(ctx, "a dead letter could not be resolved", "dead_letter", id.String(), telemetry.KeyErr, err)
		return came, rpcserver.Error(codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL, "the dead letter could not be resolved")
	}
	return came, s.databaseError(ctx, "resolving a dead letter", err)
}

// patiently runs something in the database, and again with growing waits where it
// could not decide. It gives up when its patience or the call's time is over, and
// when the server stops.
func (s *WriterService) patiently(call context.Context, do func(context.Context) error) error {
	waits := backoff.NewExponentialBackOff()
	waits.InitialInterval, waits.MaxInterval, waits.Multiplier, waits.RandomizationFactor = firstRetry, longestRetry, 2, 0.5
	var last error
	_, err := backoff.Retry(call, func() (struct{}, error) {
		select {
		case s.deciding <- struct{}{}:
			defer func() { <-s.deciding }()
		case <-call.Done():
			return struct{}{}, backoff.Permanent(call.Err())
		}
		try, cancel := context.WithTimeout(call, decideTimeout)
		defer cancel()
		err := do(try)
		if err != nil {
			last = err
		}
		if err != nil && (s.stopping() || gone(call)) {
			return struct{}{}, backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(waits), backoff.WithMaxElapsedTime(resolvePatience))
	if err != nil && last != nil && gone(call) {
		return last // what it waited for says more than that the time is over
	}
	return err
}

// stopping tells that the server takes no new calls.
func (s *WriterService) stopping() bool {
	select {
	case <-s.draining: // nil: never
		return true
	default:
		return false
	}
}
