package load

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// ReasonNoAnswer is the reason of Grabs that had no answer when the drain ended.
const ReasonNoAnswer = "NO_ANSWER"

// period is what was counted since it was last collected.
type period struct {
	offered, dropped int64
	answers          [outcomeCount]int64
	warm             tally // of Grabs that were due in the warm-up
	measured         tally // of all others
}

// tally is what Grabs came to.
type tally struct {
	offered, dropped int64
	answers          [outcomeCount]int64
	inWindow         [outcomeCount]int64 // of answers, those that came while it measured
	reasons          map[string]int64
	latency          Histogram // of decisions
	failed           Histogram // latency of failures
}

func (t *tally) add(outcome Outcome, reason string, latency time.Duration) {
	t.answers[outcome]++
	if outcome != Failed {
		t.latency.Record(latency)
		return
	}
	t.failed.Record(latency)
	if t.reasons == nil {
		t.reasons = make(map[string]int64)
	}
	t.reasons[reason]++
}

func (t *tally) merge(other *tally) {
	t.offered += other.offered
	t.dropped += other.dropped
	for i := range t.answers {
		t.answers[i] += other.answers[i]
		t.inWindow[i] += other.inWindow[i]
	}
	for reason, n := range other.reasons {
		if t.reasons == nil {
			t.reasons = make(map[string]int64)
		}
		t.reasons[reason] += n
	}
	t.latency.Merge(&other.latency)
	t.failed.Merge(&other.failed)
}

func (p *period) merge(other *period) {
	p.offered += other.offered
	p.dropped += other.dropped
	for i := range p.answers {
		p.answers[i] += other.answers[i]
	}
	p.warm.merge(&other.warm)
	p.measured.merge(&other.measured)
}

// shard is where one lane, or a share of the callers, counts.
type shard struct {
	*recorder
	mu      sync.Mutex
	current *period
}

// arrived counts a Grab that is due, and whether it was dropped. Call it between
// lock and unlock.
func (s *shard) arrived(due time.Duration, dropped bool) {
	t := s.tally(due)
	t.offered++
	s.current.offered++
	if dropped {
		t.dropped++
		s.current.dropped++
	}
}

// answered counts an answer that came now to a Grab that was due then. Call it
// between lock and unlock.
func (s *shard) answered(due, now time.Duration, outcome Outcome, reason string) {
	if outcome >= outcomeCount {
		outcome, reason = Failed, "UNKNOWN_OUTCOME"
	}
	if outcome == Failed && s.abandoned.Load() {
		reason = ReasonNoAnswer
	}
	t := s.tally(due)
	t.add(outcome, reason, now-due)
	s.current.answers[outcome]++
	if now >= s.run.plan.WarmUp && int64(now) < s.windowEnd.Load() {
		s.current.measured.inWindow[outcome]++
	}
}

func (s *shard) tally(due time.Duration) *tally {
	if due < s.run.plan.WarmUp {
		return &s.current.warm
	}
	return &s.current.measured
}

// recorder gathers what all shards counted.
type recorder struct {
	run       *run
	shards    []*shard
	windowEnd atomic.Int64 // a time of the run, in ns; the end of time while it measures
	abandoned atomic.Bool

	// Of the collector; read when it has ended.
	total   period
	samples []Sample
}

func newRecorder(r *run, shards int) *recorder {
	rec := &recorder{run: r}
	rec.windowEnd.Store(math.MaxInt64)
	for range shards {
		rec.shards = append(rec.shards, &shard{recorder: rec, current: new(period)})
	}
	return rec
}

func (rec *recorder) closeWindow() { rec.windowEnd.Store(int64(rec.run.since())) }

// abandon says that whatever fails from now on had no answer.
func (rec *recorder) abandon() { rec.abandoned.Store(true) }

// collect gathers the time series until all is answered.
func (rec *recorder) collect(answered <-chan struct{}) {
	tick := time.NewTicker(rec.run.plan.Interval)
	defer tick.Stop()
	var (
		last, told time.Duration
		spare      = new(period)
		now        period // the interval
		second     period // since progress was told
	)
	for done := false; !done; {
		select {
		case <-tick.C:
		case <-answered:
			done = true
		}
		at := rec.run.since()
		now = period{}
		for _, s := range rec.shards {
			s.mu.Lock()
			s.current, spare = spare, s.current
			s.mu.Unlock()
			now.merge(spare)
			*spare = period{}
		}
		rec.samples = append(rec.samples, rec.sample(&now, last, at))
		rec.total.merge(&now)
		last = at
		if rec.run.plan.Progress == nil {
			continue
		}
		second.merge(&now)
		if at-told >= time.Second-rec.run.plan.Interval/2 || done {
			rec.run.plan.Progress(rec.progress(&second, told, at))
			second, told = period{}, at
		}
	}
}

// decided is the latency of every decision of a period.
func (p *period) decided() *Histogram {
	all := p.warm.latency
	all.Merge(&p.measured.latency)
	return &all
}

func (rec *recorder) sample(p *period, from, to time.Duration) Sample {
	latency := p.decided()
	return Sample{
		From: from, To: to, WarmUp: to <= rec.run.plan.WarmUp,
		Offered: p.offered, Dropped: p.dropped, Answers: byName(p.answers), Outstanding: rec.run.outstanding.Load(),
		P50: latency.Percentile(0.5), P99: latency.Percentile(0.99), Max: latency.Max(),
	}
}

// Progress is how a run goes.
type Progress struct {
	Sample               // since the progress before
	Left   time.Duration // of the run; 0 where it ends by count, or only awaits answers
}

// String is a line for people.
func (p Progress) String() string {
	var b strings.Builder
	rate := func(name string, n int64) {
		fmt.Fprintf(&b, "  %s %s/s", name, thousands(int64(math.Round(p.PerSecond(n)))))
	}
	fmt.Fprintf(&b, "%4.0fs", p.To.Seconds())
	rate("offered", p.Offered)
	for _, o := range Outcomes() {
		if n := p.Answers[o.String()]; n > 0 {
			rate(o.String(), n)
		}
	}
	if p.Dropped > 0 {
		rate("dropped", p.Dropped)
	}
	fmt.Fprintf(&b, "  p50 %s  p99 %s  outstanding %s", readable(p.P50), readable(p.P99), thousands(p.Outstanding))
	if p.WarmUp {
		b.WriteString("  (warm-up)")
	}
	if p.Left > 0 {
		fmt.Fprintf(&b, "  %.0fs left", p.Left.Seconds())
	}
	return b.String()
}

func (rec *recorder) progress(p *period, from, to time.Duration) Progress {
	left := time.Duration(0)
	if plan := &rec.run.plan; plan.Duration > 0 {
		left = max(plan.WarmUp+plan.Duration-to, 0)
	}
	return Progress{Sample: rec.sample(p, from, to), Left: left}
}

// byName holds the outcomes that occurred.
func byName(answers [outcomeCount]int64) map[string]int64 {
	named := make(map[string]int64)
	for i, n := range answers {
		if n != 0 {
			named[Outcome(i).String()] = n
		}
	}
	return named
}
