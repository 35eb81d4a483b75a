package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/rpcserver"
)

type grabClient = grpc.BidiStreamingClient[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]

func openStream(t testing.TB, ctx context.Context, client seckillv1.SeckillServiceClient) grabClient {
	t.Helper()
	stream, err := client.GrabStream(ctx)
	require.NoError(t, err)
	return stream
}

// wishes are Grabs of users from one to another, whose correlation ids are theirs.
func wishes(voucherID, from, to int64) []*seckillv1.StreamedGrab {
	var all []*seckillv1.StreamedGrab
	for user := from; user <= to; user++ {
		all = append(all, &seckillv1.StreamedGrab{CorrelationId: uint64(user), UserId: user, VoucherId: voucherID, TimeoutMs: 20_000})
	}
	return all
}

func send(t testing.TB, stream grabClient, grabs ...*seckillv1.StreamedGrab) {
	t.Helper()
	for len(grabs) > 0 {
		n := min(len(grabs), maxMessage)
		require.NoError(t, stream.Send(&seckillv1.GrabStreamRequest{Grabs: grabs[:n]}))
		grabs = grabs[n:]
	}
}

// receive takes n answers, of which no two are for the same Grab.
func receive(t testing.TB, stream grabClient, n int) map[uint64]*seckillv1.StreamedAnswer {
	t.Helper()
	all := make(map[uint64]*seckillv1.StreamedAnswer)
	for len(all) < n {
		message, err := stream.Recv()
		require.NoError(t, err, "after %d answers", len(all))
		collect(t, all, message)
	}
	return all
}

func collect(t testing.TB, all map[uint64]*seckillv1.StreamedAnswer, message *seckillv1.GrabStreamResponse) {
	require.NotEmpty(t, message.GetAnswers())
	require.LessOrEqual(t, len(message.GetAnswers()), maxMessage)
	for _, answer := range message.GetAnswers() {
		if all[answer.GetCorrelationId()] != nil || answer.GetResult() == nil {
			require.FailNow(t, "answered twice, or with nothing", "%v", answer)
		}
		all[answer.GetCorrelationId()] = answer
	}
}

// drainStream takes answers until the stream ends, and the error it ends with.
func drainStream(t testing.TB, stream grabClient) (map[uint64]*seckillv1.StreamedAnswer, error) {
	t.Helper()
	all := make(map[uint64]*seckillv1.StreamedAnswer)
	for {
		message, err := stream.Recv()
		if err != nil {
			return all, err
		}
		collect(t, all, message)
	}
}

func requireAdmitted(t testing.TB, answer *seckillv1.StreamedAnswer) *seckillv1.Order {
	t.Helper()
	require.Nil(t, answer.GetError())
	require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, answer.GetResponse().GetOutcome())
	require.NotEmpty(t, answer.GetResponse().GetOrder().GetOrderId())
	return answer.GetResponse().GetOrder()
}

func (e *edge) owed(t testing.TB, n int64) {
	t.Helper()
	require.Eventually(t, func() bool { return e.service.streams.owed.Load() == n }, patience, time.Millisecond)
}

