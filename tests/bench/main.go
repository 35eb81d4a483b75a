// Command bench measures seckill beside the tutorial's three stages and beside
// what no system on these servers can be faster than, all in one run on private
// servers, interleaved, and writes results.json and a page.
//
// Read in this order: main.go (the run), rig.go (the servers), admission.go,
// latency.go, drain.go, path.go and memory.go (what is measured), figures.go
// (which ratios of it are held against which bounds), output.go and page.go.
// Packages baseline and limits are what seckill is measured against.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
)

// settings are the flags.
type settings struct {
	Quick  bool     `help:"Measure everything once and shortly: under 3 minutes, for every day."`
	Rounds int      `default:"0" help:"How often everything is measured; 0: 3, with --quick 1."`
	Out    string   `default:"tests/bench/out" type:"path" help:"Folder for results.json and report.html."`
	Only   []string `placeholder:"NAME" help:"Measure only these (see --list); for work on one figure."`
	List   bool     `help:"List what is measured, and the figures, and end."`
	Scale  float64  `default:"1" help:"Multiplies all times and counts; small ones only show that it runs."`
}

// command is the whole command line; the hidden ones are the processes that are
// measured against, which bench starts by itself.
type command struct {
	Run   runCommand   `cmd:"" default:"withargs" help:"Measure."`
	Echo  echoCommand  `cmd:"" hidden:""`
	Stage stageCommand `cmd:"" hidden:""`
}

