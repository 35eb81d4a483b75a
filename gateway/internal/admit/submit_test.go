package admit

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/ledger"
)

// inbox is a receiver that keeps what it gets.
type inbox struct {
	t    testing.TB
	gone atomic.Bool
	mu   sync.Mutex
	got  map[int64]*Grab // by user
	runs []int           // how many came at once
}

func newInbox(t testing.TB) *inbox { return &inbox{t: t, got: map[int64]*Grab{}} }

func (r *inbox) Gone() bool { return r.gone.Load() }

func (r *inbox) Answered(grabs []*Grab) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runs = append(r.runs, len(grabs))
	for _, g := range grabs {
		if r.got[g.UserID] != nil {
			r.t.Errorf("user %d was answered twice", g.UserID)
		}
		r.got[g.UserID] = g
	}
}

func (r *inbox) await(n int) map[int64]*Grab {
	r.t.Helper()
	require.Eventually(r.t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.got) >= n
	}, patience, time.Millisecond)
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Len(r.t, r.got, n)
	return r.got
}

func wishes(voucherID, from, to int64) []*Grab {
	var all []*Grab
	for user := from; user <= to; user++ {
		all = append(all, &Grab{UserID: user, VoucherID: voucherID})
	}
	return all
}

func TestSubmit_GrabsOfAMessageLeaveTogetherInTheirOrderAndComeBackTogether(t *testing.T) {
	a, s := scripted(t)
	r := newInbox(t)
	a.Submit(r, append(wishes(7, 1, 100), wishes(8, 101, 110)...))
	seven, eight := s.next(t), s.next(t)
	if seven.VoucherID == 8 {
		seven, eight = eight, seven
	}
	require.Len(t, seven.Grabs, 100)
	for i, g := range seven.Grabs {
		require.Equal(t, int64(i+1), g.UserID)
		require.Equal(t, ledger.EncodeRecord(g.UserID, "", ""), g.Record)
	}
	require.Len(t, eight.Grabs, 10)
	seven.all(ledger.DecisionAdmitted, time.Now())
	got := r.await(100)
	require.Equal(t, []int{100}, r.runs)
	require.Equal(t, int64(5), got[5].Result.Order.Seq)
	require.NoError(t, got[5].Err)
	eight.fail(ledger.ErrRefused)
	require.ErrorIs(t, r.await(110)[105].Err, ErrRedisUnreachable)
}

func TestSubmit_ReceiverThatIsGoneBeforeItsBatchLeftTakesNothing(t *testing.T) {
	a, s := scripted(t)
	leaves, stays := newInbox(t), newInbox(t)
	a.Submit(leaves, wishes(7, 1, 3))
	first := s.next(t)
	a.Submit(leaves, wishes(7, 4, 6))
	a.Submit(stays, wishes(7, 7, 9))
	leaves.gone.Store(true)
	first.all(ledger.DecisionAdmitted, time.Now())
	second := s.next(t)
	require.Equal(t, []int64{7, 8, 9}, second.users())
	got := leaves.await(6)
	require.NoError(t, got[1].Err, "it had left")
	require.ErrorIs(t, got[4].Err, context.Canceled)
	second.all(ledger.DecisionSoldOut, time.Now())
	stays.await(3)
}

func TestSubmit_ReceiverThatIsGoneIsNotTriedAgain(t *testing.T) {
	a, s := scripted(t)
	r := newInbox(t)
	a.Submit(r, wishes(7, 1, 3))
	first := s.next(t)
	r.gone.Store(true)
	first.all(ledger.DecisionLate, time.Now())
	require.ErrorIs(t, r.await(3)[1].Err, context.Canceled)
	s.none(t)
}

// Each is answered by its own deadline with what is known then: nothing was
// taken for one that has not left, and of one that has nothing is known.
func TestSubmit_EachIsAnsweredByItsDeadline(t *testing.T) {
	a, s := scripted(t)
	r := newInbox(t)
	within := func(user int64, d time.Duration) *Grab {
		return &Grab{UserID: user, VoucherID: 7, Deadline: time.Now().Add(d)}
	}
	started := time.Now()
	a.Submit(r, []*Grab{within(1, 300*time.Millisecond), within(2, patience), within(3, 200*time.Millisecond)})
	first := s.next(t)
	a.Submit(r, []*Grab{within(4, 250*time.Millisecond), within(5, patience)})
	got := r.await(3)
	require.Less(t, time.Since(started), 5*time.Second)
	require.ErrorIs(t, got[1].Err, ErrOutcomeUnknown)
	require.ErrorIs(t, got[3].Err, ErrOutcomeUnknown)
	require.ErrorIs(t, got[4].Err, ErrRedisUnreachable, "nothing came back meanwhile")
	for _, user := range []int64{1, 3, 4} {
		require.False(t, time.Now().Before(got[user].Deadline.Add(-answerMargin)))
	}
	first.all(ledger.DecisionAdmitted, time.Now())
	// The first batch may run again, where its answer was given up meanwhile.
	for waits := true; waits; {
		select {
		case c := <-s.calls:
			c.all(ledger.DecisionReplayed, time.Now())
		case <-time.After(time.Millisecond):
		}
		r.mu.Lock()
		waits = len(r.got) < 5
		r.mu.Unlock()
	}
	got = r.await(5)
	require.NoError(t, got[2].Err)
	require.NoError(t, got[5].Err)
}

