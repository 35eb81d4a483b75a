package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/seckill/seckill/pkg/command"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

const (
	// lettersPage is how many dead letters are asked for at once, the most that a
	// writer gives.
	lettersPage = 1000
	// answerMax bounds what is read of an answer to a question.
	answerMax = 64
)

// filter names dead letters.
type filter struct {
	Voucher    int64  `placeholder:"VOUCHER" help:"Those of a voucher."`
	User       int64  `placeholder:"USER" help:"Those of a user."`
	HeldReason string `placeholder:"TEXT" help:"Those whose own reason begins so."`
	SeenBefore moment `placeholder:"TIME" help:"Those first seen before a time: =-10m, or =2026-11-30T18:00:00Z."`
}

func (f *filter) empty() bool { return *f == filter{} }

func (f *filter) message() *seckillv1.DeadLetterFilter {
	return &seckillv1.DeadLetterFilter{VoucherId: f.Voucher, UserId: f.User, ReasonPrefix: f.HeldReason, SeenBefore: f.SeenBefore.timestamp()}
}

type lettersCommand struct {
	filter `embed:""`
}

// Run shows dead letters, all pages.
func (c *lettersCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return to.withWriter(func(s *server, _ seckillv1.VoucherServiceClient, operators seckillv1.WriterServiceClient) error {
		table := newTable(std.Out)
		if to.Output != "json" {
			fmt.Fprintln(table, "dead letter\torder\tuser\tvoucher\tunits\tfirst seen\ttries\treason")
		}
		for token := ""; ; {
			part, err := page(ctx, s, operators.ListDeadLetters, &seckillv1.ListDeadLettersRequest{Filter: c.message(), PageSize: lettersPage, PageToken: token})
			if err != nil {
				return err
			}
			for _, letter := range part.GetDeadLetters() {
				if to.Output == "json" {
					if err := printJSON(std.Out, letter); err != nil {
						return err
					}
					continue
				}
				order, user, voucher := "entry "+letter.GetEntryId(), "-", "-"
				if o := letter.GetOrder(); o != nil {
					order, user, voucher = o.GetOrderId(), fmt.Sprint(o.GetUserId()), fmt.Sprint(o.GetVoucherId())
				}
				fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", letter.GetDeadLetterId(), order, user, voucher, letter.GetUnits(),
					instant(letter.GetFirstSeen()), letter.GetTries(), printable(letter.GetReason()))
			}
			if token = part.GetNextPageToken(); token == "" {
				return table.Flush()
			}
		}
	})
}

// resolve is what requeue and cancel share.
type resolve struct {
	ID       string `arg:"" optional:"" help:"One dead letter, as dead-letters list names it. Without it the flags say which."`
	filter   `embed:""`
	All      bool   `help:"All of them."`
	Operator string `required:"" env:"SECKILL_OPERATOR,USER" placeholder:"NAME" help:"Who decides. Kept for ever."`
	Reason   string `required:"" placeholder:"TEXT" help:"Why. Kept for ever."`
	Yes      bool   `short:"y" help:"Do not ask before many are resolved."`
}

// Validate is called by kong.
func (r *resolve) Validate() error {
	named := 0
	for _, given := range []bool{r.ID != "", !r.empty(), r.All} {
		if given {
			named++
		}
	}
	switch {
	case named != 1:
		return errors.New("say which: one dead letter, or --voucher, --user, --held-reason and --seen-before, or --all")
	case r.ID == "" && !r.Yes && !terminal(os.Stdin):
		return errors.New("nobody can be asked here, where standard input is no terminal: give --yes")
	}
	return nil
}

type (
	requeueCommand struct {
		resolve `embed:""`
	}
	cancelCommand struct {
		resolve `embed:""`
	}
)

// Run requeues.
func (c *requeueCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return c.run(ctx, to, std, os.Stdin, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE)
}

// Run cancels.
func (c *cancelCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return c.run(ctx, to, std, os.Stdin, seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL)
}