type runCommand struct {
	settings `embed:""`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// The first interrupt asks, the second one kills; the servers die with this
	// process either way.
	context.AfterFunc(ctx, stop)
	var c command
	parsed := kong.Parse(&c, kong.Name("bench"), kong.Description("Measures seckill beside the tutorial's stages and the bare limits."),
		kong.BindTo(ctx, (*context.Context)(nil)), kong.UsageOnError())
	if err := parsed.Run(); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

// sizes are how long and how much is measured.
type sizes struct {
	rounds    int
	load      time.Duration // of load on one target in one round
	path      time.Duration // of load on the whole path
	fill      int64         // orders in the stream that a writer drains
	stageFill int64         // the same for the tutorial's consumer
	buyers    int64         // of the large voucher
	grabs     int64         // at each size of voucher
	inFlight  int64         // orders whose memory is measured
	alone     int           // script calls, and fsyncs, one at a time
	sweep     []float64     // offered load, of saturation
}

func (s settings) sizes() sizes {
	z := sizes{
		rounds: 3, load: 4 * time.Second, path: 10 * time.Second, fill: 400_000, stageFill: 4_000,
		buyers: 1_000_000, grabs: 20_000, inFlight: 300_000, alone: 2_000,
		sweep: []float64{0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1},
	}
	if s.Quick {
		z.rounds, z.load, z.path, z.fill, z.stageFill = 1, 2*time.Second, 5*time.Second, 200_000, 2_000
		z.inFlight, z.alone, z.sweep = 100_000, 1_000, []float64{0.5, 0.8, 1}
	}
	if s.Rounds > 0 {
		z.rounds = s.Rounds
	}
	scaled := func(n int64) int64 { return max(int64(float64(n)*s.Scale), 100) }
	z.load = time.Duration(float64(z.load) * s.Scale)
	z.path = time.Duration(float64(z.path) * s.Scale)
	z.fill, z.stageFill, z.buyers = scaled(z.fill), scaled(z.stageFill), scaled(z.buyers)
	z.grabs, z.inFlight, z.alone = scaled(z.grabs), scaled(z.inFlight), int(scaled(int64(z.alone)))
	return z
}

// bench is one run.
type bench struct {
	settings
	sizes
	started time.Time
	rig     *rig
	results *results
	page    pageData

	tutorialVoucher int64           // the last one
	rawVoucher      int64           // the last one of plain INSERTs
	databases       map[string]bool // that were made
	unusual         []string        // what went otherwise than planned, for the page
}

// measurement is something that every round measures.
type measurement struct {
	name string
	what string
	// halves are taken in turns with those of the others that have halves: to and
	// fro, so that a machine that gets slower meanwhile is slower for all.
	halves bool
	run    func(ctx context.Context, b *bench) error
}

func measurements() []measurement {
	return []measurement{
		{"fsync", "the disk's fsync", false, measureFsync},
		{"echo", "bare gRPC echo, unary and stream", true, measureEcho},
		{"unary", "unary Grab, fast and strict", true, measureUnary},
		{"stream", "GrabStream, fast and strict", true, measureStream},
		{"refused", "refusals of a sold-out voucher over GrabStream", true, measureRefused},
		{"tutorial", "the tutorial's script alone, by redis-benchmark", false, measureTutorial},
		{"latency", "p99 of unary Grab at half of saturation, and its floor", false, measureLatency},
		{"buyers", "cost of a Grab with few and many buyers in the voucher", false, measureBuyers},
		{"drain", "a writer draining a full stream, plain INSERTs, the tutorial's consumer", false, measureDrain},
		{"path", "the whole path, admitted and persisted", false, measurePath},
		{"stages", "the tutorial's three stages, whole path", false, measureStages},
		{"memory", "Redis memory of an order in flight, and what is left", false, measureMemory},
		{"sweep", "throughput and latency against offered load", false, measureSweep},
	}
}

// inTurns is the order of a round.
func inTurns(chosen []measurement) []measurement {
	var order, halves []measurement
	for _, m := range chosen {
		order = append(order, m)
		if m.halves {
			halves = append(halves, m)
		}
	}
	last := slices.IndexFunc(order, func(m measurement) bool { return len(halves) > 0 && m.name == halves[len(halves)-1].name })
	slices.Reverse(halves)
	return slices.Insert(order, last+1, halves...)
}

// Run measures.
func (c *runCommand) Run(ctx context.Context) error {
	if c.List {
		for _, m := range measurements() {
			fmt.Printf("%-10s %s\n", m.name, m.what)
		}
		fmt.Println()
		for _, f := range figures() {
			fmt.Printf("%-24s %s, %s %g\n", f.name, f.what, f.limitWord(), f.bound)
		}
		return nil
	}
	if c.Scale <= 0 {
		return errors.New("--scale must be more than 0")
	}
	b := &bench{settings: c.settings, sizes: c.sizes(), started: time.Now(), results: newResults(), databases: make(map[string]bool)}
	chosen, err := b.chosen()
	if err != nil {
		return err
	}
	if b.rig, err = startRig(ctx, b.rounds, os.Stderr); err != nil {
		return err
	}
	defer b.rig.close()
	failed := 0
	for round := 1; round <= b.rounds; round++ {
		b.results.begin()
		for _, m := range inTurns(chosen) {
			began := time.Now()
			fmt.Fprintf(os.Stderr, "%6.1f s  round %d of %d: %s\n", time.Since(b.started).Seconds(), round, b.rounds, m.what)
			err := m.run(ctx, b)
			if ctx.Err() != nil {
				return b.interrupted(round)
			}
			if err != nil { // the others are worth having all the same
				failed++
				b.unusually("round %d could not measure %s: %v", round, m.what, err)
				continue
			}
			b.results.record("seconds_"+m.name, time.Since(began).Seconds())
		}
	}
	if err := b.write(); err != nil {
		return err
	}
	if failed > 0 {
		return fmt.Errorf("%d measurements failed, see above", failed)
	}
	return nil
}

// interrupted writes what there is if it is at least a whole round: less must not
// take the place of the results of an earlier run.
func (b *bench) interrupted(round int) error {
	if round == 1 {
		b.table(os.Stdout)
		return errors.New("interrupted in the first round: nothing is written")
	}
	b.unusually("interrupted in round %d of %d", round, b.rounds)
	if err := b.write(); err != nil {
		return err
	}
	return errors.New("interrupted")
}

func (b *bench) chosen() ([]measurement, error) {
	all := measurements()
	if len(b.Only) == 0 {
		return all, nil
	}
	var chosen []measurement
	known := make([]string, 0, len(all))
	for _, m := range all {
		known = append(known, m.name)
		for _, name := range b.Only {
			if m.name == name {
				chosen = append(chosen, m)
			}
		}
	}
	if len(chosen) != len(b.Only) {
		return nil, fmt.Errorf("--only %s: must be of %s", strings.Join(b.Only, ","), strings.Join(known, ", "))
	}
	return chosen, nil
}

// write puts out everything, whether or not it was interrupted.
func (b *bench) write() error {
	b.table(os.Stdout)
	if err := os.MkdirAll(b.Out, 0o755); err != nil {
		return err
	}
	doc := b.document()
	if err := errors.Join(doc.write(filepath.Join(b.Out, "results.json")), b.writePage(doc, filepath.Join(b.Out, "report.html"))); err != nil {
		return err
	}
	fmt.Printf("\nwrote %s and report.html after %.0f s\n", filepath.Join(b.Out, "results.json"), time.Since(b.started).Seconds())
	return nil
}

// noteMost bounds a note, in bytes.
const noteMost = 500

// unusually notes what a reader of the figures must know.
func (b *bench) unusually(format string, args ...any) {
	note := fmt.Sprintf(format, args...)
	fmt.Fprintln(os.Stderr, "          "+note)
	if len(note) > noteMost { // it ends in what a process printed
		note = strings.ToValidUTF8(note[:noteMost], "") + " ..."
	}
	if !slices.Contains(b.unusual, note) { // every round may say it
		b.unusual = append(b.unusual, note)
	}
}
