package rpc

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// operators is WriterService as a caller meets it, with its database and its
// Redis behind proxies; the fixture itself goes past them.
type operators struct {
	*writertest.Fixture
	seckillv1.WriterServiceClient
	guardian             *guardian.Guardian
	stopGuardian         func()
	ids                  *orderid.Codec
	sqlProxy, redisProxy *devstack.Proxy
	draining             chan struct{}
	database             *telemetry.Part // what the pipeline says of it
}

// pipelineHealth is a pipeline that says what it is told.
type pipelineHealth struct{ part *telemetry.Part }

func (p pipelineHealth) Health() []telemetry.Part {
	return []telemetry.Part{{Name: "reader.0"}, *p.part}
}

func newOperators(t *testing.T, partitions int) *operators {
	t.Helper()
	f := writertest.New(t, partitions)
	o := &operators{Fixture: f, guardian: f.Guardian(), draining: make(chan struct{}), database: &telemetry.Part{Name: "database", Serving: true}}
	o.stopGuardian = f.Run(o.guardian)
	f.Open(o.guardian)
	before, rest, _ := strings.Cut(f.DSN, "tcp(")
	addr, after, _ := strings.Cut(rest, ")")
	o.sqlProxy, o.redisProxy = devstack.TestProxy(t, addr), devstack.TestProxy(t, f.Redis.Addr())
	store, err := orderstore.Open(f.Ctx, orderstore.Options{DSN: before + "tcp(" + o.sqlProxy.Addr() + ")" + after, LockWait: time.Second, Logger: writertest.Logger()})
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	o.ids, err = orderid.New(orderid.Key{Secret: [orderid.KeySize]byte{1, 2, 3}})
	require.NoError(t, err)

	service := NewWriter(WriterOptions{Store: store, OrderIDs: o.ids, Logger: writertest.Logger(), Draining: o.draining})
	o.WriterServiceClient = serveOperators(t, service)
	_, err = o.GetBacklog(f.Ctx, &seckillv1.GetBacklogRequest{})
	requireStatus(t, err, codes.Unavailable, reasonRedis)
	service.Bind(WriterLedger{Client: f.Dial(o.redisProxy.Addr()), Partitions: partitions, Guardian: o.guardian, Pipeline: pipelineHealth{o.database}})
	return o
}

