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
// ledger, which admits nobody half a second after it was sent. Until that has
// passed, "sold out" may be followed by an order.
const refusalMargin = time.Second

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
	var lost time.Time // when an attempt ended last of which nobody knows what came of it
	var last *Error    // of the attempt before
	for {
		result, failed := c.attempt(ctx, call, expired)
		again.attempts++
		if failed == nil {
			wait := time.Duration(0)
			if !lost.IsZero() && !result.Admitted() {
				wait = refusalMargin - time.Since(lost)
			}
			if wait <= 0 {
				return result, again.attempts, nil
			}
			failed = &Error{
				Code: codes.Unavailable, Reason: seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, RetryAfter: wait,
				Message: "refused while a lost attempt may still be decided",
			}
		} else if failed.OutcomeUnknown {
			lost = time.Now()
		}
		delay, repeat := again.after(failed, c.config.OverloadRetries)
		if repeat && delay < time.Until(call.deadline) {
			if failed.Code == codes.Unavailable && failed.RetryAfter > 0 && ofThatGateway(failed.Reason) {
				c.dispatcher.avoid(call.slot, failed.RetryAfter)
			}
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
		ended.Attempts, ended.OutcomeUnknown = again.attempts, ended.OutcomeUnknown || !lost.IsZero()
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
	moved               bool // away from a gateway that shuts down, at once
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
		if failed.lost { // waits for a stream if there is none
			return 0, true
		}
		if shuttingDown(failed) && !r.moved {
			r.moved = true
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
