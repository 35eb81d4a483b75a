package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

func TestStep_WhileRedisIsAwayIsRecordedAndCarriedLater(t *testing.T) {
	s := newStack(t, 1)
	ctx := context.Background()
	s.create(t, 1, 10)
	s.create(t, 2, 10)
	s.create(t, 3, 10)
	s.step(t, "Open", 1)
	s.step(t, "Open", 2)

	s.redisProxy.Refuse()
	for _, id := range []int64{1, 2} {
		_, err := steps["Pause"](ctx, s, id)
		st := requireStatus(t, err, codes.Unavailable, reasonRedis)
		require.Contains(t, st.Message(), "recorded as PAUSED (rev 2)")
		v := s.get(t, id)
		require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_PAUSED, v.GetState())
		require.EqualValues(t, 2, v.GetRev())
		require.False(t, v.GetApplied())
		require.Equal(t, ledger.VoucherOpen, s.ledgerOf(t, id).State)
	}
	// What needs Redis to be decided changes nothing.
	_, err := steps["Open"](ctx, s, 3)
	requireStatus(t, err, codes.Unavailable, reasonRedis)
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_DRAFT, s.get(t, 3).GetState())
	_, err = s.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: 1})
	requireStatus(t, err, codes.Unavailable, reasonRedis)

	s.redisProxy.Pass()
	var paused *seckillv1.Voucher
	require.Eventually(t, func() bool {
		paused, err = steps["Pause"](ctx, s, 1)
		return err == nil
	}, patience, pollTime, "a repeated call waits for it")
	require.EqualValues(t, 2, paused.GetRev())
	require.True(t, paused.GetApplied())
	require.Equal(t, ledger.VoucherPaused, s.ledgerOf(t, 1).State)
	require.Eventually(t, func() bool { return s.get(t, 2).GetApplied() }, patience, pollTime, "the guardian carries it without a call")
	require.Equal(t, ledger.VoucherPaused, s.ledgerOf(t, 2).State)
}

func TestStep_OfWhichTheReplyIsLostAnswersBeforeTheDeadline(t *testing.T) {
	s := newStack(t, 1)
	s.create(t, 1, 10)
	s.step(t, "Open", 1)
	s.redisProxy.SwallowReplies()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
	defer cancel()
	_, err := steps["Pause"](ctx, s, 1)
	st := requireStatus(t, err, codes.Unavailable, reasonRedis)
	require.Contains(t, st.Message(), "recorded as PAUSED")
	require.NoError(t, ctx.Err(), "the answer came before the deadline")
	s.redisProxy.Pass()
	require.Eventually(t, func() bool { return s.get(t, 1).GetApplied() }, patience, pollTime)
}

func TestStep_WithoutALedgerIsRebuilding(t *testing.T) {
	s := newStack(t, 1)
	ctx := context.Background()
	s.create(t, 1, 10)
	s.create(t, 2, 10)
	s.step(t, "Open", 1)
	require.NoError(t, s.redis.Do(ctx, s.redis.B().Flushall().Build()).Error())

	_, err := steps["Close"](ctx, s, 1)
	st := requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING)
	require.Contains(t, st.Message(), "recorded as CLOSED")
	_, err = steps["Open"](ctx, s, 2)
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING)
	require.False(t, s.ledgerOf(t, 1).Exists, "nothing is made in its place")
	require.False(t, s.ledgerOf(t, 2).Exists)
}

func TestStep_OnAVoucherKeyOfAWrongTypeIsALedgerFault(t *testing.T) {
	s := newStack(t, 1)
	ctx := context.Background()
	s.create(t, 1, 10)
	s.step(t, "Open", 1)
	require.NoError(t, s.redis.Do(ctx, s.redis.B().Set().Key(ledger.VoucherKey(0, 1, 1)).Value("x").Build()).Error())
	_, err := steps["Pause"](ctx, s, 1)
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_LEDGER_FAULT)
}

