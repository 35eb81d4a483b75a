package main

import (
	"fmt"
	"strings"
	"time"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// figures are those of the last line, read from Redis and the database when
// all is over.
type figures struct {
	total      int64  // units of the voucher, by the database
	admitted   int64  // orders, by the ledger: its highest seq
	persisted  int64  // rows, counted
	remaining  int64  // units left, by the ledger
	inFlight   int64  // by the ledger
	duplicates int64  // users with more than one row, counted
	books      string // verdict of GetBooks
}

// result is all that was found out.
type result struct {
	figures
	databaseStock, databaseSold int64
	reckoning                   *seckillv1.Books

	// What users were told.
	users        int64
	answers      int64 // in the sale itself, before users come back
	acknowledged int64 // users with an order_id
	replayed     int64 // answers
	soldOut      int64 // answers
	repeated     int64 // calls made again after an error
	unanswered   int64 // Grabs that got no answer
	failure      string
	differing    int64 // users who were told two order_ids
	contradicted int64 // users who were admitted twice, or admitted and refused
	durability   map[seckillv1.Durability]int64

	// What users were told, held against what is stored.
	lost         int64 // users whose order_id is not that of their row
	asked        int64 // users who asked GetOrder
	notPersisted int64 // of these, with another answer than their order, PERSISTED

	crash                   crashReport
	took, p50, p99, catchUp time.Duration
}

// verdict names the first thing that must hold and does not; "" is a pass. The
// worst comes first: a promise that is broken, then a proof that is missing.
func verdict(r result) string {
	expected := min(r.total, r.users)
	for _, rule := range []struct {
		broken bool
		reason string
	}{
		{r.persisted > r.total || r.admitted > r.total, "oversold"},
		{r.duplicates > 0, fmt.Sprintf("%d users have more than one order", r.duplicates)},
		{r.lost > 0, fmt.Sprintf("%d acknowledged orders are not the row of their user", r.lost)},
		{r.differing > 0, fmt.Sprintf("%d users were told two order_ids", r.differing)},
		{r.contradicted > 0, fmt.Sprintf("%d users were admitted twice, or admitted and refused", r.contradicted)},
		{r.unanswered > 0, fmt.Sprintf("%d Grabs got no answer: %s", r.unanswered, r.failure)},
		{r.inFlight != 0, fmt.Sprintf("%d orders are still in flight", r.inFlight)},
		{r.admitted != expected, fmt.Sprintf("%d orders were to be admitted", expected)},
		{r.remaining != r.total-r.admitted, fmt.Sprintf("%d units should remain", r.total-r.admitted)},
		{r.persisted != r.admitted, "not every admitted order is a row"},
		{r.databaseStock != r.remaining || r.databaseSold != r.persisted, fmt.Sprintf("the database has stock %d and sold %d", r.databaseStock, r.databaseSold)},
		{r.acknowledged != r.persisted, fmt.Sprintf("%d users were told an order_id", r.acknowledged)},
		{r.notPersisted > 0, fmt.Sprintf("GetOrder told %d of %d users something else than their order, persisted", r.notPersisted, r.asked)},
		{r.books != "PROVEN", "the books are not proven" + violations(r.reckoning)},
		{r.replayed == 0, "nothing was replayed"},
		{r.asked == 0, "no order was asked for"},
		{r.crash.victim == "" || r.crash.held == 0, "no writer was killed with orders in its hands"},
		{r.crash.left > 0, fmt.Sprintf("%s still holds %d entries", r.crash.victim, r.crash.left)},
		{r.crash.takenOver == 0, "nothing was taken over"},
		{r.crash.takenOver < r.crash.held, fmt.Sprintf("%d orders were taken over of %d that %s held", r.crash.takenOver, r.crash.held, r.crash.victim)},
	} {
		if rule.broken {
			return rule.reason
		}
	}
	return ""
}

func violations(books *seckillv1.Books) string {
	var rules []string
	for _, v := range books.GetViolations() {
		rules = append(rules, v.GetRule()+" ("+v.GetDetail()+")")
	}
	if len(rules) == 0 {
		return ""
	}
	return ": " + strings.Join(rules, ", ")
}

// lastLine is the line that other programs may read.
func lastLine(r result, reason string) string {
	head := "PASS"
	if reason != "" {
		head = "FAIL " + reason
	}
	return fmt.Sprintf("demo: %s total=%d admitted=%d persisted=%d remaining=%d in_flight=%d duplicates=%d books=%s",
		head, r.total, r.admitted, r.persisted, r.remaining, r.inFlight, r.duplicates, r.books)
}

func verdictName(v seckillv1.BooksVerdict) string {
	return strings.TrimPrefix(v.String(), "BOOKS_VERDICT_")
}
