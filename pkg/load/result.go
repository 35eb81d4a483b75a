package load

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Result is what a run came to. In JSON durations are in ns.
type Result struct {
	Mode        string    `json:"mode"` // open or closed
	Started     time.Time `json:"started"`
	Plan        Plan      `json:"plan"`        // with its defaults
	Interrupted bool      `json:"interrupted"` // ended early by its context
	// Users is how many fresh users clicked: Plan.FirstUser and those after it.
	Users int64 `json:"users"`

	// Measured is how long was measured, without warm-up and drain; PerSecond is
	// reckoned with it.
	Measured time.Duration `json:"measured_ns"`

	// All counts are of Grabs that were due while it measured:
	// Offered = Dropped + the sum of Answers. A Grab that never had an answer is
	// among the failed, with ReasonNoAnswer.
	Offered int64            `json:"offered"`
	Dropped int64            `json:"dropped"` // not sent, since too many were outstanding
	Answers map[string]int64 `json:"answers"` // by outcome
	Reasons map[string]int64 `json:"reasons"` // of the failed
	WarmUp  WarmUp           `json:"warm_up"`

	// PerSecond is the rate of what was offered ("offered"), of answers that came
	// while it measured by outcome, and of all decisions together ("decided"), which
	// is all but the failed.
	PerSecond map[string]float64 `json:"per_second"`

	// Latency is of all decisions, counted from when the Grab was due; FailedLatency
	// of the failed.
	Latency       *Histogram `json:"latency"`
	FailedLatency *Histogram `json:"failed_latency"`

	Series []Sample `json:"series"`
}

// WarmUp is what was offered before it measured.
type WarmUp struct {
	Offered int64            `json:"offered"`
	Dropped int64            `json:"dropped"`
	Answers map[string]int64 `json:"answers"`
	Reasons map[string]int64 `json:"reasons"`
}

// Sample is one interval of a run: what became due in it, and the answers that
// came in it, whenever their Grabs were due.
type Sample struct {
	From        time.Duration    `json:"from_ns"` // since the start of the run
	To          time.Duration    `json:"to_ns"`
	WarmUp      bool             `json:"warm_up"`
	Offered     int64            `json:"offered"`
	Dropped     int64            `json:"dropped"`
	Answers     map[string]int64 `json:"answers"`
	Outstanding int64            `json:"outstanding"` // at its end
	P50         time.Duration    `json:"p50_ns"`      // of decisions
	P99         time.Duration    `json:"p99_ns"`
	Max         time.Duration    `json:"max_ns"`
}

// PerSecond makes a number of the interval a rate.
func (s *Sample) PerSecond(n int64) float64 {
	if s.To <= s.From {
		return 0
	}
	return float64(n) / (s.To - s.From).Seconds()
}

func (rec *recorder) result(interrupted bool) *Result {
	r, m := rec.run, &rec.total.measured
	measured := max(time.Duration(rec.windowEnd.Load())-r.plan.WarmUp, 0)
	if r.plan.Duration > 0 {
		measured = min(measured, r.plan.Duration)
	}
	result := &Result{
		Mode: "open", Started: r.start, Plan: r.plan, Interrupted: interrupted,
		Users: r.nextUser.Load() - r.plan.FirstUser, Measured: measured,
		Offered: m.offered, Dropped: m.dropped, Answers: byName(m.answers), Reasons: notNil(m.reasons),
		WarmUp: WarmUp{
			Offered: rec.total.warm.offered, Dropped: rec.total.warm.dropped,
			Answers: byName(rec.total.warm.answers), Reasons: notNil(rec.total.warm.reasons),
		},
		PerSecond: map[string]float64{}, Latency: &m.latency, FailedLatency: &m.failed, Series: rec.samples,
	}
	if r.plan.Concurrency > 0 {
		result.Mode = "closed"
	}
	if measured > 0 {
		result.PerSecond["offered"] = float64(m.offered) / measured.Seconds()
		decided := int64(0)
		for i, n := range m.inWindow {
			if n > 0 {
				result.PerSecond[Outcome(i).String()] = float64(n) / measured.Seconds()
			}
			if Outcome(i) != Failed {
				decided += n
			}
		}
		result.PerSecond["decided"] = float64(decided) / measured.Seconds()
	}
	return result
}

func notNil(m map[string]int64) map[string]int64 {
	if m == nil {
		return map[string]int64{}
	}
	return m
}

// Count is how many Grabs came to an outcome.
func (r *Result) Count(o Outcome) int64 { return r.Answers[o.String()] }

// Rate is how many Grabs a second came to an outcome while it measured.
func (r *Result) Rate(o Outcome) float64 { return r.PerSecond[o.String()] }

