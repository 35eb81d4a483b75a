package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/pkg/load/report"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// lookTimeout bounds the look at a voucher's stock, which a load can do without:
// who runs one may not reach a writer.
const lookTimeout = 2 * time.Second

type loadCommand struct {
	Voucher int64 `required:"" placeholder:"VOUCHER" help:"The voucher."`

	Rate           float64       `placeholder:"GRABS" help:"Open loop: so many Grabs a second, whatever the answers do. Latency is counted from when each was due. Or --concurrency."`
	FromRate       float64       `placeholder:"GRABS" help:"The rate at the beginning of --ramp."`
	Ramp           time.Duration `placeholder:"TIME" help:"Time in which the rate goes from --from-rate to --rate. The warm-up is part of it."`
	Poisson        bool          `help:"Arrivals at random, as of callers that know nothing of each other, instead of evenly spaced."`
	MaxOutstanding int           `default:"10000" placeholder:"GRABS" help:"Most Grabs of an open loop that are due and not answered; what is due beyond it is dropped, and counted."`
	Concurrency    int           `placeholder:"GRABS" help:"Closed loop: so many Grabs outstanding at any time. Or --rate."`

	WarmUp   time.Duration `default:"0s" help:"Time before --duration that is not measured."`
	Duration time.Duration `default:"10s" help:"How long to measure; 0: until --count is reached."`
	Count    int64         `default:"0" help:"Most Grabs in all; 0: as many as the time allows."`

	FirstUser   int64   `default:"1000000000000000" help:"User of the first Grab; the others follow it. Each that is admitted has bought: keep them off the ids of people. Users who have an order are answered that."`
	RepeatShare float64 `default:"0" help:"Share of Grabs, 0 to 1, that are repeated clicks of users who clicked lately."`

	Stream      bool          `help:"Over GrabStreams. So it is where --unary is not given."`
	Unary       bool          `help:"Call by call."`
	Streams     int           `default:"4" help:"GrabStreams to open."`
	Window      int           `default:"512" help:"Most Grabs that a stream has without their answers."`
	Connections int           `default:"2" help:"Connections to each gateway."`
	GrabTimeout time.Duration `default:"2s" help:"Deadline of each Grab."`

	JSON   string `name:"json" type:"path" placeholder:"FILE" help:"Write the result there, with the histogram and the time series."`
	Report string `type:"path" placeholder:"FILE" help:"Write the report there, a page of HTML."`
	Yes    bool   `short:"y" help:"Do not ask before units are taken."`
}

// Help is shown by kong under the flags.
func (c *loadCommand) Help() string {
	return `WARNING: these are Grabs like any others. Where the voucher is on sale each one that is admitted takes a real unit, becomes an order in the database, and stays. Use a voucher of your own, made for it.

Every second a line of progress goes to standard error; at the end the result goes to standard output. One interrupt (Ctrl-C) ends the load early, with the result of what was done; a second one kills.

Exit code: 0 where every answer was a decision (sold out and the like too), 1 where any was a fault, in the warm-up too, where the load could not begin, or where a result could not be written. Grabs that were dropped are no faults.`
}

// Validate is called by kong.
func (c *loadCommand) Validate() error {
	if c.Stream && c.Unary {
		return errors.New("give --stream or --unary, one of them")
	}
	if c.Voucher < 1 {
		return fmt.Errorf("--voucher %d: must be at least 1", c.Voucher)
	}
	if c.Streams < 1 || c.Window < 1 || c.Connections < 1 || c.MaxOutstanding < 1 {
		return errors.New("--streams, --window, --connections and --max-outstanding: must be at least 1")
	}
	if c.GrabTimeout <= 0 {
		return fmt.Errorf("--grab-timeout %s: must be more than 0", c.GrabTimeout)
	}
	if c.JSON != "" && c.JSON == c.Report {
		return errors.New("--json and --report: give two files")
	}
	if c.FirstUser < 1 {
		return fmt.Errorf("--first-user %d: must be at least 1", c.FirstUser)
	}
	if err := c.plan().Check(); err != nil {
		return err
	}
	if !c.Yes && !terminal(os.Stdin) {
		return errors.New("it takes real units, and nobody can be asked here, where standard input is no terminal: give --yes")
	}
	return nil
}

