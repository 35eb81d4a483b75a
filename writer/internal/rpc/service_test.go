package rpc

import (
	"context"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/rpcserver"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	reasonState    = seckillv1.ErrorReason_ERROR_REASON_VOUCHER_STATE
	reasonInvalid  = seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD
	reasonRedis    = seckillv1.ErrorReason_ERROR_REASON_REDIS_UNREACHABLE
	reasonDatabase = seckillv1.ErrorReason_ERROR_REASON_DATABASE_UNREACHABLE
)

func TestStep_EveryPairOfStates(t *testing.T) {
	s := newStack(t, 2)
	// How a voucher gets into a state, and where each step takes it from there;
	// a step that is not named is refused.
	states := []struct {
		name string
		path []string
		to   map[string]string
	}{
		{"DRAFT", nil, map[string]string{"Open": "OPEN"}},
		{"OPEN", []string{"Open"}, map[string]string{"Open": "OPEN", "Resume": "OPEN", "Pause": "PAUSED", "Close": "CLOSED"}},
		{"PAUSED", []string{"Open", "Pause"}, map[string]string{"Pause": "PAUSED", "Resume": "OPEN", "Close": "CLOSED"}},
		{"CLOSED", []string{"Open", "Pause", "Close"}, map[string]string{"Close": "CLOSED", "Archive": "ARCHIVED"}},
		{"ARCHIVED", []string{"Open", "Close", "Archive"}, map[string]string{"Archive": "ARCHIVED"}},
	}
	id := int64(0)
	for _, state := range states {
		for name, step := range steps {
			t.Run(state.name+" "+name, func(t *testing.T) {
				id++
				s.create(t, id, 10)
				for _, before := range state.path {
					s.step(t, before, id)
				}
				was := s.get(t, id)
				require.Equal(t, "VOUCHER_STATE_"+state.name, was.GetState().String())

				now, err := step(context.Background(), s, id)
				want, allowed := state.to[name]
				if !allowed {
					st := requireStatus(t, err, codes.FailedPrecondition, reasonState)
					require.Contains(t, st.Message(), state.name)
					require.Equal(t, state.name, metadata(t, err)["state"])
					require.True(t, proto.Equal(was, s.get(t, id)), "a refused step changes nothing")
					return
				}
				require.NoError(t, err)
				require.Equal(t, "VOUCHER_STATE_"+want, now.GetState().String())
				require.True(t, now.GetApplied())
				if want == state.name {
					require.Equal(t, was.GetRev(), now.GetRev(), "already there: nothing changes")
				} else {
					require.Equal(t, was.GetRev()+1, now.GetRev())
				}
				require.Equal(t, strings.ToLower(want), string(s.ledgerOf(t, id).State))
				require.Equal(t, now.GetRev(), s.ledgerOf(t, id).Rev)

				again, err := step(context.Background(), s, id)
				require.NoError(t, err, "a repeated call succeeds")
				require.True(t, proto.Equal(now, again), "and changes nothing")
			})
		}
	}
}

func metadata(t *testing.T, err error) map[string]string {
	t.Helper()
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetMetadata()
		}
	}
	t.Fatalf("no ErrorInfo in %v", err)
	return nil
}

func TestStep_OfAnUnknownVoucher(t *testing.T) {
	s := newStack(t, 1)
	for name, step := range steps {
		_, err := step(context.Background(), s, math.MaxInt64)
		st := requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND)
		require.Contains(t, st.Message(), "9223372036854775807", name)
	}
	_, err := s.GetVoucher(context.Background(), &seckillv1.GetVoucherRequest{VoucherId: 5})
	requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND)
	_, err = s.GetBooks(context.Background(), &seckillv1.GetBooksRequest{VoucherId: 5})
	requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND)
}

