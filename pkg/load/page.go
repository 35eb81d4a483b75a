package load

import (
	"fmt"
	"math"
	"time"

	"github.com/seckill/seckill/pkg/load/report"
)

// Page is the result as a page: what came of it, how it went over time, and the
// latencies. Facts are shown at its top, as where and with what it was run.
func (r *Result) Page(title string, facts ...report.Fact) report.Page {
	subtitle := fmt.Sprintf("%s loop, %s measured, begun %s", r.Mode, readable(r.Measured), r.Started.UTC().Format("2006-01-02 15:04:05 MST"))
	if r.Interrupted {
		subtitle += ", ended early"
	}
	return report.Page{Title: title, Subtitle: subtitle, Facts: facts, Sections: r.Sections()}
}

// Sections are those of the page, for pages that hold more.
func (r *Result) Sections() []report.Section {
	sections := []report.Section{r.outcome(), r.overTime()}
	if r.Latency.Count() > 0 {
		sections = append(sections, r.latencies())
	}
	return sections
}

func (r *Result) outcome() report.Section {
	rate := func(name string) string { return thousands(int64(math.Round(r.PerSecond[name]))) + "/s" }
	s := report.Section{Heading: "What came of it", Tiles: []report.Tile{
		{Label: "offered", Value: rate("offered"), Note: thousands(r.Offered) + " grabs"},
		{Label: "admitted", Value: rate("admitted"), Note: thousands(r.Count(Admitted)) + " orders"},
		{Label: "decided", Value: rate("decided"), Note: "admitted, replayed or refused"},
		{Label: "p50", Value: readable(r.Latency.Percentile(0.5)), Note: "of decisions"},
		{Label: "p99", Value: readable(r.Latency.Percentile(0.99)), Note: "longest " + readable(r.Latency.Max())},
		{Label: "faults", Value: thousands(r.Faults()), Verdict: none(r.Faults()), Note: "answers that were no decision"},
		{Label: "dropped", Value: thousands(r.Dropped), Verdict: none(r.Dropped), Note: "not sent: too many outstanding"},
	}}
	table := report.Table{Title: "Answers", Columns: []report.Column{
		{Name: "answer"}, {Name: "grabs", Numeric: true}, {Name: "share", Numeric: true}, {Name: "per second", Numeric: true},
	}}
	row := func(name string, n int64, perSecond string) {
		share := "–"
		if r.Offered > 0 {
			share = fmt.Sprintf("%.2f %%", 100*float64(n)/float64(r.Offered))
		}
		table.Rows = append(table.Rows, report.Cells(name, thousands(n), share, perSecond))
	}
	for _, o := range Outcomes() {
		if n := r.Count(o); n > 0 {
			row(o.String(), n, rate(o.String()))
		}
	}
	for _, reason := range sortedReasons(r.Reasons) {
		row("failed: "+reason, r.Reasons[reason], "")
	}
	if r.Dropped > 0 {
		row("dropped", r.Dropped, "")
	}
	table.Note = "Of all that was due while it measured; rates are of what was answered in that time."
	if r.WarmUp.Offered > 0 {
		table.Note += fmt.Sprintf(" Not counted: a warm-up of %s grabs", thousands(r.WarmUp.Offered))
		for _, reason := range sortedReasons(r.WarmUp.Reasons) {
			table.Note += fmt.Sprintf(", %s of them failed: %s", thousands(r.WarmUp.Reasons[reason]), reason)
		}
		table.Note += "."
	}
	s.Tables = []report.Table{table}
	return s
}

func none(n int64) report.Verdict {
	if n == 0 {
		return report.Pass
	}
	return report.Fail
}

func (r *Result) overTime() report.Section {
	seconds := report.Axis{Label: "time since the start", Unit: report.Seconds}
	rates := report.Lines{Title: "Grabs a second", X: seconds, Y: report.Axis{Label: "grabs a second", Unit: report.PerSecond}}
	rates.Series = append(rates.Series, r.series("offered", func(s *Sample) float64 { return s.PerSecond(s.Offered) }))
	rates.Series[0].Dashed = true
	for _, o := range Outcomes() {
		if r.Count(o)+r.WarmUp.Answers[o.String()] > 0 {
			rates.Series = append(rates.Series, r.series(o.String(), func(s *Sample) float64 { return s.PerSecond(s.Answers[o.String()]) }))
		}
	}
	if r.Dropped+r.WarmUp.Dropped > 0 {
		rates.Series = append(rates.Series, r.series("dropped", func(s *Sample) float64 { return s.PerSecond(s.Dropped) }))
	}
	latency := report.Lines{
		Title: "Latency of decisions", X: seconds, Y: report.Axis{Label: "latency, from when a grab was due", Unit: report.Seconds, Scale: report.Log},
		Series: []report.Series{
			r.series("p50", func(s *Sample) float64 { return s.P50.Seconds() }),
			r.series("p99", func(s *Sample) float64 { return s.P99.Seconds() }),
			r.series("longest", func(s *Sample) float64 { return s.Max.Seconds() }),
		},
	}
	outstanding := report.Lines{Title: "Outstanding grabs", X: seconds, Y: report.Axis{Label: "due and not answered"}, Series: []report.Series{
		r.series("outstanding", func(s *Sample) float64 { return float64(s.Outstanding) }),
	}}
	outstanding.Series[0].Area = true
	section := report.Section{Heading: "Over time", Charts: []report.Chart{rates}}
	if r.Latency.Count() > 0 {
		section.Charts = append(section.Charts, latency)
	}
	section.Charts = append(section.Charts, outstanding)
	return section
}