func (c *loadCommand) plan() load.Plan {
	return load.Plan{
		VoucherID: c.Voucher, Rate: c.Rate, FromRate: c.FromRate, Ramp: c.Ramp, Poisson: c.Poisson, MaxOutstanding: c.MaxOutstanding,
		Concurrency: c.Concurrency, WarmUp: c.WarmUp, Duration: c.Duration, Count: c.Count, FirstUser: c.FirstUser, RepeatShare: c.RepeatShare,
		// Who was called in time is answered in time.
		Drain: c.GrabTimeout + time.Second,
	}
}

// Run loads.
func (c *loadCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return c.run(ctx, to, std, os.Stdin)
}

func (c *loadCommand) run(ctx context.Context, to *connection, std command.Streams, in io.Reader) error {
	// What can go wrong is tried before anything is taken.
	jsonFile, err := openResult(c.JSON, "--json")
	if err != nil {
		return err
	}
	defer jsonFile.Close()
	reportFile, err := openResult(c.Report, "--report")
	if err != nil {
		return err
	}
	defer reportFile.Close()
	conns, hangUp, err := c.dial(ctx, to)
	if err != nil {
		return err
	}
	defer hangUp()
	if err := c.announce(ctx, to, std.Err, in); err != nil {
		return err
	}
	target, err := c.target(conns)
	if err != nil {
		return err
	}
	plan := c.plan()
	show := newProgress(std.Err)
	plan.Progress = show.line
	result, err := load.Run(ctx, target, plan)
	show.end()
	if err != nil {
		return err
	}
	if err := c.print(to, std, result, jsonFile, reportFile); err != nil {
		return err
	}
	if faults := result.Faults(); faults > 0 {
		return fmt.Errorf("%d answers were faults", faults)
	}
	return nil
}

// dial connects to every gateway, and asks each one whether it would be of use.
func (c *loadCommand) dial(ctx context.Context, to *connection) (conns []*grpc.ClientConn, hangUp func(), err error) {
	hangUp = func() {
		for _, conn := range conns {
			conn.Close()
		}
	}
	for round := range c.Connections {
		for addr := range strings.SplitSeq(to.Gateway, ",") {
			s, err := to.dial("gateway", strings.TrimSpace(addr))
			if err == nil {
				conns = append(conns, s.conn)
				if round == 0 {
					err = c.probe(ctx, s)
				}
			}
			if err != nil {
				hangUp()
				return nil, nil, err
			}
		}
	}
	return conns, hangUp, nil
}

// probe takes nothing and tells whether a gateway can be reached, knows the
// voucher and has the calls that are needed.
func (c *loadCommand) probe(ctx context.Context, s *server) error {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	client := seckillv1.NewSeckillServiceClient(s.conn)
	_, err := client.GetOrder(ctx, &seckillv1.GetOrderRequest{UserId: c.FirstUser, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: c.Voucher}})
	if err != nil && load.Reason(err) != "ORDER_NOT_FOUND" {
		return s.fault(err)
	}
	if c.Unary {
		return nil
	}
	stream, err := client.GrabStream(ctx)
	if err == nil {
		_ = stream.CloseSend() // if it fails, receiving does, and tells why
		_, err = stream.Recv()
	}
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case status.Code(err) == codes.Unimplemented:
		return fmt.Errorf("gateway at %s has no GrabStream: give --unary", s.addr)
	}
	return s.fault(err)
}

// announce says what it is about to do, and asks, unless it was told yes.
func (c *loadCommand) announce(ctx context.Context, to *connection, out io.Writer, in io.Reader) error {
	bounded, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	err := to.withWriter(func(s *server, vouchers seckillv1.VoucherServiceClient, _ seckillv1.WriterServiceClient) error {
		resp, err := call(bounded, s, vouchers.GetVoucher, &seckillv1.GetVoucherRequest{VoucherId: c.Voucher})
		if err == nil {
			v := resp.GetVoucher()
			fmt.Fprintf(out, "Voucher %d (%s) is %s, with %d of %d units left.\n", c.Voucher, cmp.Or(printable(v.GetTitle()), "no title"), enumName(v.GetState()), v.GetStock(), v.GetTotal())
		}
		return err
	})
	if err != nil {
		fmt.Fprintf(out, "No writer tells how voucher %d stands (%v).\n", c.Voucher, err)
	}
	fmt.Fprintf(out, "Grabs that are admitted take real units, and are orders of user %d and those after.\n", c.FirstUser)
	if c.Yes {
		return nil
	}
	fmt.Fprint(out, "Go on? [y/N] ")
	if !agreed(ctx, in) {
		return errors.New("nothing was taken")
	}
	return nil
}