func TestGrabStream_AnswersAsUnaryDoes(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 2)
	stream := openStream(t, t.Context(), e)
	one := &seckillv1.StreamedGrab{CorrelationId: 9, UserId: 1, VoucherId: 7, Reference: "ref"}
	send(t, stream, one)
	first := receive(t, stream, 1)[9].GetResponse()
	require.Equal(t, seckillv1.Durability_DURABILITY_STRICT, first.Durability)
	require.Equal(t, "ref", first.Order.Reference)
	require.Equal(t, int64(1), first.Order.UserId)
	require.Equal(t, int64(7), first.Order.VoucherId)
	require.Equal(t, first.DecidedAt.AsTime(), first.Order.AdmittedAt.AsTime())
	require.Equal(t, first.Order.OrderId, e.grab(t, 1, 7).Order.OrderId)
	send(t, stream, one)
	again := receive(t, stream, 1)[9].GetResponse()
	require.True(t, again.Replayed)
	require.Equal(t, first.Order.OrderId, again.Order.OrderId)
	require.Empty(t, again.Order.Reference)

	send(t, stream, wishes(7, 2, 4)...)
	send(t, stream) // a message of none is answered with nothing
	require.NoError(t, stream.Send(&seckillv1.GrabStreamRequest{}))
	outcomes := map[seckillv1.Outcome]int{}
	for _, answer := range receive(t, stream, 3) {
		outcomes[answer.GetResponse().GetOutcome()]++
	}
	require.Equal(t, map[seckillv1.Outcome]int{seckillv1.Outcome_OUTCOME_ADMITTED: 1, seckillv1.Outcome_OUTCOME_SOLD_OUT: 2}, outcomes)
	require.NoError(t, stream.CloseSend())
	_, err := stream.Recv()
	require.ErrorIs(t, err, io.EOF)
}

func TestGrabStream_HalfCloseWaitsForTheAnswers(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 10_000)
	e.grab(t, 9999, 7)
	require.NoError(t, e.redis.Pause())
	stream := openStream(t, t.Context(), e)
	send(t, stream, wishes(7, 1, 1000)...)
	require.NoError(t, stream.CloseSend())
	e.owed(t, 1000)
	require.NoError(t, e.redis.Resume())
	all, err := drainStream(t, stream)
	require.ErrorIs(t, err, io.EOF)
	require.Len(t, all, 1000)
	for _, answer := range all {
		requireAdmitted(t, answer)
	}
	require.Equal(t, int64(1001), ledgertest.Books(t, e.client, v).Seq)
}

// A client that does not read can send only so much; it goes on when it reads.
func TestGrabStream_ClientThatStopsReading(t *testing.T) {
	const n = 30_000
	e := newEdge(t)
	v := e.sell(t, 7, n)
	stream := openStream(t, t.Context(), e)
	var sent atomic.Int64
	failed := make(chan error, 1)
	go func() {
		all := wishes(7, 1, n)
		for i := 0; i < n; i += 100 {
			if err := stream.Send(&seckillv1.GrabStreamRequest{Grabs: all[i : i+100]}); err != nil {
				failed <- err
				return
			}
			sent.Add(100)
		}
		failed <- stream.CloseSend()
	}()
	most, before, still := int64(0), int64(-1), 0
	require.Eventually(t, func() bool {
		owed, now := e.service.streams.owed.Load(), sent.Load()
		most = max(most, owed)
		if owed < maxOwed || now != before {
			before, still = now, 0
			return false
		}
		still++
		return still == 100
	}, patience, 5*time.Millisecond, "it can send on and on")
	require.Less(t, most, int64(maxOwed+maxMessage))
	require.Less(t, sent.Load(), int64(n))
	require.LessOrEqual(t, ledgertest.Books(t, e.client, v).Seq, sent.Load())

	all, err := drainStream(t, stream)
	require.ErrorIs(t, err, io.EOF)
	require.NoError(t, <-failed)
	require.Len(t, all, n)
	require.Equal(t, int64(n), ledgertest.Books(t, e.client, v).Seq)
}

// Who does not read takes no more than its share: where that is used up, others
// are served a message at a time.
func TestGrabStream_WhereAllRoomIsTakenAMessageAtATimeIsServed(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 10_000)
	e.service.streams.owed.Add(maxOwedAll)
	defer e.service.streams.owed.Add(-maxOwedAll)
	stream := openStream(t, t.Context(), e)
	go func() { send(t, stream, wishes(7, 1, 2000)...) }()
	for _, answer := range receive(t, stream, 2000) {
		requireAdmitted(t, answer)
	}
	e.grab(t, 1, 7)
	require.NoError(t, e.redis.Pause())
	send(t, stream, wishes(7, 3000, 3009)...)
	e.owed(t, maxOwedAll+10)
	send(t, stream, wishes(7, 4000, 4009)...)
	require.Never(t, func() bool { return e.service.streams.owed.Load() > maxOwedAll+10 }, 100*time.Millisecond, 5*time.Millisecond)
	require.NoError(t, e.redis.Resume())
	receive(t, stream, 20)
}

