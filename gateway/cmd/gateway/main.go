// Command gateway answers Grabs: it serves SeckillService from the ledger in
// Redis. It holds no state that matters, knows no database, and any number of
// them may run at once.
//
// Read in this order: main.go (commands), settings.go (flags), serve.go (how a
// gateway is wired, started and stopped), connect.go (what it waits for and what
// it refuses to start with), health.go (what it says of itself); then check.go.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/telemetry"
)

const description = `Answers Grabs: serves SeckillService from the ledger in Redis.

Every flag can be given by the environment variable named beside it. Secrets come from files. A gateway waits for Redis and for a writer that has laid out the ledger there; any number of gateways may run at once.`

type commands struct {
	Serve       serveCommand     `cmd:"" default:"withargs" help:"Run a gateway until SIGTERM or SIGINT. The default."`
	CheckConfig checkCommand     `cmd:"" name:"check-config" help:"Check the settings of serve and print the effective ones. Connects to nothing."`
	Version     kong.VersionFlag `help:"Print the version and exit."`
}

// streams are where a command prints: a person's output, and logs and errors.
type streams struct{ out, err io.Writer }

func main() { os.Exit(execute(os.Args[1:], streams{os.Stdout, os.Stderr})) }

// execute runs one command and returns the exit code: 0 done, 1 failed, 2 not
// understood.
func execute(args []string, std streams) int {
	var cli commands
	exited := -1
	parser, err := kong.New(&cli,
		kong.Name("gateway"),
		kong.Description(description),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		kong.Vars{"version": telemetry.BuildVersion()},
		kong.Writers(std.out, std.err),
		kong.Exit(func(code int) { exited = code }),
	)
	if err != nil {
		fmt.Fprintln(std.err, "gateway:", err)
		return 2
	}
	command, err := parser.Parse(args)
	if exited >= 0 {
		return exited // --help or --version was printed
	}
	if err != nil {
		fmt.Fprintln(std.err, "gateway:", err)
		fmt.Fprintln(std.err, "See gateway --help.")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	// The first signal asks, the second one kills: it finds no handler any more.
	context.AfterFunc(ctx, stop)
	command.BindTo(ctx, (*context.Context)(nil))
	if err := command.Run(std); err != nil {
		fmt.Fprintln(std.err, "gateway:", err)
		return 1
	}
	return 0
}
