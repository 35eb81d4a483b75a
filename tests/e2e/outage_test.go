//go:build fleet

package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

const (
	// leastIdle is about the shortest min idle that a writer starts with.
	leastIdle = 2003 * time.Millisecond
	// longOutage is more than any time that shortest sets.
	longOutage = 10*leastIdle + time.Second
)

// shortest are flags that make an outage of a minute, for a writer, one of days:
// all of its timeouts are as short as they may be.
func shortest() []string {
	return []string{
		"--lock-wait=1s", "--batch-timeout=1001ms", "--min-idle=" + leastIdle.String(), "--block=200ms", "--drain-timeout=3s",
		"--consumer-idle=5s", "--default-deadline=10s", "--max-deadline=10s", "--guardian-interval=200ms",
	}
}

// The database is gone for ten times min idle, under load all the while: nothing
// is dead-lettered, nobody takes over, readers hold no more than their slots,
// health says so, what is beyond the bound on orders in flight leaves no trace,
// and the backlog drains as fast as one that no outage has made.
func TestDatabase_OutageUnderLoad(t *testing.T) {
	ctx := testContext(t)
	const slots, bound, buyers, beyond = 600, 30_000, 2000, 20
	s := stack.Test(t, stack.Options{Gateways: 2, Writers: 2, Partitions: 1, WriterArgs: append(shortest(),
		"--committers=1", "--batch-size=16", fmt.Sprintf("--slots=%d", slots), fmt.Sprintf("--max-in-flight=%d", bound))})
	for v := range int64(3) {
		s.MustOpenVoucher(t, v+1, 100_000)
	}
	alive := s.Writers()
	admitted := func(voucherID, first int64) {
		t.Helper()
		for ; first <= bound; first += 16 {
			var grabs []ledger.Grab
			for user := first; user < min(first+16, bound+1); user++ {
				grabs = append(grabs, buy(user))
			}
			admit(ctx, t, s, voucherID, grabs...)
		}
	}
	// pausedFor makes a backlog by stopping the writers, and is how fast it drains.
	pausedFor := func(voucherID int64) float64 {
		since := settledBy(ctx, t, alive)
		for _, w := range alive {
			require.NoError(t, w.Pause())
		}
		unblocked(ctx, t, s)
		admitted(voucherID, 1)
		for _, w := range alive {
			require.NoError(t, w.Resume())
		}
		return drained(ctx, t, s, voucherID, alive, since)
	}
	before := pausedFor(1)

	// A writer dies with entries in hand just before.
	victim, err := s.StartWriter(ctx)
	require.NoError(t, err)
	release, err := s.HoldVoucherRow(ctx, 2)
	require.NoError(t, err)
	answers, user := map[int64]*seckillv1.GrabResponse{}, int64(0)
	more := func(n int64) (errs map[int64]error) {
		t.Helper()
		told, errs := crowd(ctx, t, s, 2, user+1, n)
		user += n
		for who, answer := range told {
			answers[who] = answer
		}
		return errs
	}
	held := func(w *stack.Process) (orders int64) {
		t.Helper()
		_, orders, err := s.Held(ctx, 2, w.Name)
		require.NoError(t, err)
		return orders
	}
	for held(victim) == 0 {
		require.Less(t, user, int64(slots), "it reads nothing")
		require.Empty(t, more(5))
	}
	victim.Kill()
	s.Database.Kill()
	release()
	began, heldBefore := time.Now(), held(victim)
	require.Positive(t, heldBefore)

	require.Empty(t, more(buyers), "the gateway needs no database")
	admitted(2, user+1)
	user = bound
	for _, w := range alive {
		require.Eventually(t, func() bool {
			n, err := w.Metric(ctx, "seckill_writer_database_available")
			return err == nil && n == 0 && !serves(ctx, t, w, "database")
		}, patience, 20*time.Millisecond, "nothing says that the database is unavailable")
	}
	in := len(answers)
	full, err := s.Ledger(ctx, 2)
	require.NoError(t, err)
	require.EqualValues(t, bound, full.InFlight())
	claims := calls(ctx, t, s, "xautoclaim")
	for time.Since(began) < longOutage {
		for who, err := range more(beyond) {
			requireBusy(t, err, who)
		}
		require.Len(t, answers, in, "somebody got in beyond the bound")
		now, err := s.Ledger(ctx, 2)
		require.NoError(t, err)
		now.Now = full.Now
		require.Equal(t, full, now)
		for _, w := range alive {
			require.LessOrEqual(t, held(w), int64(slots), "%s reads on", w.Name)
		}
		time.Sleep(50 * time.Millisecond)
	}
	require.Equal(t, heldBefore, held(victim), "somebody took over what nobody can write")
	require.Equal(t, claims, calls(ctx, t, s, "xautoclaim"), "claiming goes on")
	for _, w := range alive {
		require.False(t, serves(ctx, t, w, "database"))
		available, err := w.Metric(ctx, "seckill_writer_database_available")
		require.NoError(t, err)
		require.Zero(t, available)
		tries, err := w.Metric(ctx, "seckill_writer_transient_errors_total")
		require.NoError(t, err)
		require.Positive(t, tries)
		// It backs off up to 2 s: tens of tries, not thousands.
		require.Less(t, tries, 200.0, "a hot loop")
	}

	since := settledBy(ctx, t, alive)
	restarted := make(chan error, 1)
	go func() { restarted <- s.Database.Restart(ctx) }()
	back := drained(ctx, t, s, 2, alive, since)
	require.NoError(t, <-restarted)
	require.Empty(t, more(beyond), "there is room again")
	proven(ctx, t, s, 2, bound+beyond)
	stored(ctx, t, s, 2, answers)
	for _, w := range alive {
		require.Eventually(t, func() bool { return serves(ctx, t, w, "database") }, patience, 50*time.Millisecond)
	}
	require.Empty(t, outcomes(ctx, t, s, 2))
	require.Zero(t, whole(ctx, t, s, "SELECT COUNT(*) FROM dead_entries"))
	require.Zero(t, sum(ctx, t, s, "seckill_writer_dead_letters_total"))

	// The machine may have been busier before or after.
	after := pausedFor(3)
	t.Logf("%d orders drained at %.0f a second before the outage, %.0f when it was over, %.0f later", bound, before, back, after)
	require.Greater(t, back, min(before, after)/2, "the backlog of the outage does not drain at full speed")
}

