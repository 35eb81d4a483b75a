package main

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/tests/bench/baseline"
	"github.com/seckill/seckill/tests/bench/limits"
)

const (
	// callers saturate unary calls: more only wait longer.
	callers = 256
	// streams and window saturate GrabStream.
	streams, window = 4, 1024
	// tutorialCallers and tutorialPipeline are where redis-server spends least on
	// the tutorial's script: as many commands a read as an automatically
	// pipelining client brings together.
	tutorialCallers, tutorialPipeline = 64, 16
	tutorialCalls                     = 200_000
)

// saturate measures a target with as much as it can take, for half of the time
// of a round: each is measured twice, see measurement. All answers should be
// wanted.
func (b *bench) saturate(ctx context.Context, target load.Target, voucherID int64, outstanding int, wanted load.Outcome) (*load.Result, error) {
	result, err := load.Run(ctx, target, load.Plan{
		VoucherID: voucherID, Concurrency: outstanding, WarmUp: b.load / 8, Duration: b.load / 2,
	})
	if err != nil {
		return nil, err
	}
	if result.Count(wanted) == 0 {
		return nil, fmt.Errorf("of %d Grabs of voucher %d none was %s: %v %v", result.Offered, voucherID, wanted, result.Answers, result.Reasons)
	}
	if n := result.Offered - result.Count(wanted); n > 0 {
		b.unusually("%d of %d Grabs of voucher %d at saturation were not %s: %v %v", n, result.Offered, voucherID, wanted, result.Answers, result.Reasons)
	}
	return result, nil
}

func (b *bench) saturateUnary(ctx context.Context, to []*grpc.ClientConn, voucherID int64) (*load.Result, error) {
	target, err := load.NewUnary(to, 0)
	if err != nil {
		return nil, err
	}
	return b.saturate(ctx, target, voucherID, callers, load.Admitted)
}

func (b *bench) saturateStream(ctx context.Context, to []*grpc.ClientConn, voucherID int64, wanted load.Outcome) (*load.Result, error) {
	target, err := load.NewStreams(to, load.StreamOptions{Streams: streams, Window: window})
	if err != nil {
		return nil, err
	}
	return b.saturate(ctx, target, voucherID, streams*window, wanted)
}

// with measures what each process uses for a Grab while something runs. The
// warm-up counts on both sides.
func (b *bench) with(pids map[string]int, run func() (*load.Result, error)) (*load.Result, map[string]float64, error) {
	clock, err := startCPU(pids)
	if err != nil {
		return nil, nil, err
	}
	result, err := run()
	if err != nil {
		return nil, nil, err
	}
	answered := int64(0)
	for _, answers := range []map[string]int64{result.Answers, result.WarmUp.Answers} {
		for _, n := range answers {
			answered += n
		}
	}
	each, err := clock.used(answered)
	return result, each, err
}

func (b *bench) recordCPU(prefix string, each map[string]float64) {
	for process, us := range each {
		b.results.record(prefix+"_"+process+"_us", us)
	}
}