// Faults is how many answers were faults, those of the warm-up included.
func (r *Result) Faults() int64 { return r.Count(Failed) + r.WarmUp.Answers[Failed.String()] }

// Summary is the result for people, with a picture of the latencies.
func (r *Result) Summary() string {
	var b strings.Builder
	if r.Interrupted {
		fmt.Fprintln(&b, "Ended early.")
	}
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	share := func(n int64) string {
		if r.Offered == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f %%", 100*float64(n)/float64(r.Offered))
	}
	fmt.Fprintln(table, "\tgrabs\tshare\tper second\t")
	fmt.Fprintf(table, "offered\t%s\t\t%s\t\n", thousands(r.Offered), thousands(int64(math.Round(r.PerSecond["offered"]))))
	for _, o := range Outcomes() {
		if n := r.Count(o); n > 0 {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t\n", o, thousands(n), share(n), thousands(int64(math.Round(r.Rate(o)))))
		}
	}
	if r.Dropped > 0 {
		fmt.Fprintf(table, "dropped\t%s\t%s\t\t\n", thousands(r.Dropped), share(r.Dropped))
	}
	_ = table.Flush() // into memory
	fmt.Fprintf(&b, "in %s", r.Measured.Round(time.Millisecond))
	if r.WarmUp.Offered > 0 {
		fmt.Fprintf(&b, ", after a warm-up of %s grabs that is not counted", thousands(r.WarmUp.Offered))
	}
	if r.Dropped > 0 {
		fmt.Fprint(&b, "; dropped grabs were not sent, since too many were outstanding")
	}
	fmt.Fprintln(&b)
	for _, part := range []struct {
		title   string
		reasons map[string]int64
	}{{"faults", r.Reasons}, {"faults in the warm-up", r.WarmUp.Reasons}} {
		for _, reason := range sortedReasons(part.reasons) {
			fmt.Fprintf(&b, "%s: %s %s\n", part.title, thousands(part.reasons[reason]), reason)
		}
	}
	if r.Latency.Count() > 0 {
		fmt.Fprintf(&b, "\nlatency of decisions, from when each grab was due:\n%s", r.Latency)
	}
	return b.String()
}

// sortedReasons are the reasons, the most frequent first.
func sortedReasons(reasons map[string]int64) []string {
	return slices.SortedFunc(maps.Keys(reasons), func(a, b string) int {
		return cmp.Or(cmp.Compare(reasons[b], reasons[a]), cmp.Compare(a, b))
	})
}

// barWidth is the width of the longest bar in characters.
const barWidth = 50

// String is a picture: a bar for each power of two that holds something, and the
// percentiles.
func (h *Histogram) String() string {
	if h.n == 0 {
		return "nothing was recorded\n"
	}
	var b strings.Builder
	counts, most := map[int]uint64{}, uint64(0)
	for i, n := range h.counts {
		octave := max(i/subBuckets, 10) // all below 33 us in one
		if n > 0 {
			counts[octave] += n
			most = max(most, counts[octave])
		}
	}
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	octaves := slices.Sorted(maps.Keys(counts))
	for octave := octaves[0]; octave <= octaves[len(octaves)-1]; octave++ {
		n := counts[octave]
		_, below := bounds(octave*subBuckets + subBuckets - 1)
		bar := strings.Repeat("#", int(math.Ceil(float64(n)/float64(most)*barWidth)))
		fmt.Fprintf(table, "< %s\t%s\t%.2f %%\t %s\n", readable(time.Duration(below)), thousands(int64(n)), 100*float64(n)/float64(h.n), bar)
	}
	_ = table.Flush() // into memory
	fmt.Fprintf(&b, "  min %s", readable(h.Min()))
	for _, p := range Percentiles {
		fmt.Fprintf(&b, "  %s %s", percentileName(p), readable(h.Percentile(p)))
	}
	fmt.Fprintf(&b, "  max %s\n", readable(h.Max()))
	return b.String()
}

// readable is a duration to three digits.
func readable(d time.Duration) string {
	switch {
	case d >= 999500*time.Microsecond:
		return fmt.Sprintf("%.3gs", d.Seconds())
	case d >= 999500*time.Nanosecond:
		return fmt.Sprintf("%.3gms", float64(d)/1e6)
	case d >= time.Microsecond:
		return fmt.Sprintf("%.3gus", float64(d)/1e3)
	}
	return d.String()
}

// thousands is a number with separators.
func thousands(n int64) string {
	digits := fmt.Sprint(max(n, -n))
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	if n < 0 {
		return "-" + digits
	}
	return digits
}
