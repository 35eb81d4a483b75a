package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// exampleGateway stands for a gateway: voucher 1 has a unit for users below 100,
// voucher 2 does not exist.
func exampleGateway() (addr string, stop func()) {
	s := &server{book: newBook(), conns: map[net.Conn]bool{}}
	s.grab = func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		switch {
		case g.GetVoucherId() == 2:
			return failed(g, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, 0)
		case g.GetUserId() >= 100:
			return refused(g, client.SoldOut)
		}
		return s.admit(g)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	s.grpc = grpc.NewServer()
	seckillv1.RegisterSeckillServiceServer(s.grpc, s)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.grpc.Serve(l) }()
	return l.Addr().String(), func() { s.grpc.Stop(); <-done }
}

func Example() {
	addr, stop := exampleGateway()
	defer stop()

	c, err := client.New(client.Config{
		Addresses:   []string{addr},
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close(context.Background())

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, user := range []int64{42, 42, 100} {
		result, err := c.Grab(ctx, user, 1)
		switch {
		case errors.Is(err, client.ErrOutcomeUnknown):
			fmt.Println("the order may exist: the same Grab finds it later")
		case err != nil:
			fmt.Println("nothing was taken:", err)
		case result.Admitted():
			fmt.Printf("user %d has order %s, replayed: %t\n", user, result.Order.ID, result.Replayed)
		default:
			fmt.Printf("user %d: %s\n", user, result.Outcome)
		}
	}
	// Output:
	// user 42 has order 00000000000000000000000001, replayed: false
	// user 42 has order 00000000000000000000000001, replayed: true
	// user 100: OUTCOME_SOLD_OUT
}

func ExampleError() {
	addr, stop := exampleGateway()
	defer stop()
	c, err := client.New(client.Config{
		Addresses:   []string{addr},
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close(context.Background())

	_, err = c.Grab(context.Background(), 42, 2)
	fmt.Println(errors.Is(err, client.ErrVoucherNotFound), errors.Is(err, client.ErrOutcomeUnknown))
	var e *client.Error
	if errors.As(err, &e) {
		fmt.Println(e.Code, e.Reason, e.Attempts)
	}
	// Output:
	// true false
	// NotFound ERROR_REASON_VOUCHER_NOT_FOUND 1
}

func ExampleClient_GetOrder() {
	addr, stop := exampleGateway()
	defer stop()
	c, err := client.New(client.Config{
		Addresses:   []string{addr},
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close(context.Background())

	result, err := c.Grab(context.Background(), 42, 1)
	if err != nil {
		log.Fatal(err)
	}
	order, err := c.GetOrder(context.Background(), 42, 1)
	fmt.Println(order.ID == result.Order.ID, order.State, err)
	_, err = c.GetOrder(context.Background(), 43, 1)
	fmt.Println(errors.Is(err, client.ErrOrderNotFound))
	// Output:
	// true ORDER_STATE_PERSISTED <nil>
	// true
}

func ExampleHooks() {
	addr, stop := exampleGateway()
	defer stop()
	var admitted, refusals, faults atomic.Int64 // counters of your metrics library
	c, err := client.New(client.Config{
		Addresses:   []string{addr},
		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
		Hooks: client.Hooks{GrabDone: func(d client.GrabDone) {
			switch {
			case d.Err != nil:
				faults.Add(1)
			case d.Outcome == client.Admitted:
				admitted.Add(1)
			default:
				refusals.Add(1)
			}
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close(context.Background())
	for _, user := range []int64{1, 2, 100} {
		_, _ = c.Grab(context.Background(), user, 1)
	}
	_, _ = c.Grab(context.Background(), 1, 2)
	fmt.Println(admitted.Load(), refusals.Load(), faults.Load())
	// Output: 2 1 1
}