func TestGrabStream_ThousandsOfStreams(t *testing.T) {
	n := 10_000
	if raceEnabled {
		n = 2000 // the race detector has room for 8,128 goroutines
	}
	e := newEdge(t)
	v := e.sell(t, 7, int64(2*n))
	var clients []seckillv1.SeckillServiceClient
	for range n/1000 + 1 {
		conn := e.dial(t)
		clients = append(clients, seckillv1.NewSeckillServiceClient(conn))
		_, err := clients[len(clients)-1].GetOrder(t.Context(), byVoucher(1, 7))
		require.Equal(t, codes.NotFound, status.Code(err))
	}
	e.grab(t, 1<<40, 7)
	before := runtime.NumGoroutine()
	streams := make([]grabClient, n)
	for i := range streams {
		streams[i] = openStream(t, t.Context(), clients[i%len(clients)])
		send(t, streams[i], wishes(7, int64(2*i+1), int64(2*i+2))...)
	}
	require.Eventually(t, func() bool { return e.service.streams.open.Load() == int64(n) }, patience, time.Millisecond)
	answered := 0
	for i, stream := range streams {
		all := receive(t, stream, 2)
		require.Contains(t, all, uint64(2*i+1))
		require.Contains(t, all, uint64(2*i+2))
		answered += len(all)
	}
	require.Equal(t, 2*n, answered)
	e.owed(t, 0)
	require.Equal(t, int64(2*n), ledgertest.Books(t, e.client, v).Seq)
	for _, stream := range streams {
		require.NoError(t, stream.CloseSend())
	}
	for _, stream := range streams {
		_, err := stream.Recv()
		require.ErrorIs(t, err, io.EOF)
	}
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+10 }, patience, 10*time.Millisecond)
}

func TestGrabStream_CancelledStreamIsOwedNothing(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 100_000)
	e.grab(t, 1<<40, 7)
	before := runtime.NumGoroutine()
	require.NoError(t, e.redis.Pause())
	var streams []grabClient
	var cancels []context.CancelFunc
	for i := range int64(10) {
		ctx, cancel := context.WithCancel(t.Context())
		stream := openStream(t, ctx, e)
		send(t, stream, wishes(7, 10_000*i+1, 10_000*i+1000)...)
		streams, cancels = append(streams, stream), append(cancels, cancel)
	}
	e.owed(t, 10_000)
	for i, cancel := range cancels {
		cancel()
		_, err := drainStream(t, streams[i])
		require.Equal(t, codes.Canceled, status.Code(err))
	}
	require.Eventually(t, func() bool { return e.service.streams.open.Load() == 0 }, patience, time.Millisecond)
	require.Zero(t, e.service.streams.owed.Load())
	require.NoError(t, e.redis.Resume())
	// One that came last is answered when all before it have left or are dropped.
	e.grab(t, 1<<41, 7)
	// Four batches had left when the callers went; nobody else took anything.
	require.LessOrEqual(t, ledgertest.Books(t, e.client, v).Seq, int64(2+4*ledger.MaxBatch))
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+5 }, patience, 10*time.Millisecond)
}