func TestOpen_AfterTheCloseDoesNotOpenAgain(t *testing.T) {
	s := newStack(t, 1)
	s.create(t, 7, 10)
	s.step(t, "Open", 7)
	opened, err := s.store.Voucher(context.Background(), 7)
	require.NoError(t, err)
	s.step(t, "Close", 7)

	_, err = steps["Open"](context.Background(), s, 7)
	requireStatus(t, err, codes.FailedPrecondition, reasonState)
	_, err = steps["Resume"](context.Background(), s, 7)
	requireStatus(t, err, codes.FailedPrecondition, reasonState)

	// A writer that read the row before the closing and carries it only now.
	require.ErrorIs(t, s.guardian.Carry(context.Background(), opened), orderstore.ErrRevMoved)
	require.Equal(t, "closed", string(s.ledgerOf(t, 7).State))
}

func TestCreate_IsIdempotent(t *testing.T) {
	s := newStack(t, 8)
	ctx := context.Background()
	const largest = int64(math.MaxInt64)
	first, err := s.CreateVoucher(ctx, createRequest(largest, 1<<40-1))
	require.NoError(t, err)
	v := first.GetVoucher()
	require.Equal(t, largest, v.GetVoucherId())
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_DRAFT, v.GetState())
	require.EqualValues(t, 1<<40-1, v.GetStock())
	require.Zero(t, v.GetSold())
	require.Zero(t, v.GetRev())
	require.Equal(t, begin.UTC(), v.GetBeginTime().AsTime())
	require.Equal(t, end.UTC(), v.GetEndTime().AsTime())

	again, err := s.CreateVoucher(ctx, createRequest(largest, 1<<40-1))
	require.NoError(t, err)
	require.True(t, proto.Equal(v, again.GetVoucher()))

	// Below a millisecond there is no other content.
	finer := createRequest(largest, 1<<40-1)
	finer.BeginTime = timestamppb.New(begin.Add(999 * time.Microsecond))
	_, err = s.CreateVoucher(ctx, finer)
	require.NoError(t, err)

	for _, change := range []func(*seckillv1.CreateVoucherRequest){
		func(r *seckillv1.CreateVoucherRequest) { r.Title = "Tea" },
		func(r *seckillv1.CreateVoucherRequest) { r.Total-- },
		func(r *seckillv1.CreateVoucherRequest) {
			r.BeginTime = timestamppb.New(begin.Add(time.Millisecond))
		},
		func(r *seckillv1.CreateVoucherRequest) { r.EndTime = timestamppb.New(end.Add(time.Millisecond)) },
	} {
		other := createRequest(largest, 1<<40-1)
		change(other)
		_, err = s.CreateVoucher(ctx, other)
		requireStatus(t, err, codes.AlreadyExists, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_EXISTS)
	}

	s.create(t, 3, 5)
	s.step(t, "Open", 3)
	now, err := s.CreateVoucher(ctx, createRequest(3, 5))
	require.NoError(t, err)
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_OPEN, now.GetVoucher().GetState(), "as it is now")
}

func TestCreate_WithoutAnIDGivesOneEachTime(t *testing.T) {
	s := newStack(t, 8)
	seen := map[int64]bool{}
	for range 5 {
		r, err := s.CreateVoucher(context.Background(), createRequest(0, 5))
		require.NoError(t, err)
		require.Positive(t, r.GetVoucher().GetVoucherId())
		seen[r.GetVoucher().GetVoucherId()] = true
	}
	require.Len(t, seen, 5)
}

func TestCreate_TheSameFromManyAtOnce(t *testing.T) {
	s := newStack(t, 1)
	var running sync.WaitGroup
	errs := make([]error, 20)
	for i := range errs {
		running.Go(func() { _, errs[i] = s.CreateVoucher(context.Background(), createRequest(9, 5)) })
	}
	running.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	list, err := s.ListVouchers(context.Background(), &seckillv1.ListVouchersRequest{})
	require.NoError(t, err)
	require.Len(t, list.GetVouchers(), 1)
}

