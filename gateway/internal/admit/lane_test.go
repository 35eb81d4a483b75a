package admit

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
)

// begin starts a Grab in the background.
func begin(a *Admitter, userID, voucherID int64, within time.Duration) <-chan answered {
	done := make(chan answered, 1)
	go func() {
		result, err := grab(a, userID, voucherID, within)
		done <- answered{userID, result, err}
	}()
	return done
}

func end(t *testing.T, done <-chan answered) answered {
	t.Helper()
	select {
	case got := <-done:
		return got
	case <-time.After(patience):
		require.FailNow(t, "a Grab has no answer")
		return answered{}
	}
}

func waitQueued(t *testing.T, a *Admitter, voucherID int64, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		s := &a.shards[uint64(voucherID)%shards]
		s.mu.Lock()
		defer s.mu.Unlock()
		l := s.lanes[voucherID]
		return l != nil && l.queued == n && l.unsent == 0
	}, patience, time.Millisecond)
}

func TestLane_GathersWhileABatchIsInFlight(t *testing.T) {
	a, s := scripted(t)
	var all []<-chan answered
	all = append(all, begin(a, 1, 7, patience))
	first := s.next(t)
	require.Equal(t, []int64{1}, first.users(), "the first one waits for nobody")
	for user := int64(2); user <= 256; user++ {
		all = append(all, begin(a, user, 7, patience))
	}
	waitQueued(t, a, 7, 255)
	s.none(t)
	all = append(all, begin(a, 257, 7, patience))
	second := s.next(t)
	require.Len(t, second.Grabs, 256, "a full batch leaves while another is in flight")
	for user := int64(258); user <= 300; user++ {
		all = append(all, begin(a, user, 7, patience))
	}
	waitQueued(t, a, 7, 43)
	s.none(t)
	first.all(ledger.DecisionSoldOut, time.Now())
	s.none(t)
	second.all(ledger.DecisionSoldOut, time.Now())
	third := s.next(t)
	require.Len(t, third.Grabs, 43)
	third.all(ledger.DecisionSoldOut, time.Now())
	for _, done := range all {
		require.NoError(t, end(t, done).err)
	}
}

func TestLane_HasAtMostFourBatchesInFlight(t *testing.T) {
	a, s := scripted(t, func(c *Config) { c.MaxBatch = 2 })
	var all []<-chan answered
	for user := range int64(20) {
		all = append(all, begin(a, user+1, 7, patience))
	}
	var calls []*scriptCall
	for range 4 {
		calls = append(calls, s.next(t))
	}
	s.none(t)
	answered := 0
	for answered < 20 {
		c := calls[0]
		calls = calls[1:]
		answered += len(c.Grabs)
		c.all(ledger.DecisionSoldOut, time.Now())
		if len(calls) == 0 && answered < 20 {
			calls = append(calls, s.next(t))
		}
	}
	for _, done := range all {
		require.NoError(t, end(t, done).err)
	}
}

func TestLane_VouchersDoNotWaitForEachOther(t *testing.T) {
	a, s := scripted(t)
	one := begin(a, 1, 7, patience)
	stuck := s.next(t)
	other := begin(a, 1, 8, patience)
	c := s.next(t)
	require.Equal(t, int64(8), c.VoucherID)
	c.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, other).err)
	stuck.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, one).err)
}