func (r *resolve) run(ctx context.Context, to *connection, std command.Streams, in io.Reader, action seckillv1.DeadLetterAction) error {
	req := &seckillv1.ResolveDeadLetterRequest{
		Which:  &seckillv1.ResolveDeadLetterRequest_DeadLetterId{DeadLetterId: r.ID},
		Action: action, Operator: r.Operator, Reason: r.Reason,
	}
	if r.ID == "" {
		req.Which = &seckillv1.ResolveDeadLetterRequest_Filter{Filter: r.message()}
	}
	return to.withWriter(func(s *server, _ seckillv1.VoucherServiceClient, operators seckillv1.WriterServiceClient) error {
		if r.ID == "" && !r.Yes {
			if err := r.ask(ctx, s, operators, std.Err, in, action); err != nil {
				return err
			}
		}
		if r.ID != "" {
			bounded, cancel := context.WithTimeout(ctx, to.Timeout)
			defer cancel()
			ctx = bounded
		}
		return follow(ctx, to, std, s, operators, req)
	})
}

// ask tells how many it is about and goes on only where a person says yes.
func (r *resolve) ask(ctx context.Context, s *server, operators seckillv1.WriterServiceClient, out io.Writer, in io.Reader, action seckillv1.DeadLetterAction) error {
	part, err := page(ctx, s, operators.ListDeadLetters, &seckillv1.ListDeadLettersRequest{Filter: r.message(), PageSize: lettersPage})
	if err != nil {
		return err
	}
	number := fmt.Sprint(len(part.GetDeadLetters()))
	if part.GetNextPageToken() != "" {
		number = "more than " + number
	}
	fmt.Fprintf(out, "%s %s dead letters, as %s? [y/N] ", strings.ToLower(enumName(action)), number, printable(r.Operator))
	if !agreed(ctx, in) {
		return errors.New("nothing was changed")
	}
	return nil
}

// agreed tells whether a person answers yes. An interrupt does not wait for an answer.
func agreed(ctx context.Context, in io.Reader) bool {
	answered := make(chan string, 1)
	go func() {
		answer, _ := bufio.NewReader(io.LimitReader(in, answerMax)).ReadString('\n')
		answered <- answer
	}()
	select {
	case answer := <-answered:
		return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(answer)))
	case <-ctx.Done():
		return false
	}
}

// asked is what an action is meant to come to.
var asked = map[seckillv1.DeadLetterAction]seckillv1.DeadLetterResult{
	seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE: seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED,
	seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL:  seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED,
}

// follow prints what became of each dead letter as it comes, and the sum.
func follow(ctx context.Context, to *connection, std command.Streams, s *server, operators seckillv1.WriterServiceClient, req *seckillv1.ResolveDeadLetterRequest) error {
	stream, err := operators.ResolveDeadLetter(ctx, req)
	if err != nil {
		return s.fault(err)
	}
	results := map[string]int{}
	last := &seckillv1.ResolveDeadLetterResponse{}
	for {
		came, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil && last.GetDone() == 0 {
			return s.fault(err)
		}
		if err != nil {
			return fmt.Errorf("after %d of %d, which stay resolved; the same command goes on with the others: %w", last.GetDone(), last.GetTotal(), s.fault(err))
		}
		last = came
		results[strings.ToLower(enumName(came.GetResult()))]++
		if to.Output == "json" {
			err = printJSON(std.Out, came)
		} else {
			line := fmt.Sprintf("%d/%d %s %s", came.GetDone(), came.GetTotal(), came.GetDeadLetterId(), enumName(came.GetResult()))
			if came.GetDetail() != "" {
				line += ": " + printable(came.GetDetail())
			}
			_, err = fmt.Fprintln(std.Out, line)
		}
		if err != nil {
			return fmt.Errorf("writing progress: %w", err)
		}
	}
	sum := fmt.Sprintf("%d dead letters", last.GetDone())
	for _, result := range slices.Sorted(maps.Keys(results)) {
		sum += fmt.Sprintf(", %d %s", results[result], result)
	}
	fmt.Fprintln(std.Err, sum)
	if held := results["still_held"]; held > 0 {
		return fmt.Errorf("%d are still held", held)
	}
	// Of many each has its line, and another verdict is as final. Who names one
	// wants this one: a script that looks at the code alone must hear of a requeue
	// that stored nothing.
	if req.GetDeadLetterId() != "" && last.GetResult() != asked[req.GetAction()] {
		return fmt.Errorf("%s is %s, which is not what was asked for", req.GetDeadLetterId(), enumName(last.GetResult()))
	}
	return nil
}

// terminal tells whether somebody can be asked there.
func terminal(f *os.File) bool {
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull) // a device, too, and silent
	return err != nil || !os.SameFile(info, null)
}