func TestCalls_WhileTheDatabaseIsAway(t *testing.T) {
	s := newStack(t, 1)
	ctx := context.Background()
	s.create(t, 1, 10)
	calls := map[string]func(context.Context) error{
		"Create": func(ctx context.Context) error { _, err := s.CreateVoucher(ctx, createRequest(2, 5)); return err },
		"Get": func(ctx context.Context) error {
			_, err := s.GetVoucher(ctx, &seckillv1.GetVoucherRequest{VoucherId: 1})
			return err
		},
		"List": func(ctx context.Context) error {
			_, err := s.ListVouchers(ctx, &seckillv1.ListVouchersRequest{})
			return err
		},
		"GetBooks": func(ctx context.Context) error {
			_, err := s.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: 1})
			return err
		},
	}
	for name, step := range steps {
		calls[name] = func(ctx context.Context) error { _, err := step(ctx, s, 1); return err }
	}

	s.sqlProxy.Refuse()
	for name, call := range calls {
		t.Run("refused "+name, func(t *testing.T) {
			requireStatus(t, call(ctx), codes.Unavailable, reasonDatabase)
		})
	}
	s.sqlProxy.Pass()
	require.Eventually(t, func() bool { return calls["Get"](ctx) == nil }, patience, pollTime, "it recovers by itself")

	// A database that hangs: typed, and before the caller has gone.
	s.sqlProxy.Hold()
	var running sync.WaitGroup
	errs := map[string]*error{}
	for name, call := range calls {
		err := new(error)
		errs[name] = err
		running.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, 4*time.Second)
			defer cancel()
			*err = call(ctx)
		})
	}
	running.Wait()
	for name, err := range errs {
		t.Run("hanging "+name, func(t *testing.T) { requireStatus(t, *err, codes.Unavailable, reasonDatabase) })
	}
	s.sqlProxy.Release()
	require.Eventually(t, func() bool { return calls["Open"](ctx) == nil }, patience, pollTime)
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_OPEN, s.get(t, 1).GetState())
}

func TestCalls_BeforeRedisWasReached(t *testing.T) {
	s := newStack(t, 1)
	s.create(t, 1, 10)
	s.step(t, "Open", 1)
	s.create(t, 2, 10)
	early := New(Options{Vouchers: s.store, OrderIDs: s.orderIDs})
	ctx := context.Background()
	_, err := early.GetVoucher(ctx, &seckillv1.GetVoucherRequest{VoucherId: 1})
	require.NoError(t, err, "the database alone can answer that")
	_, err = early.OpenVoucher(ctx, &seckillv1.OpenVoucherRequest{VoucherId: 2})
	requireStatus(t, err, codes.Unavailable, reasonRedis)
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_DRAFT, s.get(t, 2).GetState())
	_, err = early.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: 1})
	requireStatus(t, err, codes.Unavailable, reasonRedis)
	// A sale that must stop is recorded all the same.
	_, err = early.PauseVoucher(ctx, &seckillv1.PauseVoucherRequest{VoucherId: 1})
	st := requireStatus(t, err, codes.Unavailable, reasonRedis)
	require.Contains(t, st.Message(), "recorded as PAUSED")
	require.Eventually(t, func() bool { return s.get(t, 1).GetApplied() }, patience, pollTime)
}

func TestArchive_OnlyWithProvenBooks(t *testing.T) {
	s := newStack(t, 1)
	ctx := context.Background()
	s.create(t, 1, 10)
	s.step(t, "Open", 1)
	s.admit(t, 1, 101, 102, 103)
	s.step(t, "Close", 1)

	_, err := steps["Archive"](ctx, s, 1)
	st := requireStatus(t, err, codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_BOOKS_NOT_PROVEN)
	require.Contains(t, st.Message(), "3 orders in flight")
	require.Equal(t, "3", metadata(t, err)["in_flight"])
	require.Equal(t, "BOOKS_VERDICT_IN_FLIGHT", metadata(t, err)["verdict"])
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_CLOSED, s.get(t, 1).GetState())

	s.persist(t, 0)
	archived := s.step(t, "Archive", 1)
	require.True(t, archived.GetApplied())
	require.EqualValues(t, 3, archived.GetSold())
	require.Equal(t, ledger.VoucherArchived, s.ledgerOf(t, 1).State)
	require.Zero(t, s.ledgerOf(t, 1).Buyers)
	s.step(t, "Archive", 1)
	books, err := s.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: 1})
	require.NoError(t, err)
	require.Nil(t, books.GetBooks().GetLedger())
	require.EqualValues(t, 3, books.GetBooks().GetDatabase().GetOrders())
}

