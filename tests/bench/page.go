package main

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/pkg/load/report"
)

// pageData is what the page shows beside the results.
type pageData struct {
	sweep   []point          // of the first round
	backlog []backlogPoint   // of the last round
	bound   int64            // on it
	latency []namedHistogram // of the last round
}

type namedHistogram struct {
	name      string
	histogram *load.Histogram
}

func (b *bench) writePage(doc resultsJSON, path string) error {
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
	if len(b.unusual) > 0 {
		page.Sections = append(page.Sections, report.Section{Heading: "Unusual", Text: strings.Join(b.unusual, "\n\n")})
	}
	for _, section := range []report.Section{b.admission(), b.latencies(), b.cpu(), b.persisting(), b.memorySection()} {
		if len(section.Charts)+len(section.Tables)+len(section.Tiles) > 0 {
			page.Sections = append(page.Sections, section)
		}
	}
	var text bytes.Buffer
	if err := page.WriteHTML(&text); err != nil {
		return err
	}
	return replace(path, text.Bytes())
}

// summary is the four figures that are always told apart.
func (b *bench) summary() report.Section {
	s := report.Section{Heading: "Four figures"}
	for _, tile := range []struct{ name, label, format, note string }{
		{"refused_per_second", "refused a second", "", "sold out, over GrabStream"},
		{"stream_strict_per_second", "admitted a second", "", "over GrabStream, strict, writers stopped"},
		{"path_per_second", "admitted and persisted a second", "", "whole path, strict, books proven"},
		{"path_catchup_s", "catch-up", "%.2f s", "from the last answer to the last row, whole path"},
	} {
		if samples := b.results.samples(tile.name); len(samples) > 0 {
			value := thousands(int(median(samples)))
			if tile.format != "" {
				value = fmt.Sprintf(tile.format, median(samples))
			}
			s.Tiles = append(s.Tiles, report.Tile{Label: tile.label, Value: value, Note: tile.note})
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
		Text:    "Each is of two readings of the same round, so a slow hour slows both. Medians of all rounds." + b.fsync(),
		Tables:  []report.Table{report.Figures("", rows)},
	}
}

// fsync is the latency of the disk, which belongs beside every ratio to the
// tutorial's third stage.
func (b *bench) fsync() string {
	p50, p99 := b.results.samples("fsync_p50_ms"), b.results.samples("fsync_p99_ms")
	if len(p50) == 0 {
		return ""
	}
	return fmt.Sprintf("\n\nWhat the tutorial's third stage waits for, order by order, is the disk: an fsync took %.2f ms here (p99 %.2f ms). "+
		"Its ratios are on the same servers, with a Redis as durable as the database; what it does with a Redis in everysec is in the table of the whole path.",
		median(p50), median(p99))
}

// bars makes one bar of each name that was measured.
func (b *bench) bars(title, note, label string, unit report.Unit, rows ...[2]string) (charts []report.Chart) {
	chart := report.Bars{Title: title, Note: note, Value: report.Axis{Label: label, Unit: unit}}
	for _, row := range rows {
		if samples := b.results.samples(row[1]); len(samples) > 0 {
			// Less than nothing, as of memory that something else gave back meanwhile, is drawn as nothing.
			chart.Rows = append(chart.Rows, report.Bar{
				Label: row[0], Values: []float64{max(median(samples), 0)}, Low: max(slices.Min(samples), 0), High: max(slices.Max(samples), 0),
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
		Text: "Writers are stopped here, so that the cores are the admission's. The echo is bare gRPC with messages of the same size, as generated, with Go's default for garbage collections. " +
			"The gateway lets its heap grow further between them; so does the second echo, which no figure is held against. " +
			"Both streams carry up to 256 Grabs in a message, and the load generator encodes those by hand; its share is in the section on CPU. " +
			fmt.Sprintf("Load is a closed loop of %d callers, or %d streams of %d Grabs outstanding each, over %d connections. A warm-up of a quarter of that time comes before and is not counted.", callers, streams, window, conns),
		Charts: b.bars("Answers a second at saturation", "", "answers a second", report.PerSecond,
			[2]string{"bare unary echo", "echo_unary_per_second"},
			[2]string{"the same, GC as the gateway", "echo_tuned_unary_per_second"},
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
			Title: "Throughput against offered load", Note: fmt.Sprintf("An open loop over GrabStream, strict; arrivals are Poisson. Measured in the first round. What was due while %s Grabs had no answer was dropped.", thousands(sweepOutstanding)),
			X: offered, Y: report.Axis{Label: "admitted", Unit: report.PerSecond},
			Series: []report.Series{line("admitted", func(p point) float64 { return p.admitted }), ideal},
		},
		report.Lines{
			Title: "Latency against offered load", Note: "Counted from when each Grab was due. The load generator wakes once a millisecond and sends all that is due by then, which is part of each latency.",
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
		Title: "Unary Grab, strict, beside what it cannot be faster than", Note: "An open loop at the same rate for echo and Grab, whose generator wakes every 0.2 ms; the script one call after the other. Of the last round.",
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
	s := report.Section{Heading: "Where the microseconds are", Text: "Microseconds of user and system time of whole processes."}
	// A chart each: beside a unary call all else is a stripe.
	s.Charts = append(s.Charts, b.cpuOf("CPU an order, by process", "For each answer over a stream. Draining, plain INSERT and whole path: for each row, what was refused as busy included.",
		[2]string{"stream echo", "echo_stream"}, [2]string{"stream, fast", "stream_fast"}, [2]string{"stream, strict", "stream_strict"}, [2]string{"refusal", "refused"},
		[2]string{"draining", "drain"}, [2]string{"plain INSERT", "raw_insert"}, [2]string{"whole path", "path"})...)
	s.Charts = append(s.Charts, b.cpuOf("CPU a unary call, by process", "",
		[2]string{"unary echo", "echo_unary"}, [2]string{"GC as the gateway", "echo_tuned_unary"}, [2]string{"unary, fast", "unary_fast"}, [2]string{"unary, strict", "unary_strict"})...)
	s.Charts = append(s.Charts, b.bars("CPU of redis-server for an admitted order, fast", "The tutorial's script is run by redis-benchmark, which pipelines.", "microseconds", report.Number,
		[2]string{"seckill, batches", "redis_us_per_admitted"}, [2]string{"tutorial's script", "tutorial_redis_us_per_admitted"})...)
	return s
}

// cpuOf makes a bar of each row that was measured, with a part for each process.
func (b *bench) cpuOf(title, note string, rows ...[2]string) (charts []report.Chart) {
	chart := report.Bars{Title: title, Note: note, Value: report.Axis{Label: "microseconds"}, Parts: processes}
	for _, row := range rows {
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
	if len(chart.Rows) > 0 {
		charts = append(charts, chart)
	}
	return charts
}

func (b *bench) persisting() report.Section {
	s := report.Section{
		Heading: "Into the database",
		Text:    "The plain INSERTs are the writer's statements, batches and connections, with nothing around them. Half of them run before the draining and half after it.",
		Charts: b.bars("Rows a second", "", "rows a second", report.PerSecond,
			[2]string{"plain INSERTs", "raw_insert_per_second"}, [2]string{"a writer, draining", "drain_per_second"},
			[2]string{"the whole path", "path_per_second"},
			[2]string{"stage 3, consumer alone", "stage3_drain_per_second"}, [2]string{"the same, everysec", "stage3_everysec_drain_per_second"},
		),
	}
	if len(b.page.backlog) > 0 {
		series := report.Series{Name: "in flight", Area: true}
		for _, p := range b.page.backlog {
			series.Points = append(series.Points, report.Point{X: p.seconds, Y: p.orders})
		}
		s.Charts = append(s.Charts, report.Lines{
			Title: "Backlog over time", Note: "Orders admitted and not yet rows, on the whole path, in the last round; the load ends where it begins to fall to 0.",
			X: report.Axis{Label: "since the first Grab", Unit: report.Seconds}, Y: report.Axis{Label: "orders in flight"},
			Series: []report.Series{series}, Bounds: []report.Bound{{Label: "bound", Value: float64(b.page.bound)}},
		})
	}
	s.Charts = append(s.Charts, b.bars("fsync of this disk", "Appending 4 KiB and having it on disk.", "ms", report.Number,
		[2]string{"p50", "fsync_p50_ms"}, [2]string{"p99", "fsync_p99_ms"})...)
	s.Tables = b.wholePath()
	return s
}

// wholePath is the table of whole paths, side by side.
func (b *bench) wholePath() []report.Table {
	t := report.Table{
		Title: "The whole path, side by side",
		Note: "Persisted a second is reckoned from the first Grab to the last row; catch-up is its end, after the last answer. The tutorial admits what its stage can hold in memory or in its stream; " +
			"seckill refuses as busy what its writers could not bring home soon.",
		Columns: []report.Column{{Name: ""}, {Name: "admitted a second", Numeric: true}, {Name: "persisted a second", Numeric: true}, {Name: "catch-up", Numeric: true}, {Name: "refused as busy a second", Numeric: true}},
	}
	for _, row := range [][2]string{
		{"seckill, strict", "path"}, {"tutorial 1, synchronous", "stage_sync"}, {"tutorial 2, queue in memory", "stage_queue"},
		{"tutorial 3, stream", "stage_stream"}, {"tutorial 3, Redis in everysec", "stage_stream_everysec"},
	} {
		cells := report.Cells(row[0])
		for _, what := range []string{"_admitted_per_second", "_per_second", "_catchup_s", "_busy_per_second"} {
			text := "–"
			if samples := b.results.samples(row[1] + what); len(samples) > 0 && what == "_catchup_s" {
				text = fmt.Sprintf("%.2f s", median(samples))
			} else if len(samples) > 0 {
				text = thousands(int(median(samples)))
			}
			cells = append(cells, report.Cells(text)...)
		}
		if len(b.results.samples(row[1]+"_per_second")) > 0 {
			t.Rows = append(t.Rows, cells)
		}
	}
	if len(t.Rows) == 0 {
		return nil
	}
	return []report.Table{t}
}

// thousands is a number with separators.
func thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

func (b *bench) memorySection() report.Section {
	return report.Section{
		Heading: "Memory of Redis",
		Charts: b.bars("Bytes an order", "In flight with its buyer's mark; settled, the mark alone; archived, nothing.", "bytes", report.Number,
			[2]string{"in flight", "bytes_in_flight"}, [2]string{"settled", "bytes_settled"}, [2]string{"archived", "bytes_archived"}),
	}
}
