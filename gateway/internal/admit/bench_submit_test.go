package admit

import (
	"testing"

	"github.com/seckill/seckill/pkg/ledger"
)

// window is a receiver that uses Grabs again as they come back, as a stream does.
type window struct{ free chan []*Grab }

func (w *window) Gone() bool { return false }

func (w *window) Answered(grabs []*Grab) { w.free <- append([]*Grab(nil), grabs...) }

func benchSubmit(b *testing.B, a *Admitter, size int) {
	const inFlight = 4096
	w := &window{free: make(chan []*Grab, inFlight)}
	for range inFlight / size {
		grabs := make([]*Grab, size)
		for i := range grabs {
			grabs[i] = new(Grab)
		}
		w.free <- grabs
	}
	b.ReportAllocs()
	b.ResetTimer()
	defer reportCPU(b, cpuTime())
	for n := 0; n < b.N; {
		grabs := <-w.free
		for _, g := range grabs {
			*g = Grab{UserID: benchUser.Add(1), VoucherID: 1}
		}
		n += len(grabs)
		a.Submit(w, grabs)
	}
	for a.waiting.Load() > 0 {
		<-w.free
	}
}

func BenchmarkSubmit_Instant1(b *testing.B)    { benchSubmit(b, instant(b, ledger.DecisionAdmitted), 1) }
func BenchmarkSubmit_Instant64(b *testing.B)   { benchSubmit(b, instant(b, ledger.DecisionAdmitted), 64) }
func BenchmarkSubmit_Refused64(b *testing.B)   { benchSubmit(b, instant(b, ledger.DecisionSoldOut), 64) }
func BenchmarkSubmit_Redis64(b *testing.B)     { benchSubmit(b, onRedis(b, 900_000_000_000), 64) }
func BenchmarkSubmit_RedisSold64(b *testing.B) { benchSubmit(b, onRedis(b, 0), 64) }
