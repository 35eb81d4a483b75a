package rpc

import (
	"context"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

const partitions = 8

// edge is a gateway's edge on a real Redis, called over gRPC.
type edge struct {
	seckillv1.SeckillServiceClient
	*port
	redis   *devstack.Redis
	client  rueidis.Client
	service *Service
	ids     *orderid.Codec
}

func newEdge(t testing.TB, change ...func(*Options)) *edge {
	t.Helper()
	e := &edge{redis: devstack.TestRedis(t)}
	e.client = ledgertest.Client(t, e.redis.Addr())
	ledgertest.Open(t, e.client, partitions)
	var err error
	e.ids, err = orderid.New(orderid.Key{Secret: [orderid.KeySize]byte{7}})
	require.NoError(t, err)
	a, err := admit.New(admit.Config{Client: e.client, Partitions: partitions})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, a.Close(context.Background())) })
	e.port = newPort(t)
	options := Options{OrderIDs: e.ids, Draining: e.server.Draining()}
	for _, c := range change {
		c(&options)
	}
	e.service = newService(t, options)
	e.service.Use(a)
	e.serve(t, e.service)
	e.SeckillServiceClient = seckillv1.NewSeckillServiceClient(e.dial(t))
	return e
}

// port is a server on a port of its own.
type port struct {
	server *rpcserver.Server
	stop   func() // begins the shutdown
	done   chan error
	run    func()
}

func newPort(t testing.TB) *port {
	t.Helper()
	server, err := rpcserver.New(rpcserver.Options{Addr: "127.0.0.1:0"})
	require.NoError(t, err)
	require.NoError(t, server.Listen())
	ctx, stop := context.WithCancel(context.Background())
	p := &port{server: server, stop: stop, done: make(chan error, 1)}
	p.run = func() { p.done <- server.Run(ctx); close(p.done) }
	return p
}

// serve serves until stop, at the latest until the end of the test.
func (p *port) serve(t testing.TB, s *Service) {
	seckillv1.RegisterSeckillServiceServer(p.server.GRPC(), s)
	go p.run()
	t.Cleanup(func() {
		p.stop()
		require.NoError(t, <-p.done)
		require.Zero(t, s.streams.open.Load())
		require.Zero(t, s.streams.owed.Load(), "a stream that ended is owed nothing")
	})
}

func (p *port) dial(t testing.TB, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	options = append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))
	conn, err := grpc.NewClient(p.server.Addr(), options...)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

func newService(t testing.TB, o Options) *Service {
	t.Helper()
	s, err := New(o)
	require.NoError(t, err)
	return s
}

func serve(t testing.TB, s *Service) seckillv1.SeckillServiceClient {
	t.Helper()
	p := newPort(t)
	p.serve(t, s)
	return seckillv1.NewSeckillServiceClient(p.dial(t))
}

// patience bounds what must happen soon; a test that waits that long has failed.
const patience = 20 * time.Second

func (e *edge) sell(t testing.TB, id, stock int64) ledger.Voucher {
	t.Helper()
	v := ledgertest.Voucher(partitions, id, stock)
	ledgertest.Sell(t, e.client, v)
	return v
}

func (e *edge) grab(t *testing.T, userID, voucherID int64) *seckillv1.GrabResponse {
	t.Helper()
	response, err := e.Grab(t.Context(), &seckillv1.GrabRequest{UserId: userID, VoucherId: voucherID, Reference: "ref"})
	require.NoError(t, err)
	return response
}

func byVoucher(userID, voucherID int64) *seckillv1.GetOrderRequest {
	return &seckillv1.GetOrderRequest{UserId: userID, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: voucherID}}
}

func byID(userID int64, id string) *seckillv1.GetOrderRequest {
	return &seckillv1.GetOrderRequest{UserId: userID, Key: &seckillv1.GetOrderRequest_OrderId{OrderId: id}}
}