// series is a figure over time. The last interval, which is cut short by the end,
// is left out where there are others.
func (r *Result) series(name string, of func(*Sample) float64) report.Series {
	line := report.Series{Name: name}
	for i := range r.Series {
		s := &r.Series[i]
		if i > 0 && i == len(r.Series)-1 && s.To-s.From < (r.Series[0].To-r.Series[0].From)/2 {
			break
		}
		line.Points = append(line.Points, report.Point{X: s.To.Seconds(), Y: of(s)})
	}
	return line
}

func (r *Result) latencies() report.Section {
	return report.Section{
		Heading: "Latency",
		Text:    fmt.Sprintf("Of %s decisions, counted from when each grab was due, not from when it was sent. Percentiles are true to %.1f %%.", thousands(r.Latency.Count()), 100*RelativeError),
		Charts: []report.Chart{
			report.Lines{
				Title: "Latency by percentile", X: report.Axis{Label: "percentile", Unit: report.Share, Scale: report.Tail},
				Y:      report.Axis{Label: "latency", Unit: report.Seconds, Scale: report.Log},
				Series: []report.Series{{Name: "decisions", Points: r.Latency.Curve()}},
			},
			report.Lines{
				Title: "Distribution", X: report.Axis{Label: "latency", Unit: report.Seconds, Scale: report.Log},
				Y:      report.Axis{Label: "share of decisions", Unit: report.Share},
				Series: []report.Series{{Name: "decisions", Points: r.Latency.Distribution(), Area: true}},
			},
		},
		Tables: []report.Table{PercentileTable([]string{"decisions"}, []*Histogram{r.Latency})},
	}
}

// Curve is the latency in seconds over percentiles, for a chart over a Tail axis:
// up to where one Grab alone decides.
func (h *Histogram) Curve() []report.Point {
	var points []report.Point
	for nines := 0.0; h.n > 0; nines += 0.1 {
		p := 1 - math.Pow(10, -nines)
		if (1-p)*float64(h.n) < 1 || nines > 6 {
			break
		}
		points = append(points, report.Point{X: p, Y: h.Percentile(p).Seconds()})
	}
	return points
}

// Distribution is the share of all in each eighth of a power of two, over its
// middle in seconds.
func (h *Histogram) Distribution() []report.Point {
	const width = subBuckets / 8
	var points []report.Point
	first, last := bucketOf(h.min)/width, bucketOf(h.max)/width
	for group := max(first-1, 0); group <= min(last+1, bucketCount/width-1) && h.n > 0; group++ {
		n := uint64(0)
		for _, in := range h.counts[group*width : (group+1)*width] {
			n += in
		}
		low, _ := bounds(group * width)
		_, high := bounds(group*width + width - 1)
		points = append(points, report.Point{X: (time.Duration(low+high) / 2).Seconds(), Y: float64(n) / float64(h.n)})
	}
	return points
}

// PercentileTable holds the percentiles of histograms, a row each.
func PercentileTable(names []string, histograms []*Histogram) report.Table {
	t := report.Table{Title: "Percentiles", Columns: []report.Column{{Name: ""}, {Name: "count", Numeric: true}, {Name: "min", Numeric: true}}}
	for _, p := range Percentiles {
		t.Columns = append(t.Columns, report.Column{Name: percentileName(p), Numeric: true})
	}
	t.Columns = append(t.Columns, report.Column{Name: "max", Numeric: true}, report.Column{Name: "mean", Numeric: true})
	for i, h := range histograms {
		row := report.Cells(names[i], thousands(h.Count()), readable(h.Min()))
		for _, p := range Percentiles {
			row = append(row, report.Cell{Text: readable(h.Percentile(p))})
		}
		t.Rows = append(t.Rows, append(row, report.Cells(readable(h.Max()), readable(h.Mean()))...))
	}
	return t
}
