package client_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

type grabStream = grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]

// decideAndBreak decides every Grab of the first message, keeps the answers to
// itself and ends the stream with an error.
func decideAndBreak(s *server, why error) func(grabStream) error {
	return func(rpc grabStream) error {
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		for _, g := range message.GetGrabs() {
			s.admit(g)
		}
		return why
	}
}

// streamsAt waits until every server has a stream: the next Grabs go to all.
func streamsAt(t testing.TB, servers ...*server) {
	t.Helper()
	for _, s := range servers {
		require.Eventually(t, func() bool { return s.streams.Load() > 0 }, patience, time.Millisecond)
	}
}

func TestGrab_BrokenStreamIsRepeatedElsewhereAndGetsTheSameOrder(t *testing.T) {
	shared := newBook()
	breaking := &server{book: shared}
	breaking.stream = decideAndBreak(breaking, status.Error(codes.Internal, "broken"))
	start(t, breaking)
	sound := start(t, &server{book: shared})
	c := connect(t, client.Config{}, breaking, sound)
	streamsAt(t, breaking, sound)
	results, errs := crowd(within(t, patience), c, 1000)
	requireOwnOrders(t, shared, results, errs)
	replayed := 0
	for _, r := range results {
		if r.Replayed {
			replayed++
		}
	}
	require.Positive(t, replayed, "the first server has decided some")
	require.Len(t, shared.orders, 1000)
}

func TestGrab_LostConnectionsUnderLoadLoseNoCaller(t *testing.T) {
	shared := newBook()
	var servers []*server
	for range 2 {
		s := &server{book: shared}
		s.stream = shuffle(s)
		servers = append(servers, start(t, s))
	}
	c := connect(t, client.Config{}, servers...)
	stop := make(chan struct{})
	var breaker sync.WaitGroup
	breaker.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(rand.N(40 * time.Millisecond)):
				servers[i%2].breakConns()
			}
		}
	})
	for range 10 {
		results, errs := crowd(within(t, patience), c, 1000)
		requireOwnOrders(t, shared, results, errs)
	}
	close(stop)
	breaker.Wait()
	require.Len(t, shared.orders, 1000)
}

// What is read of a server that shuts down is answered; the rest goes elsewhere
// and is not of unknown outcome.
func TestGrab_ShuttingDownIsNoError(t *testing.T) {
	shared := newBook()
	leaving := &server{book: shared}
	leaving.stream = func(rpc grabStream) error {
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		answers := &seckillv1.GrabStreamResponse{}
		for i, g := range message.GetGrabs() {
			if i%2 == 0 {
				answers.Answers = append(answers.Answers, leaving.admit(g))
			}
		}
		_ = rpc.Send(answers)
		return fault(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN, 100*time.Millisecond)
	}
	start(t, leaving)
	sold := start(t, &server{book: shared, grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		if id := shared.order(g.GetUserId(), 1); id != "" {
			return decided(g, shared.decide(g.GetUserId(), 1, ""))
		}
		return refused(g, client.SoldOut)
	}})
	c := connect(t, client.Config{}, leaving, sold)
	streamsAt(t, leaving, sold)
	results, errs := crowd(within(t, patience), c, 500)
	soldOut := 0
	for user := 1; user < len(results); user++ {
		require.NoError(t, errs[user])
		if results[user].Outcome == client.SoldOut {
			soldOut++
			continue
		}
		require.Equal(t, shared.order(int64(user), 1), results[user].Order.ID)
	}
	require.Equal(t, 500-len(shared.orders), soldOut)
}

// A refusal right after a lost attempt may be followed by that attempt's order:
// it is not told before that can no more be.
func TestGrab_RefusalAfterALostAttemptIsAskedForAgain(t *testing.T) {
	shared := newBook()
	losing := start(t, &server{book: shared, stream: func(rpc grabStream) error {
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		for _, g := range message.GetGrabs() { // decided only after the refusal elsewhere
			time.AfterFunc(300*time.Millisecond, func() { shared.decide(g.GetUserId(), g.GetVoucherId(), "") })
		}
		return status.Error(codes.Unavailable, "gone")
	}})
	refusals := atomic.Int64{}
	sold := start(t, &server{book: shared, grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		if shared.order(g.GetUserId(), 1) != "" {
			return decided(g, shared.decide(g.GetUserId(), 1, ""))
		}
		refusals.Add(1)
		return refused(g, client.SoldOut)
	}})
	c := connect(t, client.Config{Connections: 1, Streams: 1}, losing, sold)
	streamsAt(t, losing, sold)
	// Who did not pass by the losing server is sold out; who did has the order.
	results, errs := crowd(within(t, patience), c, 20)
	for user := 1; user < len(results); user++ {
		require.NoError(t, errs[user])
		if shared.order(int64(user), 1) != "" {
			require.True(t, results[user].Admitted(), "user %d has an order", user)
		} else {
			require.Equal(t, client.SoldOut, results[user].Outcome)
		}
	}
	require.NotEmpty(t, shared.orders)
	require.Greater(t, refusals.Load(), int64(20-len(shared.orders)), "some were refused at first")
}

