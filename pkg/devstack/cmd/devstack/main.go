// Command devstack prepares the servers that the demo, "make run" and the tests
// use, so that this is done once and not by every test package.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/seckill/seckill/pkg/devstack"
)

const usage = `usage: devstack COMMAND

  fetch   find redis-server and MariaDB or MySQL, or fetch them into the private
          folder from the distribution's packages (no root, no system changes),
          and try them out
          --mysql   the same with real MySQL, which Debian's unstable suite has;
                    ends with code 3 where it is not available today
  where   print the private folder and the programs that are used
  race    print "yes" if the race detector can be built here, else "no"

The private folder is .dev in the repository, or SECKILL_DEV_DIR.
SECKILL_REDIS_SERVER and SECKILL_DATABASE_SERVER name programs to use instead;
SECKILL_DATABASE=mysql or mariadb says which of the two databases it must be.
`

func main() {
	flag.Usage = func() { fmt.Fprint(flag.CommandLine.Output(), usage) }
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Stdout, flag.Args()); err != nil {
		fmt.Fprintf(os.Stderr, "devstack: %v\n", err)
		stop()
		if errors.Is(err, devstack.ErrMySQLUnavailable) {
			os.Exit(3)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, args []string) error {
	if len(args) == 2 && args[0] == "fetch" && args[1] == "--mysql" {
		if err := os.Setenv("SECKILL_DATABASE", "mysql"); err != nil {
			return err
		}
		args = args[:1]
	}
	if len(args) != 1 {
		return fmt.Errorf("one command is needed\n%s", usage)
	}
	switch args[0] {
	case "fetch":
		return fetch(ctx, out)
	case "where":
		b, err := devstack.Find(ctx, os.Stderr)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "folder    %s\nredis     %s\ndatabase  %s\n", devstack.Dir(), b.Redis, b.Database)
		return nil
	case "race":
		answer := "no"
		if devstack.RaceAvailable() {
			answer = "yes"
		}
		fmt.Fprintln(out, answer)
		return nil
	default:
		return fmt.Errorf("unknown command %q\n%s", args[0], usage)
	}
}

// fetch also starts each server once: the database's template is made now, and
// a server that cannot run here is reported once and not by every test.
func fetch(ctx context.Context, out io.Writer) error {
	b, err := devstack.Find(ctx, out)
	if err != nil {
		return err
	}
	defer devstack.Cleanup()
	redis, err := devstack.StartRedis(ctx, b, devstack.RedisOptions{})
	if err != nil {
		return fmt.Errorf("trying Redis: %w", err)
	}
	defer redis.Close()
	database, err := devstack.StartDatabase(ctx, b, devstack.DatabaseOptions{})
	if err != nil {
		return fmt.Errorf("trying the database: %w", err)
	}
	defer database.Close()
	fmt.Fprintf(out, "devstack: ready: Redis %s (%s), database %s (%s)\n", b.RedisVersion, b.Redis, b.DatabaseVersion, b.Database)
	return nil
}
