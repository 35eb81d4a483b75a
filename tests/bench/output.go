package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
)

// results are all readings, by round and name. What a round records more than
// once counts as its mean.
type results struct{ rounds []map[string]reading }

type reading struct {
	sum float64
	n   int
}

func (r reading) mean() float64 { return r.sum / float64(r.n) }

func newResults() *results { return &results{} }

func (r *results) begin() { r.rounds = append(r.rounds, make(map[string]reading)) }

// record keeps a reading of the current round. What is no number, as of a time
// of 0, is none.
func (r *results) record(name string, value float64) {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return
	}
	round := r.rounds[len(r.rounds)-1]
	round[name] = reading{round[name].sum + value, round[name].n + 1}
}

// now is a reading that this round has taken already.
func (r *results) now(name string) (float64, bool) {
	if len(r.rounds) == 0 {
		return 0, false
	}
	value, ok := r.rounds[len(r.rounds)-1][name]
	return value.mean(), ok
}

// samples are the readings of a name, one a round that has it.
func (r *results) samples(name string) []float64 {
	var all []float64
	for _, round := range r.rounds {
		if value, ok := round[name]; ok {
			all = append(all, value.mean())
		}
	}
	return all
}

func (r *results) names() []string {
	all := make(map[string]bool)
	for _, round := range r.rounds {
		for name := range round {
			all[name] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

func (r *results) figureSamples(f figure) []float64 {
	var all []float64
	for _, round := range r.rounds {
		if value, ok := f.value(round); ok {
			all = append(all, value)
		}
	}
	return all
}

func median(samples []float64) float64 {
	sorted := slices.Sorted(slices.Values(samples))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// shown is the four figures that are always told apart, and what goes with them.
var shown = []struct{ name, label, unit string }{
	{"refused_per_second", "refused", "a second"},
	{"stream_strict_per_second", "admitted, writers stopped", "a second"},
	{"path_per_second", "admitted and persisted, whole path", "a second"},
	{"path_catchup_s", "catch-up after that load", "s"},
	{"stage_stream_per_second", "the same, tutorial's stage 3", "a second"},
	{"stage_stream_catchup_s", "catch-up after its load", "s"},
	{"fsync_p50_ms", "fsync of this disk, p50", "ms"},
}

// table prints medians, spreads and bounds.
func (b *bench) table(w io.Writer) {
	fmt.Fprintf(w, "\n%-26s %10s %21s %14s\n", "figure", "median", "from - to", "bound")
	for _, f := range figures() {
		samples := b.results.figureSamples(f)
		if len(samples) == 0 {
			fmt.Fprintf(w, "%-26s %10s\n", f.name, "-")
			continue
		}
		verdict := "met"
		if !f.met(median(samples)) {
			verdict = "NOT MET"
		}
		fmt.Fprintf(w, "%-26s %10.3f %10.3f - %-10.3f %s %g  %s\n", f.name, median(samples), slices.Min(samples), slices.Max(samples), f.limitWord(), f.bound, verdict)
	}
	fmt.Fprintln(w)
	for _, s := range shown {
		if samples := b.results.samples(s.name); len(samples) > 0 {
			fmt.Fprintf(w, "%-40s %12.2f %s\n", s.label, median(samples), s.unit)
		}
	}
}

type figureJSON struct {
	Name    string    `json:"name"`
	Value   float64   `json:"value"`
	Bound   float64   `json:"bound"`
	Better  string    `json:"better"`
	Samples []float64 `json:"samples"`
}

type absoluteJSON struct {
	Value   float64   `json:"value"`
	Samples []float64 `json:"samples"`
}

type resultsJSON struct {
	Machine  string                  `json:"machine"`
	Commit   string                  `json:"commit"`
	At       time.Time               `json:"at"`
	Command  string                  `json:"command"`
	Notes    []string                `json:"notes,omitempty"`
	Figures  []figureJSON            `json:"figures"`
	Absolute map[string]absoluteJSON `json:"absolute"`
}

func (b *bench) document() resultsJSON {
	doc := resultsJSON{
		Machine: b.machine(), Commit: commit(), At: b.started.UTC().Truncate(time.Second),
		Command: strings.Join(append([]string{"bench"}, os.Args[1:]...), " "),
		Notes:   b.unusual, Figures: []figureJSON{}, Absolute: make(map[string]absoluteJSON),
	}
	for _, f := range figures() {
		if samples := b.results.figureSamples(f); len(samples) > 0 {
			doc.Figures = append(doc.Figures, figureJSON{f.name, median(samples), f.bound, f.better, samples})
		}
	}
	for _, name := range b.results.names() {
		samples := b.results.samples(name)
		doc.Absolute[name] = absoluteJSON{median(samples), samples}
	}
	return doc
}

func (doc resultsJSON) write(path string) error {
	text, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		return err
	}
	return replace(path, append(text, '\n'))
}

// replace writes a file, or leaves the one that is there as it was, as on a disk
// that is full.
func replace(path string, text []byte) error {
	next := path + ".new"
	if err := os.WriteFile(next, text, 0o644); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	return os.Rename(next, path)
}

// machine is what the figures were measured on.
func (b *bench) machine() string {
	cpu := runtime.GOARCH
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range bytes.Lines(info) {
			if name, value, ok := bytes.Cut(line, []byte(":")); ok && string(bytes.TrimSpace(name)) == "model name" {
				cpu = string(bytes.TrimSpace(value))
				break
			}
		}
	}
	binaries := b.rig.binaries
	return fmt.Sprintf("%d x %s, %s, Redis %s, %s", runtime.NumCPU(), cpu, runtime.Version(), binaries.RedisVersion, binaries.DatabaseVersion)
}

// commit is that of the working tree, "+" behind it where files are changed.
func commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
