package load

import (
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// arrivals are the times of all lanes together.
func arrivals(t *testing.T, p Plan, lanes int) []time.Duration {
	t.Helper()
	p.VoucherID = 1
	require.NoError(t, p.complete())
	var all []time.Duration
	for lane := range lanes {
		s := newSchedule(&p, lane, lanes)
		for at, more := s.peek(); more; at, more = s.peek() {
			s.pop()
			all = append(all, at)
		}
	}
	slices.Sort(all)
	return all
}

// between counts the arrivals of a time.
func between(all []time.Duration, from, to time.Duration) int {
	first, _ := slices.BinarySearch(all, from)
	last, _ := slices.BinarySearch(all, to)
	return last - first
}

func TestSchedule_EvenlySpacedOverAllLanes(t *testing.T) {
	for _, lanes := range []int{1, 3, 8} {
		all := arrivals(t, Plan{Rate: 1000, Duration: time.Second}, lanes)
		require.Len(t, all, 1000)
		for i, at := range all {
			require.InDelta(t, float64(i)*1e6, float64(at), 2, "lanes share one schedule")
		}
	}
}

func TestSchedule_RampRisesAndFallsInAStraightLine(t *testing.T) {
	up := arrivals(t, Plan{Rate: 1000, FromRate: 0, Ramp: 2 * time.Second, Duration: 4 * time.Second}, 3)
	require.InDelta(t, 250, between(up, 0, time.Second), 2)
	require.InDelta(t, 750, between(up, time.Second, 2*time.Second), 2)
	require.InDelta(t, 1000, between(up, 2*time.Second, 3*time.Second), 2)
	require.InDelta(t, 1000, between(up, 3*time.Second, 4*time.Second), 2)
	down := arrivals(t, Plan{Rate: 100, FromRate: 500, Ramp: 4 * time.Second, Duration: 5 * time.Second}, 1)
	require.InDelta(t, 450, between(down, 0, time.Second), 2)
	require.InDelta(t, 150, between(down, 3*time.Second, 4*time.Second), 2)
	require.InDelta(t, 100, between(down, 4*time.Second, 5*time.Second), 2)
}

func TestSchedule_PoissonHasTheRateAndTheSpread(t *testing.T) {
	all := arrivals(t, Plan{Rate: 1000, Duration: 100 * time.Second, Poisson: true}, 4)
	require.InDelta(t, 100_000, len(all), 5*math.Sqrt(100_000))
	// The number in 10 ms has mean and variance 10.
	sum, squares, n := 0.0, 0.0, 10_000
	for i := range n {
		x := float64(between(all, time.Duration(i)*10*time.Millisecond, time.Duration(i+1)*10*time.Millisecond))
		sum, squares = sum+x, squares+x*x
	}
	mean := sum / float64(n)
	require.InDelta(t, 10, mean, 0.2)
	require.InDelta(t, 10, squares/float64(n)-mean*mean, 1)
	require.Equal(t, all, arrivals(t, Plan{Rate: 1000, Duration: 100 * time.Second, Poisson: true}, 4), "a run can be repeated")
}

func TestSchedule_CountEndsItOverAllLanes(t *testing.T) {
	for _, lanes := range []int{1, 3, 8} {
		require.Len(t, arrivals(t, Plan{Rate: 1000, Count: 100}, lanes), 100)
		require.Len(t, arrivals(t, Plan{Rate: 1000, Count: 100, Duration: 10 * time.Millisecond}, lanes), 10)
	}
}

func TestUsers_FreshOnesAreDenseAndRepeatsHaveTheirShare(t *testing.T) {
	var next atomic.Int64
	next.Store(100)
	sources := []*users{newUsers(&next, 0.25, 0), newUsers(&next, 0.25, 1)}
	clicks := map[int64]int{}
	for i := range 20_000 {
		clicks[sources[i%2].user()]++
	}
	fresh := next.Load() - 100
	require.InDelta(t, 15_000, fresh, 500)
	require.Len(t, clicks, int(fresh))
	for user := int64(100); user < 100+fresh; user++ {
		require.Positive(t, clicks[user], "user %d", user)
	}
	always := newUsers(&next, 1, 0)
	require.Equal(t, always.user(), always.user())
}
