package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

const (
	voucherID = 1
	// comeBack is how many users Grab once more when all is over, at most.
	comeBack = 1000
	// asked is how many orders are asked for by GetOrder, at most. All of them are
	// looked up in the database.
	asked = 1000
	// readTimeout bounds the reading of the final figures, which is done also
	// when the sale ran out of time.
	readTimeout = 30 * time.Second
)

// run does all of it. The result holds what was found out by the time of an
// error.
func run(ctx context.Context, cfg settings, out *progress) (result, error) {
	r := result{figures: figures{total: cfg.Stock, books: "UNKNOWN"}, users: cfg.Users}
	out.print(fmt.Sprintf("%s, %s, %s, %s", counted(cfg.Stock, "unit"), counted(cfg.Users, "user"),
		counted(int64(cfg.Gateways), "gateway"), counted(int64(cfg.Writers), "writer")))
	s, err := stack.Start(ctx, stack.Options{
		Gateways: cfg.Gateways, Writers: cfg.Writers, Partitions: cfg.Partitions,
		Programs: cfg.Programs, WriterArgs: stack.FastTakeover(), Log: out,
	})
	if err != nil {
		return r, err
	}
	defer s.Close()
	if err := s.OpenVoucher(ctx, voucherID, cfg.Stock); err != nil {
		return r, err
	}

	bounded, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	crowd := newCrowd(s, cfg)
	err = sell(bounded, s, cfg, crowd, &r, out)
	if bounded.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("not finished within %s: %w", cfg.Timeout, err)
	}
	crowd.report(&r)

	reading, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if err := errors.Join(err, count(reading, s, &r)); err != nil {
		return r, err
	}
	if err := compare(reading, s, crowd, &r); err != nil {
		return r, err
	}
	out.print(summary(r, cfg))
	return r, nil
}

// sell is the sale with its crash, until nothing is in flight.
func sell(ctx context.Context, s *stack.Stack, cfg settings, crowd *crowd, r *result, out *progress) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	live := make(chan struct{})
	go func() {
		defer close(live)
		out.follow(ctx, s, crowd, cfg)
	}()
	defer func() { // the live line ends before anything else is printed
		cancel()
		<-live
	}()

	crash := newCrash(s, min(cfg.Stock, cfg.Users), out)
	crashed := make(chan error, 1)
	go func() { crashed <- crash.run(ctx) }()

	out.event("the sale is open")
	crowd.grabAll(ctx, crash)
	lastGrab := time.Now()
	if ctx.Err() == nil {
		out.event(fmt.Sprintf("every user has an answer after %.1f s", crowd.took().Seconds()))
	}
	err := <-crashed
	r.crash = crash.report
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("letting users Grab: %w", err)
	}
	if err := s.AwaitSettled(ctx, voucherID); err != nil {
		return err
	}
	r.catchUp = time.Since(lastGrab)
	out.event("nothing is in flight")
	// Users who lost their answer, or only want to see it again: all is sold and
	// written by now.
	crowd.comeBack(ctx, comeBack)
	return ctx.Err()
}

// count reads the figures of the last line from Redis and the database.
func count(ctx context.Context, s *stack.Stack, r *result) error {
	var problems []error
	note := func(err error) {
		if err != nil {
			problems = append(problems, err)
		}
	}
	total, stock, sold, err := s.Total(ctx, voucherID)
	note(err)
	r.total, r.databaseStock, r.databaseSold = total, stock, sold
	var books ledger.Books
	books, err = s.Ledger(ctx, voucherID)
	note(err)
	r.admitted, r.remaining, r.inFlight = books.Seq, books.Stock, books.InFlight()
	r.persisted, err = s.Rows(ctx, voucherID)
	note(err)
	r.duplicates, err = s.DuplicateBuyers(ctx, voucherID)
	note(err)
	r.reckoning, err = s.Books(ctx, voucherID)
	note(err)
	if err == nil {
		r.books = verdictName(r.reckoning.GetVerdict())
	}
	return errors.Join(problems...)
}

// compare holds what users were told against the rows, order by order, and
// asks for some of them by GetOrder.
func compare(ctx context.Context, s *stack.Stack, crowd *crowd, r *result) error {
	rows, err := s.Orders(ctx, voucherID)
	if err != nil {
		return err
	}
	byUser := make(map[int64]string, len(rows))
	for _, row := range rows {
		byUser[row.UserID] = s.OrderIDs().Encode(row.Position)
	}
	acknowledged := crowd.acknowledged()
	for user, orderID := range acknowledged {
		if byUser[user] != orderID {
			r.lost++
		}
	}
	i := 0
	for user, orderID := range acknowledged {
		if i++; i > asked {
			break
		}
		gateway := s.Seckill(i % len(s.Gateways()))
		request := &seckillv1.GetOrderRequest{UserId: user, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: voucherID}}
		if i%2 == 0 {
			request.Key = &seckillv1.GetOrderRequest_OrderId{OrderId: orderID}
		}
		answer, err := gateway.GetOrder(ctx, request)
		if err != nil {
			return fmt.Errorf("asking for the order of user %d: %w", user, err)
		}
		r.asked++
		if answer.GetOrder().GetOrderId() != orderID || answer.GetOrder().GetState() != seckillv1.OrderState_ORDER_STATE_PERSISTED {
			r.notPersisted++
		}
	}
	return nil
}