func serveOperators(t *testing.T, service *WriterService) seckillv1.WriterServiceClient {
	t.Helper()
	server, err := rpcserver.New(rpcserver.Options{Addr: "127.0.0.1:0", DefaultDeadline: 20 * time.Second, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	seckillv1.RegisterWriterServiceServer(server.GRPC(), service)
	require.NoError(t, server.Listen())
	conn, err := grpc.NewClient(server.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	run(t, server.Run)
	t.Cleanup(func() { conn.Close() })
	return seckillv1.NewWriterServiceClient(conn)
}

// hold makes orders of users dead letters, by a constraint that refuses them
// while they are written.
func (o *operators) hold(voucherID int64, users ...int64) {
	o.T.Helper()
	o.Exec(fmt.Sprintf("ALTER TABLE orders ADD CONSTRAINT test_refused CHECK (voucher_id <> %d OR user_id NOT IN (%s))",
		voucherID, strings.Trim(strings.ReplaceAll(fmt.Sprint(users), " ", ","), "[]")))
	o.Admitted(voucherID, users...)
	o.Drained()
	o.Exec("ALTER TABLE orders DROP CONSTRAINT test_refused")
}

func (o *operators) id(voucherID, seq int64) string {
	return o.ids.Encode(orderid.Position{VoucherID: voucherID, Epoch: 1, Seq: seq})
}

func (o *operators) letters(filter *seckillv1.DeadLetterFilter) []*seckillv1.DeadLetter {
	o.T.Helper()
	resp, err := o.ListDeadLetters(o.Ctx, &seckillv1.ListDeadLettersRequest{Filter: filter, PageSize: 1000})
	require.NoError(o.T, err)
	require.Empty(o.T, resp.GetNextPageToken())
	return resp.GetDeadLetters()
}

func byOrderID(id string) *seckillv1.FindOrderRequest {
	return &seckillv1.FindOrderRequest{Key: &seckillv1.FindOrderRequest_OrderId{OrderId: id}}
}

func byUser(userID, voucherID int64) *seckillv1.FindOrderRequest {
	return &seckillv1.FindOrderRequest{Key: &seckillv1.FindOrderRequest_UserVoucher{
		UserVoucher: &seckillv1.UserVoucher{UserId: userID, VoucherId: voucherID},
	}}
}

func ofVoucher(id int64, size int32, token string) *seckillv1.ListOrdersRequest {
	return &seckillv1.ListOrdersRequest{Of: &seckillv1.ListOrdersRequest_VoucherId{VoucherId: id}, PageSize: size, PageToken: token}
}

func ofUser(id int64, size int32, token string) *seckillv1.ListOrdersRequest {
	return &seckillv1.ListOrdersRequest{Of: &seckillv1.ListOrdersRequest_UserId{UserId: id}, PageSize: size, PageToken: token}
}

func TestFindOrder_HoweverItEnded(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	o.Admitted(7, 1)
	_, err := o.FindOrder(o.Ctx, byUser(1, 7))
	requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND)
	o.Drained()
	o.hold(7, 2)
	o.Exec(`INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind, reason) VALUES (7, 1, 10, 3, 'REJECTED', ''), (7, 1, 11, 4, 'CANCELLED', 'was broken')`)
	o.Exec(`INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind, standing_epoch, standing_seq) VALUES (7, 1, 12, 1, 'CONFLICT', 1, 1), (7, 1, 13, 5, 'CONFLICT', 1, 99)`)

	for name, c := range map[string]struct {
		requests []*seckillv1.FindOrderRequest
		id       string
		user     int64
		state    seckillv1.OrderState
		reason   string
	}{
		"persisted": {[]*seckillv1.FindOrderRequest{byUser(1, 7), byOrderID(o.id(7, 1))}, o.id(7, 1), 1, seckillv1.OrderState_ORDER_STATE_PERSISTED, ""},
		"held":      {[]*seckillv1.FindOrderRequest{byUser(2, 7), byOrderID(o.id(7, 2))}, o.id(7, 2), 2, seckillv1.OrderState_ORDER_STATE_HELD, "held as a dead letter: "},
		"rejected":  {[]*seckillv1.FindOrderRequest{byUser(3, 7), byOrderID(o.id(7, 10))}, o.id(7, 10), 3, seckillv1.OrderState_ORDER_STATE_REJECTED, "no unit left"},
		"cancelled": {[]*seckillv1.FindOrderRequest{byUser(4, 7), byOrderID(o.id(7, 11))}, o.id(7, 11), 4, seckillv1.OrderState_ORDER_STATE_CANCELLED, "was broken"},
		"conflict":  {[]*seckillv1.FindOrderRequest{byOrderID(o.id(7, 12))}, o.id(7, 1), 1, seckillv1.OrderState_ORDER_STATE_PERSISTED, "order " + o.id(7, 12) + " ended as a conflict"},
	} {
		for _, request := range c.requests {
			found, err := o.FindOrder(o.Ctx, request)
			require.NoError(t, err, name)
			order := found.GetOrder()
			require.Equal(t, c.id, order.GetOrderId(), name)
			require.Equal(t, c.user, order.GetUserId(), name)
			require.EqualValues(t, 7, order.GetVoucherId(), name)
			require.Equal(t, c.state, order.GetState(), name)
			require.Equal(t, c.state == seckillv1.OrderState_ORDER_STATE_PERSISTED, order.GetPersistedAt() != nil, name)
			if c.reason == "" {
				require.Empty(t, found.GetReason(), name)
				require.WithinDuration(t, time.Now(), order.GetAdmittedAt().AsTime(), time.Minute)
			} else {
				require.Contains(t, found.GetReason(), c.reason, name)
			}
		}
	}
	for _, request := range []*seckillv1.FindOrderRequest{
		byUser(9, 7), byUser(1, 8), byUser(math.MaxInt64, math.MaxInt64), byOrderID(o.id(7, 500)), byOrderID("7ZZZZZZZZZZZZZZZZZZZZZZZZZ"),
	} {
		_, err := o.FindOrder(o.Ctx, request)
		requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND)
	}
	_, err = o.FindOrder(o.Ctx, byOrderID(o.id(7, 13)))
	requireStatus(t, err, codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL)
}

// rows inserts rows of orders as a sale leaves them.
func (o *operators) rows(voucherID, from, to int64) {
	o.T.Helper()
	var values []string
	for seq := from; seq <= to; seq++ {
		values = append(values, fmt.Sprintf("(%d, %d, %d, %d, 'ref %d', '2026-01-01 00:00:00.001')", voucherID, 1+seq%2, seq, 1000+seq, seq))
	}
	o.Exec(`INSERT INTO orders (voucher_id, epoch, seq, user_id, reference, admitted_at) VALUES ` + strings.Join(values, ","))
}

func TestListOrders_PagesOfAVoucherKeepTheirPlaceWhileOrdersAreWritten(t *testing.T) {
	o := newOperators(t, 1)
	o.rows(7, 1, 2000)
	o.rows(8, 1, 10)
	var all []*seckillv1.Order
	token, pages := "", 0
	for {
		page, err := o.ListOrders(o.Ctx, ofVoucher(7, 250, token))
		require.NoError(t, err)
		all = append(all, page.GetOrders()...)
		if token = page.GetNextPageToken(); token == "" {
			break
		}
		if pages++; pages == 1 {
			o.rows(7, 2001, 2250) // half of them lie in epoch 1, all behind this page
			// Before it: one that is committed late, or requeued.
			o.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 1, 99, '2026-01-01')")
		}
	}
	require.Len(t, all, 2250, "and no page is empty, although the last one is full")
	require.Equal(t, 8, pages)
	last := orderid.Position{}
	for _, order := range all {
		at, err := o.ids.Decode(order.GetOrderId())
		require.NoError(t, err)
		require.True(t, at.Epoch > last.Epoch || at.Epoch == last.Epoch && at.Seq > last.Seq, "%v after %v", at, last)
		require.Equal(t, 1000+at.Seq, order.GetUserId())
		require.Equal(t, fmt.Sprintf("ref %d", at.Seq), order.GetReference())
		require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, order.GetState())
		require.Equal(t, time.Date(2026, 1, 1, 0, 0, 0, 1e6, time.UTC), order.GetAdmittedAt().AsTime())
		require.NotNil(t, order.GetPersistedAt())
		last = at
	}
	page, err := o.ListOrders(o.Ctx, ofVoucher(7, 10_000, ""))
	require.NoError(t, err)
	require.Len(t, page.GetOrders(), 2251)
	page, err = o.ListOrders(o.Ctx, ofVoucher(7, 0, ""))
	require.NoError(t, err)
	require.Len(t, page.GetOrders(), 1000)
	page, err = o.ListOrders(o.Ctx, ofVoucher(99, 0, ""))
	require.NoError(t, err)
	require.Empty(t, page.GetOrders())
}

