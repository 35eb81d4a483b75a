package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/seckill/seckill/tests/internal/stack"
)

const (
	// The crash happens in the middle of the sale. From this share of it on, a
	// writer is caught that happens to hold orders. At the second share users wait
	// until one is caught or the voucher's row is held, which makes a writer hold
	// the orders that follow: so one is caught in any sale, on any machine. At the
	// third share the others wait until it is killed: so it is in the middle also
	// of a sale that would be over at once.
	crashFrom, crashForced, crashBy = 0.25, 0.6, 0.8
	// settling is the time in which what a writer had sent before it was stopped
	// reaches Redis.
	settling = 40 * time.Millisecond
	// standing is how long the stopped writer is left alone before it is killed.
	standing = 300 * time.Millisecond
	// takeoverMargin is how much longer than min idle a takeover may take: scans
	// are up to 0.6 x min idle apart, and a machine may be busy.
	takeoverMargin = 60 * time.Second
	// countMargin is how much later than Redis a writer may count what it took.
	countMargin = 5 * time.Second

	reclaimedMetric = "seckill_writer_orders_reclaimed_total"
)

// crashReport is what became of one writer and its orders.
type crashReport struct {
	victim string
	// What it held when it stood still, entries and orders, by Redis.
	entries, held int64
	// left is what it still held at the end, in entries, by Redis.
	left int64
	// takenOver is the number of orders that other writers took over since, by
	// their metrics.
	takenOver int64
	after     time.Duration // from the kill until it held nothing
}

// crash stops a writer that holds orders, kills it, and sees to it that others
// take them over.
type crash struct {
	stack    *stack.Stack
	expected int64 // orders of the whole sale
	out      *progress
	middle   *gate // users wait for a victim, or for the row to be held
	late     *gate // users wait for the kill

	release func() // gives the voucher's row free; nil: it is not held
	victim  *stack.Process
	before  map[string]float64 // reclaimed by each writer before the kill
	killed  time.Time
	report  crashReport
}

func newCrash(s *stack.Stack, expected int64, out *progress) *crash {
	return &crash{
		stack: s, expected: expected, out: out,
		middle: newGate(), late: newGate(),
	}
}

// gates are where users wait: no more orders are admitted before middle than its
// share, so the others are still to come; and of the visits between the two, one
// at least is a user's first.
func (c *crash) gates(visits []visit) (middle, late int) {
	middle = int(crashForced * float64(c.expected))
	seen := make(map[int64]bool)
	for _, v := range visits[:middle] {
		seen[v.user] = true
	}
	for late = middle; late < len(visits); late++ {
		if first := !seen[visits[late].user]; first {
			late++
			break
		}
	}
	return middle, min(max(late, int(crashBy*float64(c.expected))), len(visits))
}

// gate is where users wait.
type gate struct {
	reached, opened chan struct{}
	open            func()
}

func newGate() *gate {
	g := &gate{reached: make(chan struct{}), opened: make(chan struct{})}
	g.open = sync.OnceFunc(func() { close(g.opened) })
	return g
}

// wait tells that users wait, and waits with them. It is called once.
func (g *gate) wait(ctx context.Context) {
	close(g.reached)
	select {
	case <-g.opened:
	case <-ctx.Done():
	}
}

// holdRow locks the voucher's row: no writer can commit orders of it, so
// whoever reads some holds them. It is what a slow transaction of somebody else
// does in production.
func (c *crash) holdRow(ctx context.Context) (err error) {
	c.release, err = c.stack.HoldVoucherRow(ctx, voucherID)
	return err
}

func (c *crash) giveRowFree() {
	if c.release != nil {
		c.release()
		c.release = nil
	}
}

