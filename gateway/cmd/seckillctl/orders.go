package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seckill/seckill/pkg/command"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

const (
	// ordersPage is how many orders are asked for at once, half of the most that a
	// writer gives: about a megabyte.
	ordersPage = 5000
	// progressEvery is how often progress is told.
	progressEvery = time.Second
)

type findCommand struct {
	ID      string `name:"id" placeholder:"ORDER" help:"The order, 26 characters."`
	User    int64  `placeholder:"USER" help:"The user, together with --voucher."`
	Voucher int64  `placeholder:"VOUCHER" help:"The voucher, together with --user."`
}

// Validate is called by kong.
func (c *findCommand) Validate() error {
	if (c.ID != "") == (c.User != 0 && c.Voucher != 0) || (c.User != 0) != (c.Voucher != 0) {
		return errors.New("give --id, or --user and --voucher")
	}
	return nil
}

// Run finds an order in the database.
func (c *findCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	req := &seckillv1.FindOrderRequest{Key: &seckillv1.FindOrderRequest_OrderId{OrderId: c.ID}}
	if c.ID == "" {
		req.Key = &seckillv1.FindOrderRequest_UserVoucher{UserVoucher: &seckillv1.UserVoucher{UserId: c.User, VoucherId: c.Voucher}}
	}
	return to.withWriter(func(s *server, _ seckillv1.VoucherServiceClient, operators seckillv1.WriterServiceClient) error {
		resp, err := call(ctx, s, operators.FindOrder, req)
		if err != nil {
			return err
		}
		return to.print(std.Out, resp)
	})
}

type ordersCommand struct {
	Voucher int64 `placeholder:"VOUCHER" help:"Orders of this voucher, by epoch and seq; or --user."`
	User    int64 `placeholder:"USER" help:"Orders of this user, by voucher; or --voucher."`

	PageToken string `placeholder:"TOKEN" help:"Go on where an earlier list of the same orders broke off; its error named the token."`
}

// Validate is called by kong, whose own way to say "one of these" shows each of
// them as required.
func (c *ordersCommand) Validate() error {
	if (c.Voucher != 0) == (c.User != 0) {
		return errors.New("give --voucher or --user, one of them")
	}
	return nil
}

// Run prints committed orders, all pages. What is printed is complete where the
// code is 0.
func (c *ordersCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return to.withWriter(func(s *server, _ seckillv1.VoucherServiceClient, operators seckillv1.WriterServiceClient) error {
		out := bufio.NewWriter(std.Out)
		n, told := 0, time.Now()
		for token := c.PageToken; ; {
			req := &seckillv1.ListOrdersRequest{Of: &seckillv1.ListOrdersRequest_VoucherId{VoucherId: c.Voucher}, PageSize: ordersPage, PageToken: token}
			if c.User != 0 {
				req.Of = &seckillv1.ListOrdersRequest_UserId{UserId: c.User}
			}
			part, err := page(ctx, s, operators.ListOrders, req)
			if err != nil && n == 0 {
				return err
			}
			if err != nil {
				return fmt.Errorf("after %d orders, which are not all; --page-token %s goes on with the others: %w", n, printable(token), err)
			}
			for _, order := range part.GetOrders() {
				if err := printJSON(out, order); err != nil {
					return err
				}
			}
			if err := out.Flush(); err != nil {
				return fmt.Errorf("writing orders: %w", err)
			}
			n += len(part.GetOrders())
			if token = part.GetNextPageToken(); token == "" {
				fmt.Fprintf(std.Err, "%d orders\n", n)
				return nil
			}
			if time.Since(told) >= progressEvery {
				told = time.Now()
				fmt.Fprintf(std.Err, "%d orders so far\n", n)
			}
		}
	})
}

type grabCommand struct {
	User      int64  `required:"" placeholder:"USER" help:"The buyer."`
	Voucher   int64  `required:"" placeholder:"VOUCHER" help:"The voucher."`
	Reference string `placeholder:"TEXT" help:"Stored with the order, up to 64 bytes."`
}

// Run grabs a unit. Whatever was decided is an answer, sold out too.
func (c *grabCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return to.withGateway(func(s *server, sale seckillv1.SeckillServiceClient) error {
		resp, err := call(ctx, s, sale.Grab, &seckillv1.GrabRequest{UserId: c.User, VoucherId: c.Voucher, Reference: c.Reference})
		if err != nil {
			return err
		}
		return to.print(std.Out, resp)
	})
}

type getOrderCommand struct {
	User    int64  `required:"" placeholder:"USER" help:"The buyer."`
	Voucher int64  `placeholder:"VOUCHER" help:"The voucher; or --id."`
	ID      string `name:"id" placeholder:"ORDER" help:"The order, 26 characters; or --voucher."`
}

// Validate is called by kong.
func (c *getOrderCommand) Validate() error {
	if (c.Voucher != 0) == (c.ID != "") {
		return errors.New("give --voucher or --id, one of them")
	}
	return nil
}

// Run shows a user's order.
func (c *getOrderCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	req := &seckillv1.GetOrderRequest{UserId: c.User, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: c.Voucher}}
	if c.ID != "" {
		req.Key = &seckillv1.GetOrderRequest_OrderId{OrderId: c.ID}
	}
	return to.withGateway(func(s *server, sale seckillv1.SeckillServiceClient) error {
		resp, err := call(ctx, s, sale.GetOrder, req)
		if err != nil {
			return err
		}
		return to.print(std.Out, resp.GetOrder())
	})
}
