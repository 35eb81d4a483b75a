package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func mustRun(t *testing.T, ctx context.Context, target Target, p Plan) *Result {
	t.Helper()
	p.VoucherID = 7
	if p.Drain == 0 {
		p.Drain = patience
	}
	result, err := Run(ctx, target, p)
	require.NoError(t, err)
	accounted := result.Dropped
	for _, n := range result.Answers {
		accounted += n
	}
	require.Equal(t, result.Offered, accounted, "whatever is offered is accounted for: %v", result.Answers)
	failed := int64(0)
	for _, n := range result.Reasons {
		failed += n
	}
	require.Equal(t, result.Count(Failed), failed)
	require.Equal(t, result.Count(Failed), result.FailedLatency.Count())
	return result
}

func TestRun_CountsOutcomesAndReasonsApart(t *testing.T) {
	each(t, func() *gateway {
		return &gateway{grab: func(_ context.Context, user int64) (*seckillv1.GrabResponse, error) {
			switch user % 8 {
			case 0:
				return admitted(), nil
			case 1:
				return &seckillv1.GrabResponse{Outcome: seckillv1.Outcome_OUTCOME_ADMITTED, Replayed: true}, nil
			case 2, 3, 4, 5:
				return &seckillv1.GrabResponse{Outcome: seckillv1.Outcome(user % 8)}, nil
			case 6:
				return nil, refused{&seckillv1.GrabError{Code: int32(codes.DeadlineExceeded), Message: "late"}}
			}
			return &seckillv1.GrabResponse{}, nil
		}}
	}, func(t *testing.T, _ *gateway, target Target) {
		result := mustRun(t, t.Context(), target, Plan{Concurrency: 20, Count: 8000, FirstUser: 8})
		require.EqualValues(t, 8000, result.Offered)
		want := map[string]int64{"admitted": 1000, "replayed": 1000, "sold_out": 1000, "not_started": 1000, "ended": 1000, "paused": 1000, "failed": 2000}
		require.Equal(t, want, result.Answers)
		require.EqualValues(t, 1000, result.Reasons["NO_OUTCOME"])
		require.Len(t, result.Reasons, 2)
		require.EqualValues(t, 6000, result.Latency.Count())
		require.EqualValues(t, 2000, result.Faults())
		require.EqualValues(t, 8, result.Plan.FirstUser)
		require.EqualValues(t, 8000, result.Users)
		inSeries := int64(0)
		for _, s := range result.Series {
			inSeries += s.Answers["sold_out"]
		}
		require.EqualValues(t, 1000, inSeries)
		require.Contains(t, result.Summary(), "NO_OUTCOME")
		require.Regexp(t, `sold_out +1,000 +12.50 %`, result.Summary())

		text, err := json.Marshal(result)
		require.NoError(t, err)
		var read Result
		require.NoError(t, json.Unmarshal(text, &read))
		require.Equal(t, result.Answers, read.Answers)
		require.Equal(t, result.Latency.Percentile(0.99), read.Latency.Percentile(0.99))
	})
}

// since makes a clock that starts with its first use.
func since() func() time.Duration {
	start := sync.OnceValue(time.Now)
	return func() time.Duration { return time.Since(start()) }
}

// stalled is a server that stands still for a while, half a second after its
// first Grab.
func stalled(wait time.Duration) *gateway {
	clock := since()
	return &gateway{grab: func(context.Context, int64) (*seckillv1.GrabResponse, error) {
		if late := clock() - 500*time.Millisecond; late > 0 && late < wait {
			time.Sleep(wait - late)
		}
		return admitted(), nil
	}}
}

// A server that stalls for a second while 1000 a second are due owes the last of
// them 0, the first of them a second: half a second on average over a third of
// all. Whoever counts from the sending of what it managed to send sees one.
func TestRun_OpenLoopShowsAllOfAStall(t *testing.T) {
	each(t, func() *gateway { return stalled(time.Second) }, func(t *testing.T, _ *gateway, target Target) {
		result := mustRun(t, t.Context(), target, Plan{Rate: 1000, Duration: 3 * time.Second, MaxOutstanding: 5000})
		require.EqualValues(t, 3000, result.Offered)
		require.EqualValues(t, 3000, result.Count(Admitted))
		slow := int64(0)
		for _, b := range result.Latency.Buckets() {
			if b.Low >= 400*time.Millisecond {
				slow += b.Count
			}
		}
		require.Greater(t, slow, int64(500), "of those due in the stall, the first 600 waited for more than 0.4 s")
		require.Greater(t, result.Latency.Max(), 900*time.Millisecond)
	})
}

