package load

import (
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"time"
)

const (
	// subBits: every power of two is cut into 64 buckets of equal width, so a
	// bucket is at most 1/64 of its lower end wide, and its middle at most 1/128
	// (0.78 %) away from any duration in it.
	subBits    = 6
	subBuckets = 1 << subBits
	// Below subBuckets nanoseconds a bucket is one nanosecond. Durations from 2^42
	// ns (73 minutes) on share the last bucket; no Grab outlasts that.
	maxBits     = 42
	bucketCount = (maxBits - subBits + 1) * subBuckets
)

// RelativeError is the most by which a percentile of a Histogram may differ from
// the exact one, as a share of it. Min, Max, Count and Mean are exact.
const RelativeError = 1.0 / (2 * subBuckets)

// Histogram counts durations in buckets of logarithmic width. It takes 19 kB
// whatever it holds. The zero value is empty and ready. It is not safe for
// concurrent use: give every goroutine its own and merge them.
type Histogram struct {
	counts   [bucketCount]uint64
	n        uint64
	sum      float64 // ns
	min, max int64   // ns, exact; valid while n > 0
}

// Record counts one duration. One below 0 counts as 0.
func (h *Histogram) Record(d time.Duration) {
	ns := max(int64(d), 0)
	h.counts[bucketOf(ns)]++
	if h.n == 0 || ns < h.min {
		h.min = ns
	}
	h.max = max(h.max, ns)
	h.n++
	h.sum += float64(ns)
}

func bucketOf(ns int64) int {
	if ns < subBuckets {
		return int(ns)
	}
	exponent := bits.Len64(uint64(ns)) - 1 // 6 and more
	if exponent >= maxBits {
		return bucketCount - 1
	}
	return (exponent-subBits+1)*subBuckets + int(ns>>(exponent-subBits))&(subBuckets-1)
}

// bounds are the durations of a bucket in ns: from low, below high.
func bounds(bucket int) (low, high int64) {
	if bucket < subBuckets {
		return int64(bucket), int64(bucket) + 1
	}
	shift := bucket/subBuckets - 1
	low = int64(subBuckets+bucket%subBuckets) << shift
	return low, low + 1<<shift
}

// Merge adds what another one counted.
func (h *Histogram) Merge(other *Histogram) {
	if other.n == 0 {
		return
	}
	for i, n := range other.counts {
		h.counts[i] += n
	}
	if h.n == 0 || other.min < h.min {
		h.min = other.min
	}
	h.max = max(h.max, other.max)
	h.n += other.n
	h.sum += other.sum
}

// Reset empties it.
func (h *Histogram) Reset() { *h = Histogram{} }

// Count is how many durations were recorded.
func (h *Histogram) Count() int64 { return int64(h.n) }

// Min is the shortest duration, exactly; 0 of none.
func (h *Histogram) Min() time.Duration { return time.Duration(h.min) }

// Max is the longest duration, exactly; 0 of none.
func (h *Histogram) Max() time.Duration { return time.Duration(h.max) }

// Mean is the mean; 0 of none.
func (h *Histogram) Mean() time.Duration {
	if h.n == 0 {
		return 0
	}
	return time.Duration(h.sum / float64(h.n))
}

// Percentile is the duration within which a share p (0 to 1) of all lies, to
// RelativeError; 0 of none.
func (h *Histogram) Percentile(p float64) time.Duration {
	if h.n == 0 {
		return 0
	}
	rank := uint64(math.Ceil(p * float64(h.n)))
	rank = min(max(rank, 1), h.n)
	if rank == h.n {
		return h.Max()
	}
	seen := uint64(0)
	for i, n := range h.counts {
		if seen += n; seen >= rank {
			low, high := bounds(i)
			return time.Duration(min(max((low+high-1)/2, h.min), h.max))
		}
	}
	return h.Max()
}

// Bucket is a bucket that holds something.
type Bucket struct {
	Low, High time.Duration // from Low, below High
	Count     int64
}

// Buckets are the buckets that hold something, from the shortest on.
func (h *Histogram) Buckets() []Bucket {
	var held []Bucket
	for i, n := range h.counts {
		if n > 0 {
			low, high := bounds(i)
			held = append(held, Bucket{time.Duration(low), time.Duration(high), int64(n)})
		}
	}
	return held
}

// Percentiles are those that summaries and JSON show.
var Percentiles = []float64{0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999}

// histogramJSON is a Histogram in JSON: figures for readers, and the buckets
// that hold something as pairs of number and count, of which it is read back.
type histogramJSON struct {
	Count       int64            `json:"count"`
	Min         int64            `json:"min_ns"`
	Mean        float64          `json:"mean_ns"`
	Max         int64            `json:"max_ns"`
	Percentiles map[string]int64 `json:"percentiles_ns"`
	Error       float64          `json:"relative_error"`
	Buckets     [][2]uint64      `json:"buckets"`
}

// MarshalJSON writes it with all durations in ns.
func (h *Histogram) MarshalJSON() ([]byte, error) {
	out := histogramJSON{
		Count: h.Count(), Min: h.min, Max: h.max, Percentiles: map[string]int64{}, Error: RelativeError, Buckets: [][2]uint64{},
	}
	if h.n > 0 {
		out.Mean = h.sum / float64(h.n)
	}
	for _, p := range Percentiles {
		out.Percentiles[percentileName(p)] = int64(h.Percentile(p))
	}
	for i, n := range h.counts {
		if n > 0 {
			out.Buckets = append(out.Buckets, [2]uint64{uint64(i), n})
		}
	}
	return json.Marshal(out)
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (h *Histogram) UnmarshalJSON(text []byte) error {
	var in histogramJSON
	if err := json.Unmarshal(text, &in); err != nil {
		return fmt.Errorf("reading histogram: %w", err)
	}
	if in.Error != RelativeError {
		return fmt.Errorf("reading histogram: its buckets are of another width (relative error %g, not %g)", in.Error, RelativeError)
	}
	h.Reset()
	for _, bucket := range in.Buckets {
		if bucket[0] >= bucketCount {
			return fmt.Errorf("reading histogram: no bucket %d", bucket[0])
		}
		h.counts[bucket[0]] += bucket[1]
		h.n += bucket[1]
	}
	if h.n != uint64(in.Count) {
		return fmt.Errorf("reading histogram: its buckets hold %d, not %d", h.n, in.Count)
	}
	h.min, h.max, h.sum = in.Min, in.Max, in.Mean*float64(in.Count)
	return nil
}

// percentileName is p50, p99, p99.9.
func percentileName(p float64) string { return fmt.Sprintf("p%.6g", p*100) }
