package load

import (
	"context"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// What the generator itself costs, against targets that answer at once.

func BenchmarkRun_Calls(b *testing.B) {
	for b.Loop() {
		result, err := Run(b.Context(), callerFunc(func(context.Context, int64, int64) (Outcome, error) { return Admitted, nil }),
			Plan{VoucherID: 1, Concurrency: 64, Count: 1_000_000})
		require.NoError(b, err)
		require.EqualValues(b, 1_000_000, result.Offered)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1e6, "ns/grab")
}

// loopback is a pipe that answers everything as soon as it is sent.
type loopback chan []Answer

func (loopback) Count() int                              { return 4 }
func (loopback) Window() int                             { return 512 }
func (loopback) Open(context.Context, int) (Pipe, error) { return make(loopback, 512), nil }
func (l loopback) Close() error                          { close(l); return nil }
func (l loopback) Receive(into []Answer) ([]Answer, error) {
	answers, open := <-l
	if !open {
		return nil, io.EOF
	}
	return append(into, answers...), nil
}

func (l loopback) Send(batch []Grab) error {
	answers := make([]Answer, len(batch))
	for i, g := range batch {
		answers[i] = Answer{ID: g.ID}
	}
	l <- answers
	return nil
}

func BenchmarkRun_Pipes(b *testing.B) {
	for name, p := range map[string]Plan{
		"closed": {VoucherID: 1, Concurrency: 2048, Count: 1_000_000},
		"open":   {VoucherID: 1, Rate: 250_000, Count: 250_000, MaxOutstanding: 100_000},
	} {
		b.Run(name, func(b *testing.B) {
			offered := int64(0)
			for b.Loop() {
				result, err := Run(b.Context(), loopback(nil), p)
				require.NoError(b, err)
				offered += result.Offered
				require.Zero(b, result.Dropped)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(offered), "ns/grab")
		})
	}
}

// One stream of the generated code on the other side, which costs several times
// as much as the generator.
func BenchmarkRun_Streams(b *testing.B) {
	response := &seckillv1.StreamedAnswer_Response{Response: admitted()}
	g := &gateway{streamed: func(_ context.Context, _ int, grabs []*seckillv1.StreamedGrab) ([]*seckillv1.StreamedAnswer, error) {
		answers := make([]*seckillv1.StreamedAnswer, len(grabs))
		for i, grab := range grabs {
			answers[i] = &seckillv1.StreamedAnswer{CorrelationId: grab.GetCorrelationId(), Result: response}
		}
		return answers, nil
	}, silent: true}
	target := streams(b, g, StreamOptions{})
	for b.Loop() {
		result, err := Run(b.Context(), target, Plan{VoucherID: 1, Concurrency: 2048, Duration: 2 * time.Second})
		require.NoError(b, err)
		b.ReportMetric(result.Rate(Admitted), "grabs/s")
		b.ReportMetric(float64(result.Latency.Percentile(0.99)), "p99-ns")
	}
}