// run waits for the middle of the sale, crashes a writer, and returns when
// others have taken over what it held. ctx bounds it.
func (c *crash) run(ctx context.Context) error {
	defer c.late.open()
	defer c.middle.open()
	defer c.giveRowFree()
	for c.victim == nil {
		if isClosed(c.middle.reached) && c.release == nil {
			if err := c.holdRow(ctx); err != nil {
				return err
			}
			c.middle.open()
		}
		figures, err := c.stack.Ledger(ctx, voucherID)
		if err != nil {
			return fmt.Errorf("watching the sale: %w", err)
		}
		if c.release != nil || float64(figures.Seq) >= crashFrom*float64(c.expected) {
			if err := c.catch(ctx); err != nil {
				return err
			}
		}
		if c.victim == nil && isClosed(c.late.reached) && figures.InFlight() == 0 {
			return errors.New("no writer could be stopped while it held orders: all of them are written")
		}
		if !wait(ctx, time.Millisecond) {
			return fmt.Errorf("waiting for a writer that holds orders: %w", ctx.Err())
		}
	}
	c.middle.open()
	c.out.event(fmt.Sprintf("%s (pid %d) is stopped (SIGSTOP): it holds %s in %s",
		c.victim.Name, c.victim.Pid(), counted(c.report.held, "order"), counted(c.report.entries, "entry")))
	c.giveRowFree()
	wait(ctx, standing)
	if err := c.takeReadings(ctx); err != nil {
		return err
	}
	c.victim.Kill()
	c.killed = time.Now()
	c.out.event(fmt.Sprintf("%s is killed (SIGKILL)", c.victim.Name))
	c.late.open()
	if c.alone() {
		successor, err := c.stack.StartWriter(ctx)
		if err != nil {
			return err
		}
		c.out.event(successor.Name + " is started in its place")
	}
	return c.awaitTakeover(ctx)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// catch stops the writer that holds most, and lets it go on if it turns out to
// have settled everything by the time it stood still.
func (c *crash) catch(ctx context.Context) error {
	consumers, err := c.stack.Pending(ctx, voucherID)
	if err != nil {
		return fmt.Errorf("looking at what writers hold: %w", err)
	}
	var name string
	var most int64
	for _, consumer := range consumers {
		if consumer.Entries > most {
			name, most = consumer.Consumer, consumer.Entries
		}
	}
	for _, writer := range c.stack.Writers() {
		if writer.Name != name {
			continue
		}
		if err := writer.Pause(); err != nil {
			return err
		}
		wait(ctx, settling)
		entries, orders, err := c.stack.Held(ctx, voucherID, name)
		if err != nil {
			return err
		}
		if entries == 0 {
			return writer.Resume()
		}
		c.victim = writer
		c.report.victim, c.report.entries, c.report.held = name, entries, orders
	}
	return nil
}

func (c *crash) alone() bool { return len(c.stack.Writers()) == 1 }

// takeReadings notes how much each other writer has taken over before, and
// what the stopped one holds: now for certain.
func (c *crash) takeReadings(ctx context.Context) (err error) {
	c.before = make(map[string]float64)
	for _, writer := range c.stack.Writers() {
		if writer == c.victim {
			continue
		}
		if c.before[writer.Name], err = writer.Metric(ctx, reclaimedMetric); err != nil {
			return err
		}
	}
	c.report.entries, c.report.held, err = c.stack.Held(ctx, voucherID, c.victim.Name)
	return err
}

// awaitTakeover returns when the dead writer holds nothing any more.
func (c *crash) awaitTakeover(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, takeoverMargin)
	defer cancel()
	for {
		entries, err := c.pendingOfVictim(ctx)
		if err == nil {
			c.report.left = entries
			if entries == 0 {
				break
			}
		}
		if !wait(ctx, 20*time.Millisecond) {
			return fmt.Errorf("%s still holds %d entries: %w (%v)", c.report.victim, c.report.left, ctx.Err(), err)
		}
	}
	c.report.after = time.Since(c.killed)
	// Redis has moved an entry before the writer that asked for it can count it.
	counting, cancel := context.WithTimeout(ctx, countMargin)
	defer cancel()
	for {
		var taken int64
		for _, writer := range c.stack.Writers() {
			if writer == c.victim {
				continue
			}
			now, err := writer.Metric(ctx, reclaimedMetric)
			if err != nil {
				return err
			}
			taken += int64(now - c.before[writer.Name])
		}
		c.report.takenOver = taken
		if taken >= c.report.held || !wait(counting, 20*time.Millisecond) {
			break // what is missing is for the verdict
		}
	}
	c.out.event(fmt.Sprintf("%s taken over, %.1f s after the kill", counted(c.report.takenOver, "order"), c.report.after.Seconds()))
	return nil
}

func (c *crash) pendingOfVictim(ctx context.Context) (int64, error) {
	consumers, err := c.stack.Pending(ctx, voucherID)
	if err != nil {
		return 0, err
	}
	for _, consumer := range consumers {
		if consumer.Consumer == c.report.victim {
			return consumer.Entries, nil
		}
	}
	return 0, nil // removed with nothing pending
}

// wait waits for d and reports false when ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