func TestCreate_NamesEveryFieldThatIsOutOfBounds(t *testing.T) {
	s := New(Options{})
	ts := func(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t) }
	year := func(y int) *timestamppb.Timestamp { return ts(time.Date(y, 1, 1, 0, 0, 0, 0, time.UTC)) }
	table := []struct {
		name   string
		change func(*seckillv1.CreateVoucherRequest)
		fields []string
	}{
		{"negative id", func(r *seckillv1.CreateVoucherRequest) { r.VoucherId = -1 }, []string{"voucher_id"}},
		{"least id", func(r *seckillv1.CreateVoucherRequest) { r.VoucherId = math.MinInt64 }, []string{"voucher_id"}},
		{"total 0", func(r *seckillv1.CreateVoucherRequest) { r.Total = 0 }, []string{"total"}},
		{"total negative", func(r *seckillv1.CreateVoucherRequest) { r.Total = -5 }, []string{"total"}},
		{"total 2^40", func(r *seckillv1.CreateVoucherRequest) { r.Total = 1 << 40 }, []string{"total"}},
		{"title too long", func(r *seckillv1.CreateVoucherRequest) { r.Title = strings.Repeat("ü", 201) }, []string{"title"}},
		{"title not UTF-8", func(r *seckillv1.CreateVoucherRequest) { r.Title = "a\xff" }, []string{"title"}},
		{"no begin", func(r *seckillv1.CreateVoucherRequest) { r.BeginTime = nil }, []string{"begin_time"}},
		{"no end", func(r *seckillv1.CreateVoucherRequest) { r.EndTime = nil }, []string{"end_time"}},
		{"end is begin", func(r *seckillv1.CreateVoucherRequest) { r.EndTime = r.BeginTime }, []string{"end_time"}},
		{"end before begin", func(r *seckillv1.CreateVoucherRequest) { r.BeginTime, r.EndTime = r.EndTime, r.BeginTime }, []string{"end_time"}},
		{"less than a millisecond", func(r *seckillv1.CreateVoucherRequest) {
			r.EndTime = ts(r.BeginTime.AsTime().Add(999 * time.Microsecond))
		}, []string{"end_time"}},
		{"before 1970", func(r *seckillv1.CreateVoucherRequest) { r.BeginTime = year(1969) }, []string{"begin_time"}},
		{"invalid nanos", func(r *seckillv1.CreateVoucherRequest) { r.BeginTime.Nanos = -1 }, []string{"begin_time"}},
		{"after 9999", func(r *seckillv1.CreateVoucherRequest) { r.EndTime = &timestamppb.Timestamp{Seconds: 253402300800} }, []string{"end_time"}},
		{"everything", func(r *seckillv1.CreateVoucherRequest) {
			*r = seckillv1.CreateVoucherRequest{VoucherId: -1, Title: strings.Repeat("x", 201), Total: -1}
		}, []string{"voucher_id", "title", "total", "begin_time", "end_time"}},
	}
	for _, row := range table {
		t.Run(row.name, func(t *testing.T) {
			req := createRequest(1, 1)
			row.change(req)
			_, err := s.CreateVoucher(context.Background(), req)
			requireStatus(t, err, codes.InvalidArgument, reasonInvalid)
			require.Equal(t, row.fields, violated(t, err))
		})
	}
	// The bounds themselves are within.
	for _, change := range []func(*seckillv1.CreateVoucherRequest){
		func(r *seckillv1.CreateVoucherRequest) { r.VoucherId = math.MaxInt64 },
		func(r *seckillv1.CreateVoucherRequest) { r.Total = 1<<40 - 1 },
		func(r *seckillv1.CreateVoucherRequest) { r.Title = strings.Repeat("ü", 200) },
		func(r *seckillv1.CreateVoucherRequest) { r.Title = "" },
		func(r *seckillv1.CreateVoucherRequest) { r.BeginTime = year(1970) },
		func(r *seckillv1.CreateVoucherRequest) { r.EndTime = &timestamppb.Timestamp{Seconds: 253402300799} },
		func(r *seckillv1.CreateVoucherRequest) {
			r.EndTime = ts(r.BeginTime.AsTime().Add(time.Millisecond))
		},
	} {
		req := createRequest(1, 1)
		change(req)
		_, err := newVoucher(req)
		require.NoError(t, err, "%v", req)
	}
}

