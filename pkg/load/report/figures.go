package report

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"
)

// Figure is a measured figure and what it must reach.
type Figure struct {
	Name    string
	Meaning string
	Unit    Unit
	Samples []float64 // of repeated runs, at least one
	Bound   float64
	Better  string // "higher" or "lower"; else there is no bound
}

// Median is the middle one of the samples, or the mean of the two in the middle;
// NaN of none.
func (f Figure) Median() float64 {
	if len(f.Samples) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(f.Samples))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

// Verdict holds the median against the bound.
func (f Figure) Verdict() Verdict {
	median := f.Median()
	switch {
	case f.Better != "higher" && f.Better != "lower":
		return NoVerdict
	case f.Better == "higher" && median >= f.Bound, f.Better == "lower" && median <= f.Bound:
		return Pass
	}
	return Fail // also of no samples
}

// Figures makes a table of figures: the median, with all samples and the bound
// in a small picture.
func Figures(title string, figures []Figure) Table {
	t := Table{Title: title, Columns: []Column{{Name: "figure"}, {Name: "what"}, {"median", true}, {"spread", true}, {"bound", true}, {Name: "samples and bound"}}}
	for _, f := range figures {
		median, between, bound := "–", "", ""
		if len(f.Samples) > 0 {
			median = f.Unit.format(f.Median())
			between = f.Unit.format(slices.Min(f.Samples)) + " – " + f.Unit.format(slices.Max(f.Samples))
		}
		switch f.Better {
		case "higher":
			bound = "≥ " + f.Unit.format(f.Bound)
		case "lower":
			bound = "≤ " + f.Unit.format(f.Bound)
		}
		t.Rows = append(t.Rows, []Cell{
			{Text: f.Name}, {Text: f.Meaning}, {Text: median, Verdict: f.Verdict()}, {Text: between}, {Text: bound}, {graphic: f.strip()},
		})
	}
	return t
}

// strip is the small picture: from 0 a line, the bound as a stroke across it, a
// dot for each sample, the median larger.
func (f Figure) strip() template.HTML {
	if len(f.Samples) == 0 {
		return ""
	}
	const wide, high, middle = 190.0, 20.0, 10.0
	most := slices.Max(f.Samples)
	bounded := f.Better == "higher" || f.Better == "lower"
	if bounded {
		most = max(most, f.Bound)
	}
	if most <= 0 || math.IsInf(most, 0) || math.IsNaN(most) {
		return ""
	}
	at := func(v float64) float64 { return 4 + max(v, 0)/most*(wide-12) }
	var b strings.Builder
	about := fmt.Sprintf("%s: median %s of %d", f.Name, f.Unit.format(f.Median()), len(f.Samples))
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %s %s" role="img" aria-label="%s">`, num(wide), num(high), escape(about))
	fmt.Fprintf(&b, `<line class="cg" x1="4" y1="%s" x2="%s" y2="%s"/>`, num(middle), num(wide-4), num(middle))
	colour := "f1"
	switch f.Verdict() {
	case Pass:
		colour = "fp"
	case Fail:
		colour = "fx"
	}
	if bounded {
		fmt.Fprintf(&b, `<line class="cm" x1="%s" y1="2" x2="%s" y2="%s"/>`, num(at(f.Bound)), num(at(f.Bound)), num(high-2))
	}
	for _, v := range f.Samples {
		fmt.Fprintf(&b, `<circle class="%s" opacity="0.45" cx="%s" cy="%s" r="2.5"><title>%s</title></circle>`, colour, num(at(v)), num(middle), escape(f.Unit.format(v)))
	}
	fmt.Fprintf(&b, `<circle class="%s" cx="%s" cy="%s" r="4.5"><title>%s</title></circle></svg>`, colour, num(at(f.Median())), num(middle), escape("median "+f.Unit.format(f.Median())))
	return template.HTML(b.String()) // all text in it is escaped
}