func TestArchive_BringsTheClosingToTheLedgerFirst(t *testing.T) {
	s := newStack(t, 1)
	ctx := context.Background()
	s.create(t, 1, 10)
	s.step(t, "Open", 1)
	s.redisProxy.Refuse()
	_, err := steps["Close"](ctx, s, 1)
	requireStatus(t, err, codes.Unavailable, reasonRedis)
	require.Equal(t, ledger.VoucherOpen, s.ledgerOf(t, 1).State)
	// Books that are proven at this moment are no reason to archive: the ledger
	// still sells.
	working := *s.service.ledger.Load()
	proven := working
	proven.Reckoner = fake{books: books.Books{Verdict: books.Proven}}
	s.service.Bind(proven)
	_, err = steps["Archive"](ctx, s, 1)
	requireStatus(t, err, codes.Unavailable, reasonRedis)
	require.Equal(t, seckillv1.VoucherState_VOUCHER_STATE_CLOSED, s.get(t, 1).GetState(), "not archived while it may still sell")

	s.service.Bind(working)
	s.redisProxy.Pass()
	require.Eventually(t, func() bool { _, err = steps["Archive"](ctx, s, 1); return err == nil }, patience, pollTime)
	require.Equal(t, ledger.VoucherArchived, s.ledgerOf(t, 1).State)
}

func TestGetBooks_ShowsEverySideAndNamesMissingOrders(t *testing.T) {
	s := newStack(t, 2)
	ctx := context.Background()
	read := func(id int64) *seckillv1.Books {
		r, err := s.GetBooks(ctx, &seckillv1.GetBooksRequest{VoucherId: id})
		require.NoError(t, err)
		return r.GetBooks()
	}
	s.create(t, 3, 10)
	draft := read(3)
	require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN, draft.GetVerdict())
	require.Nil(t, draft.GetLedger())
	require.EqualValues(t, 10, draft.GetDatabase().GetStock())

	s.step(t, "Open", 3)
	s.admit(t, 3, 201, 202)
	inFlight := read(3)
	require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_IN_FLIGHT, inFlight.GetVerdict())
	require.EqualValues(t, 2, inFlight.GetInFlight())
	require.Nil(t, inFlight.GetDatabase().Orders, "not counted")
	require.Nil(t, inFlight.GetDatabase().Outcomes)
	l := inFlight.GetLedger()
	require.Equal(t, []int64{1, 8, 10, 0, 2, 0, 2},
		[]int64{l.GetEpoch(), l.GetStock(), l.GetOpening(), l.GetReturned(), l.GetAdmitted(), l.GetSettled(), l.GetBuyers()})

	s.persist(t, 1)
	proven := read(3)
	require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN, proven.GetVerdict(), "%v", proven)
	require.EqualValues(t, 2, proven.GetDatabase().GetOrders())
	require.NotNil(t, proven.GetDatabase().Outcomes)
	require.EqualValues(t, 8, proven.GetDatabase().GetStock())
	require.EqualValues(t, 2, proven.GetLedger().GetSettled())
	require.WithinDuration(t, time.Now(), proven.GetReadTime().AsTime(), time.Minute)

	lost := s.admit(t, 3, 301, 302)
	require.NoError(t, s.redis.Do(ctx, s.redis.B().Del().Key(ledger.OrdersKey(1, 1)).Build()).Error())
	require.NoError(t, s.redis.Do(ctx, s.redis.B().XgroupCreate().Key(ledger.OrdersKey(1, 1)).Group(ledger.Group).Id("0").Mkstream().Build()).Error())
	violated := read(3)
	require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_VIOLATED, violated.GetVerdict())
	var named []string
	for _, v := range violated.GetViolations() {
		require.NotEmpty(t, v.GetRule())
		require.NotEmpty(t, v.GetDetail())
		named = append(named, v.GetOrderIds()...)
	}
	require.Len(t, named, 2)
	for i, id := range named {
		position, err := s.orderIDs.Decode(id)
		require.NoError(t, err)
		require.Equal(t, lost[i], position)
	}
}

