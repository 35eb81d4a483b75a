package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/orderstore"
	"github.com/seckill/seckill/writer/internal/writertest"
)

const (
	requeue = seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_REQUEUE
	cancel  = seckillv1.DeadLetterAction_DEAD_LETTER_ACTION_CANCEL
)

func one(id string, action seckillv1.DeadLetterAction, operator, reason string) *seckillv1.ResolveDeadLetterRequest {
	return &seckillv1.ResolveDeadLetterRequest{
		Which:  &seckillv1.ResolveDeadLetterRequest_DeadLetterId{DeadLetterId: id},
		Action: action, Operator: operator, Reason: reason,
	}
}

func many(filter *seckillv1.DeadLetterFilter, action seckillv1.DeadLetterAction) *seckillv1.ResolveDeadLetterRequest {
	return &seckillv1.ResolveDeadLetterRequest{
		Which:  &seckillv1.ResolveDeadLetterRequest_Filter{Filter: filter},
		Action: action, Operator: "ann", Reason: "ticket 12",
	}
}

// resolve reads the whole stream; hear is told of each message, if given.
func (o *operators) resolve(ctx context.Context, req *seckillv1.ResolveDeadLetterRequest, hear func(*seckillv1.ResolveDeadLetterResponse)) ([]*seckillv1.ResolveDeadLetterResponse, error) {
	stream, err := o.ResolveDeadLetter(ctx, req)
	if err != nil {
		return nil, err
	}
	var all []*seckillv1.ResolveDeadLetterResponse
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, m)
		if hear != nil {
			hear(m)
		}
	}
}

func TestResolve_RequeueMakesARowAndTheLedgerHearsOfIt(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	o.hold(7, 1)
	letter := o.letters(nil)[0]
	require.Equal(t, ledger.MarkHeld, o.ledgerOf(1, 7, 1).Mark.State)

	came, err := o.resolve(o.Ctx, one(letter.GetDeadLetterId(), requeue, "ann", "ticket 12"), nil)
	require.NoError(t, err)
	require.Len(t, came, 1)
	require.Equal(t, letter.GetDeadLetterId(), came[0].GetDeadLetterId())
	require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED, came[0].GetResult())
	require.EqualValues(t, 1, came[0].GetDone())
	require.EqualValues(t, 1, came[0].GetTotal())
	found, err := o.FindOrder(o.Ctx, byUser(1, 7))
	require.NoError(t, err)
	require.Equal(t, letter.GetOrder().GetOrderId(), found.GetOrder().GetOrderId())
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_PERSISTED, found.GetOrder().GetState())
	require.EqualValues(t, 1, o.Number("SELECT COUNT(*) FROM operator_actions WHERE operator = 'ann' AND action = 'REQUEUE' AND reason = 'ticket 12'"))
	require.Eventually(t, func() bool { return o.ledgerOf(1, 7, 1).Mark.State == ledger.MarkPersisted }, patience, pollTime)

	again, err := o.resolve(o.Ctx, one(letter.GetDeadLetterId(), cancel, "bob", "too late"), nil)
	require.NoError(t, err)
	require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED, again[0].GetResult(), "it answers what it came to")
	require.EqualValues(t, 1, o.Number("SELECT COUNT(*) FROM operator_actions"))
}

func TestFindOrder_NamesTheOperatorWhoDecided(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	o.hold(7, 1, 2, 3)
	letters := o.letters(nil)
	for i, action := range []seckillv1.DeadLetterAction{cancel, requeue} {
		_, err := o.resolve(o.Ctx, one(letters[i].GetDeadLetterId(), action, "ann", fmt.Sprint("ticket ", i)), nil)
		require.NoError(t, err)
	}
	// One more ends as a conflict: the order that stands was nobody's decision.
	o.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 900, 3, '2026-01-01')")
	_, err := o.resolve(o.Ctx, one(letters[2].GetDeadLetterId(), requeue, "bob", "ticket 2"), nil)
	require.NoError(t, err)

	for seq, want := range map[int64]*seckillv1.OperatorAction{
		1: {Operator: "ann", Action: cancel, Reason: "ticket 0"}, 2: {Operator: "ann", Action: requeue, Reason: "ticket 1"},
		3: {Operator: "bob", Action: requeue, Reason: "ticket 2"}, 900: nil,
	} {
		found, err := o.FindOrder(o.Ctx, byOrderID(o.id(7, seq)))
		require.NoError(t, err)
		action := found.GetOperatorAction()
		if want == nil {
			require.Nil(t, action)
			continue
		}
		require.WithinDuration(t, time.Now(), action.GetActionTime().AsTime(), time.Minute)
		action.ActionTime = nil
		require.True(t, proto.Equal(want, action), "%v is not %v", action, want)
	}
	found, err := o.FindOrder(o.Ctx, byUser(1, 7))
	require.NoError(t, err)
	require.Equal(t, seckillv1.OrderState_ORDER_STATE_CANCELLED, found.GetOrder().GetState())
	require.Equal(t, "ann", found.GetOperatorAction().GetOperator())
}