func TestGrabStream_InvalidGrabsAmidValidOnes(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 1000)
	stream := openStream(t, t.Context(), e)
	long := strings.Repeat("x", 65)
	for range 2 { // and the stream goes on
		send(t, stream,
			&seckillv1.StreamedGrab{CorrelationId: 1, UserId: 1, VoucherId: 7},
			&seckillv1.StreamedGrab{CorrelationId: 2, UserId: 0, VoucherId: 7},
			&seckillv1.StreamedGrab{CorrelationId: 3, UserId: 3, VoucherId: 7},
			&seckillv1.StreamedGrab{CorrelationId: 4, UserId: -1, VoucherId: -1, Reference: long},
			&seckillv1.StreamedGrab{CorrelationId: 5, UserId: 5, VoucherId: 99},
		)
		all := receive(t, stream, 5)
		requireAdmitted(t, all[1])
		requireAdmitted(t, all[3])
		require.Equal(t, []string{"user_id"}, fields(all[2].GetError()))
		require.Equal(t, []string{"user_id", "voucher_id", "reference"}, fields(all[4].GetError()))
		for _, bad := range []uint64{2, 4} {
			require.Equal(t, int32(codes.InvalidArgument), all[bad].GetError().GetCode())
			require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD, all[bad].GetError().GetReason())
		}
		require.Equal(t, int32(codes.NotFound), all[5].GetError().GetCode())
		require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, all[5].GetError().GetReason())
	}
	require.Equal(t, int64(2), ledgertest.Books(t, e.client, v).Seq)
}

func fields(e *seckillv1.GrabError) (names []string) {
	for _, v := range e.GetFieldViolations() {
		names = append(names, v.GetField())
	}
	return names
}

func TestGrabStream_AUserHasOneOrderHoweverOftenHeAsks(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 1000)
	const users, times = 20, 10
	var mu sync.Mutex
	orders, fresh := map[int64]map[string]bool{}, 0
	var all sync.WaitGroup
	for range 8 {
		stream := openStream(t, t.Context(), e)
		all.Go(func() {
			var grabs []*seckillv1.StreamedGrab
			for i := range users * times {
				grabs = append(grabs, &seckillv1.StreamedGrab{CorrelationId: uint64(i), UserId: int64(i%users + 1), VoucherId: 7})
			}
			send(t, stream, grabs...)
			answers := receive(t, stream, len(grabs))
			mu.Lock()
			defer mu.Unlock()
			for _, answer := range answers {
				order := requireAdmitted(t, answer)
				if orders[order.UserId] == nil {
					orders[order.UserId] = map[string]bool{}
				}
				orders[order.UserId][order.OrderId] = true
				if !answer.GetResponse().GetReplayed() {
					fresh++
				}
			}
		})
	}
	all.Wait()
	require.Len(t, orders, users)
	for _, ids := range orders {
		require.Len(t, ids, 1)
	}
	require.Equal(t, users, fresh)
	require.Equal(t, int64(users), ledgertest.Books(t, e.client, v).Seq)
}

func TestGrabStream_EveryGrabHasADeadlineOfItsOwn(t *testing.T) {
	e := newEdge(t, func(o *Options) { o.DefaultDeadline, o.MaxDeadline = 400*time.Millisecond, 900*time.Millisecond })
	e.sell(t, 7, 1000)
	e.grab(t, 1, 7)
	require.NoError(t, e.redis.Pause())
	stream := openStream(t, t.Context(), e)
	started := time.Now()
	send(t, stream,
		&seckillv1.StreamedGrab{CorrelationId: 100, UserId: 2, VoucherId: 7, TimeoutMs: 100},
		&seckillv1.StreamedGrab{CorrelationId: 400, UserId: 3, VoucherId: 7},
		&seckillv1.StreamedGrab{CorrelationId: 900, UserId: 4, VoucherId: 7, TimeoutMs: 100_000},
	)
	for _, want := range []uint64{100, 400, 900} {
		for id, answer := range receive(t, stream, 1) {
			require.Equal(t, want, id)
			require.GreaterOrEqual(t, time.Since(started), time.Duration(want)*time.Millisecond*8/10)
			require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, answer.GetError().GetReason())
			require.Equal(t, int32(codes.Unavailable), answer.GetError().GetCode())
			require.Positive(t, answer.GetError().GetRetryAfter().AsDuration())
		}
	}
	require.NoError(t, e.redis.Resume())
	require.Eventually(t, func() bool {
		send(t, stream, &seckillv1.StreamedGrab{CorrelationId: 1, UserId: 2, VoucherId: 7})
		return receive(t, stream, 1)[1].GetResponse().GetOutcome() == seckillv1.Outcome_OUTCOME_ADMITTED
	}, patience, 10*time.Millisecond)
}

