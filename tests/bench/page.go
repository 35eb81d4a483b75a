package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/pkg/load/report"
)

// pageData is what the page shows beside the results.
type pageData struct {
	sweep   []point
	backlog []backlogPoint
	latency []namedHistogram // of the last round
}

type namedHistogram struct {
	name      string
	histogram *load.Histogram
}

func (b *bench) writePage(ctx context.Context, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close() // the error of writing is the one below
	doc := b.document(ctx)
	page := report.Page{
		Title:    "seckill: what it reaches, and where the next microsecond is",
		Subtitle: "Load generator, gateway, Redis, writer and database share this machine's cores. Everything on this page comes from one run, interleaved; compare figures within it.",
		Facts: []report.Fact{
			{Name: "machine", Value: doc.Machine}, {Name: "commit", Value: doc.Commit},
			{Name: "measured", Value: doc.At.Format("2006-01-02 15:04 MST") + ", " + time.Since(b.started).Round(time.Second).String()},
			{Name: "rounds", Value: fmt.Sprint(b.rounds)}, {Name: "command", Value: doc.Command},
		},
		Sections: []report.Section{b.summary(), b.ratios()},
	}
	for _, section := range []report.Section{b.admission(), b.latencies(), b.cpu(), b.persisting(), b.memorySection()} {
		if len(section.Charts)+len(section.Tables)+len(section.Tiles) > 0 {
			page.Sections = append(page.Sections, section)
		}
	}
	if len(b.unusual) > 0 {
		page.Sections = append(page.Sections, report.Section{Heading: "Unusual", Text: strings.Join(b.unusual, "\n\n")})
	}
	if err := page.WriteHTML(f); err != nil {
		return err
	}
	return f.Sync()
}

// summary is the four figures that are always told apart.
func (b *bench) summary() report.Section {
	s := report.Section{Heading: "Four figures"}
	for _, tile := range []struct{ name, label, format, note string }{
		{"refused_per_second", "refused a second", "%.0f", "sold out, over GrabStream"},
		{"stream_strict_per_second", "admitted a second", "%.0f", "over GrabStream, strict, writers stopped"},
		{"path_per_second", "admitted and persisted a second", "%.0f", "whole path, strict, books proven"},
		{"path_catchup_s", "s to catch up", "%.2f", "from the last Grab to the last row"},
	} {
		if samples := b.results.samples(tile.name); len(samples) > 0 {
			s.Tiles = append(s.Tiles, report.Tile{Label: tile.label, Value: fmt.Sprintf(tile.format, median(samples)), Note: tile.note})
		}
	}
	return s
}

func (b *bench) ratios() report.Section {
	var rows []report.Figure
	for _, f := range figures() {
		if samples := b.results.figureSamples(f); len(samples) > 0 {
			unit := report.Ratio
			if f.under == "" {
				unit = report.Number
			}
			rows = append(rows, report.Figure{Name: f.name, Meaning: f.what, Unit: unit, Samples: samples, Bound: f.bound, Better: f.better})
		}
	}
	return report.Section{
		Heading: "Ratios and their bounds",
		Text:    "Each is of two readings of the same round, so a slow hour slows both. Medians of all rounds.",
		Tables:  []report.Table{report.Figures("", rows)},
	}
}

// bars makes one bar of each name that was measured.
func (b *bench) bars(title, note, label string, unit report.Unit, rows ...[2]string) (charts []report.Chart) {
	chart := report.Bars{Title: title, Note: note, Value: report.Axis{Label: label, Unit: unit}}
	for _, row := range rows {
		if samples := b.results.samples(row[1]); len(samples) > 0 {
			chart.Rows = append(chart.Rows, report.Bar{
				Label: row[0], Values: []float64{median(samples)}, Low: slices.Min(samples), High: slices.Max(samples),
			})
		}
	}
	if len(chart.Rows) > 0 {
		charts = append(charts, chart)
	}
	return charts
}

func (b *bench) admission() report.Section {
	s := report.Section{
		Heading: "Admission",
		Text: "Writers are stopped here, so that the cores are the admission's. The echo is bare gRPC with messages of the same size. " +
			"The load generator encodes its stream messages by hand; its share is in the section on CPU.",
		Charts: b.bars("Answers a second at saturation", "", "answers a second", report.PerSecond,
			[2]string{"bare unary echo", "echo_unary_per_second"},
			[2]string{"unary Grab, fast", "unary_fast_per_second"},
			[2]string{"unary Grab, strict", "unary_strict_per_second"},
			[2]string{"bare stream echo", "echo_stream_per_second"},
			[2]string{"GrabStream, fast", "stream_fast_per_second"},
			[2]string{"GrabStream, strict", "stream_strict_per_second"},
			[2]string{"GrabStream, refusals", "refused_per_second"},
			[2]string{"tutorial's script alone", "tutorial_script_per_second"},
		),
	}
	if len(b.page.sweep) == 0 {
		return s
	}
	line := func(name string, of func(point) float64) report.Series {
		series := report.Series{Name: name}
		for _, p := range b.page.sweep {
			series.Points = append(series.Points, report.Point{X: p.offered, Y: of(p)})
		}
		return series
	}
	ideal := line("offered", func(p point) float64 { return p.offered })
	ideal.Dashed = true
	offered := report.Axis{Label: "offered", Unit: report.PerSecond}
	s.Charts = append(s.Charts,
		report.Lines{
			Title: "Throughput against offered load", Note: "An open loop over GrabStream, strict; arrivals are Poisson.",
			X: offered, Y: report.Axis{Label: "admitted", Unit: report.PerSecond},
			Series: []report.Series{line("admitted", func(p point) float64 { return p.admitted }), ideal},
		},
		report.Lines{
			Title: "Latency against offered load", Note: "Counted from when each Grab was due.",
			X: offered, Y: report.Axis{Label: "latency", Unit: report.Seconds, Scale: report.Log},
			Series: []report.Series{
				line("p99.9", func(p point) float64 { return p.p999 / 1000 }),
				line("p99", func(p point) float64 { return p.p99 / 1000 }),
				line("p50", func(p point) float64 { return p.p50 / 1000 }),
			},
		},
		report.Lines{
			Title: "Batches grow with the load", Note: "Grabs that one script call carried, on average.",
			X: offered, Y: report.Axis{Label: "Grabs a batch"},
			Series: []report.Series{line("Grabs a batch", func(p point) float64 { return p.grabsABatch })},
		},
	)
	return s
}

