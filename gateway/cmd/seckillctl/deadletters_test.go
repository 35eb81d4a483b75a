package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/rpcserver"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// resolving answers n resolutions and then err.
func resolving(n int64, total int64, result seckillv1.DeadLetterResult, err error) func(*seckillv1.ResolveDeadLetterRequest, grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
	return func(_ *seckillv1.ResolveDeadLetterRequest, s grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
		for i := range n {
			if err := s.Send(&seckillv1.ResolveDeadLetterResponse{DeadLetterId: fmt.Sprint("o.", i), Result: result, Detail: "so it is", Done: i + 1, Total: total}); err != nil {
				return err
			}
		}
		return err
	}
}

func TestDeadLetters_ProgressAndSum(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	var got *seckillv1.ResolveDeadLetterRequest
	answer := resolving(2, 2, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED, nil)
	w.resolve = func(r *seckillv1.ResolveDeadLetterRequest, s grpc.ServerStreamingServer[seckillv1.ResolveDeadLetterResponse]) error {
		got = r
		return answer(r, s)
	}
	t.Setenv("USER", "ann")
	cancel := func(args ...string) (int, string, string) {
		return run(append([]string{"--writer", addr, "dead-letters", "cancel", "--reason", "ticket 12"}, args...)...)
	}
	code, out, errs := cancel("--yes", "--voucher", "7", "--held-reason", "bad", "--seen-before=-10m")
	require.Zero(t, code, errs)
	require.Equal(t, "1/2 o.0 CANCELLED: so it is\n2/2 o.1 CANCELLED: so it is\n", out)
	require.Equal(t, "2 dead letters, 2 cancelled\n", errs)
	require.Equal(t, "ann", got.GetOperator())
	require.Equal(t, "ticket 12", got.GetReason())
	require.EqualValues(t, 7, got.GetFilter().GetVoucherId())
	require.Equal(t, "bad", got.GetFilter().GetReasonPrefix())
	require.WithinDuration(t, time.Now().Add(-10*time.Minute), got.GetFilter().GetSeenBefore().AsTime(), time.Minute)
	code, _, errs = cancel("o.5", "--operator", "bob")
	require.Zero(t, code, errs)
	require.Equal(t, "o.5", got.GetDeadLetterId())
	require.Equal(t, "bob", got.GetOperator())
	require.Equal(t, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL, got.GetAction())

	answer = resolving(1, 3, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
		rpcserver.Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_DATABASE_UNREACHABLE, "away", rpcserver.WithRetryAfter(time.Second)))
	code, out, errs = cancel("--yes", "--all")
	require.Equal(t, 1, code)
	require.Contains(t, out, "1/3 o.0")
	require.Contains(t, errs, "after 1 of 3, which stay resolved")
	require.Contains(t, errs, "DATABASE_UNREACHABLE")

	answer = resolving(2, 2, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_STILL_HELD, nil)
	code, _, errs = cancel("--yes", "--all")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "2 are still held")
}

func TestDeadLetters_OneThatCameToSomethingElseThanAskedIsAnError(t *testing.T) {
	w := &writer{}
	addr := serve(t, w)
	t.Setenv("USER", "ann")
	const persisted, conflict, cancelled = seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED,
		seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CONFLICT, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED
	for _, row := range []struct {
		action string
		result seckillv1.DeadLetterResult
		code   int
	}{
		{"requeue", persisted, 0}, {"requeue", cancelled, 1}, {"requeue", conflict, 1},
		{"cancel", cancelled, 0}, {"cancel", persisted, 1}, {"cancel", conflict, 1},
	} {
		w.resolve = resolving(1, 1, row.result, nil)
		code, out, errs := run("--writer", addr, "dead-letters", row.action, "o.7.1.5.0", "--reason", "x")
		require.Equal(t, row.code, code, "%s %s", row.action, row.result)
		require.Contains(t, out, "1/1 o.0 "+enumName(row.result)+": so it is\n", "it is an answer all the same")
		if row.code != 0 {
			require.Contains(t, errs, "o.7.1.5.0 is "+enumName(row.result)+", which is not what was asked for")
		}
		code, _, errs = run("--writer", addr, "dead-letters", row.action, "--all", "--yes", "--reason", "x")
		require.Zero(t, code, errs)
	}
}

func TestDeadLetters_ManyAreResolvedOnlyAfterAYes(t *testing.T) {
	w := &writer{
		letters: func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
			return &seckillv1.ListDeadLettersResponse{DeadLetters: make([]*seckillv1.DeadLetter, 3), NextPageToken: "more"}, nil
		},
		resolve: resolving(1, 1, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED, nil),
	}
	to := &connection{Writer: serve(t, w), Timeout: 10 * time.Second, Output: "text"}
	for answer, goesOn := range map[string]bool{"y\n": true, " YES \n": true, "n\n": false, "\n": false, "": false, "yes please\n": false} {
		var out, errs bytes.Buffer
		r := &resolve{All: true, Operator: "ann", Reason: "why"}
		err := r.run(context.Background(), to, command.Streams{Out: &out, Err: &errs}, strings.NewReader(answer), seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE)
		require.Contains(t, errs.String(), "requeue more than 3 dead letters, as ann? [y/N] ")
		if goesOn {
			require.NoError(t, err, "%q", answer)
			require.NotEmpty(t, out.String())
		} else {
			require.ErrorContains(t, err, "nothing was changed", "%q", answer)
			require.Empty(t, out.String())
		}
	}
}

func TestDeadLetters_AnInterruptEndsTheQuestion(t *testing.T) {
	w := &writer{letters: func(*seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
		return &seckillv1.ListDeadLettersResponse{DeadLetters: make([]*seckillv1.DeadLetter, 3)}, nil
	}}
	to := &connection{Writer: serve(t, w), Timeout: 10 * time.Second, Output: "text"}
	ctx, interrupt := context.WithCancel(t.Context())
	in, terminal := io.Pipe() // nobody answers
	defer terminal.Close()
	asked := &notice{of: "[y/N]", then: interrupt}
	r := &resolve{All: true, Operator: "ann", Reason: "why"}
	err := r.run(ctx, to, command.Streams{Out: io.Discard, Err: asked}, in, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL)
	require.ErrorContains(t, err, "nothing was changed")
}

func TestTerminal_IsNeitherAFileNorTheNullDevice(t *testing.T) {
	for _, name := range []string{os.DevNull, filepath.Join(t.TempDir(), "file")} {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		require.False(t, terminal(f), name)
		require.NoError(t, f.Close())
	}
}