// A refusal may be on its way for longer than the margin: what counts is when it
// was decided.
func TestGrab_SlowRefusalAfterALostAttemptIsAskedForAgain(t *testing.T) {
	shared := newBook()
	losing := start(t, &server{book: shared, stream: func(rpc grabStream) error {
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		for _, g := range message.GetGrabs() { // decided only after the refusal elsewhere
			time.AfterFunc(300*time.Millisecond, func() { shared.decide(g.GetUserId(), g.GetVoucherId(), "") })
		}
		return status.Error(codes.Unavailable, "gone")
	}})
	sold := start(t, &server{book: shared, grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
		if shared.order(g.GetUserId(), 1) != "" {
			return decided(g, shared.decide(g.GetUserId(), 1, ""))
		}
		refusal := refused(g, client.SoldOut)
		time.Sleep(1200 * time.Millisecond)
		return refusal
	}})
	c := connect(t, client.Config{Connections: 1, Streams: 1}, losing, sold)
	streamsAt(t, losing, sold)
	for user := int64(1); user <= 2; user++ { // one after the other: they take turns with the servers
		result, err := c.Grab(within(t, patience), user, 1)
		require.NoError(t, err)
		require.Equal(t, shared.order(user, 1) != "", result.Admitted(), "user %d", user)
	}
	require.NotEmpty(t, shared.order(1, 1)+shared.order(2, 1), "one was lost")
}

func TestGrab_RefusalAfterALostAttemptIsUnknownWhereTimeIsShort(t *testing.T) {
	s := &server{}
	s.stream = func(rpc grabStream) error {
		if s.streams.Load() == 1 {
			_, _ = rpc.Recv()
			return status.Error(codes.Unavailable, "gone")
		}
		message, err := rpc.Recv()
		if err != nil {
			return err
		}
		return rpc.Send(&seckillv1.GrabStreamResponse{Answers: []*seckillv1.StreamedAnswer{refused(message.GetGrabs()[0], client.SoldOut)}})
	}
	start(t, s)
	_, err := connect(t, client.Config{Connections: 1, Streams: 1}, s).Grab(within(t, 500*time.Millisecond), 1, 1)
	requireError(t, err, client.ErrOutcomeUnknown)
}

func TestGrab_StalledServerIsGivenUp(t *testing.T) {
	shared := newBook()
	silent := &server{book: shared}
	silent.stream = func(rpc grabStream) error {
		for {
			message, err := rpc.Recv()
			if err != nil {
				return err
			}
			silent.grabs.Add(int64(len(message.GetGrabs())))
		}
	}
	start(t, silent)
	sound := start(t, &server{book: shared})
	c := connect(t, client.Config{StallTimeout: 200 * time.Millisecond}, silent, sound)
	streamsAt(t, silent, sound)
	results, errs := crowd(within(t, patience), c, 200)
	requireOwnOrders(t, shared, results, errs)
	require.Positive(t, silent.grabs.Load())
}

func TestGrab_OldServerGetsUnaryCallsUntilItKnowsStreams(t *testing.T) {
	s := &server{}
	var knows atomic.Bool
	s.stream = func(rpc grabStream) error {
		if !knows.Load() {
			return status.Error(codes.Unimplemented, "unknown method GrabStream")
		}
		return shuffle(s)(rpc)
	}
	start(t, s)
	c := connect(t, client.Config{StreamRetry: 50 * time.Millisecond}, s)
	results, errs := crowd(within(t, patience), c, 2000)
	requireOwnOrders(t, s.book, results, errs)
	require.Equal(t, int64(2000), s.unaries.Load())
	knows.Store(true)
	require.Eventually(t, func() bool {
		before := s.unaries.Load()
		results, errs := crowd(within(t, patience), c, 100)
		requireOwnOrders(t, s.book, results, errs)
		return s.unaries.Load() == before
	}, patience, 10*time.Millisecond)
}

