//go:build fleet

package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

var orders = ledger.OrdersKey(0, 1) // of the only partition of these tests

// Entries vanish when they are settled: what a sale leaves in Redis' memory are
// the buyers' marks, and nothing after the voucher is archived.
func TestStream_LeavesOnlyMarksAndNothingAfterArchive(t *testing.T) {
	ctx := testContext(t)
	const n = 60_000
	// What connections, buffers and the server's own tables may differ by between
	// two looks; the sale as a whole takes some 8 MB.
	const noise = 1 << 20
	s := stack.Test(t, stack.Options{Gateways: -1, Writers: 2, Partitions: 1})
	s.MustOpenVoucher(t, 1, n)
	// What is allocated once, such as the buffers of busy connections.
	s.MustOpenVoucher(t, 2, 5000)
	admitMany(ctx, t, s, 2, 1, 5000)
	proven(ctx, t, s, 2, 5000)
	archive(ctx, t, s, 2)
	before := calm(ctx, t, s)

	for _, w := range s.Writers() {
		require.NoError(t, w.Pause())
	}
	unblocked(ctx, t, s)
	reference := strings.Repeat("r", ledger.MaxReference)
	for user := int64(1); user <= n; {
		var grabs []ledger.Grab
		for ; user <= n && len(grabs) < ledger.MaxBatch; user++ {
			grabs = append(grabs, ledger.Grab{UserID: user, Record: ledger.EncodeRecord(user, reference, "")})
		}
		admit(ctx, t, s, 1, grabs...)
	}
	full := info(ctx, t, s, "memory", "used_memory")
	for _, w := range s.Writers() {
		require.NoError(t, w.Resume())
	}
	proven(ctx, t, s, 1, n)
	nothingPending(ctx, t, s, 1)
	after := calm(ctx, t, s)
	marks, err := do(ctx, t, s, "MEMORY", "USAGE", ledger.BuyersKey(0, 1, 1), "SAMPLES", "0").AsInt64()
	require.NoError(t, err)
	t.Logf("%d bytes before, %d with all in flight, %d settled, of which %d marks", before, full, after, marks)
	require.Greater(t, full-before, marks+2*noise, "the entries took too little to be seen")
	require.InDelta(t, before+marks, after, noise)

	archive(ctx, t, s, 1)
	gone := calm(ctx, t, s)
	t.Logf("%d bytes archived", gone)
	require.InDelta(t, before, gone, noise)
	keys, err := do(ctx, t, s, "KEYS", "sk:{0}:e1:buyers:*").AsStrSlice()
	require.NoError(t, err)
	require.Empty(t, keys)
}

func archive(ctx context.Context, t *testing.T, s *stack.Stack, voucherID int64) {
	t.Helper()
	_, err := s.Vouchers(0).CloseVoucher(ctx, &seckillv1.CloseVoucherRequest{VoucherId: voucherID})
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, err := s.Vouchers(0).ArchiveVoucher(ctx, &seckillv1.ArchiveVoucherRequest{VoucherId: voucherID})
		return err == nil
	}, patience, 100*time.Millisecond)
	require.Eventually(t, func() bool {
		n, err := do(ctx, t, s, "EXISTS", ledger.BuyersKey(0, 1, voucherID)).AsInt64()
		return err == nil && n == 0
	}, patience, 50*time.Millisecond)
}

// calm is the memory that Redis uses once it changes no more: memory is given
// back in the background.
func calm(ctx context.Context, t *testing.T, s *stack.Stack) (used int64) {
	t.Helper()
	last := int64(0)
	require.Eventually(t, func() bool {
		used = info(ctx, t, s, "memory", "used_memory")
		still := used-last < 64<<10 && last-used < 64<<10
		last = used
		return still
	}, patience, 500*time.Millisecond)
	return used
}

