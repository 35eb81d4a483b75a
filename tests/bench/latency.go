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
	voucher, err := s.voucher()
	if err != nil {
		return err
	}
	echo := &offered{name: "bare unary echo", to: b.rig.echo.conns, voucherID: 1}
	grab := &offered{name: "unary Grab, strict", to: s.conns, voucherID: voucher}
	// To and fro, so that a machine that gets slower meanwhile is slower for both.
	if err := b.offer(ctx, rate, echo, grab); err != nil {
		return err
	}
	alone, err := b.scriptAlone(ctx, s)
	if err != nil {
		return err
	}
	if err := b.offer(ctx, rate, grab, echo); err != nil {
		return err
	}
	floor := echo.latency.Percentile(0.99) + alone.Percentile(0.99)
	for name, d := range map[string]time.Duration{
		"echo_half_p50": echo.latency.Percentile(0.5), "echo_half_p99": echo.latency.Percentile(0.99),
		"script_alone_p50": alone.Percentile(0.5), "script_alone_p99": alone.Percentile(0.99),
		"unary_half_p50": grab.latency.Percentile(0.5), "unary_half_p99": grab.latency.Percentile(0.99),
	} {
		b.results.record(name+"_ms", ms(d))
	}
	// A floor that did not carry the rate is none: beside it everything looks fast.
	if echo.carried {
		b.results.record("floor_p99_ms", ms(floor))
	}
	b.page.latency = []namedHistogram{{echo.name, &echo.latency}, {"one strict script call alone", alone}, {grab.name, &grab.latency}}
	return nil
}

// offered is a target of an open loop of unary calls, and what came of it.
type offered struct {
	name      string
	to        []*grpc.ClientConn
	voucherID int64
	nextUser  int64
	latency   load.Histogram
	carried   bool // the rate, each time
}

// carriedShare is the share of what is due that must be answered while it
// measures.
const carriedShare = 0.95

// offer offers a rate to each target for half of the time of a round. Where one
// does not carry it, as where the machine stood still, it is offered once more,
// and the second time counts.
func (b *bench) offer(ctx context.Context, rate float64, targets ...*offered) error {
	for _, to := range targets {
		target, err := load.NewUnary(to.to, 0)
		if err != nil {
			return err
		}
		for try := 1; ; try++ {
			result, err := load.Run(ctx, target, load.Plan{
				VoucherID: to.voucherID, Rate: rate, Poisson: true, FirstUser: to.nextUser, WarmUp: b.load / 8, Duration: b.load / 2,
			})
			if err != nil {
				return err
			}
			to.nextUser = result.Plan.FirstUser + result.Users
			carried := carries(result)
			if !carried && try == 1 && ctx.Err() == nil {
				b.unusually("the %s did not carry half of saturation, and was offered it once more", to.name)
				continue
			}
			if !carried {
				b.unusually("the %s did not carry half of saturation (%.0f a second): the machine was busy with something else", to.name, rate)
			}
			to.carried = carried && (to.latency.Count() == 0 || to.carried)
			to.latency.Merge(result.Latency)
			break
		}
	}
	return nil
}

// carries tells whether a target kept up with what an open loop offered.
func carries(result *load.Result) bool {
	return result.Faults() == 0 && result.Dropped+result.WarmUp.Dropped == 0 && result.Rate(load.Admitted) >= carriedShare*result.PerSecond["offered"]
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

// sweepOutstanding bounds the Grabs of the sweep that have no answer.
const sweepOutstanding = 4 * streams * window

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
	var points []point
	for _, share := range b.sweep {
		before, err := batches(ctx, s)
		if err != nil {
			return err
		}
		result, err := load.Run(ctx, target, load.Plan{
			VoucherID: voucher, Rate: share * saturation, Poisson: true, FirstUser: first, WarmUp: b.load / 4, Duration: b.load / 2,
			MaxOutstanding: sweepOutstanding,
		})
		if err != nil {
			return err
		}
		after, err := batches(ctx, s)
		if err != nil {
			return err
		}
		first += result.Users
		points = append(points, point{
			offered: result.PerSecond["offered"], admitted: result.Rate(load.Admitted),
			p50: ms(result.Latency.Percentile(0.5)), p99: ms(result.Latency.Percentile(0.99)), p999: ms(result.Latency.Percentile(0.999)),
			dropped: result.Dropped, grabsABatch: (after.grabs - before.grabs) / max(after.batches-before.batches, 1),
		})
	}
	b.page.sweep = points
	return nil
}