func TestGrab_UnaryCallsAreRepeatedAsWell(t *testing.T) {
	s := &server{stream: func(grabStream) error { return status.Error(codes.Unimplemented, "unknown method GrabStream") }}
	s.unary = func(r *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
		switch {
		case r.GetVoucherId() == 2:
			return nil, fault(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, 0)
		case s.unaries.Load() == 1:
			return nil, fault(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, 10*time.Millisecond)
		}
		return s.decide(r.GetUserId(), r.GetVoucherId(), r.GetReference()), nil
	}
	start(t, s)
	c := connect(t, client.Config{}, s)
	result, err := c.Grab(t.Context(), 1, 1, client.WithReference("r"))
	require.NoError(t, err)
	require.True(t, result.Admitted())
	require.Equal(t, "r", result.Order.Reference)
	_, err = c.Grab(t.Context(), 1, 2)
	requireError(t, err, client.ErrVoucherNotFound)
	require.Equal(t, int64(3), s.unaries.Load())
}

// No server of ours gives it; a caller must not take it for a refusal.
func TestGrab_AnswerWithoutAnOutcomeIsAnError(t *testing.T) {
	for name, s := range map[string]*server{
		"stream": {grab: func(g *seckillv1.StreamedGrab) *seckillv1.StreamedAnswer {
			return decided(g, &seckillv1.GrabResponse{})
		}},
		"unary": {
			stream: func(grabStream) error { return status.Error(codes.Unimplemented, "unknown method GrabStream") },
			unary:  func(*seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) { return &seckillv1.GrabResponse{}, nil },
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := connect(t, client.Config{}, start(t, s)).Grab(within(t, patience), 1, 1)
			e := requireError(t, err, client.ErrOutcomeUnknown)
			require.Equal(t, codes.Internal, e.Code)
		})
	}
}

func TestGetOrder_AnswerWithoutAnOrderIsAnError(t *testing.T) {
	s := start(t, &server{look: func(*seckillv1.GetOrderRequest) (*seckillv1.GetOrderResponse, error) {
		return &seckillv1.GetOrderResponse{}, nil
	}})
	_, err := connect(t, client.Config{}, s).GetOrder(within(t, patience), 1, 1)
	e := requireError(t, err)
	require.Equal(t, codes.Internal, e.Code)
	require.NotErrorIs(t, err, client.ErrOutcomeUnknown)
}

func TestGetOrder_IsRepeated(t *testing.T) {
	shared := newBook()
	shared.decide(1, 1, "")
	var asked atomic.Int64
	s := &server{book: shared}
	s.look = func(r *seckillv1.GetOrderRequest) (*seckillv1.GetOrderResponse, error) {
		if asked.Add(1) < 3 {
			return nil, fault(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, 10*time.Millisecond)
		}
		return &seckillv1.GetOrderResponse{Order: &seckillv1.Order{OrderId: shared.order(1, 1), UserId: r.GetUserId()}}, nil
	}
	start(t, s)
	order, err := connect(t, client.Config{}, s).GetOrderByID(within(t, patience), 1, shared.order(1, 1))
	require.NoError(t, err)
	require.Equal(t, shared.order(1, 1), order.ID)
	require.Equal(t, int64(3), asked.Load())
}

// Callers leave at any moment, connections break, streams are renewed, answers
// come late and in any order: whoever gets an answer gets his own.
func TestGrab_LeavingBreakingAndRenewingAtOnceMixesNothingUp(t *testing.T) {
	shared := newBook()
	var servers []*server
	for range 2 {
		s := &server{book: shared}
		s.stream = shuffle(s)
		servers = append(servers, start(t, s))
	}
	c := connect(t, client.Config{StreamAge: 20 * time.Millisecond, StallTimeout: 50 * time.Millisecond}, servers...)
	ctx := within(t, 2*time.Second)
	var answered atomic.Int64
	var callers sync.WaitGroup
	for user := int64(1); user <= 100; user++ {
		callers.Go(func() {
			for ctx.Err() == nil {
				bounded, cancel := context.WithTimeout(ctx, rand.N(80*time.Millisecond))
				result, err := c.Grab(bounded, user, 1)
				cancel()
				if err != nil {
					continue
				}
				answered.Add(1)
				if result.Order.UserID != user || result.Order.ID != shared.order(user, 1) {
					t.Errorf("user %d was answered %+v", user, result)
				}
			}
		})
	}
	for i := 0; ctx.Err() == nil; i++ {
		time.Sleep(rand.N(60 * time.Millisecond))
		servers[i%2].breakConns()
	}
	callers.Wait()
	require.Greater(t, answered.Load(), int64(20))
	results, errs := crowd(within(t, patience), c, 1000)
	requireOwnOrders(t, shared, results, errs)
}
