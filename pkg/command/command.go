// Package command is the command line of a binary: Run parses it, runs the
// command that it names and tells how that ended; Problems gathers what is
// wrong with settings.
package command

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/telemetry"
)

// Streams are where a command prints: what a person asked for, and logs and
// errors.
type Streams struct{ Out, Err io.Writer }

// Exit codes of Run.
const (
	exitDone          = 0
	exitFailed        = 1
	exitNotUnderstood = 2
)

// Run parses args into commands, a pointer to a struct of kong, runs the command
// that they name and returns the exit code: 0 done, 1 failed, 2 not understood.
// The Run of a command may take a context, which SIGTERM and SIGINT end, and the
// Streams.
func Run(name, description string, commands any, args []string, std Streams) int {
	exited := -1
	parser, err := kong.New(commands,
		kong.Name(name),
		kong.Description(description),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		kong.Vars{"version": telemetry.BuildVersion()},
		kong.Writers(std.Out, std.Err),
		kong.Exit(func(code int) { exited = code }),
	)
	if err != nil {
		fmt.Fprintf(std.Err, "%s: %v\n", name, err)
		return exitNotUnderstood
	}
	parsed, err := parser.Parse(args)
	if exited >= 0 {
		return exited // --help or --version was printed
	}
	if err != nil {
		fmt.Fprintf(std.Err, "%s: %v\nSee %s --help.\n", name, err, name)
		return exitNotUnderstood
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	// The first signal asks, the second one kills: it finds no handler any more.
	context.AfterFunc(ctx, stop)
	parsed.BindTo(ctx, (*context.Context)(nil))
	if err := parsed.Run(std); err != nil {
		fmt.Fprintf(std.Err, "%s: %v\n", name, err)
		return exitFailed
	}
	return exitDone
}

// gcPercent lets the heap grow to five times what lives before it is collected.
// Nearly all that gateway and writer allocate lives for one call or one batch,
// and what lives is some tens of MB: with the default of Go a tenth of a
// gateway's CPU and a fifth of a writer's went into collections.
const gcPercent = 400

// TuneGC collects garbage less often than the default of Go does. GOGC, if set,
// is what counts; GOMEMLIMIT, if set, bounds the heap either way.
func TuneGC() {
	if _, set := os.LookupEnv("GOGC"); !set {
		debug.SetGCPercent(gcPercent)
	}
}