func TestListOrders_OfAUserByVoucher(t *testing.T) {
	o := newOperators(t, 1)
	for _, voucher := range []int64{9, math.MaxInt64, 7} {
		o.rows(voucher, 1, 3)
	}
	var vouchers []int64
	for token := ""; ; {
		page, err := o.ListOrders(o.Ctx, ofUser(1002, 1, token))
		require.NoError(t, err)
		for _, order := range page.GetOrders() {
			require.EqualValues(t, 1002, order.GetUserId())
			vouchers = append(vouchers, order.GetVoucherId())
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
		if len(vouchers) == 1 {
			o.rows(6, 1, 3)
			o.rows(8, 1, 3)
		}
	}
	require.Equal(t, []int64{7, 8, 9, math.MaxInt64}, vouchers, "none twice, none that was there left out")
}

func TestListDeadLetters_ByPagesAndFilters(t *testing.T) {
	o := newOperators(t, 2)
	o.Voucher(o.guardian, 7, 100)
	o.Voucher(o.guardian, 8, 100)
	o.hold(7, 1, 2, 3)
	o.hold(8, 1)
	_, err := o.Store.HoldEntry(o.Ctx, orderstore.DeadEntry{PartitionID: 1, Epoch: 1, EntryID: "5-1", Raw: []byte("garbage"), Reason: "unreadable"})
	require.NoError(t, err)

	all := o.letters(nil)
	require.Len(t, all, 5)
	first := all[0]
	require.Equal(t, o.id(7, 1), first.GetOrder().GetOrderId())
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_HELD, first.GetOrder().GetState())
	require.EqualValues(t, 1, first.GetOrder().GetUserId())
	require.EqualValues(t, 1, first.GetPartition())
	require.EqualValues(t, 1, first.GetEpoch())
	require.EqualValues(t, 1, first.GetUnits())
	require.EqualValues(t, 1, first.GetTries())
	require.NotEmpty(t, first.GetRaw())
	require.NotEmpty(t, first.GetReason())
	require.NotEmpty(t, first.GetEntryId())
	require.WithinDuration(t, time.Now(), first.GetFirstSeen().AsTime(), time.Minute)
	entry := all[4]
	require.Nil(t, entry.GetOrder())
	require.Equal(t, []byte("garbage"), entry.GetRaw())
	require.Equal(t, "5-1", entry.GetEntryId())
	require.Zero(t, entry.GetUnits())

	var paged []string
	for token := ""; ; {
		page, err := o.ListDeadLetters(o.Ctx, &seckillv1.ListDeadLettersRequest{PageSize: 2, PageToken: token})
		require.NoError(t, err)
		for _, letter := range page.GetDeadLetters() {
			paged = append(paged, letter.GetDeadLetterId())
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	for i, letter := range all {
		require.Equal(t, letter.GetDeadLetterId(), paged[i])
	}
	require.Len(t, paged, len(all))

	for name, c := range map[string]struct {
		filter *seckillv1.DeadLetterFilter
		n      int
	}{
		"voucher": {&seckillv1.DeadLetterFilter{VoucherId: 7}, 3},
		"user":    {&seckillv1.DeadLetterFilter{UserId: 1}, 2},
		"reason":  {&seckillv1.DeadLetterFilter{ReasonPrefix: "unread"}, 1},
		"before":  {&seckillv1.DeadLetterFilter{SeenBefore: timestamppb.New(time.Now().Add(-time.Hour))}, 0},
		"later":   {&seckillv1.DeadLetterFilter{SeenBefore: timestamppb.New(time.Now().Add(time.Hour))}, 5},
	} {
		require.Len(t, o.letters(c.filter), c.n, name)
	}
}

func TestListDeadLetters_PagesFitIntoAMessage(t *testing.T) {
	o := newOperators(t, 1)
	for i := range 6 {
		_, err := o.Store.HoldEntry(o.Ctx, orderstore.DeadEntry{Epoch: 1, EntryID: fmt.Sprintf("%d-0", i+1), Raw: make([]byte, 900_000), Reason: "large"})
		require.NoError(t, err)
	}
	n, pages := 0, 0
	for token := ""; ; {
		page, err := o.ListDeadLetters(o.Ctx, &seckillv1.ListDeadLettersRequest{PageSize: 1000, PageToken: token})
		require.NoError(t, err)
		require.NotEmpty(t, page.GetDeadLetters())
		n += len(page.GetDeadLetters())
		pages++
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	require.Equal(t, 6, n)
	require.Equal(t, 3, pages)
}

func TestPageTokens_AreBoundToTheirQuery(t *testing.T) {
	o := newOperators(t, 1)
	o.rows(7, 1, 3)
	o.Voucher(o.guardian, 9, 100)
	o.hold(9, 1, 2)
	page, err := o.ListOrders(o.Ctx, ofVoucher(7, 1, ""))
	require.NoError(t, err)
	token := page.GetNextPageToken()
	require.NotEmpty(t, token)
	letters, err := o.ListDeadLetters(o.Ctx, &seckillv1.ListDeadLettersRequest{PageSize: 1})
	require.NoError(t, err)
	deadToken := letters.GetNextPageToken()
	require.NotEmpty(t, deadToken)

	_, err = o.ListOrders(o.Ctx, ofVoucher(7, 2, token))
	require.NoError(t, err, "the size may change")
	for name, call := range map[string]func() error{
		"another voucher":   func() error { _, err := o.ListOrders(o.Ctx, ofVoucher(8, 1, token)); return err },
		"a user":            func() error { _, err := o.ListOrders(o.Ctx, ofUser(7, 1, token)); return err },
		"another list":      func() error { _, err := o.ListOrders(o.Ctx, ofVoucher(7, 1, deadToken)); return err },
		"cut":               func() error { _, err := o.ListOrders(o.Ctx, ofVoucher(7, 1, token[:len(token)-4])); return err },
		"of vouchers":       func() error { _, err := o.ListOrders(o.Ctx, ofVoucher(7, 1, pageToken(7))); return err },
		"nonsense":          func() error { _, err := o.ListOrders(o.Ctx, ofVoucher(7, 1, "%")); return err },
		"a place that none": func() error { _, err := o.ListOrders(o.Ctx, ofVoucher(7, 1, cursor("orders 7 0", "x"))); return err },
		"another filter": func() error {
			_, err := o.ListDeadLetters(o.Ctx, &seckillv1.ListDeadLettersRequest{Filter: &seckillv1.DeadLetterFilter{VoucherId: 9}, PageToken: deadToken})
			return err
		},
	} {
		err := call()
		requireStatus(t, err, codes.InvalidArgument, reasonInvalid)
		require.Equal(t, []string{"page_token"}, violated(t, err), name)
	}
}

func TestWriterService_NamesEveryViolation(t *testing.T) {
	client := serveOperators(t, NewWriter(WriterOptions{})) // nothing of it may reach a database
	ctx := context.Background()
	filter := &seckillv1.DeadLetterFilter{
		VoucherId: -1, UserId: -2, ReasonPrefix: strings.Repeat("x", 256), SeenBefore: timestamppb.New(time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)),
	}
	filterFields := []string{"filter.voucher_id", "filter.user_id", "filter.reason_prefix", "filter.seen_before"}
	find := func(req *seckillv1.FindOrderRequest) error { _, err := client.FindOrder(ctx, req); return err }
	list := func(req *seckillv1.ListOrdersRequest) error { _, err := client.ListOrders(ctx, req); return err }
	letters := func(req *seckillv1.ListDeadLettersRequest) error {
		_, err := client.ListDeadLetters(ctx, req)
		return err
	}
	resolve := func(req *seckillv1.ResolveDeadLetterRequest) error {
		stream, err := client.ResolveDeadLetter(ctx, req)
		require.NoError(t, err)
		_, err = stream.Recv()
		return err
	}
	for name, c := range map[string]struct {
		err    error
		fields []string
	}{
		"find nothing":       {find(&seckillv1.FindOrderRequest{}), []string{"key"}},
		"find lower case":    {find(byOrderID(strings.Repeat("a", 26))), []string{"order_id"}},
		"find short":         {find(byOrderID("ABC")), []string{"order_id"}},
		"find ids":           {find(byUser(0, -1)), []string{"user_voucher.user_id", "user_voucher.voucher_id"}},
		"list nothing":       {list(&seckillv1.ListOrdersRequest{PageSize: -1, PageToken: "x"}), []string{"of", "page_size", "page_token"}},
		"list voucher":       {list(ofVoucher(0, 10_001, "")), []string{"voucher_id", "page_size"}},
		"list user":          {list(ofUser(math.MinInt64, 0, "")), []string{"user_id"}},
		"dead letters":       {letters(&seckillv1.ListDeadLettersRequest{Filter: filter, PageSize: 1001, PageToken: "x"}), append(filterFields[:4:4], "page_size", "page_token")},
		"resolve nothing":    {resolve(&seckillv1.ResolveDeadLetterRequest{}), []string{"which", "action", "operator", "reason"}},
		"resolve by filter":  {resolve(&seckillv1.ResolveDeadLetterRequest{Which: &seckillv1.ResolveDeadLetterRequest_Filter{Filter: filter}, Action: 9, Operator: " ", Reason: "\t\n"}), append(filterFields[:4:4], "action", "operator", "reason")},
		"resolve too long":   {resolve(one(strings.Repeat("x", 129), cancel, strings.Repeat("é", 65), strings.Repeat("é", 256))), []string{"dead_letter_id", "operator", "reason"}},
		"resolve without id": {resolve(one("", cancel, "ann", "why")), []string{"dead_letter_id"}},
	} {
		t.Run(name, func(t *testing.T) {
			requireStatus(t, c.err, codes.InvalidArgument, reasonInvalid)
			require.Equal(t, c.fields, violated(t, c.err))
		})
	}
	requireStatus(t, resolve(one("o.1.1", cancel, strings.Repeat("é", 64), strings.Repeat("é", 255))),
		codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_DEAD_LETTER_NOT_FOUND)
}

func TestWriterService_WhileTheDatabaseIsAway(t *testing.T) {
	o := newOperators(t, 1)
	o.sqlProxy.Refuse()
	for name, call := range map[string]func(context.Context) error{
		"FindOrder":  func(ctx context.Context) error { _, err := o.FindOrder(ctx, byUser(1, 7)); return err },
		"ListOrders": func(ctx context.Context) error { _, err := o.ListOrders(ctx, ofVoucher(7, 0, "")); return err },
		"ListDeadLetters": func(ctx context.Context) error {
			_, err := o.ListDeadLetters(ctx, &seckillv1.ListDeadLettersRequest{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) { requireStatus(t, call(o.Ctx), codes.Unavailable, reasonDatabase) })
	}
}

// The mark of a user in the ledger, and how his order ended there.
func (o *operators) ledgerOf(userID, voucherID, seq int64) ledger.Lookup {
	o.T.Helper()
	found, err := ledger.FindOrder(o.Ctx, o.Client, ledger.Partition(voucherID, o.Partitions), 1, voucherID, userID, seq)
	require.NoError(o.T, err)
	return found
}