func TestGrabStream_CarriesTheTraceOfEachGrab(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 8, 10)
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	stream := openStream(t, t.Context(), e)
	send(t, stream,
		&seckillv1.StreamedGrab{CorrelationId: 1, UserId: 1, VoucherId: 8, Traceparent: trace},
		&seckillv1.StreamedGrab{CorrelationId: 2, UserId: 2, VoucherId: 8, Traceparent: "00-nonsense"},
		&seckillv1.StreamedGrab{CorrelationId: 3, UserId: 3, VoucherId: 8, Reference: "r"})
	receive(t, stream, 3)
	entries, err := ledger.Scan(context.Background(), e.client, 0, 1, "-", 10)
	require.NoError(t, err)
	require.Len(t, entries, 1, "the Grabs of one message are one batch")
	entry, err := ledger.DecodeEntry(0, entries[0].ID, entries[0].Fields)
	require.NoError(t, err)
	for i, want := range []string{trace, "", ""} {
		require.Equal(t, want, entry.Orders[i].Traceparent)
	}
	require.Equal(t, "r", entry.Orders[2].Reference)
}

func TestGrabStream_BeforeRedisIsFound(t *testing.T) {
	stream := openStream(t, t.Context(), serve(t, newService(t, Options{})))
	send(t, stream, wishes(7, 1, 3)...)
	for _, answer := range receive(t, stream, 3) {
		require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE, answer.GetError().GetReason())
		require.Contains(t, answer.GetError().GetMessage(), "nothing was taken")
	}
}

// brokenBackend is one that panics.
type brokenBackend struct{ Backend }

func (brokenBackend) Submit(admit.Receiver, []*admit.Grab) { panic("of a test") }

func TestGrabStream_APanicEndsTheStreamOnly(t *testing.T) {
	s := newService(t, Options{})
	s.Use(brokenBackend{})
	client := serve(t, s)
	idle := openStream(t, t.Context(), client)
	stream := openStream(t, t.Context(), client)
	send(t, stream, wishes(7, 1, 3)...)
	_, err := stream.Recv()
	requireStatus(t, err, codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL)
	require.NoError(t, idle.CloseSend())
	_, err = idle.Recv()
	require.ErrorIs(t, err, io.EOF)
	require.Zero(t, s.streams.owed.Load(), "what the panic left takes no room from others")
}

// A fault is told over a stream as it is told as a status.
func TestStreamError_SaysWhatTheStatusSays(t *testing.T) {
	errs := []error{context.Canceled, context.DeadlineExceeded, checkGrab(0, -1, "")}
	for _, f := range faults {
		errs = append(errs, fmt.Errorf("wrapped: %w", f.err))
	}
	decoded := func(err error) *seckillv1.GrabError {
		var e seckillv1.GrabError
		require.NoError(t, proto.Unmarshal(streamErrorBytes(err), &e))
		return &e
	}
	for _, err := range errs {
		st, streamed := status.Convert(grabError(err)), decoded(err)
		require.Equal(t, st.Code(), codes.Code(streamed.GetCode()))
		require.Equal(t, st.Message(), streamed.GetMessage())
		reason, _ := rpcserver.Reason(st.Err())
		require.Equal(t, reason, streamed.GetReason())
		after, _ := rpcserver.RetryAfter(st.Err())
		require.Equal(t, after, streamed.GetRetryAfter().AsDuration())
		require.Equal(t, violated(st.Err()), fields(streamed))
	}
	internal := decoded(errors.New("text of a driver"))
	require.Equal(t, int32(codes.Internal), internal.GetCode())
	require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_INTERNAL, internal.GetReason())
	require.NotContains(t, internal.GetMessage(), "driver")
}
