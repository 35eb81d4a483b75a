package load

import (
	"encoding/json"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// durations draws some over all orders of magnitude.
func durations(t *rapid.T, label string) []time.Duration {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) time.Duration {
		exponent := rapid.IntRange(0, maxBits-1).Draw(t, "exponent")
		return time.Duration(rapid.Int64Range(1<<exponent>>1, 1<<exponent).Draw(t, "ns"))
	}), 1, 300).Draw(t, label)
}

func recorded(all []time.Duration) *Histogram {
	h := new(Histogram)
	for _, d := range all {
		h.Record(d)
	}
	return h
}

func TestHistogram_PercentilesAreWithinTheErrorItStates(t *testing.T) {
	require.Less(t, RelativeError, 0.01)
	rapid.Check(t, func(t *rapid.T) {
		all := durations(t, "durations")
		h := recorded(all)
		slices.Sort(all)
		sum := 0.0
		for _, d := range all {
			sum += float64(d)
		}
		require.EqualValues(t, len(all), h.Count())
		require.Equal(t, all[0], h.Min())
		require.Equal(t, all[len(all)-1], h.Max())
		require.InDelta(t, sum/float64(len(all)), float64(h.Mean()), 1)
		for _, p := range append([]float64{0, 0.001, 0.25, 1}, Percentiles...) {
			exact := all[max(int(math.Ceil(p*float64(len(all))))-1, 0)]
			require.InDelta(t, float64(exact), float64(h.Percentile(p)), RelativeError*float64(exact), "p = %g", p)
		}
	})
}

func TestHistogram_MergedIsAsIfRecordedInOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := durations(t, "a"), durations(t, "b")
		merged, all := recorded(a), recorded(append(slices.Clone(a), b...))
		merged.Merge(recorded(b))
		merged.Merge(new(Histogram))
		require.InEpsilon(t, all.sum+1, merged.sum+1, 1e-9) // sums of floats in another order
		merged.sum = all.sum
		require.Equal(t, all, merged)

		text, err := json.Marshal(all)
		require.NoError(t, err)
		var read Histogram
		require.NoError(t, json.Unmarshal(text, &read))
		require.InEpsilon(t, all.sum+1, read.sum+1, 1e-9)
		read.sum = all.sum
		require.Equal(t, all, &read)
	})
}

func TestHistogram_EveryDurationHasItsBucket(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := rapid.Int64Range(0, 1<<maxBits-1).Draw(t, "ns")
		low, high := bounds(bucketOf(d))
		require.LessOrEqual(t, low, d)
		require.Greater(t, high, d)
	})
	require.Equal(t, bucketCount-1, bucketOf(1<<maxBits-1))
	require.Equal(t, bucketCount-1, bucketOf(math.MaxInt64), "what is longer than all buckets is in the last one")
	h := recorded([]time.Duration{-time.Second, 0})
	require.Zero(t, h.Max())
	require.Zero(t, new(Histogram).Percentile(0.5))
}

func TestHistogram_ReadsNoJSONOfAnotherForm(t *testing.T) {
	for text, want := range map[string]string{
		`{"relative_error":0.5}`:                                   "another width",
		`{"relative_error":0.0078125,"count":2,"buckets":[[1,1]]}`: "hold 1, not 2",
		`{"relative_error":0.0078125,"buckets":[[999999,1]]}`:      "no bucket 999999",
	} {
		require.ErrorContains(t, json.Unmarshal([]byte(text), new(Histogram)), want)
	}
}