func requireStatus(t *testing.T, err error, code codes.Code, reason seckillv1.ErrorReason) {
	t.Helper()
	require.Equal(t, code, status.Code(err), "%v", err)
	got, ok := rpcserver.Reason(err)
	require.True(t, ok, "no ErrorInfo: %v", err)
	require.Equal(t, reason, got)
	if code == codes.Unavailable || code == codes.ResourceExhausted {
		after, ok := rpcserver.RetryAfter(err)
		require.True(t, ok, "no RetryInfo")
		require.Positive(t, after)
	}
}

func TestGrab_AdmittedReplayedSoldOut(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 1)
	first := e.grab(t, 1, 7)
	require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, first.Outcome)
	require.False(t, first.Replayed)
	require.Equal(t, seckillv1.Durability_DURABILITY_STRICT, first.Durability)
	require.Len(t, first.Order.OrderId, orderid.Length)
	require.Equal(t, int64(1), first.Order.UserId)
	require.Equal(t, int64(7), first.Order.VoucherId)
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_PENDING, first.Order.State)
	require.Equal(t, "ref", first.Order.Reference)
	require.Equal(t, first.DecidedAt.AsTime(), first.Order.AdmittedAt.AsTime())
	require.WithinDuration(t, time.Now(), first.DecidedAt.AsTime(), time.Minute)

	again := e.grab(t, 1, 7)
	require.True(t, again.Replayed)
	require.Equal(t, first.Order.OrderId, again.Order.OrderId)
	require.Nil(t, again.Order.AdmittedAt)
	require.Empty(t, again.Order.Reference)

	other := e.grab(t, 2, 7)
	require.Equal(t, seckillv1.Outcome_OUTCOME_SOLD_OUT, other.Outcome)
	require.Nil(t, other.Order)
	require.False(t, other.Replayed)
	require.Equal(t, seckillv1.Durability_DURABILITY_UNSPECIFIED, other.Durability)
	require.WithinDuration(t, time.Now(), other.DecidedAt.AsTime(), time.Minute)
}

func TestGrab_Refusals(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 10)
	for rev, c := range []struct {
		change func(*ledger.Voucher)
		want   seckillv1.Outcome
	}{
		{func(v *ledger.Voucher) { v.State = ledger.VoucherPaused }, seckillv1.Outcome_OUTCOME_PAUSED},
		{func(v *ledger.Voucher) { v.Begin = time.Now().Add(time.Minute) }, seckillv1.Outcome_OUTCOME_NOT_STARTED},
		{func(v *ledger.Voucher) { v.End = time.Now().Add(-time.Minute) }, seckillv1.Outcome_OUTCOME_ENDED},
		{func(v *ledger.Voucher) { v.State = ledger.VoucherClosed }, seckillv1.Outcome_OUTCOME_ENDED},
	} {
		changed := v
		changed.Rev = int64(rev + 2)
		c.change(&changed)
		ledgertest.Apply(t, e.client, changed)
		require.Equal(t, c.want, e.grab(t, 1, 7).Outcome)
	}
}

func TestGrab_Validation(t *testing.T) {
	client := serve(t, newService(t, Options{})) // nothing of it may reach a backend
	for name, c := range map[string]struct {
		request *seckillv1.GrabRequest
		fields  []string
	}{
		"nothing given":      {&seckillv1.GrabRequest{}, []string{"user_id", "voucher_id"}},
		"user 0":             {&seckillv1.GrabRequest{VoucherId: 1}, []string{"user_id"}},
		"user negative":      {&seckillv1.GrabRequest{UserId: -1, VoucherId: 1}, []string{"user_id"}},
		"user least":         {&seckillv1.GrabRequest{UserId: math.MinInt64, VoucherId: 1}, []string{"user_id"}},
		"voucher 0":          {&seckillv1.GrabRequest{UserId: 1}, []string{"voucher_id"}},
		"voucher negative":   {&seckillv1.GrabRequest{UserId: 1, VoucherId: -5}, []string{"voucher_id"}},
		"reference too long": {&seckillv1.GrabRequest{UserId: 1, VoucherId: 1, Reference: strings.Repeat("x", 65)}, []string{"reference"}},
		"bytes, not letters": {&seckillv1.GrabRequest{UserId: 1, VoucherId: 1, Reference: strings.Repeat("é", 33)}, []string{"reference"}},
		"all of them":        {&seckillv1.GrabRequest{UserId: -1, VoucherId: -1, Reference: strings.Repeat("x", 65)}, []string{"user_id", "voucher_id", "reference"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := client.Grab(t.Context(), c.request)
			requireStatus(t, err, codes.InvalidArgument, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD)
			require.Equal(t, c.fields, violated(err))
		})
	}
}