func violated(t *testing.T, err error) (fields []string) {
	t.Helper()
	for _, d := range status.Convert(err).Details() {
		if bad, ok := d.(*errdetails.BadRequest); ok {
			for _, v := range bad.GetFieldViolations() {
				require.NotEmpty(t, v.GetDescription())
				fields = append(fields, v.GetField())
			}
		}
	}
	return fields
}

func TestEveryCall_RefusesAnIDBelowOne(t *testing.T) {
	s := &stack{VoucherServiceClient: serve(t, New(Options{}), nil)}
	ctx := context.Background()
	calls := map[string]func(id int64) error{
		"Get": func(id int64) error {
			_, err := s.GetVoucher(ctx, &seckillv1.GetVoucherRequest{VoucherId: id})
			return err
		},
		"GetBooks": func(id int64) error {
			_, err := s.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: id})
			return err
		},
	}
	for name, step := range steps {
		calls[name] = func(id int64) error { _, err := step(ctx, s, id); return err }
	}
	for name, call := range calls {
		for _, id := range []int64{0, -1, math.MinInt64} {
			err := call(id)
			requireStatus(t, err, codes.InvalidArgument, reasonInvalid)
			require.Equal(t, []string{"voucher_id"}, violated(t, err), name)
		}
	}
}

func TestList_PagesByAscendingID(t *testing.T) {
	s := newStack(t, 8)
	ctx := context.Background()
	var want []int64
	for id := int64(1); id <= 20; id++ {
		s.create(t, id*1000, 5)
		want = append(want, id*1000)
	}
	for _, size := range []int32{1, 7, 10, 19, 20, 21, 0, 1000} {
		var got []int64
		token, pages := "", 0
		for {
			page, err := s.ListVouchers(ctx, &seckillv1.ListVouchersRequest{PageSize: size, PageToken: token})
			require.NoError(t, err)
			require.NotEmpty(t, page.GetVouchers(), "size %d: no empty page at the end", size)
			if size > 0 {
				require.LessOrEqual(t, len(page.GetVouchers()), int(size))
			}
			for _, v := range page.GetVouchers() {
				got = append(got, v.GetVoucherId())
			}
			pages++
			if token = page.GetNextPageToken(); token == "" {
				break
			}
			require.Less(t, pages, 21, "size %d: the pages end", size)
		}
		require.Equal(t, want, got, "size %d", size)
	}
}

func TestList_RefusesTokensAndSizesThatItNeverGave(t *testing.T) {
	s := New(Options{})
	good := pageToken(42)
	id, ok := parsePageToken(good)
	require.True(t, ok)
	require.EqualValues(t, 42, id)
	for _, token := range []string{"x", "!!", good + "A", good[1:], pageToken(0), pageToken(-1), "Ag" + good[2:], strings.Repeat("A", 12), strings.Repeat("A", 1<<20)} {
		_, err := s.ListVouchers(context.Background(), &seckillv1.ListVouchersRequest{PageToken: token})
		requireStatus(t, err, codes.InvalidArgument, reasonInvalid)
		require.Equal(t, []string{"page_token"}, violated(t, err))
	}
	for _, size := range []int32{-1, 1001, math.MaxInt32} {
		_, err := s.ListVouchers(context.Background(), &seckillv1.ListVouchersRequest{PageSize: size, PageToken: "x"})
		requireStatus(t, err, codes.InvalidArgument, reasonInvalid)
		require.Equal(t, []string{"page_size", "page_token"}, violated(t, err))
	}
}

