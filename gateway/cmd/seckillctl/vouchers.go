package main

import (
	"context"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/seckill/seckill/pkg/command"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// listPage is how many vouchers are asked for at once, the most that a writer
// gives.
const listPage = 1000

type createCommand struct {
	ID    int64  `name:"id" default:"0" help:"Id of the voucher; 0: the server gives one, another one each time."`
	Title string `placeholder:"TEXT" help:"What people call it."`
	Total int64  `required:"" placeholder:"UNITS" help:"Units in all."`
	Begin moment `default:"now" help:"When the sale opens: now, +2h, or 2026-11-30T18:00:00Z."`
	End   moment `required:"" placeholder:"TIME" help:"When it ends, in the same forms."`
}

// Run creates a voucher.
func (c *createCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return to.withWriter(func(s *server, vouchers seckillv1.VoucherServiceClient, _ seckillv1.WriterServiceClient) error {
		resp, err := call(ctx, s, vouchers.CreateVoucher, &seckillv1.CreateVoucherRequest{
			VoucherId: c.ID, Title: c.Title, Total: c.Total, BeginTime: c.Begin.timestamp(), EndTime: c.End.timestamp(),
		})
		if err != nil {
			return err
		}
		return to.print(std.Out, resp.GetVoucher())
	})
}

// one names a voucher.
type one struct {
	Voucher int64 `arg:"" help:"Id of the voucher."`
}

type voucherAnswer interface {
	proto.Message
	GetVoucher() *seckillv1.Voucher
}

// step calls a method that answers a voucher, and prints it.
func step[Req any, Resp voucherAnswer](ctx context.Context, to *connection, out io.Writer, req Req,
	method func(seckillv1.VoucherServiceClient) func(context.Context, Req, ...grpc.CallOption) (Resp, error),
) error {
	return to.withWriter(func(s *server, vouchers seckillv1.VoucherServiceClient, _ seckillv1.WriterServiceClient) error {
		resp, err := call(ctx, s, method(vouchers), req)
		if err != nil {
			return err
		}
		return to.print(out, resp.GetVoucher())
	})
}

type (
	getCommand     struct{ one }
	openCommand    struct{ one }
	pauseCommand   struct{ one }
	resumeCommand  struct{ one }
	closeCommand   struct{ one }
	archiveCommand struct{ one }
)

// Run shows a voucher.
func (c *getCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	type method = func(context.Context, *seckillv1.GetVoucherRequest, ...grpc.CallOption) (*seckillv1.GetVoucherResponse, error)
	return step(ctx, to, std.Out, &seckillv1.GetVoucherRequest{VoucherId: c.Voucher},
		func(v seckillv1.VoucherServiceClient) method { return v.GetVoucher })
}

// Run opens a voucher.
func (c *openCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	type method = func(context.Context, *seckillv1.OpenVoucherRequest, ...grpc.CallOption) (*seckillv1.OpenVoucherResponse, error)
	return step(ctx, to, std.Out, &seckillv1.OpenVoucherRequest{VoucherId: c.Voucher},
		func(v seckillv1.VoucherServiceClient) method { return v.OpenVoucher })
}

// Run pauses a voucher.
func (c *pauseCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	type method = func(context.Context, *seckillv1.PauseVoucherRequest, ...grpc.CallOption) (*seckillv1.PauseVoucherResponse, error)
	return step(ctx, to, std.Out, &seckillv1.PauseVoucherRequest{VoucherId: c.Voucher},
		func(v seckillv1.VoucherServiceClient) method { return v.PauseVoucher })
}

// Run resumes a voucher.
func (c *resumeCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	type method = func(context.Context, *seckillv1.ResumeVoucherRequest, ...grpc.CallOption) (*seckillv1.ResumeVoucherResponse, error)
	return step(ctx, to, std.Out, &seckillv1.ResumeVoucherRequest{VoucherId: c.Voucher},
		func(v seckillv1.VoucherServiceClient) method { return v.ResumeVoucher })
}

// Run closes a voucher.
func (c *closeCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	type method = func(context.Context, *seckillv1.CloseVoucherRequest, ...grpc.CallOption) (*seckillv1.CloseVoucherResponse, error)
	return step(ctx, to, std.Out, &seckillv1.CloseVoucherRequest{VoucherId: c.Voucher},
		func(v seckillv1.VoucherServiceClient) method { return v.CloseVoucher })
}

// Run archives a voucher.
func (c *archiveCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	type method = func(context.Context, *seckillv1.ArchiveVoucherRequest, ...grpc.CallOption) (*seckillv1.ArchiveVoucherResponse, error)
	return step(ctx, to, std.Out, &seckillv1.ArchiveVoucherRequest{VoucherId: c.Voucher},
		func(v seckillv1.VoucherServiceClient) method { return v.ArchiveVoucher })
}

type listCommand struct{}

// Run shows all vouchers, page by page.
func (c *listCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return to.withWriter(func(s *server, vouchers seckillv1.VoucherServiceClient, _ seckillv1.WriterServiceClient) error {
		table := newTable(std.Out)
		if to.Output != "json" {
			fmt.Fprintln(table, "voucher\tstate\ttotal\tstock\tsold\tbegin\tend\ttitle")
		}
		for token := ""; ; {
			part, err := page(ctx, s, vouchers.ListVouchers, &seckillv1.ListVouchersRequest{PageSize: listPage, PageToken: token})
			if err != nil {
				return err
			}
			for _, v := range part.GetVouchers() {
				if to.Output == "json" {
					if err := printJSON(std.Out, v); err != nil {
						return err
					}
					continue
				}
				fmt.Fprintf(table, "%d\t%s\t%d\t%d\t%d\t%s\t%s\t%s\n", v.GetVoucherId(), enumName(v.GetState()), v.GetTotal(), v.GetStock(), v.GetSold(),
					instant(v.GetBeginTime()), instant(v.GetEndTime()), printable(v.GetTitle()))
			}
			if token = part.GetNextPageToken(); token == "" {
				return table.Flush()
			}
		}
	})
}

type booksCommand struct{ one }

// Run reckons a voucher's books. Violated ones are an error, so that a script
// that looks at the code alone hears of them.
func (c *booksCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return to.withWriter(func(s *server, vouchers seckillv1.VoucherServiceClient, _ seckillv1.WriterServiceClient) error {
		resp, err := call(ctx, s, vouchers.GetBooks, &seckillv1.GetBooksRequest{VoucherId: c.Voucher})
		if err != nil {
			return err
		}
		if err := to.print(std.Out, resp.GetBooks()); err != nil {
			return err
		}
		if resp.GetBooks().GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_VIOLATED {
			return fmt.Errorf("the books of voucher %d are violated", c.Voucher)
		}
		return nil
	})
}
