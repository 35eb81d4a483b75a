// Command writer carries admitted orders from Redis into the database, opens
// and watches partitions as their guardian, and serves VoucherService.
//
// Read in this order: main.go (commands), settings.go (flags), serve.go (how a
// writer is wired, started and stopped), connect.go (what it waits for and what
// it refuses to start with), health.go; then the commands beside it: migrate.go,
// check.go, keygen.go.
package main

import (
	"os"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/command"
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

func main() {
	command.TuneGC()
	os.Exit(execute(os.Args[1:], command.Streams{Out: os.Stdout, Err: os.Stderr}))
}

func execute(args []string, std command.Streams) int {
	return command.Run("writer", description, &commands{}, args, std)
}
