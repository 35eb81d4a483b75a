// Package retry repeats what a process cannot start without, such as to reach a
// server, for as long as it takes, and keeps the log short meanwhile.
package retry

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/seckill/seckill/pkg/telemetry"
)

const (
	// The first retry comes soon, since at a common start what is missing is
	// often only a moment late; the longest wait is what an operator bears after
	// a repair.
	firstWait, longestWait = 100 * time.Millisecond, 2 * time.Second
)

// Until calls try, with exponential backoff and jitter, until it succeeds or
// returns a backoff.Permanent error, which is then the result. An attempt must
// be bounded by itself. Where ctx ends first, the error holds why, and the last
// failure. One attempt in 1, 2, 4, 8, ... is logged, under message, and each that
// fails in a new way.
func Until[T any](ctx context.Context, log *slog.Logger, message string, try func() (T, error)) (T, error) {
	waits := backoff.NewExponentialBackOff()
	waits.InitialInterval, waits.MaxInterval, waits.Multiplier, waits.RandomizationFactor = firstWait, longestWait, 2, 0.5
	attempt, nextLogged := 0, 1
	var last error
	result, err := backoff.Retry(ctx,
		func() (result T, err error) {
			if err := ctx.Err(); err != nil {
				return result, backoff.Permanent(err)
			}
			attempt++
			return try()
		},
		backoff.WithBackOff(waits),
		backoff.WithMaxElapsedTime(0), // ctx is the bound
		backoff.WithNotify(func(err error, wait time.Duration) {
			if attempt >= nextLogged || last == nil || err.Error() != last.Error() {
				log.Warn(message, telemetry.KeyErr, err, telemetry.KeyAttempt, attempt, telemetry.KeyRetryInMS, wait.Milliseconds())
			}
			for nextLogged <= attempt {
				nextLogged *= 2
			}
			last = err
		}))
	if err != nil && last != nil && ctx.Err() != nil {
		return result, fmt.Errorf("%w after %d attempts, the last: %w", err, attempt, last)
	}
	return result, err
}
