package retry

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/stretchr/testify/require"
)

func textLog() (*bytes.Buffer, *slog.Logger) {
	var b bytes.Buffer
	return &b, slog.New(slog.NewTextHandler(&b, nil))
}

func TestUntil_LogsAttempts1248AndNewFailures(t *testing.T) {
	said, log := textLog()
	attempt := 0
	got, err := Until(t.Context(), log, "waiting for it", func() (string, error) {
		attempt++
		switch attempt {
		case 3:
			return "", errors.New("in another way")
		case 6:
			return "it", nil
		}
		return "", errors.New("not there")
	})
	require.NoError(t, err)
	require.Equal(t, "it", got)
	require.Equal(t, 4, strings.Count(said.String(), "level=WARN msg=\"waiting for it\""), said.String())
	for _, logged := range []string{"attempt=1 ", "attempt=2 ", "err=\"in another way\" attempt=3 ", "attempt=4 "} {
		require.Contains(t, said.String(), logged)
	}
}

func TestUntil_APermanentErrorIsTheResult(t *testing.T) {
	_, log := textLog()
	final, attempt := errors.New("refused"), 0
	_, err := Until(t.Context(), log, "waiting", func() (int, error) {
		attempt++
		if attempt == 2 {
			return 0, backoff.Permanent(final)
		}
		return 0, errors.New("not there")
	})
	require.Equal(t, final, err)
	require.Equal(t, 2, attempt)
}

func TestUntil_EndsWithItsContextAndHoldsTheLastFailure(t *testing.T) {
	_, log := textLog()
	failure := errors.New("not there")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := Until(ctx, log, "waiting", func() (int, error) { return 0, failure })
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorIs(t, err, failure)

	_, err = Until(ctx, log, "waiting", func() (int, error) { panic("it has ended before") })
	require.Equal(t, context.DeadlineExceeded, err)
}
