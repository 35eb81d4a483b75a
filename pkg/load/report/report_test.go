package report

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// sample is a page with everything in it.
func sample() Page {
	curve := func(scale float64) (points []Point) {
		for i := 0.0; i <= 6; i += 0.25 {
			points = append(points, Point{X: 1 - math.Pow(10, -i), Y: scale * (1 + i*i*i/3)})
		}
		return points
	}
	var backlog, wave []Point
	for i := range 300 {
		at := float64(i) / 10
		backlog = append(backlog, Point{X: at, Y: 20000 * math.Exp(-(at-10)*(at-10)/30)})
		wave = append(wave, Point{X: at, Y: 9000 + 4000*math.Sin(at/3)})
	}
	bound, low := 0.30, 5.5e-6
	return Page{
		Title: "Benchmarks <of> a \"sale\" & more", Subtitle: "Everything on one machine, interleaved, load generator included.",
		Facts: []Fact{{"machine", "2 cores, 24 GiB, Linux 6.1"}, {"commit", "0123abcd"}, {"command", "make bench"}, {"taken", "2026-11-30 22:40 UTC"}},
		Sections: []Section{
			{Heading: "In short", Text: "Ratios are of one run.\n\nAbsolute figures move from hour to hour.", Tiles: []Tile{
				{Label: "admitted", Value: "97,400/s", Note: "STRICT, over GrabStream"}, {Label: "persisted", Value: "52,100/s"},
				{Label: "bounds met", Value: "11 of 12", Verdict: Fail}, {Label: "books", Value: "PROVEN", Verdict: Pass},
			}, Tables: []Table{Figures("Figures against their bounds", []Figure{
				{Name: "unary_over_echo", Meaning: "unary Grab, FAST, over a bare echo", Unit: Ratio, Samples: []float64{0.83, 0.86, 0.81}, Bound: 0.8, Better: "higher"},
				{Name: "p99_over_floor", Meaning: "p99 at half of saturation", Unit: Ratio, Samples: []float64{2.31, 2.02, 2.6, 1.8}, Bound: 2, Better: "lower"},
				{Name: "bytes_in_flight", Meaning: "Redis memory per order", Unit: Bytes, Samples: []float64{104}, Bound: 120, Better: "lower"},
				{Name: "fsync", Meaning: "one fsync of this disk", Unit: Seconds, Samples: []float64{0.00081, 0.0012}},
				{Name: "missing", Meaning: "was not measured", Bound: 1, Better: "higher"},
			})}},
			{Heading: "Throughput", Charts: []Chart{
				Lines{Title: "Throughput against offered load", Note: "Median of 5, with the spread.",
					X: Axis{Label: "offered", Unit: PerSecond}, Y: Axis{Label: "answered", Unit: PerSecond}, Bounds: []Bound{{"bound", 90000}},
					Series: []Series{
						{Name: "ideal", Dashed: true, Points: []Point{{X: 0, Y: 0}, {X: 150000, Y: 150000}}},
						{Name: "stream", Points: []Point{{10000, 10000, 0, 0}, {50000, 50000, 0, 0}, {90000, 88000, 84000, 90000}, {120000, 97000, 91000, 99500}, {150000, 96000, 88000, 99000}}},
						{Name: "unary", Points: []Point{{5000, 5000, 0, 0}, {10000, 9900, 0, 0}, {20000, 14000, 12500, 14800}, {40000, 14200, 13000, 14500}}},
					}},
				Lines{Title: "Latency over load", X: Axis{Label: "offered", Unit: PerSecond, Scale: Log}, Y: Axis{Label: "latency", Unit: Seconds, Scale: Log},
					Series: []Series{
						{Name: "p50", Points: []Point{{X: 1000, Y: 0.0012}, {X: 10000, Y: 0.0014}, {X: 90000, Y: 0.014}}},
						{Name: "p99", Points: []Point{{X: 1000, Y: 0.0041}, {X: 10000, Y: 0.006}, {X: 90000, Y: 0.043}}},
						{Name: "p99.9", Points: []Point{{X: 1000, Y: 0.0044}, {X: 10000, Y: 0.0064}, {X: 90000, Y: 0.048}}},
					}},
				Lines{Title: "Backlog over time", X: Axis{Label: "time", Unit: Seconds}, Y: Axis{Label: "orders in flight"},
					Series: []Series{{Name: "in flight", Points: backlog, Area: true}, {Name: "persisted/s", Points: wave}}},
				Lines{Title: "Latency by percentile", X: Axis{Label: "percentile", Unit: Share, Scale: Tail}, Y: Axis{Label: "latency", Unit: Seconds},
					Series: []Series{{Name: "stream", Points: curve(0.002)}, {Name: "unary", Points: curve(0.001)}}},
			}},
			{Heading: "CPU", Charts: []Chart{
				Bars{Title: "CPU per order by process", Value: Axis{Label: "CPU per order", Unit: Seconds}, Parts: []string{"load generator", "gateway", "redis-server", "writer", "database"},
					Rows: []Bar{{Label: "whole path", Values: []float64{0.4e-6, 5.2e-6, 7.1e-6, 4.2e-6, 13.3e-6}}, {Label: "admission", Values: []float64{0.5e-6, 5.4e-6, 5.5e-6, 0, 0}}, {Label: "stage 3", Values: []float64{35e-6, 40e-6, 20e-6, 60e-6, 210e-6}}}},
				Bars{Title: "redis-server, CPU per admitted order", Value: Axis{Label: "CPU per order", Unit: Seconds},
					Rows: []Bar{{Label: "the tutorial's script", Values: []float64{16.2e-6}, Low: 15e-6, High: 17.7e-6}, {Label: "seckill", Values: []float64{4.2e-6}, Low: 3.9e-6, High: 5.1e-6, Bound: &low}}},
			}},
			{Heading: "Machine", Tables: []Table{{Title: "Limits", Note: "Of this run.", Columns: []Column{{Name: "what"}, {"value", true}},
				Rows: [][]Cell{{{Text: "bare unary echo"}, {Text: "24,100/s"}}, {{Text: "bound"}, {Text: strconv.FormatFloat(bound, 'f', 2, 64), Verdict: Pass}}}}}},
		},
	}
}