func (c *loadCommand) target(conns []*grpc.ClientConn) (load.Target, error) {
	if c.Unary {
		return load.NewUnary(conns, c.GrabTimeout)
	}
	return load.NewStreams(conns, load.StreamOptions{Streams: c.Streams, Window: c.Window, Timeout: c.GrabTimeout})
}

func (c *loadCommand) print(to *connection, std command.Streams, result *load.Result, jsonFile, reportFile *os.File) error {
	text, err := json.Marshal(result)
	if err != nil {
		return fmt.Errorf("writing the result: %w", err)
	}
	text = append(text, '\n')
	// Where one cannot be written the others are worth the more.
	var errs []error
	written := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("writing %s: %w", what, err))
		}
	}
	if to.Output == "json" {
		_, err = std.Out.Write(text)
	} else {
		_, err = io.WriteString(std.Out, result.Summary())
	}
	written("the result", err)
	fmt.Fprintf(std.Err, "The next load finds fresh users from --first-user %d on.\n", c.FirstUser+result.Users)
	if jsonFile != nil {
		written("--json", fill(jsonFile, text))
	}
	if reportFile != nil {
		var page bytes.Buffer
		err := result.Page(fmt.Sprintf("Load on voucher %d", c.Voucher), c.facts(to)...).WriteHTML(&page)
		if err == nil {
			err = fill(reportFile, page.Bytes())
		}
		written("--report", err)
	}
	return errors.Join(errs...)
}

// facts are what one must know to read the page.
func (c *loadCommand) facts(to *connection) []report.Fact {
	transport := fmt.Sprintf("%d GrabStreams, window %d", c.Streams, c.Window)
	if c.Unary {
		transport = "unary calls"
	}
	offered := fmt.Sprintf("%d outstanding", c.Concurrency)
	if c.Concurrency == 0 {
		offered = fmt.Sprintf("%g a second", c.Rate)
		if c.Ramp > 0 {
			offered += fmt.Sprintf(", from %g within %s", c.FromRate, c.Ramp)
		}
		if c.Poisson {
			offered += ", at random"
		}
	}
	return []report.Fact{
		{Name: "gateway", Value: to.Gateway}, {Name: "transport", Value: fmt.Sprintf("%s, %d connections to each gateway", transport, c.Connections)},
		{Name: "offered", Value: offered}, {Name: "repeated clicks", Value: fmt.Sprintf("%g %%", c.RepeatShare*100)},
	}
}

// openResult opens a file that a result is to be written to, before there is
// one; nil where there is no name. What it holds stays until fill.
func openResult(name, flag string) (*os.File, error) {
	if name == "" {
		return nil, nil
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	return f, nil
}

func fill(f *os.File, text []byte) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Mode().IsRegular() { // else a pipe or a terminal, which has no length
		if err := f.Truncate(0); err != nil {
			return err
		}
	}
	if _, err := f.Write(text); err != nil {
		return err
	}
	return f.Close()
}

// progress shows how it goes: on a terminal always on the same line, else a line
// each time.
type progress struct {
	out      io.Writer
	terminal bool
}

func newProgress(out io.Writer) *progress {
	f, ok := out.(*os.File)
	return &progress{out: out, terminal: ok && terminal(f)}
}

func (p *progress) line(at load.Progress) {
	if p.terminal {
		// What is wider than the terminal is cut off, not carried to a next line.
		fmt.Fprintf(p.out, "\r\x1b[K\x1b[?7l%s\x1b[?7h", at)
		return
	}
	fmt.Fprintln(p.out, at)
}

func (p *progress) end() {
	if p.terminal {
		fmt.Fprintln(p.out)
	}
}