func measureFsync(ctx context.Context, b *bench) error {
	took, err := limits.Fsyncs(ctx, b.rig.strict.Redis.Dir(), b.alone)
	if err != nil {
		return err
	}
	var h load.Histogram
	for _, d := range took {
		h.Record(d)
	}
	b.results.record("fsync_p50_ms", ms(h.Percentile(0.5)))
	b.results.record("fsync_p99_ms", ms(h.Percentile(0.99)))
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func measureEcho(ctx context.Context, b *bench) error {
	for _, e := range []struct {
		name string
		echo *echo
	}{{"echo_unary", b.rig.echo}, {"echo_tuned_unary", b.rig.tuned}} {
		result, each, err := b.with(map[string]int{"server": e.echo.Pid()}, func() (*load.Result, error) {
			return b.saturateUnary(ctx, e.echo.conns, 1)
		})
		if err != nil {
			return err
		}
		b.results.record(e.name+"_per_second", result.Rate(load.Admitted))
		b.recordCPU(e.name, each)
	}
	result, each, err := b.with(map[string]int{"server": b.rig.echo.Pid()}, func() (*load.Result, error) {
		return b.saturateStream(ctx, b.rig.echo.conns, 1, load.Admitted)
	})
	if err != nil {
		return err
	}
	b.results.record("echo_stream_per_second", result.Rate(load.Admitted))
	b.recordCPU("echo_stream", each)
	return nil
}

func measureUnary(ctx context.Context, b *bench) error {
	for _, s := range []*side{b.rig.fast, b.rig.strict} {
		voucher, err := s.voucher()
		if err != nil {
			return err
		}
		result, each, err := b.with(s.pids(), func() (*load.Result, error) { return b.saturateUnary(ctx, s.conns, voucher) })
		if err != nil {
			return err
		}
		b.results.record("unary_"+s.name+"_per_second", result.Rate(load.Admitted))
		b.results.record("unary_"+s.name+"_p99_ms", ms(result.Latency.Percentile(0.99)))
		b.recordCPU("unary_"+s.name, each)
	}
	return nil
}

func measureStream(ctx context.Context, b *bench) error {
	for _, s := range []*side{b.rig.fast, b.rig.strict} {
		voucher, err := s.voucher()
		if err != nil {
			return err
		}
		before, err := batches(ctx, s)
		if err != nil {
			return err
		}
		result, each, err := b.with(s.pids(), func() (*load.Result, error) {
			return b.saturateStream(ctx, s.conns, voucher, load.Admitted)
		})
		if err != nil {
			return err
		}
		after, err := batches(ctx, s)
		if err != nil {
			return err
		}
		b.results.record("stream_"+s.name+"_per_second", result.Rate(load.Admitted))
		b.results.record("stream_"+s.name+"_p99_ms", ms(result.Latency.Percentile(0.99)))
		b.results.record("stream_"+s.name+"_grabs_a_batch", (after.grabs-before.grabs)/max(after.batches-before.batches, 1))
		b.recordCPU("stream_"+s.name, each)
		if s.name == "fast" {
			b.results.record("redis_us_per_admitted", each["redis"])
		}
	}
	return nil
}

// batchCount is what a gateway counted of the batches that it sent.
type batchCount struct{ grabs, batches float64 }

func batches(ctx context.Context, s *side) (c batchCount, err error) {
	if c.grabs, err = s.Gateway(0).Metric(ctx, "seckill_gateway_batch_grabs_sum"); err != nil {
		return c, err
	}
	c.batches, err = s.Gateway(0).Metric(ctx, "seckill_gateway_batch_grabs_count")
	return c, err
}

func measureRefused(ctx context.Context, b *bench) error {
	s := b.rig.strict
	if err := b.soldOut(ctx, s); err != nil {
		return err
	}
	result, each, err := b.with(s.pids(), func() (*load.Result, error) {
		return b.saturateStream(ctx, s.conns, s.soldOut, load.SoldOut)
	})
	if err != nil {
		return err
	}
	b.results.record("refused_per_second", result.Rate(load.SoldOut))
	b.recordCPU("refused", each)
	return nil
}

// soldOut sells the one unit of a voucher, once a run.
func (b *bench) soldOut(ctx context.Context, s *side) error {
	target, err := load.NewUnary(s.conns, 0)
	if err != nil {
		return err
	}
	outcome, err := target.Grab(ctx, 1_000_000_000_000, s.soldOut)
	if err != nil {
		return err
	}
	if outcome != load.Admitted && outcome != load.Replayed {
		return fmt.Errorf("the only unit of voucher %d was not sold: %s", s.soldOut, outcome)
	}
	return nil
}

func measureTutorial(ctx context.Context, b *bench) error {
	s := b.rig.fast
	program, err := limits.FindBenchmark(b.rig.binaries)
	if err != nil {
		b.unusually("the tutorial's script was not measured: %v", err)
		return nil
	}
	calls := max(int64(tutorialCalls*b.Scale), 1000)
	clock, err := startCPU(map[string]int{"redis": s.Redis.Pid()})
	if err != nil {
		return err
	}
	b.tutorialVoucher++ // its keys are its own
	run, err := limits.TutorialScript(ctx, program, s.Redis.Addr(), s.Client(), baseline.AdmitScript(), b.tutorialVoucher, calls, tutorialCallers, tutorialPipeline)
	if err != nil {
		return err
	}
	each, err := clock.used(run.Admitted)
	if err != nil {
		return err
	}
	if run.Admitted < run.Calls*99/100 {
		return fmt.Errorf("the tutorial's script admitted %d of %d", run.Admitted, run.Calls)
	}
	b.results.record("tutorial_redis_us_per_admitted", each["redis"])
	b.results.record("tutorial_script_per_second", float64(run.Admitted)/run.Took.Seconds())
	return s.Client().Do(ctx, s.Client().B().Unlink().Key(baseline.Stream).Build()).Error()
}

// measureBuyers compares what a Grab costs redis-server and gateway in a voucher
// of few buyers and in one of many, as a unary call and over GrabStream. Each
// time so few Grabs are measured that the voucher hardly grows.
func measureBuyers(ctx context.Context, b *bench) error {
	s := b.rig.strict
	unary, err := load.NewUnary(s.conns, 0)
	if err != nil {
		return err
	}
	stream, err := load.NewStreams(s.conns, load.StreamOptions{Streams: streams, Window: window})
	if err != nil {
		return err
	}
	for _, size := range []struct {
		name   string
		buyers int64
	}{{"few", max(b.buyers/100, 1)}, {"many", b.buyers}} {
		voucher, err := s.voucher()
		if err != nil {
			return err
		}
		first := int64(1)
		grab := func(target load.Target, outstanding int, count int64) (*load.Result, error) {
			result, err := load.Run(ctx, target, load.Plan{VoucherID: voucher, Concurrency: outstanding, Count: count, FirstUser: first})
			if err == nil && result.Count(load.Admitted) != count {
				err = fmt.Errorf("%d of %d were admitted: %v %v", result.Count(load.Admitted), count, result.Answers, result.Reasons)
			}
			first += count
			return result, err
		}
		if _, err := grab(stream, streams*window, size.buyers); err != nil {
			return err
		}
		for _, way := range []struct {
			name        string
			target      load.Target
			outstanding int
		}{{"unary", unary, callers}, {"stream", stream, streams * window}} {
			_, each, err := b.with(s.pids(), func() (*load.Result, error) { return grab(way.target, way.outstanding, b.grabs) })
			if err != nil {
				return err
			}
			b.results.record(size.name+"_buyers_"+way.name+"_us", each["redis"]+each["gateway"])
			b.results.record(size.name+"_buyers_"+way.name+"_redis_us", each["redis"])
		}
	}
	return nil
}
