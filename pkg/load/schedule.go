package load

import (
	"math"
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// schedule tells when the Grabs of an open loop are due. Their times do not
// depend on how long any Grab takes.
//
// Cumulated is the number of Grabs that are due by a time: the integral of the
// rate, which rises in a straight line from a to b during the ramp and stays
// there. The k-th is due where it reaches k; with Poisson arrivals, where it
// reaches the sum of k exponential gaps, which is a Poisson process of that very
// rate.
//
// Several lanes share one schedule: lane i of n takes every n-th Grab.
type schedule struct {
	a, b    float64 // a second
	ramp    float64 // seconds
	end     float64 // seconds; nothing is due from then on
	step    float64 // lanes
	left    int64   // Grabs of this lane yet to come
	poisson *rand.Rand

	next float64 // cumulated at the next Grab of this lane
}

func newSchedule(p *Plan, lane, lanes int) *schedule {
	s := &schedule{
		a: p.FromRate, b: p.Rate, ramp: p.Ramp.Seconds(), end: (p.WarmUp + p.Duration).Seconds(), step: float64(lanes),
		left: math.MaxInt64, next: float64(lane),
	}
	if p.Count > 0 {
		s.left = (p.Count - int64(lane) + int64(lanes) - 1) / int64(lanes)
	}
	if s.end == 0 {
		s.end = math.Inf(1)
	}
	if p.Poisson {
		s.poisson = random(lane)
		s.next = s.poisson.ExpFloat64() * s.step
	}
	return s
}

// farAway is a time, in seconds, that no run lasts and a time.Duration can tell.
const farAway = 1e9

// random is a source that gives the same numbers in each run, so that a run can
// be repeated.
func random(lane int) *rand.Rand { return rand.New(rand.NewPCG(uint64(lane), 0x5eed)) }

// peek is when the next Grab is due, from the start of the run; false where
// none is due before the end. Where left is more than 0 the time is still true.
func (s *schedule) peek() (time.Duration, bool) {
	if s.left <= 0 {
		return 0, false
	}
	at := s.at(s.next)
	return time.Duration(min(at, farAway) * float64(time.Second)), at < s.end
}

// pop goes on to the Grab after the next one.
func (s *schedule) pop() {
	s.left--
	if s.poisson != nil {
		s.next += s.poisson.ExpFloat64() * s.step
		return
	}
	s.next += s.step
}

// at is the time in seconds at which so many Grabs are due.
func (s *schedule) at(cumulated float64) float64 {
	ramped := (s.a + s.b) / 2 * s.ramp // due by the end of the ramp
	switch {
	case cumulated >= ramped:
		return s.ramp + (cumulated-ramped)/s.b
	case s.a == s.b:
		return cumulated / s.b
	}
	// cumulated = a t + slope/2 t^2
	slope := (s.b - s.a) / s.ramp
	return (math.Sqrt(s.a*s.a+2*slope*cumulated) - s.a) / slope
}

// recentUsers is how many users a source remembers, of which repeated clicks
// come.
const recentUsers = 1024

// users tells who clicks. Fresh users are dense from the first on over all
// sources of a run; with a chance of share one who clicked lately clicks again.
// A source belongs to one goroutine at a time.
type users struct {
	next   *atomic.Int64 // shared by all sources of the run
	share  float64
	random *rand.Rand
	recent []int64
	oldest int
}

func newUsers(next *atomic.Int64, share float64, lane int) *users {
	return &users{next: next, share: share, random: random(lane)}
}

func (u *users) user() int64 {
	if u.share <= 0 {
		return u.next.Add(1) - 1
	}
	if len(u.recent) > 0 && u.random.Float64() < u.share {
		return u.recent[u.random.IntN(len(u.recent))]
	}
	id := u.next.Add(1) - 1
	if len(u.recent) < recentUsers {
		u.recent = append(u.recent, id)
		return id
	}
	u.recent[u.oldest] = id
	u.oldest = (u.oldest + 1) % recentUsers
	return id
}
