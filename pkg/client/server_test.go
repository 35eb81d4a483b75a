package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// patience bounds every wait for a condition: far more than any of them takes
// on a busy machine.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(serverVariable) != "" {
		serveBenchmark()
		return
	}
	goleak.VerifyTestMain(m)
}

// book is a ledger that several servers share: one order for a user and voucher.
type book struct {
	mu     sync.Mutex
	orders map[[2]int64]string
}

func newBook() *book { return &book{orders: map[[2]int64]string{}} }

func (b *book) decide(userID, voucherID int64, reference string) *seckillv1.GrabResponse {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := [2]int64{userID, voucherID}
	id, replayed := b.orders[key]
	if !replayed {
		id = fmt.Sprintf("%026d", len(b.orders)+1)
		b.orders[key] = id
	}
	response := &seckillv1.GrabResponse{
		Outcome: seckillv1.Outcome_OUTCOME_ADMITTED, Replayed: replayed, Durability: seckillv1.Durability_DURABILITY_STRICT,
		DecidedAt: timestamppb.Now(), Order: &seckillv1.Order{
			OrderId: id, UserId: userID, VoucherId: voucherID, State: seckillv1.OrderState_ORDER_STATE_PENDING,
		},
	}
	if !replayed {
		response.Order.AdmittedAt, response.Order.Reference = response.DecidedAt, reference
	}
	return response
}

func (b *book) order(userID, voucherID int64) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.orders[[2]int64{userID, voucherID}]
}

// server is a gateway that does as a test says. What is nil is as usual.
type server struct {
	seckillv1.UnimplementedSeckillServiceServer
	*book
	addr string
	grpc *grpc.Server

	stream func(grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error
	grab   func(*seckillv1.StreamedGrab) *seckillv1.StreamedAnswer // of a stream; nil answers nothing
	unary  func(*seckillv1.GrabRequest) (*seckillv1.GrabResponse, error)
	look   func(*seckillv1.GetOrderRequest) (*seckillv1.GetOrderResponse, error)

	messages, grabs, unaries, streams atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]bool
}

func (s *server) GrabStream(rpc grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
	s.streams.Add(1)
	if s.stream != nil {
		return s.stream(rpc)
	}
	for {
		message, err := rpc.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		s.messages.Add(1)
		answers := &seckillv1.GrabStreamResponse{}
		for _, g := range message.GetGrabs() {
			s.grabs.Add(1)
			if answer := s.answer(g); answer != nil {
				answers.Answers = append(answers.Answers, answer)
			}
		}
		if err := rpc.Send(answers); err != nil {
			return err
		}
	}
}

func (s *server) answer(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
	if s.grab != nil {
		return s.grab(g)
	}
	return s.admit(g)
}

func (s *server) admit(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
	return decided(g, s.decide(g.GetUserId(), g.GetVoucherId(), g.GetReference()))
}

func (s *server) Grab(_ context.Context, r *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	s.unaries.Add(1)
	if s.unary != nil {
		return s.unary(r)
	}
	return s.decide(r.GetUserId(), r.GetVoucherId(), r.GetReference()), nil
}

func (s *server) GetOrder(_ context.Context, r *seckillv1.GetOrderRequest) (*seckillv1.GetOrderResponse, error) {
	if s.look != nil {
		return s.look(r)
	}
	if id := s.order(r.GetUserId(), r.GetVoucherId()); id != "" {
		return &seckillv1.GetOrderResponse{Order: &seckillv1.Order{
			OrderId: id, UserId: r.GetUserId(), VoucherId: r.GetVoucherId(), State: seckillv1.OrderState_ORDER_STATE_PERSISTED,
		}}, nil
	}
	return nil, fault(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND, 0)
}

// breakConns cuts every connection, as a network or a dying process does.
func (s *server) breakConns() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for conn := range s.conns {
		_ = conn.Close()
	}
	clear(s.conns)
}

func (s *server) Accept(conn net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[conn] = true
}

type listener struct {
	net.Listener
	s *server
}

func (l listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err == nil {
		l.s.Accept(conn)
	}
	return conn, err
}

// start serves until the test ends, with what each server's fields say.
func start(t testing.TB, s *server) *server {
	t.Helper()
	if s.book == nil {
		s.book = newBook()
	}
	s.conns = map[net.Conn]bool{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.addr = l.Addr().String()
	s.grpc = grpc.NewServer(grpc.MaxRecvMsgSize(64<<10), grpc.MaxConcurrentStreams(1024))
	seckillv1.RegisterSeckillServiceServer(s.grpc, s)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.grpc.Serve(listener{l, s}) }()
	t.Cleanup(func() { s.grpc.Stop(); <-done })
	return s
}

// connect makes a client of some servers, closed when the test ends.
func connect(t testing.TB, config client.Config, servers ...*server) *client.Client {
	t.Helper()
	for _, s := range servers {
		config.Addresses = append(config.Addresses, s.addr)
	}
	config.DialOptions = append(config.DialOptions, grpc.WithTransportCredentials(insecure.NewCredentials()))
	c, err := client.New(config)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, c.Close(ctx))
	})
	return c
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func decided(g *seckillv1.StreamedGrab, r *seckillv1.GrabResponse) *seckillv1.StreamedAnswer {
	return &seckillv1.StreamedAnswer{CorrelationId: g.GetCorrelationId(), Result: &seckillv1.StreamedAnswer_Response{Response: r}}
}

func refused(g *seckillv1.StreamedGrab, outcome client.Outcome) *seckillv1.StreamedAnswer {
	return decided(g, &seckillv1.GrabResponse{Outcome: outcome, DecidedAt: timestamppb.Now()})
}

func failed(g *seckillv1.StreamedGrab, code codes.Code, reason seckillv1.ErrorReason, retryAfter time.Duration, violations ...*seckillv1.FieldViolation) *seckillv1.StreamedAnswer {
	e := &seckillv1.GrabError{Code: int32(code), Reason: reason, Message: "as the test says", FieldViolations: violations}
	if retryAfter > 0 {
		e.RetryAfter = durationpb.New(retryAfter)
	}
	return &seckillv1.StreamedAnswer{CorrelationId: g.GetCorrelationId(), Result: &seckillv1.StreamedAnswer_Error{Error: e}}
}

func fault(code codes.Code, reason seckillv1.ErrorReason, retryAfter time.Duration) error {
	st, err := status.New(code, "as the test says").WithDetails(&errdetails.ErrorInfo{Reason: reason.String(), Domain: "seckill"})
	if err == nil && retryAfter > 0 {
		st, err = st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)})
	}
	if err != nil {
		panic(err)
	}
	return st.Err()
}

// requireError requires an *Error that is all of these.
func requireError(t testing.TB, err error, targets ...error) *client.Error {
	t.Helper()
	for _, target := range targets {
		require.ErrorIs(t, err, target)
	}
	var e *client.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, e.Code, status.Code(err))
	return e
}
