package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/load"
)

// measureLatency measures unary Grabs at half of what saturates them, an open
// loop with latencies from the intended start, and what no Grab can be faster
// than: an echo at the same rate and one strict script call alone.
func measureLatency(ctx context.Context, b *bench) error {
	s := b.rig.strict
	saturation, ok := b.results.now("unary_strict_per_second")
	if !ok {
		voucher, err := s.voucher()
		if err != nil {
			return err
		}
		result, err := b.saturateUnary(ctx, s.conns, voucher)
		if err != nil {
			return err
		}
		saturation = result.Rate(load.Admitted)
	}
	rate := saturation / 2
	b.results.record("half_rate_per_second", rate)

	echo, err := b.offerUnary(ctx, b.rig.echoConns, 1, rate)
	if err != nil {
		return err
	}
	alone, err := b.scriptAlone(ctx, s)
	if err != nil {
		return err
	}
	voucher, err := s.voucher()
	if err != nil {
		return err
	}
	grab, err := b.offerUnary(ctx, s.conns, voucher, rate)
	if err != nil {
		return err
	}
	floor := echo.Latency.Percentile(0.99) + alone.Percentile(0.99)
	for name, d := range map[string]time.Duration{
		"echo_half_p50": echo.Latency.Percentile(0.5), "echo_half_p99": echo.Latency.Percentile(0.99),
		"script_alone_p50": alone.Percentile(0.5), "script_alone_p99": alone.Percentile(0.99),
		"unary_half_p50": grab.Latency.Percentile(0.5), "unary_half_p99": grab.Latency.Percentile(0.99),
		"floor_p99": floor,
	} {
		b.results.record(name+"_ms", ms(d))
	}
	b.page.latency = []namedHistogram{{"bare unary echo", echo.Latency}, {"one strict script call alone", alone}, {"unary Grab, strict", grab.Latency}}
	return nil
}

func (b *bench) offerUnary(ctx context.Context, to []*grpc.ClientConn, voucherID int64, rate float64) (*load.Result, error) {
	target, err := load.NewUnary(to, 0)
	if err != nil {
		return nil, err
	}
	return load.Run(ctx, target, load.Plan{VoucherID: voucherID, Rate: rate, Poisson: true, WarmUp: b.load / 4, Duration: b.load})
}

// scriptAlone runs the admission script for one Grab after the other.
func (b *bench) scriptAlone(ctx context.Context, s *side) (*load.Histogram, error) {
	voucher, err := s.voucher()
	if err != nil {
		return nil, err
	}
	partition := ledger.Partition(voucher, s.Partitions())
	meta, err := ledger.ReadMeta(ctx, s.Client(), partition)
	if err != nil {
		return nil, err
	}
	h := new(load.Histogram)
	for user := int64(1); user <= int64(b.alone); user++ {
		call := ledger.AdmitCall{
			Partition: partition, Epoch: meta.Epoch, SHA: ledger.AdmitSHA(partition, meta.Epoch), VoucherID: voucher,
			NotAfter: time.Now().Add(time.Minute), Grabs: []ledger.Grab{{UserID: user, Record: ledger.EncodeRecord(user, "", "")}},
		}
		began := time.Now()
		reply, err := ledger.Admit(ctx, s.Client(), call)
		took := time.Since(began)
		if err != nil {
			return nil, err
		}
		if reply.Status != ledger.AdmitOK || reply.Answers[0].Decision != ledger.DecisionAdmitted {
			return nil, errors.New("a script call alone was not admitted: " + string(reply.Status) + fmt.Sprint(reply.Answers))
		}
		h.Record(took)
	}
	return h, nil
}

// point is one offered load of the sweep.
type point struct {
	offered, admitted float64 // a second
	p50, p99, p999    float64 // ms
	dropped           int64
	grabsABatch       float64
}

// measureSweep offers more and more over GrabStream, up to what saturates it and
// beyond. Once a run.
func measureSweep(ctx context.Context, b *bench) error {
	if len(b.page.sweep) > 0 {
		return nil
	}
	s := b.rig.strict
	saturation, ok := b.results.now("stream_strict_per_second")
	if !ok {
		b.unusually("the sweep needs a saturation: it was left out, since stream was")
		return nil
	}
	voucher, err := s.voucher()
	if err != nil {
		return err
	}
	target, err := load.NewStreams(s.conns, load.StreamOptions{Streams: streams, Window: window})
	if err != nil {
		return err
	}
	first := int64(1)
	for _, share := range b.sweep {
		before, err := batches(ctx, s)
		if err != nil {
			return err
		}
		result, err := load.Run(ctx, target, load.Plan{
			VoucherID: voucher, Rate: share * saturation, Poisson: true, FirstUser: first, WarmUp: b.load / 4, Duration: b.load / 2,
			MaxOutstanding: 4 * streams * window,
		})
		if err != nil {
			return err
		}
		after, err := batches(ctx, s)
		if err != nil {
			return err
		}
		first += result.Users
		b.page.sweep = append(b.page.sweep, point{
			offered: result.PerSecond["offered"], admitted: result.Rate(load.Admitted),
			p50: ms(result.Latency.Percentile(0.5)), p99: ms(result.Latency.Percentile(0.99)), p999: ms(result.Latency.Percentile(0.999)),
			dropped: result.Dropped, grabsABatch: (after.grabs - before.grabs) / max(after.batches-before.batches, 1),
		})
	}
	return nil
}
