// Command writer carries admitted orders from Redis into the database, opens
// and watches partitions as their guardian, and serves VoucherService.
//
// Read in this order: main.go (commands), settings.go (flags), serve.go (how a
// writer is wired, started and stopped), connect.go (what it waits for and what
// it refuses to start with), health.go; then the commands beside it: migrate.go,
// check.go, keygen.go.
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

const description = `Carries admitted orders from Redis into MySQL or MariaDB, opens and watches partitions, and serves VoucherService.

Every flag can be given by the environment variable named beside it. Secrets come from files. A new database: writer migrate, then writer serve; any number of writers may run at once.`

type commands struct {
	Serve       serveCommand     `cmd:"" help:"Run a writer until SIGTERM or SIGINT."`
	Migrate     migrateCommand   `cmd:"" help:"Bring the database to this program's schema. Safe to repeat and to run at once."`
	CheckConfig checkCommand     `cmd:"" name:"check-config" help:"Check the settings of serve and print the effective ones. Changes nothing."`
	Keygen      keygenCommand    `cmd:"" help:"Write a new order key file: the secret that order ids are made with."`
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
		kong.Name("writer"),
		kong.Description(description),
		kong.UsageOnError(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true}),
		kong.Vars{"version": telemetry.BuildVersion()},
		kong.Writers(std.out, std.err),
		kong.Exit(func(code int) { exited = code }),
	)
	if err != nil {
		fmt.Fprintln(std.err, "writer:", err)
		return 2
	}
	command, err := parser.Parse(args)
	if exited >= 0 {
		return exited // --help or --version was printed
	}
	if err != nil {
		fmt.Fprintln(std.err, "writer:", err)
		fmt.Fprintln(std.err, "See writer --help.")
		return 2
	}
	for _, step := range command.Path {
		if step.Flag != nil && step.Flag.Name == "database-dsn" {
			fmt.Fprintln(std.err, "writer: --database-dsn would show a password to everybody on this machine: set --database-dsn-file, or the environment variable SECKILL_DATABASE_DSN")
			return 2
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	// The first signal asks, the second one kills: it finds no handler any more.
	context.AfterFunc(ctx, stop)
	command.BindTo(ctx, (*context.Context)(nil))
	if err := command.Run(std); err != nil {
		fmt.Fprintln(std.err, "writer:", err)
		return 1
	}
	return 0
}