func TestRun_StallBeyondTheEndIsCountedToo(t *testing.T) {
	each(t, func() *gateway { return stalled(1500 * time.Millisecond) }, func(t *testing.T, _ *gateway, target Target) {
		result := mustRun(t, t.Context(), target, Plan{Rate: 1000, Duration: time.Second, MaxOutstanding: 5000})
		require.EqualValues(t, 1000, result.Offered)
		require.Greater(t, result.Latency.Percentile(0.9), 1200*time.Millisecond)
		require.Less(t, result.Rate(Admitted), 900.0, "a rate is of answers that came while it measured")
	})
}

func TestRun_DropsWhatIsDueBeyondTheBound(t *testing.T) {
	for _, name := range []string{"unary", "stream"} {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			var most, now atomic.Int64
			g := &gateway{grab: func(ctx context.Context, _ int64) (*seckillv1.GrabResponse, error) {
				most.Store(max(most.Load(), now.Add(1)))
				defer now.Add(-1)
				select {
				case <-release:
				case <-ctx.Done():
				}
				return admitted(), nil
			}}
			var target Target
			if name == "unary" {
				target = unary(t, g)
			} else {
				target = streams(t, g, StreamOptions{Streams: 2, Window: 20})
			}
			time.AfterFunc(1500*time.Millisecond, func() { close(release) })
			result := mustRun(t, t.Context(), target, Plan{Rate: 1000, Duration: 600 * time.Millisecond, MaxOutstanding: 100})
			require.EqualValues(t, 600, result.Offered)
			require.EqualValues(t, 500, result.Dropped)
			require.EqualValues(t, 100, result.Count(Admitted))
			require.EqualValues(t, 100, result.Users, "a dropped arrival takes no user")
			require.LessOrEqual(t, most.Load(), int64(100))
			require.Contains(t, result.Summary(), "dropped")
			dropped, outstanding := int64(0), int64(0)
			for _, s := range result.Series {
				dropped += s.Dropped
				outstanding = max(outstanding, s.Outstanding)
			}
			require.EqualValues(t, 500, dropped)
			require.EqualValues(t, 100, outstanding)
		})
	}
}

func TestRun_ClosedLoopKeepsSoManyOutstanding(t *testing.T) {
	for _, name := range []string{"unary", "stream"} {
		t.Run(name, func(t *testing.T) {
			var most, now atomic.Int64
			g := &gateway{grab: func(context.Context, int64) (*seckillv1.GrabResponse, error) {
				n := now.Add(1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				time.Sleep(time.Millisecond)
				now.Add(-1)
				return admitted(), nil
			}}
			var target Target = unary(t, g)
			if name == "stream" {
				g.streamed = func(_ context.Context, _ int, grabs []*seckillv1.StreamedGrab) (answers []*seckillv1.StreamedAnswer, err error) {
					n := now.Add(int64(len(grabs)))
					for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
					}
					time.Sleep(time.Millisecond)
					now.Add(-int64(len(grabs)))
					for _, grab := range grabs {
						answers = append(answers, &seckillv1.StreamedAnswer{CorrelationId: grab.GetCorrelationId(), Result: &seckillv1.StreamedAnswer_Response{Response: admitted()}})
					}
					return answers, nil
				}
				target = streams(t, g, StreamOptions{Streams: 3, Window: 100})
			}
			result := mustRun(t, t.Context(), target, Plan{Concurrency: 13, Duration: 300 * time.Millisecond})
			require.Zero(t, result.Dropped)
			require.Greater(t, result.Count(Admitted), int64(13))
			require.EqualValues(t, 13, most.Load())
			require.Equal(t, result.Offered, result.Users)
			for user := int64(1); user <= result.Users; user++ {
				require.Equal(t, 1, g.clicks()[user], "users are dense from the first one on")
			}
		})
	}
}

func TestRun_WarmUpIsNotMeasured(t *testing.T) {
	each(t, func() *gateway {
		clock := since()
		return &gateway{grab: func(context.Context, int64) (*seckillv1.GrabResponse, error) {
			if clock() < 250*time.Millisecond {
				return nil, refused{&seckillv1.GrabError{Code: int32(codes.Internal), Message: "cold"}}
			}
			return admitted(), nil
		}}
	}, func(t *testing.T, _ *gateway, target Target) {
		result := mustRun(t, t.Context(), target, Plan{Rate: 1000, WarmUp: 500 * time.Millisecond, Duration: 500 * time.Millisecond})
		require.EqualValues(t, 500, result.WarmUp.Offered)
		require.Positive(t, result.WarmUp.Answers["failed"])
		require.EqualValues(t, 500, result.Offered)
		require.EqualValues(t, 500, result.Count(Admitted))
		require.Zero(t, result.Count(Failed))
		require.Equal(t, result.WarmUp.Answers["failed"], result.Faults(), "a fault is one also in the warm-up")
		require.InDelta(t, 1000, result.PerSecond["offered"], 1)
		require.True(t, result.Series[0].WarmUp)
		require.False(t, result.Series[len(result.Series)-1].WarmUp)
	})
}