// A sale whose window is over could never sell anything.
func TestOpen_RefusesAWindowThatIsOver(t *testing.T) {
	s := newStack(t, 1)
	ctx := context.Background()
	end := time.Now().Add(-time.Second).Truncate(time.Millisecond)
	_, err := s.CreateVoucher(ctx, &seckillv1.CreateVoucherRequest{
		VoucherId: 1, Total: 1, BeginTime: timestamppb.New(end.Add(-time.Hour)), EndTime: timestamppb.New(end),
	})
	require.NoError(t, err)
	_, err = steps["Open"](ctx, s, 1)
	st := requireStatus(t, err, codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_STATE)
	require.Contains(t, st.Message(), "end_time "+end.UTC().Format(time.RFC3339Nano))
	require.Equal(t, "DRAFT", metadata(t, err)["state"])
	v := s.get(t, 1)
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_DRAFT, v.GetState())
	require.Zero(t, v.GetRev())

	// One that is on sale stays what it is: the call is safe to repeat.
	soon := time.Now().Add(1500 * time.Millisecond)
	_, err = s.CreateVoucher(ctx, &seckillv1.CreateVoucherRequest{
		VoucherId: 2, Total: 1, BeginTime: timestamppb.New(end), EndTime: timestamppb.New(soon),
	})
	require.NoError(t, err)
	s.step(t, "Open", 2)
	require.Eventually(t, func() bool { return time.Now().After(soon) }, patience, pollTime)
	s.step(t, "Open", 2)
}

func TestOpen_RefusesWhatDoesNotFitIntoRedisMemory(t *testing.T) {
	s := newStack(t, 2, "--maxmemory 40mb")
	ctx := context.Background()
	s.create(t, 1, 1_000_000)
	_, err := steps["Open"](ctx, s, 1)
	st := requireStatus(t, err, codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_LEDGER_MEMORY)
	require.Contains(t, st.Message(), "150000000")
	figures := metadata(t, err)
	require.Equal(t, "150000000", figures["need_bytes"])
	require.Contains(t, st.Message(), figures["left_bytes"])
	v := s.get(t, 1)
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_DRAFT, v.GetState(), "refused before the database is touched")
	require.Zero(t, v.GetRev())
	require.False(t, s.ledgerOf(t, 1).Exists)

	// Each of them fits (22.5 MB), both do not, in whatever partitions they are.
	s.create(t, 2, 150_000)
	s.create(t, 3, 150_000)
	errs := make([]error, 2)
	var running sync.WaitGroup
	for i := range errs {
		running.Go(func() { _, errs[i] = steps["Open"](ctx, s, int64(2+i)) })
	}
	running.Wait()
	opened, refused := int64(2), int64(3)
	if errs[0] != nil {
		opened, refused, errs[0], errs[1] = 3, 2, errs[1], errs[0]
	}
	require.NoError(t, errs[0], "one of two at once is opened")
	requireStatus(t, errs[1], codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_LEDGER_MEMORY)

	s.step(t, "Open", opened) // repeated: needs no memory again
	s.step(t, "Pause", opened)
	_, err = steps["Open"](ctx, s, refused)
	requireStatus(t, err, codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_LEDGER_MEMORY)
	s.step(t, "Close", opened)
	s.step(t, "Open", refused) // what is closed needs nothing any more
}

func TestOpen_WithoutALimitOfRedisTheMachineIsTheLimit(t *testing.T) {
	s := newStack(t, 1)
	s.create(t, 1, 1<<40-1)
	_, err := steps["Open"](context.Background(), s, 1)
	st := requireStatus(t, err, codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_LEDGER_MEMORY)
	require.Contains(t, st.Message(), fmt.Sprint((int64(1)<<40-1)*150))
}

func TestMemoryFigures_StopAtTheLargestNumber(t *testing.T) {
	require.EqualValues(t, 300, times(2, 150))
	require.EqualValues(t, math.MaxInt64, times(math.MaxInt64/150+1, 150))
	require.EqualValues(t, math.MaxInt64, plus(math.MaxInt64, 1))
	require.EqualValues(t, 3, plus(1, 2))
}

func TestReasons_AreSentByNameAndDomain(t *testing.T) {
	err := rpcserver.Error(codes.Unavailable, reasonRedis, "x")
	require.Equal(t, "ERROR_REASON_REDIS_UNREACHABLE", status.Convert(err).Details()[0].(*errdetails.ErrorInfo).GetReason())
}