func TestGetOrder_Validation(t *testing.T) {
	client := serve(t, newService(t, Options{}))
	for name, c := range map[string]struct {
		request *seckillv1.GetOrderRequest
		fields  []string
	}{
		"nothing given":    {&seckillv1.GetOrderRequest{}, []string{"user_id", "key"}},
		"no key":           {&seckillv1.GetOrderRequest{UserId: 1}, []string{"key"}},
		"voucher 0":        {byVoucher(1, 0), []string{"voucher_id"}},
		"voucher negative": {byVoucher(1, -1), []string{"voucher_id"}},
		"user":             {byVoucher(-1, 1), []string{"user_id"}},
		"empty order_id":   {byID(1, ""), []string{"order_id"}},
		"short order_id":   {byID(1, strings.Repeat("0", 25)), []string{"order_id"}},
		"lower case":       {byID(1, strings.Repeat("a", 26)), []string{"order_id"}},
		"letter U":         {byID(1, strings.Repeat("U", 26)), []string{"order_id"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := client.GetOrder(t.Context(), c.request)
			requireStatus(t, err, codes.InvalidArgument, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD)
			require.Equal(t, c.fields, violated(err))
		})
	}
}

func violated(err error) (fields []string) {
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.GetFieldViolations() {
				fields = append(fields, v.GetField())
			}
		}
	}
	return fields
}

func TestGrab_LargestIDsAndLongestReference(t *testing.T) {
	e := newEdge(t)
	e.sell(t, math.MaxInt64, 1)
	response, err := e.Grab(t.Context(), &seckillv1.GrabRequest{UserId: math.MaxInt64, VoucherId: math.MaxInt64, Reference: strings.Repeat("é", 32)})
	require.NoError(t, err)
	require.Equal(t, int64(math.MaxInt64), response.Order.UserId)
	require.Equal(t, int64(math.MaxInt64), response.Order.VoucherId)
	position, err := e.ids.Decode(response.Order.OrderId)
	require.NoError(t, err)
	require.Equal(t, orderid.Position{VoucherID: math.MaxInt64, Epoch: 1, Seq: 1}, position)
	found, err := e.GetOrder(t.Context(), byID(math.MaxInt64, response.Order.OrderId))
	require.NoError(t, err)
	require.Equal(t, response.Order.OrderId, found.Order.OrderId)
}

func TestGrab_Faults(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 8, 1)
	_, err := e.Grab(t.Context(), &seckillv1.GrabRequest{UserId: 1, VoucherId: 99})
	requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND)

	ctx := context.Background()
	require.NoError(t, e.client.Do(ctx, e.client.B().Set().Key(ledger.VoucherKey(1, 1, 9)).Value("x").Build()).Error())
	_, err = e.Grab(t.Context(), &seckillv1.GrabRequest{UserId: 1, VoucherId: 9})
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_LEDGER_FAULT)
	require.NotContains(t, err.Error(), "WRONGTYPE", "no text of a driver")

	require.NoError(t, ledger.ClosePartition(ctx, e.client, 0, 1, "a reason for operators"))
	_, err = e.Grab(t.Context(), &seckillv1.GrabRequest{UserId: 1, VoucherId: 8})
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING)

	e.redis.Kill()
	require.Eventually(t, func() bool {
		_, err := e.Grab(t.Context(), &seckillv1.GrabRequest{UserId: 1, VoucherId: 8})
		reason, ok := rpcserver.Reason(err)
		return ok && reason == seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE
	}, 20*time.Second, 10*time.Millisecond)
	_, err = e.GetOrder(t.Context(), byVoucher(1, 8))
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE)
}