// Two operators press at the same moment, at two writers.
func TestResolve_TwoOperatorsAtOnceReturnOneUnit(t *testing.T) {
	const n = 20
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, n)
	users := writertest.Users(1, n)
	o.hold(7, users...)
	other := *o
	store, err := orderstore.Open(o.Ctx, orderstore.Options{DSN: o.DSN, LockWait: time.Second, Logger: writertest.Logger()})
	require.NoError(t, err)
	t.Cleanup(func() { store.Close() })
	other.WriterServiceClient = serveOperators(t, NewWriter(WriterOptions{Store: store, OrderIDs: o.ids, Logger: writertest.Logger()}))
	for _, letter := range o.letters(nil) {
		var pressing sync.WaitGroup
		for name, at := range map[string]*operators{"ann": o, "bob": &other, "cid": o, "dan": &other} {
			pressing.Go(func() {
				came, err := at.resolve(o.Ctx, one(letter.GetDeadLetterId(), cancel, name, "at once"), nil)
				if err != nil || len(came) != 1 || came[0].GetResult() != seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED {
					t.Errorf("%v %v", came, err)
				}
			})
		}
		pressing.Wait()
	}
	require.EqualValues(t, n, o.Number("SELECT COUNT(*) FROM operator_actions"))
	require.EqualValues(t, n, o.Number("SELECT COUNT(DISTINCT target) FROM operator_actions"))
	require.Eventually(t, func() bool {
		b, err := ledger.ReadBooks(o.Ctx, o.Client, 0, 1, 7)
		return err == nil && b.Returned == n && o.Number("SELECT COUNT(*) FROM ledger_updates") == 0
	}, patience, pollTime)
	b, err := ledger.ReadBooks(o.Ctx, o.Client, 0, 1, 7)
	require.NoError(t, err)
	require.EqualValues(t, n, b.Returned, "each unit came back once")
	require.EqualValues(t, n, b.Stock)
	o.Admitted(7, users...) // each may buy again, and once
	reply, err := o.Admit(7, n+1)
	require.NoError(t, err)
	require.Equal(t, ledger.DecisionSoldOut, reply.Answers[0].Decision)
	reply, err = o.Admit(7, users...)
	require.NoError(t, err)
	for _, answer := range reply.Answers {
		require.Equal(t, ledger.DecisionReplayed, answer.Decision)
	}
}

func TestResolve_ByFilterTellsOfEachAndTakesNoneThatComesLater(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 1000)
	o.Voucher(o.guardian, 8, 1000)
	o.hold(7, writertest.Users(1, 120)...)
	o.hold(8, 1, 2)
	// A user got another order meanwhile: the requeue of this one ends as a conflict.
	o.Exec("INSERT INTO orders (voucher_id, epoch, seq, user_id, admitted_at) VALUES (7, 1, 900, 60, '2026-01-01')")
	later := false
	came, err := o.resolve(o.Ctx, many(&seckillv1.DeadLetterFilter{VoucherId: 7}, requeue), func(*seckillv1.ResolveDeadLetterResponse) {
		if !later {
			later = true
			o.Exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind, reason, tries) VALUES (7, 1, 950, 500, 'HELD', 'later', 1)")
		}
	})
	require.NoError(t, err)
	require.Len(t, came, 120)
	seen := map[string]bool{}
	for i, m := range came {
		require.EqualValues(t, i+1, m.GetDone())
		require.EqualValues(t, 120, m.GetTotal())
		seen[m.GetDeadLetterId()] = true
		want := seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_PERSISTED
		if i == 59 {
			want = seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CONFLICT
		}
		require.Equal(t, want, m.GetResult(), "%d: %s", i, m.GetDetail())
	}
	require.Len(t, seen, 120)
	require.Len(t, o.letters(&seckillv1.DeadLetterFilter{VoucherId: 7}), 1, "what came later is left alone")
	require.Len(t, o.letters(&seckillv1.DeadLetterFilter{VoucherId: 8}), 2)

	none, err := o.resolve(o.Ctx, many(&seckillv1.DeadLetterFilter{VoucherId: 99}, cancel), nil)
	require.NoError(t, err)
	require.Empty(t, none)
}