func TestRun_RepeatedClicksAreOfUsersWhoClickedBefore(t *testing.T) {
	each(t, func() *gateway { return &gateway{grab: admit} }, func(t *testing.T, g *gateway, target Target) {
		result := mustRun(t, t.Context(), target, Plan{Concurrency: 30, Count: 6000, RepeatShare: 0.5, FirstUser: 1000})
		require.EqualValues(t, 6000, result.Offered)
		require.InDelta(t, 3000, result.Users, 300)
		clicks := g.clicks()
		require.Len(t, clicks, int(result.Users))
		for user := range clicks {
			require.True(t, user >= 1000 && user < 1000+result.Users)
		}
	})
}

func TestRun_EndOfContextEndsItWithWhatWasDone(t *testing.T) {
	each(t, func() *gateway { return &gateway{grab: admit} }, func(t *testing.T, _ *gateway, target Target) {
		ctx, cancel := context.WithCancel(t.Context())
		told := 0
		result := mustRun(t, ctx, target, Plan{Rate: 500, Duration: time.Hour, Progress: func(p Progress) {
			if told++; told == 1 {
				require.Positive(t, p.Answers["admitted"])
				require.Positive(t, p.P50)
				require.InDelta(t, float64(time.Hour), float64(p.Left), float64(time.Minute))
				cancel()
			}
		}})
		require.True(t, result.Interrupted)
		require.Positive(t, result.Count(Admitted))
		require.Zero(t, result.Count(Failed), "what was started has its answer")
		require.Less(t, result.Measured, time.Minute)
		require.Contains(t, result.Summary(), "Ended early.")
	})
}