// An operator's commands on the group cost nothing: what they hide is brought
// back, and the sale goes on.
func TestStream_OperatorsCommandsAreCured(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 2, Partitions: 1, WriterArgs: append(stack.FastTakeover(), "--guardian-interval=200ms")})
	// still lets something happen while no writer does anything.
	still := func(happen func()) {
		var paused []*stack.Process
		for _, w := range s.Writers() {
			select {
			case <-w.Done():
			default:
				require.NoError(t, w.Pause())
				paused = append(paused, w)
			}
		}
		unblocked(ctx, t, s)
		happen()
		for _, w := range paused {
			require.NoError(t, w.Resume())
		}
	}
	voucher := int64(0)
	open := func() int64 {
		voucher++
		s.MustOpenVoucher(t, voucher, 10_000)
		return voucher
	}
	goesOn := func(id, orders int64) {
		settled(ctx, t, s, id)
		_, errs := crowd(ctx, t, s, id, 100_001, 100)
		require.Empty(t, errs, "the sale goes on")
		proven(ctx, t, s, id, orders+100)
		require.Empty(t, outcomes(ctx, t, s, id))
	}

	t.Run("XGROUP DESTROY with entries in hand", func(t *testing.T) {
		id := open()
		release, err := s.HoldVoucherRow(ctx, id)
		require.NoError(t, err)
		defer release()
		admitMany(ctx, t, s, id, 1, 2000)
		require.Eventually(t, func() bool {
			_, held, err := s.Held(ctx, id, s.Writer(0).Name)
			return err == nil && held > 0
		}, patience, 10*time.Millisecond)
		do(ctx, t, s, "XGROUP", "DESTROY", orders, ledger.Group)
		release()
		goesOn(id, 2000)
	})
	for _, command := range [][]string{
		{"XGROUP", "DESTROY", orders, ledger.Group},
		{"XGROUP", "SETID", orders, ledger.Group, "$"},
		{"XGROUP", "SETID", orders, ledger.Group, "0"},
	} {
		t.Run(command[1]+" "+command[len(command)-1]+" with entries that nobody was given", func(t *testing.T) {
			id := open()
			still(func() {
				admitMany(ctx, t, s, id, 1, 2000)
				do(ctx, t, s, command...)
			})
			goesOn(id, 2000)
		})
	}
	t.Run("XGROUP SETID $ under load", func(t *testing.T) {
		id := open()
		done := make(chan map[int64]error, 1)
		go func() {
			_, errs := crowd(ctx, t, s, id, 1, 5000)
			done <- errs
		}()
		for running := true; running; {
			select {
			case errs := <-done:
				require.Empty(t, errs)
				running = false
			case <-time.After(20 * time.Millisecond):
				do(ctx, t, s, "XGROUP", "SETID", orders, ledger.Group, "$")
			}
		}
		goesOn(id, 5000)
	})
	t.Run("DELCONSUMER of a live writer with entries in hand", func(t *testing.T) {
		id := open()
		release, err := s.HoldVoucherRow(ctx, id)
		require.NoError(t, err)
		defer release()
		admitMany(ctx, t, s, id, 1, 2000)
		require.Eventually(t, func() bool {
			pending, err := s.Pending(ctx, id)
			held := int64(0)
			for _, p := range pending {
				held += p.Entries
			}
			return err == nil && held > 0
		}, patience, 10*time.Millisecond)
		for _, w := range s.Writers() {
			do(ctx, t, s, "XGROUP", "DELCONSUMER", orders, ledger.Group, w.Name)
		}
		release()
		goesOn(id, 2000)
	})
	t.Run("DELCONSUMER of a dead writer with entries in hand", func(t *testing.T) {
		id := open()
		var dead *stack.Process
		still(func() {
			var err error
			dead, err = s.StartWriter(ctx)
			require.NoError(t, err)
			release, err := s.HoldVoucherRow(ctx, id)
			require.NoError(t, err)
			defer release()
			admitMany(ctx, t, s, id, 1, 2000)
			require.Eventually(t, func() bool { _, held, err := s.Held(ctx, id, dead.Name); return err == nil && held > 0 }, patience, 5*time.Millisecond)
			dead.Kill()
			lost, err := do(ctx, t, s, "XGROUP", "DELCONSUMER", orders, ledger.Group, dead.Name).AsInt64()
			require.NoError(t, err)
			require.Positive(t, lost)
		})
		goesOn(id, 2000)
	})
}