func written(t *testing.T, p Page) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, p.WriteHTML(&b))
	return b.String()
}

var drawings = regexp.MustCompile(`(?s)<svg.*?</svg>`)

// wellFormed requires an SVG to be XML, its numbers finite and its places on it.
func wellFormed(t require.TestingT, svg string) {
	require.NotContains(t, svg, "NaN")
	require.NotContains(t, svg, "Inf")
	decoder := xml.NewDecoder(strings.NewReader(svg))
	var wide, high float64
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err, svg)
		element, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		for _, a := range element.Attr {
			switch a.Name.Local {
			case "viewBox":
				sizes := strings.Fields(a.Value)
				wide, _ = strconv.ParseFloat(sizes[2], 64)
				high, _ = strconv.ParseFloat(sizes[3], 64)
			case "x", "x1", "x2", "cx", "y", "y1", "y2", "cy":
				at, err := strconv.ParseFloat(a.Value, 64)
				require.NoError(t, err)
				limit := wide
				if a.Name.Local[len(a.Name.Local)-1] == 'y' || strings.HasPrefix(a.Name.Local, "y") {
					limit = high
				}
				require.True(t, at >= -1 && at <= limit+1, "%s %s=%g of %g", element.Name.Local, a.Name.Local, at, limit)
			}
		}
	}
	require.Positive(t, wide)
}

func TestPage_HoldsEverythingAndNeedsNothingElse(t *testing.T) {
	text := written(t, sample())
	svgs := drawings.FindAllString(text, -1)
	require.Len(t, svgs, 6+4)
	for _, svg := range svgs {
		wellFormed(t, svg)
	}
	for _, external := range []string{"src=", "@import", "url(", "<link", "<script", "<iframe"} {
		require.NotContains(t, text, external)
	}
	for _, url := range regexp.MustCompile(`(?i)https?://[^"' <]*`).FindAllString(text, -1) {
		require.Equal(t, "http://www.w3.org/2000/svg", url, "the name of a form, which nobody fetches")
	}
	for _, href := range regexp.MustCompile(`href="([^"]*)"`).FindAllStringSubmatch(text, -1) {
		require.True(t, strings.HasPrefix(href[1], "#s"), href[1])
		require.Contains(t, text, `<section id="`+href[1][1:]+`">`)
	}
	require.Contains(t, text, "prefers-color-scheme: dark")
	require.Contains(t, text, "Benchmarks &lt;of&gt; a &#34;sale&#34; &amp; more")
	for _, want := range []string{
		"make bench", "97,400/s", "PROVEN", "<p>Ratios are of one run.</p>", "<p>Absolute figures move from hour to hour.</p>", // what is given
		"≥ 0.8", "≤ 120 B", "0.81 – 0.86", "2.17", "810 µs – 1.2 ms", // figures
		"stream: 97k/s at 120k/s (91k/s to 99.5k/s)", "p99.9: 48 ms at 90k/s", "99.9 %", "bound 90k/s", // lines
		"whole path, database: 13.3 µs", "30.2 µs", "seckill: 4.2 µs (3.9 µs to 5.1 µs in all)", // bars
	} {
		require.Contains(t, text, want)
	}
	require.Equal(t, 2+1+1, strings.Count(text, `aria-label="passed"`))
	require.Equal(t, 2+1, strings.Count(text, `aria-label="failed"`), "one that was not measured does not pass")
}