// many dead letters are made by a statement, without their orders.
func (o *operators) manyHeld(n int) {
	o.T.Helper()
	const digits = "(SELECT 0 d UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7 UNION ALL SELECT 8 UNION ALL SELECT 9)"
	o.Exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind, reason, raw, tries) SELECT 7, 1, seq, seq, 'HELD', 'r', 'raw', 1 FROM " +
		"(SELECT 1 + a.d + 10*b.d + 100*c.d + 1000*e.d + 10000*f.d + 100000*g.d AS seq FROM " +
		digits + " a, " + digits + " b, " + digits + " c, " + digits + " e, " + digits + " f, " + digits + " g) AS numbers WHERE seq <= " + strconv.Itoa(n))
}

func TestResolve_RefusesAFilterThatNamesTooMany(t *testing.T) {
	o := newOperators(t, 1)
	o.manyHeld(100_001)
	_, err := o.resolve(o.Ctx, many(nil, cancel), nil)
	st := requireStatus(t, err, codes.InvalidArgument, reasonInvalid)
	require.Equal(t, []string{"filter"}, violated(t, err))
	require.Contains(t, st.Message(), "100001")
	require.Zero(t, o.Number("SELECT COUNT(*) FROM operator_actions"))
}

func TestResolve_WhatStillCannotBeStoredStaysHeld(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	_, err := o.Store.HoldEntry(o.Ctx, orderstore.DeadEntry{Epoch: 1, EntryID: "5-1", Raw: []byte("garbage"), Reason: "unreadable"})
	require.NoError(t, err)
	came, err := o.resolve(o.Ctx, many(nil, requeue), nil)
	require.NoError(t, err)
	require.Len(t, came, 1)
	require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_STILL_HELD, came[0].GetResult())
	require.Contains(t, came[0].GetDetail(), "only be cancelled")
	came, err = o.resolve(o.Ctx, many(nil, cancel), nil)
	require.NoError(t, err)
	require.Equal(t, seckillv1.DeadLetterResult_DEAD_LETTER_RESULT_CANCELLED, came[0].GetResult())
}

func TestResolve_OfOneThatNeverWas(t *testing.T) {
	o := newOperators(t, 1)
	for _, id := range []string{"nonsense", "o.7.1.1.5", "e.0.1.5-1.5"} {
		_, err := o.resolve(o.Ctx, one(id, cancel, "ann", "why"), nil)
		requireStatus(t, err, codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_DEAD_LETTER_NOT_FOUND)
	}
}

func TestResolve_GoesOnWhenTheDatabaseReturns(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 1000)
	o.hold(7, writertest.Users(1, 40)...)
	came, err := o.resolve(o.Ctx, many(nil, requeue), func(m *seckillv1.ResolveDeadLetterResponse) {
		if m.GetDone() == 5 {
			o.sqlProxy.Refuse()
			time.AfterFunc(300*time.Millisecond, o.sqlProxy.Pass)
		}
	})
	require.NoError(t, err)
	require.Len(t, came, 40)
	require.EqualValues(t, 40, o.Number("SELECT COUNT(*) FROM orders WHERE voucher_id = 7"))
	require.EqualValues(t, 40, o.Number("SELECT COUNT(*) FROM operator_actions"))
}

func TestResolve_WithoutADatabaseEndsAfterTheProgressAndIsRepeated(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 1000)
	o.hold(7, writertest.Users(1, 300)...)
	ctx, stop := context.WithTimeout(o.Ctx, 3*time.Second)
	defer stop()
	// Held back by the caller, so that the database is away in the middle.
	came, err := o.resolve(ctx, many(nil, cancel), func(m *seckillv1.ResolveDeadLetterResponse) {
		if m.GetDone() == 5 {
			o.sqlProxy.Refuse()
		}
	})
	requireStatus(t, err, codes.Unavailable, reasonDatabase)
	require.NoError(t, ctx.Err(), "the answer came before the deadline")
	require.GreaterOrEqual(t, len(came), 5)
	require.Less(t, len(came), 300)

	o.sqlProxy.Pass()
	rest, err := o.resolve(o.Ctx, many(nil, cancel), nil)
	require.NoError(t, err)
	require.InDelta(t, 300, len(came)+len(rest), 1, "one may have been decided without its answer")
	require.Empty(t, o.letters(nil))
	require.EqualValues(t, 300, o.Number("SELECT COUNT(*) FROM operator_actions"), "each was decided once")
	require.Eventually(t, func() bool {
		b, err := ledger.ReadBooks(o.Ctx, o.Client, 0, 1, 7)
		return err == nil && b.Stock == 1000 && b.Returned == 300
	}, patience, pollTime)
}

func TestResolve_EndsWhenTheServerStops(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 1000)
	o.hold(7, writertest.Users(1, 300)...)
	var stop sync.Once
	came, err := o.resolve(o.Ctx, many(nil, cancel), func(*seckillv1.ResolveDeadLetterResponse) {
		stop.Do(func() { close(o.draining) })
	})
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	require.NotEmpty(t, came)
	require.Len(t, o.letters(nil), 300-len(came), "what was decided was told")
}
