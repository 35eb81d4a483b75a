package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// summary is what a person reads.
func summary(r result, cfg settings) string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-12s %s\n", name, fmt.Sprintf(format, args...))
	}
	b.WriteString("\nThe sale\n")
	line("admitted", "%s of %s", grouped(r.admitted), counted(r.total, "unit"))
	line("replayed", "%s, each with the order_id of the first", counted(r.replayed, "answer"))
	line("sold out", "%s", counted(r.soldOut, "answer"))
	if r.repeated > 0 {
		line("repeated", "%s, after an error that asked for it", counted(r.repeated, "call"))
	}
	line("throughput", "%s Grabs/s: %s in %.1f s, by %s", grouped(rate(r.answers, r.took)), grouped(r.answers), r.took.Seconds(), counted(min(int64(cfg.Callers), r.answers), "caller"))
	line("Grab", "p50 %s, p99 %s", milliseconds(r.p50), milliseconds(r.p99))
	line("durability", "%s", durability(r.durability))

	b.WriteString("\nThe crash\n")
	line("killed", "%s, with %s in %s in its hands", r.crash.victim, counted(r.crash.held, "order"), counted(r.crash.entries, "entry"))
	line("taken over", "%s, %.1f s after the kill (%s)", counted(r.crash.takenOver, "order"), r.crash.after.Seconds(), strings.TrimPrefix(stack.FastTakeover()[0], "--"))
	line("catch-up", "%.1f s from the last Grab until nothing was in flight", r.catchUp.Seconds())
	line("persisted", "%s, counted", counted(r.persisted, "row"))

	fmt.Fprintf(&b, "\nThe books: %s\n", r.books)
	if l := r.reckoning.GetLedger(); l != nil {
		line("ledger", "stock %s + admitted %s = opening %s + returned %s; settled %s; %s", grouped(l.GetStock()), grouped(l.GetAdmitted()),
			grouped(l.GetOpening()), grouped(l.GetReturned()), grouped(l.GetSettled()), counted(l.GetBuyers(), "buyer"))
	}
	if d := r.reckoning.GetDatabase(); d != nil {
		rows := "rows not counted while orders are in flight"
		if d.Orders != nil {
			rows = counted(d.GetOrders(), "row") + ", " + counted(d.GetOutcomes(), "other outcome")
		}
		line("database", "stock %s + sold %s = total %s; %s", grouped(d.GetStock()), grouped(d.GetSold()), grouped(d.GetTotal()), rows)
	}
	for _, v := range r.reckoning.GetViolations() {
		line("VIOLATED", "%s: %s", v.GetRule(), v.GetDetail())
	}
	line("users", "%s told, %s of them the row of their user; GetOrder says persisted of %s of %s", counted(r.acknowledged, "order_id"),
		grouped(r.acknowledged-r.lost), grouped(r.asked-r.notPersisted), grouped(r.asked))
	return b.String()
}

func rate(n int64, took time.Duration) int64 {
	if took <= 0 {
		return 0
	}
	return int64(float64(n) / took.Seconds())
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
}

var durabilityMeaning = map[seckillv1.Durability]string{
	seckillv1.Durability_DURABILITY_STRICT: "STRICT: an acknowledged Grab survives a kill and a power loss of Redis",
	seckillv1.Durability_DURABILITY_FAST:   "FAST: an acknowledged Grab survives a kill of Redis on a healthy disk",
}

func durability(modes map[seckillv1.Durability]int64) string {
	var names []string
	for mode := range modes {
		meaning, ok := durabilityMeaning[mode]
		if !ok {
			meaning = strings.TrimPrefix(mode.String(), "DURABILITY_")
		}
		names = append(names, meaning)
	}
	slices.Sort(names)
	return strings.Join(names, "; ")
}
