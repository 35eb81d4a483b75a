//go:build fleet

package e2e

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// However many writers there are, the work of a sale is shared evenly, and each
// order passes through one of them, once: none is delivered to two, none is
// judged twice, none settled twice, and nobody takes over from the living.
func TestFleet_SharesWorkAndTakesNothingFromTheLiving(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: 2, Writers: 1, Partitions: 1, WriterArgs: append(stack.FastTakeover(), "--batch-size=256", "--committers=1")})
	for i, writers := range []int{1, 3, 8, 16} {
		t.Run(fmt.Sprintf("writers=%d", writers), func(t *testing.T) {
			var starting sync.WaitGroup
			for range writers - len(s.Writers()) {
				starting.Go(func() {
					if _, err := s.StartWriter(ctx); err != nil {
						t.Errorf("starting a writer: %v", err)
					}
				})
			}
			starting.Wait()
			require.Len(t, s.Writers(), writers)
			voucher, orders := int64(i+1), int64(4000+500*writers)
			s.MustOpenVoucher(t, voucher, orders)
			// What each order must do once, and what no order may.
			once := []string{"seckill_writer_orders_read_total", "seckill_writer_orders_total", "seckill_writer_orders_settled_total"}
			never := []string{"seckill_writer_orders_reclaimed_total", "seckill_writer_entries_settled_before_total"}
			before := map[string]float64{}
			for _, metric := range once {
				before[metric] = sum(ctx, t, s, metric)
			}
			settledBefore := settledBy(ctx, t, s.Writers())

			answers, errs := crowd(ctx, t, s, voucher, 1, orders)
			require.Empty(t, errs)
			require.EqualValues(t, orders, count(answers, seckillv1.Outcome_OUTCOME_ADMITTED))
			proven(ctx, t, s, voucher, orders)
			stored(ctx, t, s, voucher, answers)
			for _, metric := range once {
				// The last of them is counted a moment after the ledger knows.
				require.Eventually(t, func() bool { return sum(ctx, t, s, metric)-before[metric] >= float64(orders) }, patience, 10*time.Millisecond, metric)
				require.EqualValues(t, orders, sum(ctx, t, s, metric)-before[metric], "%s: an order was handled twice", metric)
			}
			for _, metric := range never {
				require.Zero(t, sum(ctx, t, s, metric), metric)
			}
			fair := float64(orders) / float64(writers)
			var shares []float64
			for w, n := range settledBy(ctx, t, s.Writers()) {
				shares = append(shares, (n-settledBefore[w])/fair)
			}
			t.Logf("orders of each, 1.00 is a fair share: %.2f", shares)
			require.Greater(t, slices.Min(shares), 0.25, "a writer had hardly anything to do")
			require.Less(t, slices.Max(shares), 3.0, "a writer had more than its share")
		})
	}
}

// A fleet with nothing to do costs nearly nothing: less than 2 % of a CPU for a
// writer, once its readers have found out that nothing comes.
func TestFleet_IdleCostsNearlyNothing(t *testing.T) {
	const writers, partitions = 4, 8
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: writers, Partitions: partitions, WriterArgs: []string{}})
	for v := range int64(partitions) {
		s.MustOpenVoucher(t, v+1, 10)
		admit(ctx, t, s, v+1, buy(1))
	}
	for v := range int64(partitions) {
		settled(ctx, t, s, v+1)
	}
	// A read of each partition in more than two seconds, instead of one a second.
	const span = 4 * time.Second
	reads := func() (n int64) { return calls(ctx, t, s, "xreadgroup") }
	require.Eventually(t, func() bool {
		before := reads()
		time.Sleep(span)
		return reads()-before < int64(writers*partitions*span/time.Second/2)
	}, patience, time.Millisecond, "idle readers ask all the time")

	used := func() (all []time.Duration) {
		for _, w := range s.Writers() {
			all = append(all, cpuTime(t, w.Pid()))
		}
		return all
	}
	// What else this machine does only adds to it: the best of three looks counts.
	var most float64
	for look := 1; look == 1 || look <= 3 && most >= 2; look++ {
		before, began := used(), time.Now()
		time.Sleep(10 * time.Second)
		after, took := used(), time.Since(began)
		shares := make([]float64, writers)
		for i := range shares {
			shares[i] = 100 * float64(after[i]-before[i]) / float64(took)
		}
		t.Logf("%% of a CPU: %.1f", shares)
		most = slices.Max(shares)
	}
	require.Less(t, most, 2.0)
	require.NoError(t, ctx.Err())
}

// cpuTime is what a process has used so far.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if os.IsNotExist(err) {
		t.Skip("there is no /proc here")
	}
	require.NoError(t, err)
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks int64
	for _, field := range fields[11:13] { // utime, stime, the 14th and 15th of the line
		n, err := strconv.ParseInt(field, 10, 64)
		require.NoError(t, err)
		ticks += n
	}
	const hertz = 100 // USER_HZ, on every Linux that Go runs on
	return time.Duration(ticks) * time.Second / hertz
}
