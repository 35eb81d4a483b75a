package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// proven is a result in which everything holds.
func proven() result {
	return result{
		figures:       figures{total: 100, admitted: 100, persisted: 100, remaining: 0, books: "PROVEN"},
		databaseStock: 0, databaseSold: 100,
		users: 300, answers: 350, acknowledged: 100, replayed: 20, soldOut: 230, asked: 100,
		crash: crashReport{victim: "writer-2", entries: 1, held: 7, takenOver: 7},
	}
}

func TestVerdict_PassesOnlyWhenEverythingHolds(t *testing.T) {
	require.Empty(t, verdict(proven()))
	for reason, tamper := range map[string]func(*result){
		"oversold":                         func(r *result) { r.persisted, r.databaseSold = 101, 101 },
		"1 users have more than one order": func(r *result) { r.duplicates = 1 },
		"2 acknowledged orders are not the row of their user":       func(r *result) { r.lost = 2 },
		"1 users were told two order_ids":                           func(r *result) { r.differing = 1 },
		"3 users were admitted twice, or admitted and refused":      func(r *result) { r.contradicted = 3 },
		"1 Grabs got no answer: unavailable":                        func(r *result) { r.unanswered, r.failure = 1, "unavailable" },
		"5 orders are still in flight":                              func(r *result) { r.inFlight = 5 },
		"100 orders were to be admitted":                            func(r *result) { r.admitted = 99 },
		"30 orders were to be admitted":                             func(r *result) { r.users = 30 },
		"0 units should remain":                                     func(r *result) { r.remaining = 1 },
		"not every admitted order is a row":                         func(r *result) { r.persisted = 99 },
		"the database has stock 1 and sold 99":                      func(r *result) { r.databaseStock, r.databaseSold = 1, 99 },
		"99 users were told an order_id":                            func(r *result) { r.acknowledged = 99 },
		"GetOrder told 4 of 100 users something else than their or": func(r *result) { r.notPersisted = 4 },
		"the books are not proven: ledger_stock (1 is not 2)": func(r *result) {
			r.books = "VIOLATED"
			r.reckoning = &seckillv1.Books{Violations: []*seckillv1.Violation{{Rule: "ledger_stock", Detail: "1 is not 2"}}}
		},
		"the books are not proven":                         func(r *result) { r.books = "IN_FLIGHT" },
		"nothing was replayed":                             func(r *result) { r.replayed = 0 },
		"no order was asked for":                           func(r *result) { r.asked = 0 },
		"no writer was killed with orders in its hands":    func(r *result) { r.crash = crashReport{} },
		"writer-2 still holds 1 entries":                   func(r *result) { r.crash.left = 1 },
		"nothing was taken over":                           func(r *result) { r.crash.takenOver = 0 },
		"6 orders were taken over of 7 that writer-2 held": func(r *result) { r.crash.takenOver = 6 },
	} {
		r := proven()
		tamper(&r)
		require.Contains(t, verdict(r), reason)
	}
}

func TestVerdict_FewerUsersThanUnits(t *testing.T) {
	r := proven()
	r.users, r.soldOut = 60, 0
	r.admitted, r.persisted, r.acknowledged, r.databaseSold = 60, 60, 60, 60
	r.remaining, r.databaseStock = 40, 40
	require.Empty(t, verdict(r))
}

func TestLastLine_SaysPassOrFailWithTheSameFields(t *testing.T) {
	const fields = "total=100 admitted=100 persisted=100 remaining=0 in_flight=0 duplicates=0 books=PROVEN"
	require.Equal(t, "demo: PASS "+fields, lastLine(proven(), ""))
	require.Equal(t, "demo: FAIL nothing was replayed "+fields, lastLine(proven(), "nothing was replayed"))
}

// The crowd must notice what a broken gateway would tell.
func TestCrowd_NoticesContradictions(t *testing.T) {
	admitted := func(id string, replayed bool) *seckillv1.GrabResponse {
		return &seckillv1.GrabResponse{Outcome: seckillv1.Outcome_OUTCOME_ADMITTED, Replayed: replayed, Order: &seckillv1.Order{OrderId: id}}
	}
	soldOut := &seckillv1.GrabResponse{Outcome: seckillv1.Outcome_OUTCOME_SOLD_OUT}
	for name, test := range map[string]struct {
		answers                 []*seckillv1.GrabResponse
		differing, contradicted int64
	}{
		"one order, replayed":        {[]*seckillv1.GrabResponse{admitted("A", false), admitted("A", true)}, 0, 0},
		"the replay comes first":     {[]*seckillv1.GrabResponse{admitted("A", true), admitted("A", false)}, 0, 0},
		"sold out twice":             {[]*seckillv1.GrabResponse{soldOut, soldOut}, 0, 0},
		"another order_id":           {[]*seckillv1.GrabResponse{admitted("A", false), admitted("B", true)}, 1, 0},
		"admitted twice":             {[]*seckillv1.GrabResponse{admitted("A", false), admitted("A", false)}, 0, 1},
		"sold out after an order_id": {[]*seckillv1.GrabResponse{admitted("A", false), soldOut}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			c := &crowd{users: make(map[int64]*user), durable: make(map[seckillv1.Durability]int64)}
			for _, answer := range test.answers {
				c.note(7, answer, time.Millisecond)
			}
			var r result
			c.report(&r)
			require.Equal(t, test.differing, r.differing)
			require.Equal(t, test.contradicted, r.contradicted)
		})
	}
}

func TestPlan_EveryUserComesAndSomeComeAgain(t *testing.T) {
	first, visits, doubles := map[int64]bool{}, 0, 0
	for _, v := range plan(1000) {
		first[v.user] = true
		visits++
		if v.clicks == 2 {
			doubles++
		}
	}
	require.Len(t, first, 1000)
	require.Equal(t, 1100, visits)
	require.Equal(t, 100, doubles)
	require.Len(t, plan(1), 2)
}

func TestNumbersForPeople(t *testing.T) {
	require.Equal(t, "0", grouped(0))
	require.Equal(t, "999", grouped(999))
	require.Equal(t, "-1,234,567", grouped(-1234567))
	require.Equal(t, "1 entry", counted(1, "entry"))
	require.Equal(t, "1,000 entries", counted(1000, "entry"))
	require.Equal(t, "0 writers", counted(0, "writer"))
	require.Zero(t, percentile(nil, 0.5))
	require.Equal(t, 3*time.Second, percentile([]time.Duration{time.Second, 2 * time.Second, 3 * time.Second}, 0.99))
}
