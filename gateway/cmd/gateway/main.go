// Command gateway answers Grabs: it serves SeckillService from the ledger in
// Redis. It holds no state that matters, knows no database, and any number of
// them may run at once.
//
// Read in this order: main.go (commands), settings.go (flags), serve.go (how a
// gateway is wired, started and stopped), connect.go (what it waits for and what
// it refuses to start with), health.go (what it says of itself); then check.go.
package main

import (
	"os"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/command"
)

const description = `Answers Grabs: serves SeckillService from the ledger in Redis.

Every flag can be given by the environment variable named beside it. Secrets come from files. A gateway waits for Redis and for a writer that has laid out the ledger there; any number of gateways may run at once.`

type commands struct {
	Serve       serveCommand     `cmd:"" default:"withargs" help:"Run a gateway until SIGTERM or SIGINT. The default."`
	CheckConfig checkCommand     `cmd:"" name:"check-config" help:"Check the settings of serve and print the effective ones. Connects to nothing."`
	Version     kong.VersionFlag `help:"Print the version and exit."`
}

func main() {
	command.TuneGC()
	os.Exit(execute(os.Args[1:], command.Streams{Out: os.Stdout, Err: os.Stderr}))
}

func execute(args []string, std command.Streams) int {
	return command.Run("gateway", description, &commands{}, args, std)
}