// Entries are removed from the stream before they are settled: nobody can bring
// them back. The partition closes, the orders are named, it stays closed, and
// nobody hammers on what is broken.
func TestStream_LostEntriesCloseThePartition(t *testing.T) {
	for _, loss := range []struct {
		name    string
		command []string
		named   bool // the ledger still tells which orders there were
	}{
		{"DEL", []string{"DEL", orders}, true},
		{"XTRIM of all", []string{"XTRIM", orders, "MAXLEN", "0"}, true},
		{"FLUSHALL", []string{"FLUSHALL"}, false},
	} {
		t.Run(loss.name, func(t *testing.T) {
			t.Parallel() // nearly all of it is waiting
			ctx := testContext(t)
			s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
			s.MustOpenVoucher(t, 1, 1000)
			_, errs := crowd(ctx, t, s, 1, 1, 20)
			require.Empty(t, errs)
			settled(ctx, t, s, 1)
			writer := s.Writer(0)
			require.NoError(t, writer.Pause())
			unblocked(ctx, t, s)
			admit(ctx, t, s, 1, buy(101), buy(102), buy(103)) // seq 21 to 23
			do(ctx, t, s, loss.command...)
			require.NoError(t, writer.Resume())

			late, user := int64(0), int64(1000) // who still got in before it closed
			closed := func() bool {
				user++
				answer, err := grab(ctx, s.Seckill(0), user, 1)
				if answer.GetOutcome() == seckillv1.Outcome_OUTCOME_ADMITTED {
					late++
				}
				name, _ := reason(err)
				return name == seckillv1.ErrorReason_ERROR_REASON_REBUILDING.String()
			}
			require.Eventually(t, closed, patience, 50*time.Millisecond, "it still sells")
			if loss.named {
				named := func() bool {
					page, err := healthz(ctx, writer)
					text := page + writer.Output()
					return err == nil && (strings.Contains(text, "21-23") || strings.Contains(text, "[21 22 23]"))
				}
				for until := time.Now().Add(15 * time.Second); !named(); time.Sleep(100 * time.Millisecond) {
					if time.Now().After(until) {
						t.Error("the missing orders 21 to 23 are not named in health or log")
						break
					}
				}
				books, err := s.Books(ctx, 1)
				require.NoError(t, err)
				require.Equal(t, seckillv1.BooksVerdict_BOOKS_VERDICT_VIOLATED, books.GetVerdict())
				var lost []int64
				for _, violation := range books.GetViolations() {
					for _, id := range violation.GetOrderIds() {
						position, err := s.OrderIDs().Decode(id)
						require.NoError(t, err)
						lost = append(lost, position.Seq)
					}
				}
				require.ElementsMatch(t, []int64{21, 22, 23}, lost, "%v", books.GetViolations())
			}

			// 20 reads a second, of writer, guardian and gateway together; the
			// commands of scripts count, too.
			const span = 5 * time.Second
			time.Sleep(2 * time.Second) // what the fault set off is over
			before := calls(ctx, t, s, "xreadgroup", "hmget", "xautoclaim")
			time.Sleep(span)
			rate := float64(calls(ctx, t, s, "xreadgroup", "hmget", "xautoclaim")-before) / span.Seconds()
			t.Logf("%.1f reads a second", rate)
			require.LessOrEqual(t, rate, 20.0)
			require.True(t, closed(), "it was opened again")

			// Also by another writer, after a restart.
			require.NoError(t, writer.Stop(20*time.Second))
			_, err := s.LaunchWriter(ctx, nil)
			require.NoError(t, err)
			require.Never(t, func() bool { return !closed() }, 4*time.Second, 200*time.Millisecond, "it was opened again")
			require.Eventually(t, func() bool { rows, err := s.Rows(ctx, 1); return err == nil && rows == 20+late }, patience, 50*time.Millisecond)
		})
	}
}

// Some of the entries that a dead writer held are gone: who takes over says
// which orders those are.
func TestStream_TakeoverNamesWhatWasDeleted(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 1000)
	writer := s.Writer(0)
	release, err := s.HoldVoucherRow(ctx, 1)
	require.NoError(t, err)
	for user := int64(1); user <= 5; user++ {
		admit(ctx, t, s, 1, buy(user))
	}
	require.Eventually(t, func() bool { entries, _, err := s.Held(ctx, 1, writer.Name); return err == nil && entries == 5 }, patience, 5*time.Millisecond)
	writer.Kill()
	entries, err := ledger.Scan(ctx, s.Client(), 0, 1, "-", 10)
	require.NoError(t, err)
	require.Len(t, entries, 5)
	do(ctx, t, s, "XDEL", orders, entries[2].ID)
	release()
	peer, err := s.StartWriter(ctx)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		rows, err := s.Rows(ctx, 1)
		return err == nil && rows == 4
	}, patience, 20*time.Millisecond)
	require.Eventually(t, func() bool {
		_, err := grab(ctx, s.Seckill(0), 999, 1)
		name, _ := reason(err)
		return name == seckillv1.ErrorReason_ERROR_REASON_REBUILDING.String()
	}, patience, 50*time.Millisecond, "it still sells")
	require.Eventually(t, func() bool {
		page, err := healthz(ctx, peer)
		text := page + peer.Output()
		return err == nil && (strings.Contains(text, "seq 3") || strings.Contains(text, "seq [3]"))
	}, 15*time.Second, 100*time.Millisecond, "the missing order, seq 3, is not named in health or log")
}