func TestGrab_PastDeadline(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 1)
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	_, err := e.Grab(ctx, &seckillv1.GrabRequest{UserId: 1, VoucherId: 7})
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	require.Zero(t, ledgertest.Books(t, e.client, v).Seq)
}

func TestGrab_PausedRedisIsTypedBeforeTheDeadline(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 1)
	e.grab(t, 1, 7)
	require.NoError(t, e.redis.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := e.Grab(ctx, &seckillv1.GrabRequest{UserId: 2, VoucherId: 7})
	require.NoError(t, e.redis.Resume())
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN)
}

func TestService_BeforeRedisIsFound(t *testing.T) {
	ids, err := orderid.New(orderid.Key{})
	require.NoError(t, err)
	client := serve(t, newService(t, Options{OrderIDs: ids}))
	_, err = client.Grab(t.Context(), &seckillv1.GrabRequest{UserId: 1, VoucherId: 1})
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE)
	require.Contains(t, err.Error(), "nothing was taken")
	_, err = client.GetOrder(t.Context(), byVoucher(1, 1))
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE)
	require.NotContains(t, err.Error(), "nothing was taken", "a look takes nothing")
}

func TestGrab_CarriesTheCallersTrace(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 8, 10)
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for user, header := range []string{trace, "00-nonsense", ""} {
		ctx := t.Context()
		if header != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", header)
		}
		_, err := e.Grab(ctx, &seckillv1.GrabRequest{UserId: int64(user + 1), VoucherId: 8})
		require.NoError(t, err)
	}
	entries, err := ledger.Scan(context.Background(), e.client, 0, 1, "-", 10)
	require.NoError(t, err)
	require.Len(t, entries, 3)
	for i, want := range []string{trace, "", ""} {
		entry, err := ledger.DecodeEntry(0, entries[i].ID, entries[i].Fields)
		require.NoError(t, err)
		require.Equal(t, want, entry.Orders[0].Traceparent)
	}
}

func TestTraceparentForm(t *testing.T) {
	require.True(t, traceparentForm("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"))
	for _, s := range []string{
		"", "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
		"00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
		"00-00000000000000000000000000000000-b7ad6b7169203331-00",
		"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-00",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
		"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-x",
		"00_0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
	} {
		require.False(t, traceparentForm(s), s)
	}
}

// Every reason that the backend can give has a status of its own, and every
// status but those of a bad request says whether a caller may come again.
func TestAnswerError_EveryErrorOfTheBackend(t *testing.T) {
	for err, want := range map[error]struct {
		code   codes.Code
		reason seckillv1.ErrorReason
	}{
		admit.ErrOverloaded:       {codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED},
		admit.ErrBusy:             {codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED},
		admit.ErrVoucherNotFound:  {codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND},
		admit.ErrVoucherArchived:  {codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_ARCHIVED},
		admit.ErrClosed:           {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING},
		admit.ErrScriptVersion:    {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SCRIPT_VERSION},
		admit.ErrRedisUnreachable: {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE},
		admit.ErrLedgerFault:      {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_LEDGER_FAULT},
		admit.ErrOutcomeUnknown:   {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN},
		admit.ErrClosing:          {codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN},
	} {
		requireStatus(t, grabError(err), want.code, want.reason)
		requireStatus(t, lookError(err), want.code, want.reason)
		require.NotContains(t, lookError(err).Error(), "nothing was taken")
	}
	require.Equal(t, codes.Canceled, status.Code(grabError(context.Canceled)))
	require.Equal(t, codes.DeadlineExceeded, status.Code(grabError(context.DeadlineExceeded)))
}
