package client

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc/codes"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// refusalMargin is how long after an attempt was lost a refusal is believed. A
// gateway that took the Grab with it may have left a call on its way to the
// ledger, which admits nobody half a second after it was sent. What is decided
// before that has passed, such as "sold out", may be followed by an order.
//
// An attempt that was lost only after so long a silence may be with a gateway
// that hangs, or that the network hides: that has the time which travelled with
// the Grab, and the margin after it.
const refusalMargin = time.Second

// freeLosses is how often a Grab whose stream breaks under it is sent again at
// once. One that breaks every stream, whatever the fault, takes up to 767 others
// with it each time: then it waits longer and longer.
const freeLosses = 2

// Pauses before the next attempt where the server named none.
const (
	firstRetry, longestRetry = 25 * time.Millisecond, time.Second
)

// grab makes attempts until one counts.
func (c *Client) grab(ctx context.Context, call *call, began time.Time) (Result, int, *Error) {
	var expired <-chan time.Time
	if deadline, bounded := ctx.Deadline(); bounded {
		call.deadline = deadline
	} else {
		call.deadline = began.Add(c.config.Timeout)
		call.timer.Reset(c.config.Timeout)
		expired = call.timer.C
	}
	var again retries
	var doubt time.Time // until when a lost attempt may be decided; zero where none was lost
	var last *Error     // of the attempt before
	for {
		attempt := time.Now()
		result, failed := c.attempt(ctx, call, expired)
		again.attempts++
		switch {
		// A refusal that was asked for in doubt may have been decided in doubt,
		// however long it was on its way.
		case failed == nil && (result.Admitted() || attempt.After(doubt)):
			return result, again.attempts, nil
		case failed == nil:
			failed = &Error{
				Code: codes.Unavailable, Reason: seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN,
				RetryAfter: max(time.Until(doubt), firstRetry), Message: "refused while a lost attempt may still be decided",
			}
		case failed.OutcomeUnknown:
			until := time.Now()
			if failed.Reason == 0 && until.Sub(attempt) > refusalMargin {
				until = call.deadline
			}
			if until = until.Add(refusalMargin); until.After(doubt) {
				doubt = until
			}
		}
		delay, repeat := again.after(failed, c.config.OverloadRetries)
		if failed.Code == codes.Unavailable && ofThatGateway(failed.Reason) &&
			c.dispatcher.move(call.slot, max(failed.RetryAfter, longestRetry)) {
			delay, repeat = 0, true
		}
		if repeat && delay < time.Until(call.deadline) {
			if last = failed; delay == 0 {
				continue
			}
			if failed = c.sleep(ctx, delay); failed == nil {
				continue
			}
		}
		ended := *failed // which calls of one stream share
		if ended.cause != nil && last != nil {
			ended.Message += "; the attempt before: " + last.Message
		}
		ended.Attempts, ended.OutcomeUnknown = again.attempts, ended.OutcomeUnknown || !doubt.IsZero()
		return Result{}, again.attempts, &ended
	}
}

// ofThatGateway tells whether another gateway may well be better off.
func ofThatGateway(reason seckillv1.ErrorReason) bool {
	switch reason {
	case seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE,
		seckillv1.ErrorReason_ERROR_REASON_SCRIPT_VERSION:
		return true
	}
	return false
}

// retries decides on the next attempt of a call.
type retries struct {
	attempts, overloads int
	losses              int // of attempts that were sent
	waits               *backoff.ExponentialBackOff
}

// after tells whether a call that failed is made again, and after which delay:
// only what is safe, and what may well succeed then. Never less than the server
// asks for; up to a quarter more, so that those who failed together do not come
// back together.
func (r *retries) after(failed *Error, overloadRetries int) (delay time.Duration, repeat bool) {
	if failed.cause != nil {
		return 0, false // the caller's time is over, or the client's
	}
	switch failed.Code {
	case codes.Unavailable:
		if failed.lost && failed.OutcomeUnknown {
			r.losses++
		}
		if failed.lost && r.losses <= freeLosses { // waits for a stream if there is none
			return 0, true
		}
	case codes.ResourceExhausted:
		if r.overloads++; failed.RetryAfter == 0 || r.overloads > overloadRetries {
			return 0, false
		}
	case codes.DeadlineExceeded: // the server's bound is below the caller's
	default:
		return 0, false
	}
	if failed.RetryAfter > 0 {
		return failed.RetryAfter + rand.N(failed.RetryAfter/4+1), true
	}
	if r.waits == nil {
		r.waits = newBackOff(firstRetry, longestRetry)
	}
	return r.waits.NextBackOff(), true
}

// sleep waits, and says why not to its end.
func (c *Client) sleep(ctx context.Context, d time.Duration) *Error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return errorOfContext(ctx.Err())
	case <-c.life.Done():
		return errorOfClosed()
	}
}