func (b *bench) latencies() report.Section {
	s := report.Section{Heading: "Latency at half of saturation"}
	if len(b.page.latency) == 0 {
		return s
	}
	var names []string
	var histograms []*load.Histogram
	chart := report.Lines{
		Title: "Unary Grab, strict, beside what it cannot be faster than", Note: "An open loop at the same rate for echo and Grab; the script one call after the other.",
		X: report.Axis{Label: "percentile", Unit: report.Share, Scale: report.Tail},
		Y: report.Axis{Label: "latency", Unit: report.Seconds, Scale: report.Log},
	}
	for _, h := range b.page.latency {
		names, histograms = append(names, h.name), append(histograms, h.histogram)
		chart.Series = append(chart.Series, report.Series{Name: h.name, Points: h.histogram.Curve()})
	}
	s.Charts = []report.Chart{chart}
	s.Tables = []report.Table{load.PercentileTable(names, histograms)}
	return s
}

// processes are those of a bar of CPU, in the order in which data moves.
var processes = []string{"load", "gateway", "server", "redis", "writer", "database"}

func (b *bench) cpu() report.Section {
	chart := report.Bars{
		Title: "CPU an order, by process", Note: "Microseconds of user and system time of the whole process, for each answer (on the whole path and draining: for each row).",
		Value: report.Axis{Label: "microseconds"}, Parts: processes,
	}
	for _, row := range [][2]string{
		{"unary echo", "echo_unary"}, {"stream echo", "echo_stream"}, {"unary, fast", "unary_fast"}, {"unary, strict", "unary_strict"},
		{"stream, fast", "stream_fast"}, {"stream, strict", "stream_strict"}, {"refusal", "refused"},
		{"draining", "drain"}, {"plain INSERT", "raw_insert"}, {"whole path", "path"},
	} {
		values, any := make([]float64, len(processes)), false
		for i, process := range processes {
			if samples := b.results.samples(row[1] + "_" + process + "_us"); len(samples) > 0 {
				values[i], any = median(samples), true
			}
		}
		if any {
			chart.Rows = append(chart.Rows, report.Bar{Label: row[0], Values: values})
		}
	}
	s := report.Section{Heading: "Where the microseconds are"}
	if len(chart.Rows) > 0 {
		s.Charts = []report.Chart{chart}
	}
	s.Charts = append(s.Charts, b.bars("CPU of redis-server for an admitted order, fast", "The tutorial's script is run by redis-benchmark, which pipelines.", "microseconds", report.Number,
		[2]string{"seckill, batches", "redis_us_per_admitted"}, [2]string{"tutorial's script", "tutorial_redis_us_per_admitted"})...)
	return s
}

func (b *bench) persisting() report.Section {
	s := report.Section{
		Heading: "Into the database",
		Text:    "What a consumer that writes row by row waits for is the disk: the fsync of this disk is among the absolute figures of results.json and below.",
		Charts: b.bars("Rows a second", "", "rows a second", report.PerSecond,
			[2]string{"plain INSERTs", "raw_insert_per_second"}, [2]string{"a writer, draining", "drain_per_second"},
			[2]string{"the whole path", "path_per_second"},
			[2]string{"tutorial, consumer alone", "stage3_drain_per_second"},
			[2]string{"tutorial, stream", "stage_stream_per_second"}, [2]string{"tutorial, queue", "stage_queue_per_second"},
			[2]string{"tutorial, synchronous", "stage_sync_per_second"},
		),
	}
	if len(b.page.backlog) > 0 {
		series := report.Series{Name: "in flight", Area: true}
		for _, p := range b.page.backlog {
			series.Points = append(series.Points, report.Point{X: p.seconds, Y: p.orders})
		}
		s.Charts = append(s.Charts, report.Lines{
			Title: "Backlog over time", Note: "Orders admitted and not yet rows, on the whole path; the load ends where it begins to fall to 0.",
			X: report.Axis{Label: "since the first Grab", Unit: report.Seconds}, Y: report.Axis{Label: "orders in flight"},
			Series: []report.Series{series}, Bounds: []report.Bound{{Label: "bound", Value: pathBound}},
		})
	}
	s.Charts = append(s.Charts, b.bars("fsync of this disk", "Appending 4 KiB and having it on disk.", "ms", report.Number,
		[2]string{"p50", "fsync_p50_ms"}, [2]string{"p99", "fsync_p99_ms"})...)
	return s
}

func (b *bench) memorySection() report.Section {
	return report.Section{
		Heading: "Memory of Redis",
		Charts: b.bars("Bytes an order", "In flight with its buyer's mark; settled, the mark alone; archived, nothing.", "bytes", report.Number,
			[2]string{"in flight", "bytes_in_flight"}, [2]string{"settled", "bytes_settled"}, [2]string{"archived", "bytes_archived"}),
	}
}