func TestPage_SaysWhatCannotBeDrawn(t *testing.T) {
	for want, s := range map[string]Section{
		"no points":        {Charts: []Chart{Lines{}}},
		"no bars":          {Charts: []Chart{Bars{}}},
		"NaN cannot":       {Charts: []Chart{Lines{Series: []Series{{Points: []Point{{X: math.NaN()}}}}}}},
		"+Inf cannot":      {Charts: []Chart{Bars{Rows: []Bar{{Values: []float64{math.Inf(1)}}}}}},
		"has 2 parts, not": {Charts: []Chart{Bars{Rows: []Bar{{Values: []float64{1, 2}}}}}},
		"is below 0":       {Charts: []Chart{Bars{Rows: []Bar{{Values: []float64{-1}}}}}},
		"1 cells":          {Tables: []Table{{Columns: make([]Column, 2), Rows: [][]Cell{{{}}}}}},
	} {
		require.ErrorContains(t, Page{Sections: []Section{s}}.WriteHTML(io.Discard), want)
	}
}

func TestLines_WhateverIsDrawnLiesOnTheDrawing(t *testing.T) {
	value := rapid.OneOf(rapid.Float64Range(0, 1), rapid.Float64Range(-1e9, 1e9), rapid.Float64Range(1e-9, 1e-6), rapid.Just(0.0))
	rapid.Check(t, func(t *rapid.T) {
		tail := rapid.Bool().Draw(t, "tail")
		l := Lines{
			Title: rapid.String().Draw(t, "title"),
			X:     Axis{Label: rapid.String().Draw(t, "x"), Unit: Unit(rapid.IntRange(0, 5).Draw(t, "unit")), Scale: Scale(rapid.IntRange(0, 1).Draw(t, "scale"))},
			Y:     Axis{Unit: Unit(rapid.IntRange(0, 5).Draw(t, "unit")), Scale: Scale(rapid.IntRange(0, 1).Draw(t, "scale"))},
		}
		if tail {
			l.X.Scale = Tail
		}
		for range rapid.IntRange(1, 5).Draw(t, "series") {
			s := Series{Name: rapid.StringN(0, 12, -1).Draw(t, "name"), Area: rapid.Bool().Draw(t, "area")}
			for range rapid.IntRange(1, 20).Draw(t, "points") {
				p := Point{X: value.Draw(t, "x"), Y: value.Draw(t, "y")}
				if tail {
					p.X = rapid.Float64Range(0, 1).Draw(t, "p")
				}
				s.Points = append(s.Points, p)
			}
			l.Series = append(l.Series, s)
		}
		svg, data, err := l.draw("c")
		require.NoError(t, err)
		wellFormed(t, svg)
		points := 0
		for _, s := range l.Series {
			points += len(s.Points)
		}
		require.Len(t, data.Rows, points)
	})
}

func TestUnits_ReadAsPeopleWriteThem(t *testing.T) {
	for want, got := range map[string]string{
		"1,200": Number.format(1200), "12k": Number.format(12_000), "1.25M": Number.format(1_250_000), "999": Number.format(999), "10k": Number.format(9_999), "0": Number.format(0),
		"97.4k/s": PerSecond.format(97_400), "0.05": Number.format(0.05), "1.5 ms": Seconds.format(0.0015), "1 ms": Seconds.format(0.0009999), "250 ns": Seconds.format(250e-9), "12 s": Seconds.format(12),
		"99.9 %": Share.format(0.999), "99.9999 %": Share.format(0.999999), "120 B": Bytes.format(120), "1.5 MiB": Bytes.format(1.5 * 1024 * 1024), "1.25": Ratio.format(1.25), "-3 µs": Seconds.format(-3e-6),
	} {
		require.Equal(t, want, got)
	}
}

func TestSpread_KeepsOrderAndDistance(t *testing.T) {
	require.Equal(t, []float64{20, 10, 30}, spread([]float64{11, 10, 12}, 10, 0, 100))
	require.Equal(t, []float64{100, 90}, spread([]float64{100, 99}, 10, 0, 100))
}

// A bound at the top of the chart lies where the label of the axis is.
func TestLines_ABoundAtTheTopIsNotWrittenOverTheAxis(t *testing.T) {
	for _, bound := range []float64{100, 50} {
		svg, _, err := Lines{
			Title: "Backlog", X: Axis{Label: "time", Unit: Seconds}, Y: Axis{Label: "orders in flight"},
			Series: []Series{{Name: "in flight", Points: []Point{{X: 0, Y: 1}, {X: 5, Y: 40}}}}, Bounds: []Bound{{"bound", bound}},
		}.draw("c")
		require.NoError(t, err)
		place := func(text string) float64 {
			found := regexp.MustCompile(` y="([0-9.]+)">` + text).FindStringSubmatch(svg)
			require.NotNil(t, found, text)
			y, err := strconv.ParseFloat(found[1], 64)
			require.NoError(t, err)
			return y
		}
		require.Greater(t, math.Abs(place("bound")-place("orders in flight")), 13.0, "bound at %g", bound)
	}
}