func TestSubmit_BeyondTheWaitingBoundTheLastAreRefused(t *testing.T) {
	a, s := scripted(t, func(c *Config) { c.MaxWaiting = 10 })
	r := newInbox(t)
	a.Submit(r, wishes(7, 1, 8))
	a.Submit(r, wishes(7, 9, 13))
	got := r.await(3)
	for user := int64(11); user <= 13; user++ {
		require.ErrorIs(t, got[user].Err, ErrOverloaded)
	}
	require.Equal(t, int64(10), a.waiting.Load())
	for left := 10; left > 0; {
		c := s.next(t)
		left -= len(c.Grabs)
		c.all(ledger.DecisionSoldOut, time.Now())
	}
	r.await(13)
}

func TestSubmit_AfterCloseIsRefused(t *testing.T) {
	a, _ := scripted(t)
	require.NoError(t, a.Close(context.Background()))
	r := newInbox(t)
	a.Submit(r, append(wishes(7, 1, 3), wishes(8, 4, 6)...))
	for _, g := range r.await(6) {
		require.ErrorIs(t, g.Err, ErrClosing)
	}
}

// A batch of which some leave, run again and again, never mixes up who is who.
func TestSubmit_EachGetsItsOwnAnswerWhileOthersLeave(t *testing.T) {
	a, s := scripted(t)
	r := newInbox(t)
	first := begin(a, 1000, 7, patience)
	stuck := s.next(t)
	a.Submit(r, wishes(7, 1, 20))
	var leavers []<-chan error
	ctx, leave := context.WithCancel(context.Background())
	for user := int64(21); user <= 30; user++ {
		gone := make(chan error, 1)
		go func() {
			_, err := a.Grab(ctx, user, 7, "", "")
			gone <- err
		}()
		leavers = append(leavers, gone)
	}
	waitQueued(t, a, 7, 30)
	a.Submit(r, wishes(7, 31, 50))
	stuck.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, first).err)
	c := s.next(t)
	require.Len(t, c.Grabs, 50)
	leave()
	for _, gone := range leavers {
		require.ErrorIs(t, <-gone, ErrOutcomeUnknown)
	}
	c.all(ledger.DecisionLate, time.Now())
	again := s.next(t)
	require.Len(t, again.Grabs, 40)
	reply := ledger.AdmitReply{Status: ledger.AdmitOK, Now: time.Now(), Durability: ledger.DurabilityStrict}
	for _, g := range again.Grabs {
		answer := ledger.Answer{Decision: ledger.DecisionAdmitted, State: ledger.MarkAdmitted}
		answer.Order.VoucherID, answer.Order.Epoch, answer.Order.Seq = 7, 1, g.UserID
		reply.Answers = append(reply.Answers, answer)
	}
	again.reply <- scriptReply{reply: reply}
	for user, g := range r.await(40) {
		require.Equal(t, user, g.Result.Order.Seq)
	}
}

// Under connections that break, every Grab comes back once, and who was told of
// an order has it.
func TestSubmit_CutConnectionsUnderLoad(t *testing.T) {
	redis, client, v := open(t, 100_000)
	a, proxy := proxied(t, redis)
	stop := make(chan struct{})
	var cutter sync.WaitGroup
	cutter.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				proxy.CutAll()
			case <-stop:
				return
			}
		}
	})
	r := newInbox(t)
	const messages, size = 100, 100
	for i := range int64(messages) {
		a.Submit(r, wishes(1, i*size+1, i*size+size))
		time.Sleep(5 * time.Millisecond)
	}
	got := r.await(messages * size)
	close(stop)
	cutter.Wait()
	proxy.Pass()
	seqs := map[int64]int64{}
	for user, g := range got {
		if g.Err != nil {
			continue
		}
		require.Equal(t, ledger.DecisionAdmitted, g.Result.Decision)
		require.Zero(t, seqs[g.Result.Order.Seq], fmt.Sprintf("users %d and %d have one order", user, seqs[g.Result.Order.Seq]))
		seqs[g.Result.Order.Seq] = user
		lookup, err := ledger.FindOrder(context.Background(), client, 0, 1, 1, user, 0)
		require.NoError(t, err)
		require.Equal(t, g.Result.Order.Seq, lookup.Mark.Seq)
	}
	require.NotEmpty(t, seqs)
	books := ledgertest.Books(t, client, v)
	require.Equal(t, books.Buyers, books.Seq)
	require.Equal(t, int64(100_000), books.Stock+books.Seq)
}