// settledBy is how many orders each of some writers has settled.
func settledBy(ctx context.Context, t *testing.T, writers []*stack.Process) (settled []float64) {
	t.Helper()
	for _, w := range writers {
		n, err := w.Metric(ctx, "seckill_writer_orders_settled_total")
		require.NoError(t, err)
		settled = append(settled, n)
	}
	return settled
}

// drained waits until nothing of a voucher is in flight and is how many orders a
// second went while all of some writers worked: after an outage each of them
// comes back when its backoff ends, within 2.6 s.
func drained(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64, writers []*stack.Process, since []float64) float64 {
	t.Helper()
	var all int64
	var began time.Time
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		books, err := s.Ledger(ctx, voucherID)
		require.NoError(t, err)
		left := books.InFlight()
		require.True(t, time.Now().Before(deadline), "%d orders are still in flight", left)
		if left == 0 {
			require.False(t, began.IsZero(), "a writer has done nothing")
			return float64(all) / time.Since(began).Seconds()
		}
		if !began.IsZero() {
			continue
		}
		idle := 0
		for i, n := range settledBy(ctx, t, writers) {
			if n == since[i] {
				idle++
			}
		}
		if idle == 0 {
			began, all = time.Now(), left
		}
	}
}

// While the database is gone, writers that have room leave alone what a dead
// peer had in hand: they could not write it either.
func TestDatabase_OutagePausesClaiming(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 3, Partitions: 1, WriterArgs: append(shortest(), "--slots=20000")})
	s.MustOpenVoucher(t, 1, 100_000)
	release, err := s.HoldVoucherRow(ctx, 1)
	require.NoError(t, err)
	user := int64(0)
	holds := func(w *stack.Process) int64 {
		entries, _, err := s.Held(ctx, 1, w.Name)
		require.NoError(t, err)
		return entries
	}
	// All of them have something that they fail to write.
	require.Eventually(t, func() bool {
		for range 20 {
			user++
			admit(ctx, t, s, 1, buy(user))
		}
		for _, w := range s.Writers() {
			if holds(w) == 0 {
				return false
			}
		}
		return true
	}, patience, 5*time.Millisecond)
	victim := s.Writer(0)
	s.Database.Kill()
	victim.Kill()
	release()
	held := holds(victim)
	require.Positive(t, held)
	for _, w := range s.Writers()[1:] {
		require.Eventually(t, func() bool {
			n, err := w.Metric(ctx, "seckill_writer_database_available")
			return err == nil && n == 0
		}, patience, 20*time.Millisecond)
	}
	claims := calls(ctx, t, s, "xautoclaim")
	for began := time.Now(); time.Since(began) < 4*leastIdle; time.Sleep(100 * time.Millisecond) {
		require.Equal(t, held, holds(victim), "somebody took over what nobody can write")
	}
	require.Equal(t, claims, calls(ctx, t, s, "xautoclaim"), "claiming goes on")
	require.NoError(t, s.Database.Restart(ctx))
	proven(ctx, t, s, 1, user)
	require.Empty(t, outcomes(ctx, t, s, 1))
}
