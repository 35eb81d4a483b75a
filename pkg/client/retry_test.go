package client_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func TestGrab_BadRequestsAreNotRepeated(t *testing.T) {
	s := start(t, &server{grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		switch g.GetVoucherId() {
		case 1:
			return failed(g, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, 0)
		case 2:
			return failed(g, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_ARCHIVED, 0)
		}
		return failed(g, codes.InvalidArgument, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD, 0,
			&seckillv1.FieldViolation{Field: "voucher_id", Description: "must be more"})
	}})
	c := connect(t, client.Config{}, s)
	for voucher, want := range map[int64]error{1: client.ErrVoucherNotFound, 2: client.ErrVoucherArchived, -1: client.ErrInvalid} {
		before := s.grabs.Load()
		_, err := c.Grab(within(t, patience), 1, voucher)
		e := requireError(t, err, want)
		require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
		require.Equal(t, 1, e.Attempts)
		require.Equal(t, before+1, s.grabs.Load())
		if want == client.ErrInvalid {
			require.Equal(t, []client.Violation{{Field: "voucher_id", Description: "must be more"}}, e.Violations)
		}
	}
	before := s.grabs.Load()
	for _, reference := range []string{strings.Repeat("r", 65), "\xff"} {
		_, err := c.Grab(within(t, patience), 1, 1, client.WithReference(reference))
		e := requireError(t, err, client.ErrInvalid)
		require.Equal(t, "reference", e.Violations[0].Field)
	}
	require.Equal(t, before, s.grabs.Load(), "they would spoil a message for others")
}

func TestGrab_RetryAfterIsHonoured(t *testing.T) {
	const delay = 150 * time.Millisecond
	for name, test := range map[string]struct {
		code   codes.Code
		reason seckillv1.ErrorReason
	}{
		"rebuilding":    {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING},
		"unknown":       {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN},
		"overloaded":    {codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED},
		"unreachable":   {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE},
		"shutting down": {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var at []time.Time
			s := &server{}
			s.grab = func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
				mu.Lock()
				defer mu.Unlock()
				if at = append(at, time.Now()); len(at) <= 3 {
					return failed(g, test.code, test.reason, delay)
				}
				return s.admit(g)
			}
			start(t, s)
			result, err := connect(t, client.Config{}, s).Grab(within(t, patience), 1, 1)
			require.NoError(t, err)
			require.True(t, result.Admitted())
			require.Len(t, at, 4)
			for i := range 3 {
				require.GreaterOrEqual(t, at[i+1].Sub(at[i]), delay)
			}
		})
	}
}

// A delay that is longer than the caller's time is no reason to wait.
func TestGrab_TooLongDelayIsAnsweredAtOnce(t *testing.T) {
	s := start(t, &server{grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		return failed(g, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, time.Hour)
	}})
	ctx := within(t, patience)
	_, err := connect(t, client.Config{}, s).Grab(ctx, 1, 1)
	e := requireError(t, err, client.ErrRebuilding, client.ErrUnavailable)
	require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
	require.Equal(t, time.Hour, e.RetryAfter)
	require.Equal(t, 1, e.Attempts)
	require.NoError(t, ctx.Err())
}

func TestGrab_OverloadIsRepeatedAsOftenAsConfigured(t *testing.T) {
	for retries, attempts := range map[int]int{-1: 1, 0: 4, 2: 3} {
		s := start(t, &server{grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
			return failed(g, codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED, time.Millisecond)
		}})
		_, err := connect(t, client.Config{OverloadRetries: retries}, s).Grab(within(t, patience), 1, 1)
		e := requireError(t, err, client.ErrOverloaded)
		require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
		require.Equal(t, attempts, e.Attempts)
		require.Equal(t, int64(attempts), s.grabs.Load())
	}
}