func TestLane_CallsInFlightAreBoundedOverAllVouchers(t *testing.T) {
	a, s := scripted(t, func(c *Config) { c.MaxInFlight = 2 })
	var all []<-chan answered
	for voucher := range int64(5) {
		all = append(all, begin(a, 1, voucher+1, patience))
	}
	var calls []*scriptCall
	calls = append(calls, s.next(t), s.next(t))
	s.none(t)
	for range 5 {
		calls[0].all(ledger.DecisionSoldOut, time.Now())
		if calls = calls[1:]; len(calls) < 2 && len(all) > 0 {
			select {
			case c := <-s.calls:
				calls = append(calls, c)
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	for _, done := range all {
		require.NoError(t, end(t, done).err)
	}
}

func TestGrab_CallerThatLeavesBeforeItsBatchIsDropped(t *testing.T) {
	a, s := scripted(t)
	one := begin(a, 1, 7, patience)
	first := s.next(t)
	ctx, leave := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() {
		_, err := a.Grab(ctx, 2, 7, "", "")
		gone <- err
	}()
	three := begin(a, 3, 7, patience)
	waitQueued(t, a, 7, 2)
	leave()
	require.ErrorIs(t, <-gone, context.Canceled)
	first.all(ledger.DecisionSoldOut, time.Now())
	second := s.next(t)
	require.Equal(t, []int64{3}, second.users())
	second.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, one).err)
	require.NoError(t, end(t, three).err)
}

func TestGrab_CallerThatLeavesAfterItsBatchHearsThatItIsUnknown(t *testing.T) {
	a, s := scripted(t)
	stays := begin(a, 1, 7, patience)
	first := s.next(t)
	leaves := begin(a, 2, 7, 200*time.Millisecond)
	other := begin(a, 3, 7, patience)
	waitQueued(t, a, 7, 2)
	first.all(ledger.DecisionSoldOut, time.Now())
	second := s.next(t)
	require.ElementsMatch(t, []int64{2, 3}, second.users())
	require.ErrorIs(t, end(t, leaves).err, ErrOutcomeUnknown)
	second.all(ledger.DecisionAdmitted, time.Now())
	require.NoError(t, end(t, stays).err)
	require.NoError(t, end(t, other).err)
}

func TestGrab_BeyondTheWaitingBoundIsRefusedAtOnce(t *testing.T) {
	a, s := scripted(t, func(c *Config) { c.MaxWaiting = 3 })
	var all []<-chan answered
	for user := range int64(3) {
		all = append(all, begin(a, user+1, 7, patience))
	}
	require.Eventually(t, func() bool { return a.waiting.Load() == 3 }, patience, time.Millisecond)
	_, err := grab(a, 4, 7, patience)
	require.ErrorIs(t, err, ErrOverloaded)
	for left := 3; left > 0; {
		c := s.next(t)
		left -= len(c.Grabs)
		c.all(ledger.DecisionSoldOut, time.Now())
	}
	for _, done := range all {
		require.NoError(t, end(t, done).err)
	}
	go func() { (<-s.calls).all(ledger.DecisionSoldOut, time.Now()) }()
	_, err = grab(a, 4, 7, patience)
	require.NoError(t, err)
}

func TestGrab_WaitingUntilTheDeadlineTookNothing(t *testing.T) {
	a, s := scripted(t)
	first := begin(a, 1, 7, 2*time.Second)
	c := s.next(t)
	started := time.Now()
	_, err := grab(a, 2, 7, 150*time.Millisecond)
	require.ErrorIs(t, err, ErrRedisUnreachable, "nothing came back meanwhile")
	require.Less(t, time.Since(started), time.Second)
	c.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, first).err)
	s.none(t)
}

func TestGrab_PastDeadlineIsNotSent(t *testing.T) {
	a, s := scripted(t)
	ctx, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	_, err := a.Grab(ctx, 1, 7, "", "")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	s.none(t)
}

func TestClose_AnswersWhoWaitsAndTakesNoMore(t *testing.T) {
	a, s := scripted(t)
	one := begin(a, 1, 7, patience)
	first := s.next(t)
	two := begin(a, 2, 7, patience)
	waitQueued(t, a, 7, 1)
	closed := make(chan error, 1)
	go func() { closed <- a.Close(context.Background()) }()
	require.Eventually(t, func() bool {
		last := &a.shards[shards-1]
		last.mu.Lock()
		defer last.mu.Unlock()
		return last.closed
	}, patience, time.Millisecond)
	_, err := grab(a, 3, 9, patience)
	require.ErrorIs(t, err, ErrClosing)
	first.all(ledger.DecisionSoldOut, time.Now())
	s.next(t).all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, one).err)
	require.NoError(t, end(t, two).err)
	require.NoError(t, <-closed)
}

// Where Close cannot wait, nobody waits for a deadline that nothing can come
// before: who had left does not know, who had not took nothing.
func TestClose_ThatIsCutOffAnswersWhoWaitsAtOnce(t *testing.T) {
	a, s := scripted(t)
	one := begin(a, 1, 7, 2*patience)
	s.next(t)
	two := begin(a, 2, 7, 2*patience)
	waitQueued(t, a, 7, 1)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	require.ErrorIs(t, a.Close(ctx), context.Canceled)
	require.ErrorIs(t, end(t, one).err, ErrOutcomeUnknown)
	require.ErrorIs(t, end(t, two).err, ErrClosing)
	s.none(t)
}

func TestSeen_IsBoundedAndNeverGoesBack(t *testing.T) {
	a, _ := scripted(t)
	for voucher := int64(1); voucher <= 3*maxSeen*shards; voucher += shards {
		l := &lane{voucherID: voucher, shard: &a.shards[1]}
		l.saw(1, 5)
	}
	require.LessOrEqual(t, len(a.shards[1].seen), maxSeen)
	l := &lane{voucherID: 5, shard: &a.shards[5]}
	l.saw(1, 7)
	l.saw(1, 3)
	require.Equal(t, int64(7), l.seenSeq(1))
	l.saw(2, 1)
	require.Equal(t, int64(1), l.seenSeq(2))
	l.saw(1, 9)
	require.Equal(t, int64(1), l.seenSeq(2))
	require.Zero(t, l.seenSeq(1))
	l.saw(3, 0)
	require.Equal(t, int64(1), l.seenSeq(2))
}