func TestAnswers_MapEveryError(t *testing.T) {
	s := newStack(t, 1)
	s.create(t, 1, 10)
	s.step(t, "Open", 1)
	s.step(t, "Close", 1)
	const busy = "there is one in flight"
	table := []struct {
		err    error
		code   codes.Code
		reason seckillv1.ErrorReason
	}{
		{ledger.ErrMissing, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING},
		{ledger.ErrStaleEpoch, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING},
		{orderstore.ErrEpochMoved, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING},
		{ledger.ErrFault, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_LEDGER_FAULT},
		{ledger.ErrRefused, codes.Unavailable, reasonRedis},
		{ledger.ErrUnknown, codes.Unavailable, reasonRedis},
		{ledger.ErrNoScript, codes.Unavailable, reasonRedis},
		{ledger.ErrNoGroup, codes.Unavailable, reasonRedis},
		{orderstore.ErrTransient, codes.Unavailable, reasonDatabase},
		{orderstore.ErrNotMigrated, codes.Unavailable, reasonDatabase},
		{errDriver, codes.Unavailable, reasonDatabase},
		{context.DeadlineExceeded, codes.Unavailable, reasonDatabase},
		{orderstore.ErrInvalidVoucher, codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL},
		{orderstore.ErrVoucherNotFound, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND},
	}
	for _, row := range table {
		t.Run(row.err.Error(), func(t *testing.T) {
			wrapped := fmt.Errorf("doing: %w: %w", row.err, errDriver)
			s.service.Bind(Ledger{Client: s.redis, Partitions: 1, Carrier: s.guardian, Reckoner: fake{reckon: wrapped}})
			_, err := s.GetBooks(context.Background(), &seckillv1.GetBooksRequest{VoucherId: 1})
			requireStatus(t, err, row.code, row.reason)
		})
	}
	t.Run(busy, func(t *testing.T) {
		v := orderstore.Voucher{ID: 1, State: orderstore.StateArchived, Rev: 3}
		err := s.service.carryError(context.Background(), v, fmt.Errorf("archiving: %w", ledger.ErrVoucherBusy))
		st := requireStatus(t, err, codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_BOOKS_NOT_PROVEN)
		require.Contains(t, st.Message(), "recorded as ARCHIVED (rev 3)")
	})
	t.Run("violated books name their rules", func(t *testing.T) {
		err := notProven(books.Books{VoucherID: 1, Verdict: books.Violated, Violations: []books.Violation{
			{Rule: "a", Detail: "1 is not 2"}, {Rule: "b"}, {Rule: "c"}, {Rule: "too_many"},
		}})
		st := requireStatus(t, err, codes.FailedPrecondition, seckillv1.ErrorReason_ERROR_REASON_BOOKS_NOT_PROVEN)
		require.Contains(t, st.Message(), "a (1 is not 2)")
		require.NotContains(t, st.Message(), "too_many")
	})
	t.Run("a caller that has gone", func(t *testing.T) {
		gone, cancel := context.WithCancel(context.Background())
		cancel()
		for _, err := range []error{
			s.service.databaseError(gone, "x", 1, errDriver), s.service.redisError(gone, "x", 1, errDriver),
			s.service.carryError(gone, orderstore.Voucher{}, errors.New("x")), s.service.busyOpening(gone),
		} {
			require.Equal(t, codes.Canceled, status.Code(err))
		}
	})
}

func TestCarry_OfAChangeThatAnotherOvertookAnswersWhatIsNow(t *testing.T) {
	s := newStack(t, 1)
	s.create(t, 1, 10)
	s.step(t, "Open", 1)
	s.service.Bind(Ledger{Client: s.redis, Partitions: 1, Carrier: fake{carry: orderstore.ErrRevMoved}})
	v := s.step(t, "Pause", 1)
	require.EqualValues(t, 2, v.GetRev())
}