func TestRun_GrabsWithoutAnAnswerAreCounted(t *testing.T) {
	each(t, func() *gateway {
		return &gateway{grab: func(ctx context.Context, _ int64) (*seckillv1.GrabResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
	}, func(t *testing.T, _ *gateway, target Target) {
		result := mustRun(t, t.Context(), target, Plan{Concurrency: 30, Duration: 100 * time.Millisecond, Drain: 100 * time.Millisecond})
		require.EqualValues(t, 30, result.Offered)
		require.Equal(t, map[string]int64{ReasonNoAnswer: 30}, result.Reasons)
	})
}

func TestStreams_MessagesCarryWhatHasGathered(t *testing.T) {
	g := &gateway{grab: admit}
	result := mustRun(t, t.Context(), streams(t, g, StreamOptions{Streams: 1, Window: 400}), Plan{Concurrency: 400, Count: 10_000})
	require.EqualValues(t, 10_000, result.Count(Admitted))
	require.Less(t, g.messages.Load(), int64(2_000))
}

func TestStreams_MoreThanGrabsThatMayBeOutstanding(t *testing.T) {
	g := &gateway{grab: admit}
	target := streams(t, g, StreamOptions{Streams: 5, Window: 10})
	for _, p := range []Plan{{Concurrency: 2, Count: 100}, {Rate: 10_000, MaxOutstanding: 2, Count: 100}} {
		g.streams.Store(0)
		require.EqualValues(t, 100, mustRun(t, t.Context(), target, p).Offered)
		require.EqualValues(t, 2, g.streams.Load())
	}
}

// One stream answers and uses up the count, the other one never does.
func TestStreams_ASilentOneDoesNotHoldTheEndUp(t *testing.T) {
	g := &gateway{grab: admit}
	silent := make(chan struct{}, 1)
	g.streamed = func(ctx context.Context, message int, grabs []*seckillv1.StreamedGrab) ([]*seckillv1.StreamedAnswer, error) {
		if message == 0 {
			select {
			case silent <- struct{}{}:
				<-ctx.Done()
				return nil, ctx.Err()
			default:
			}
		}
		return g.decide(ctx, message, grabs)
	}
	result := mustRun(t, t.Context(), streams(t, g, StreamOptions{Streams: 2, Window: 10}), Plan{Concurrency: 20, Count: 1000, Drain: 200 * time.Millisecond})
	require.EqualValues(t, 1000, result.Offered)
	require.EqualValues(t, 990, result.Count(Admitted))
	require.Equal(t, map[string]int64{ReasonNoAnswer: 10}, result.Reasons)
}

func TestStreams_ABrokenOneIsOpenedAgain(t *testing.T) {
	g := &gateway{grab: admit}
	g.streamed = func(ctx context.Context, message int, grabs []*seckillv1.StreamedGrab) ([]*seckillv1.StreamedAnswer, error) {
		if message == 3 {
			return nil, status.Error(codes.Unavailable, "shutting down")
		}
		return g.decide(ctx, message, grabs)
	}
	result := mustRun(t, t.Context(), streams(t, g, StreamOptions{Streams: 2, Window: 50}), Plan{Rate: 2000, Duration: time.Second})
	require.EqualValues(t, 2000, result.Offered)
	require.Greater(t, g.streams.Load(), int64(4))
	require.Positive(t, result.Count(Admitted))
	require.Positive(t, result.Reasons["UNAVAILABLE"], "%v", result.Reasons)
	require.Len(t, result.Reasons, 1)
}

func TestStreams_AnswersThatNobodyWaitsForAreNoticed(t *testing.T) {
	g := &gateway{}
	g.streamed = func(_ context.Context, _ int, grabs []*seckillv1.StreamedGrab) (answers []*seckillv1.StreamedAnswer, _ error) {
		for range 2 {
			answers = append(answers, &seckillv1.StreamedAnswer{CorrelationId: grabs[0].GetCorrelationId(), Result: &seckillv1.StreamedAnswer_Response{Response: admitted()}})
		}
		return answers, nil
	}
	result := mustRun(t, t.Context(), streams(t, g, StreamOptions{Streams: 1, Window: 50}), Plan{Concurrency: 2, Count: 2})
	require.Equal(t, map[string]int64{"STRAY_ANSWER": 1}, result.Reasons)
}

func TestStreams_NobodyThereFailsWhatIsDue(t *testing.T) {
	conns := serve(t, &gateway{grab: admit})
	require.NoError(t, conns[0].Close())
	target, err := NewStreams(conns, StreamOptions{})
	require.NoError(t, err)
	for _, p := range []Plan{{Rate: 1000, Duration: 300 * time.Millisecond}, {Concurrency: 10, Duration: 300 * time.Millisecond}} {
		result := mustRun(t, t.Context(), target, p)
		require.Positive(t, result.Offered)
		require.Equal(t, map[string]int64{"CANCELLED": result.Offered}, result.Reasons)
	}
}

func TestRun_RefusesPlansThatMakeNoSense(t *testing.T) {
	target := callerFunc(nil)
	good := Plan{VoucherID: 1, Rate: 1, Duration: 1}
	for want, change := range map[string]func(*Plan){
		"voucher 0":           func(p *Plan) { p.VoucherID = 0 },
		"one of them":         func(p *Plan) { p.Concurrency = 1 },
		"a rate or":           func(p *Plan) { p.Rate = 0 },
		"rate -1":             func(p *Plan) { p.Rate = -1 },
		"never ends":          func(p *Plan) { p.Duration = 0 },
		"must not be below 0": func(p *Plan) { p.WarmUp = -1 },
		"needs a ramp":        func(p *Plan) { p.FromRate = 1 },
		"of a rate, not":      func(p *Plan) { p.Rate, p.Concurrency, p.Poisson = 0, 1, true },
		"repeat share 1.5":    func(p *Plan) { p.RepeatShare = 1.5 },
		"first user -1":       func(p *Plan) { p.FirstUser = -1 },
		"must be at least 1":  func(p *Plan) { p.MaxOutstanding = -1 },
	} {
		p := good
		change(&p)
		_, err := Run(t.Context(), target, p)
		require.ErrorContains(t, err, want)
	}
	_, err := Run(t.Context(), "gateway", good)
	require.ErrorContains(t, err, "string is neither")
}

type callerFunc func(ctx context.Context, userID, voucherID int64) (Outcome, error)

func (f callerFunc) Grab(ctx context.Context, userID, voucherID int64) (Outcome, error) {
	return f(ctx, userID, voucherID)
}

func TestReason_NamesWhatWentWrong(t *testing.T) {
	for want, err := range map[string]error{
		"DEADLINE_EXCEEDED": fmt.Errorf("calling: %w", context.DeadlineExceeded),
		"NOT_FOUND":         status.Error(codes.NotFound, "x"),
		"UNKNOWN":           errors.New("x"),
		"OWN":               fmt.Errorf("calling: %w", reasonError("OWN")),
	} {
		require.Equal(t, want, Reason(err))
	}
}
