// Command demo sells a voucher out on a private stack, kills a writer in the
// middle, and proves by the books and by counting that nothing was lost,
// doubled or oversold.
//
// Read in this order: main.go (flags), demo.go (what happens, step by step),
// load.go (the users), crash.go (how a writer is caught with orders in its
// hands), progress.go (the live line), verdict.go (what must hold), summary.go.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/devstack"
)

const description = `Sells a voucher out on a private stack, kills a writer in the middle, and proves the result.

It builds the gateway and the writer, starts a Redis, a database, gateways and writers of its own on free ports, lets users Grab concurrently over gRPC (some click twice at once, some come back later), stops a writer that holds orders and kills it, waits until the others have taken them over, and compares what the users were told with Redis and the database. The last line says PASS or FAIL. Nothing is left behind, nor after Ctrl-C.`

type settings struct {
	Stock      int64         `default:"10000" help:"Units of the voucher."`
	Users      int64         `default:"30000" help:"Users that want one."`
	Gateways   int           `default:"1" help:"Gateway processes."`
	Writers    int           `default:"3" help:"Writer processes. With 1, another is started after the kill."`
	Partitions int           `default:"8" help:"Partitions of the ledger. One voucher lives in one of them."`
	Callers    int           `default:"256" help:"Calls in flight, about: a double click is two calls of one caller."`
	Programs   string        `type:"existingdir" placeholder:"DIR" help:"Folder with gateway and writer, such as bin after make build; without it they are built."`
	Timeout    time.Duration `default:"2m" help:"Bound on the sale and its aftermath, without the start."`
}

func (s settings) Validate() error {
	switch {
	case s.Stock < 1 || s.Stock > 10_000_000:
		return fmt.Errorf("--stock %d: must be from 1 to 10000000", s.Stock)
	case s.Users < 1 || s.Users > 10_000_000:
		return fmt.Errorf("--users %d: must be from 1 to 10000000", s.Users)
	case s.Gateways < 1 || s.Gateways > 32:
		return fmt.Errorf("--gateways %d: must be from 1 to 32", s.Gateways)
	case s.Writers < 1 || s.Writers > 32:
		return fmt.Errorf("--writers %d: must be from 1 to 32", s.Writers)
	case s.Partitions < 1 || s.Partitions > 256:
		return fmt.Errorf("--partitions %d: must be from 1 to 256", s.Partitions)
	case s.Callers < 1 || s.Callers > 4096:
		return fmt.Errorf("--callers %d: must be from 1 to 4096", s.Callers)
	case s.Timeout <= 0:
		return fmt.Errorf("--timeout %s: must be more than 0", s.Timeout)
	}
	return nil
}

// Exit codes.
const (
	exitPass        = 0
	exitFail        = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func main() { os.Exit(execute(os.Args[1:])) }

func execute(args []string) int {
	var cfg settings
	exited := -1
	parser, err := kong.New(&cfg, kong.Name("demo"), kong.Description(description), kong.Exit(func(code int) { exited = code }))
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		return exitUsage
	}
	_, err = parser.Parse(args)
	if exited >= 0 {
		return exited // --help was printed
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		fmt.Fprintln(os.Stderr, "See demo --help.")
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once; what it had started dies with it.
	context.AfterFunc(ctx, stop)

	out := newProgress(os.Stdout)
	result, err := run(ctx, cfg, out)
	devstack.Cleanup()
	if ctx.Err() != nil {
		out.event("interrupted; everything is removed")
		return exitInterrupted
	}
	if err != nil {
		var reason string
		// The whole of it, with the output of a process that failed, is for a
		// person; the last line is one line.
		if reason, _, _ = strings.Cut(err.Error(), "\n"); reason != err.Error() {
			fmt.Fprintln(os.Stderr, err)
		}
		out.print(lastLine(result, reason))
		return exitFail
	}
	reason := verdict(result)
	out.print(lastLine(result, reason))
	if reason != "" {
		return exitFail
	}
	return exitPass
}
