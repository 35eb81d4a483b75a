// Command run keeps a private stack up, with an open voucher, until Ctrl-C: to
// call it by hand, look at its metrics, and kill parts of it. Everything is
// thrown away at the end.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/tests/internal/stack"
)

const description = `Keeps a private stack up, with an open voucher, until Ctrl-C.

It builds the gateway and the writer, starts a Redis, a database, gateways and writers of its own on free ports, opens a voucher for 24 hours, and prints the addresses and three calls to copy. All data is thrown away at the end.`

const voucherID = 1

type settings struct {
	Stock      int64  `default:"1000" help:"Units of the voucher."`
	Gateways   int    `default:"1" help:"Gateway processes."`
	Writers    int    `default:"3" help:"Writer processes."`
	Partitions int    `default:"8" help:"Partitions of the ledger."`
	Programs   string `type:"existingdir" placeholder:"DIR" help:"Folder with gateway and writer, such as bin after make build; without it they are built."`
	Logs       bool   `help:"Show the logs of gateways and writers."`
}

func (s settings) Validate() error {
	switch {
	case s.Stock < 1 || s.Stock > 10_000_000:
		return fmt.Errorf("--stock %d: must be from 1 to 10000000", s.Stock)
	case s.Gateways < 1 || s.Gateways > 32:
		return fmt.Errorf("--gateways %d: must be from 1 to 32", s.Gateways)
	case s.Writers < 1 || s.Writers > 32:
		return fmt.Errorf("--writers %d: must be from 1 to 32", s.Writers)
	case s.Partitions < 1 || s.Partitions > 256:
		return fmt.Errorf("--partitions %d: must be from 1 to 256", s.Partitions)
	}
	return nil
}

func main() { os.Exit(execute(os.Args[1:])) }

// execute returns the exit code: 0 also after Ctrl-C, which is how it ends.
func execute(args []string) int {
	var cfg settings
	exited := -1
	parser, err := kong.New(&cfg, kong.Name("run"), kong.Description(description), kong.Exit(func(code int) { exited = code }))
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
		return 2
	}
	_, err = parser.Parse(args)
	if exited >= 0 {
		return exited // --help was printed
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
		fmt.Fprintln(os.Stderr, "See run --help.")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal ends the process at once; what it had started dies with it.
	context.AfterFunc(ctx, stop)

	err = run(ctx, cfg, os.Stdout)
	devstack.Cleanup()
	if err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "run:", err)
		return 1
	}
	fmt.Println("\nended; everything is removed")
	return 0
}

func run(ctx context.Context, cfg settings, out io.Writer) error {
	opt := stack.Options{Gateways: cfg.Gateways, Writers: cfg.Writers, Partitions: cfg.Partitions, Programs: cfg.Programs, WriterArgs: stack.FastTakeover(), Log: out}
	if cfg.Logs {
		opt.Output = &lines{out: out}
	}
	s, err := stack.Start(ctx, opt)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.OpenVoucher(ctx, voucherID, cfg.Stock); err != nil {
		return err
	}
	printAddresses(out, s, cfg)

	// Whoever kills a part by hand wants to see that it is gone; the rest goes on.
	ended := make(chan *stack.Process)
	processes := append(s.Gateways(), s.Writers()...)
	for _, p := range processes {
		go func() {
			<-p.Done()
			select {
			case ended <- p:
			case <-ctx.Done():
			}
		}()
	}
	for left := len(processes); left > 0; left-- {
		select {
		case <-ctx.Done():
			return nil
		case p := <-ended:
			if err := p.Wait(); err != nil {
				fmt.Fprintf(out, "%s: %v\n", p.Name, err)
			} else {
				fmt.Fprintf(out, "%s ended\n", p.Name)
			}
		}
	}
	return errors.New("every gateway and writer has ended")
}

func printAddresses(out io.Writer, s *stack.Stack, cfg settings) {
	fmt.Fprintln(out)
	for _, p := range append(s.Gateways(), s.Writers()...) {
		fmt.Fprintf(out, "%-12s grpc %-18s admin http://%-18s pid %d\n", p.Name, p.Addr, p.Admin, p.Pid())
	}
	fmt.Fprintf(out, "%-12s %s\n", "redis", s.Redis.Addr())
	fmt.Fprintf(out, "%-12s %s\n", "database", s.DSN())
	fmt.Fprintf(out, "\nVoucher %d is open for 24 hours with %d units. Copy:\n\n", voucherID, cfg.Stock)
	gateway, writer := s.Gateway(0).Addr, s.Writer(0).Addr
	fmt.Fprintf(out, `  grpcurl -plaintext -d '{"user_id": 42, "voucher_id": %d}' %s seckill.v1.SeckillService/Grab`+"\n", voucherID, gateway)
	fmt.Fprintf(out, `  grpcurl -plaintext -d '{"user_id": 42, "voucher_id": %d}' %s seckill.v1.SeckillService/GetOrder`+"\n", voucherID, gateway)
	fmt.Fprintf(out, `  grpcurl -plaintext -d '{"voucher_id": %d}' %s seckill.v1.VoucherService/GetBooks`+"\n", voucherID, writer)
	fmt.Fprintln(out, "\nCtrl-C ends it.")
}

// lines lets several processes write to one output, which each does in whole
// lines.
type lines struct {
	mu  sync.Mutex
	out io.Writer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(b)
}
