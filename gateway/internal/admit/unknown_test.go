package admit

import (
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
)

var errLost = fmt.Errorf("running script admit: %w: %w", ledger.ErrUnknown, io.EOF)

func TestRun_AfterALostAnswerAnOrderThatIsFoundIsTheCallers(t *testing.T) {
	a, s := scripted(t)
	done := begin(a, 1, 7, patience)
	s.next(t).fail(errLost)
	again := s.next(t)
	require.Equal(t, []int64{1}, again.users(), "the same batch")
	again.all(ledger.DecisionReplayed, time.Now())
	got := end(t, done)
	require.NoError(t, got.err)
	require.True(t, got.result.Replayed)
	require.Equal(t, ledger.DecisionAdmitted, got.result.Decision)
}

func TestRun_AfterALostAnswerAnAdmissionIsTheCallers(t *testing.T) {
	a, s := scripted(t)
	done := begin(a, 1, 7, patience)
	s.next(t).fail(errLost)
	s.next(t).all(ledger.DecisionAdmitted, time.Now())
	got := end(t, done)
	require.NoError(t, got.err)
	require.False(t, got.result.Replayed)
}

func TestRun_AfterALostAnswerARefusalCountsOnlyPastNotAfter(t *testing.T) {
	for _, refusal := range []ledger.Decision{ledger.DecisionSoldOut, ledger.DecisionEnded, ledger.DecisionPaused, ledger.DecisionNotStarted, ledger.DecisionBusy} {
		t.Run(fmt.Sprint(refusal), func(t *testing.T) {
			t.Parallel()
			a, s := scripted(t)
			done := begin(a, 1, 7, patience)
			lost := s.next(t)
			lost.fail(errLost)
			early := s.next(t)
			early.all(refusal, lost.NotAfter) // a run at this very time could still admit
			third := s.next(t)
			require.True(t, a.clock.now().After(lost.NotAfter), "it waits until the refusal can count")
			select {
			case got := <-done:
				require.FailNow(t, "answered too early", "%+v", got)
			default:
			}
			third.all(refusal, lost.NotAfter.Add(time.Millisecond))
			got := end(t, done)
			if refusal == ledger.DecisionBusy {
				require.ErrorIs(t, got.err, ErrBusy)
				return
			}
			require.NoError(t, got.err)
			require.Equal(t, refusal, got.result.Decision)
		})
	}
}

func TestRun_EveryLostRunMustBePast(t *testing.T) {
	a, s := scripted(t)
	done := begin(a, 1, 7, patience)
	first := s.next(t)
	first.fail(errLost)
	second := s.next(t)
	require.False(t, second.NotAfter.Before(first.NotAfter))
	second.fail(errLost)
	third := s.next(t)
	third.all(ledger.DecisionSoldOut, second.NotAfter)
	fourth := s.next(t)
	fourth.all(ledger.DecisionReplayed, second.NotAfter.Add(time.Millisecond))
	got := end(t, done)
	require.NoError(t, got.err)
	require.Equal(t, ledger.DecisionAdmitted, got.result.Decision)
}

// Whatever error a later run brings, a caller whose answer was lost is told
// that its outcome is unknown.
func TestRun_AfterALostAnswerNoErrorSaysThatNothingWasTaken(t *testing.T) {
	dial := fmt.Errorf("%w: %w", ledger.ErrUnknown, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)})
	for name, answer := range map[string]func(*scriptCall){
		"fault":       func(c *scriptCall) { c.fail(ledger.ErrFault) },
		"refused":     func(c *scriptCall) { c.fail(ledger.ErrRefused) },
		"no script":   func(c *scriptCall) { c.fail(ledger.ErrNoScript) },
		"lost again":  func(c *scriptCall) { c.fail(errLost) },
		"no dial":     func(c *scriptCall) { c.fail(dial) },
		"closed":      func(c *scriptCall) { c.status(ledger.AdmitClosed, time.Now().Add(time.Hour)) },
		"stale epoch": func(c *scriptCall) { c.status(ledger.AdmitStaleEpoch, time.Now().Add(time.Hour)) },
		"not found":   func(c *scriptCall) { c.status(ledger.AdmitNotFound, time.Now().Add(time.Hour)) },
		"archived":    func(c *scriptCall) { c.status(ledger.AdmitArchived, time.Now().Add(time.Hour)) },
		"rewound":     func(c *scriptCall) { c.status(ledger.AdmitRewound, time.Now().Add(time.Hour)) },
		"sold out before not_after": func(c *scriptCall) {
			c.all(ledger.DecisionSoldOut, time.Now().Add(-time.Hour))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, s := scripted(t, func(c *Config) { c.Client = deadClient{} })
			done := begin(a, 1, 7, 700*time.Millisecond)
			s.next(t).fail(errLost)
			for {
				select {
				case c := <-s.calls:
					answer(c)
					continue
				case got := <-done:
					require.ErrorIs(t, got.err, ErrOutcomeUnknown)
					return
				case <-time.After(patience):
					require.FailNow(t, "no answer")
				}
			}
		})
	}
}

func TestRun_WithoutALostAnswerTheErrorIsDefinite(t *testing.T) {
	dial := fmt.Errorf("%w: %w", ledger.ErrUnknown, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)})
	for name, c := range map[string]struct {
		answer func(*scriptCall)
		want   error
	}{
		"fault":     {func(c *scriptCall) { c.fail(ledger.ErrFault) }, ErrLedgerFault},
		"refused":   {func(c *scriptCall) { c.fail(ledger.ErrRefused) }, ErrRedisUnreachable},
		"no dial":   {func(c *scriptCall) { c.fail(dial) }, ErrRedisUnreachable},
		"not found": {func(c *scriptCall) { c.status(ledger.AdmitNotFound, time.Now()) }, ErrVoucherNotFound},
		"archived":  {func(c *scriptCall) { c.status(ledger.AdmitArchived, time.Now()) }, ErrVoucherArchived},
		"rewound":   {func(c *scriptCall) { c.status(ledger.AdmitRewound, time.Now()) }, ErrLedgerFault},
		"busy":      {func(c *scriptCall) { c.all(ledger.DecisionBusy, time.Now()) }, ErrBusy},
		"bad mark":  {func(c *scriptCall) { c.all(ledger.DecisionFault, time.Now()) }, ErrLedgerFault},
	} {
		t.Run(name, func(t *testing.T) {
			a, s := scripted(t, func(c *Config) { c.Client = deadClient{} })
			done := begin(a, 1, 7, patience)
			c.answer(s.next(t))
			got := end(t, done)
			require.ErrorIs(t, got.err, c.want)
			require.NotErrorIs(t, got.err, ErrOutcomeUnknown)
			s.none(t) // and no retry loop
		})
	}
}

func TestRun_LateIsRunAgainWithACorrectedClock(t *testing.T) {
	a, s := scripted(t)
	done := begin(a, 1, 7, patience)
	ahead := time.Now().Add(time.Hour)
	s.next(t).all(ledger.DecisionLate, ahead)
	again := s.next(t)
	require.WithinDuration(t, ahead.Add(attemptWindow), again.NotAfter, 10*time.Second)
	again.all(ledger.DecisionSoldOut, ahead)
	got := end(t, done)
	require.NoError(t, got.err)
	require.Equal(t, ledger.DecisionSoldOut, got.result.Decision)
}

// A lost run may have made the order whose mark cannot be read, whatever time
// the answer names.
func TestRun_AMarkThatCannotBeReadLeavesALostRunUnknown(t *testing.T) {
	a, s := scripted(t, func(c *Config) { c.Client = deadClient{} })
	done := begin(a, 1, 7, patience)
	lost := s.next(t)
	lost.fail(errLost)
	s.next(t).all(ledger.DecisionFault, lost.NotAfter.Add(time.Millisecond))
	got := end(t, done)
	require.ErrorIs(t, got.err, ErrOutcomeUnknown)
	require.NotErrorIs(t, got.err, ErrLedgerFault)
}

// Late past the not_after of a lost run proves that the lost run took nothing:
// what follows is definite again.
func TestRun_LatePastTheLostRunMakesItKnown(t *testing.T) {
	a, s := scripted(t)
	done := begin(a, 1, 7, patience)
	lost := s.next(t)
	lost.fail(errLost)
	s.next(t).all(ledger.DecisionLate, lost.NotAfter.Add(time.Millisecond))
	s.next(t).fail(ledger.ErrRefused)
	got := end(t, done)
	require.ErrorIs(t, got.err, ErrRedisUnreachable)
	require.NotErrorIs(t, got.err, ErrOutcomeUnknown)
}

func TestRun_ALostBatchDoesNotHoldUpTheNext(t *testing.T) {
	a, s := scripted(t)
	one := begin(a, 1, 7, patience)
	lost := s.next(t)
	lost.fail(errLost)
	second := s.next(t) // the same batch again, and unanswered
	two := begin(a, 2, 7, patience)
	third := s.next(t)
	require.Equal(t, []int64{2}, third.users())
	third.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, two).err)
	second.all(ledger.DecisionReplayed, time.Now())
	require.NoError(t, end(t, one).err)
}

func TestRun_WindowIsShortAndWithinTheDeadline(t *testing.T) {
	a, s := scripted(t)
	long := begin(a, 1, 7, patience)
	c := s.next(t)
	require.WithinDuration(t, a.clock.now().Add(attemptWindow), c.NotAfter, attemptWindow/2)
	c.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, long).err)

	deadline := time.Now().Add(200 * time.Millisecond)
	short := begin(a, 1, 7, 200*time.Millisecond)
	c = s.next(t)
	require.False(t, c.NotAfter.After(deadline.Add(10*time.Millisecond)), "nobody is admitted after he has left")
	c.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, short).err)
}

func TestClock_FollowsEveryAnswer(t *testing.T) {
	c := newClock()
	sent := time.Now()
	answered := sent.Add(10 * time.Millisecond)
	server := sent.Add(5 * time.Millisecond)
	c.learn(server, sent, answered)
	require.WithinDuration(t, time.Now(), c.now(), time.Second)
	before := c.offset
	c.learn(server.Add(3*time.Millisecond), sent, answered) // within what that answer proves
	require.Equal(t, before, c.offset)
	for _, step := range []time.Duration{time.Hour, -time.Hour} { // the clock of Redis is set
		c.learn(server.Add(step), sent, answered)
		require.WithinDuration(t, time.Now().Add(step), c.now(), time.Second)
	}
}

// Whoever left was told that the outcome is unknown, and may be refused elsewhere
// a second later: a run for others must not admit him after that.
func TestRun_AfterALostAnswerThoseWhoLeftAreNotRunAgain(t *testing.T) {
	a, s := scripted(t)
	first := begin(a, 1000, 7, patience)
	stuck := s.next(t)
	leaver := begin(a, 1, 7, 300*time.Millisecond)
	stayer := begin(a, 2, 7, patience)
	waitQueued(t, a, 7, 2)
	stuck.all(ledger.DecisionSoldOut, time.Now())
	require.NoError(t, end(t, first).err)
	c := s.next(t)
	require.ElementsMatch(t, []int64{1, 2}, c.users())
	require.ErrorIs(t, end(t, leaver).err, ErrOutcomeUnknown)
	c.fail(errLost)
	again := s.next(t)
	require.Equal(t, []int64{2}, again.users())
	again.all(ledger.DecisionAdmitted, time.Now())
	require.NoError(t, end(t, stayer).err)
}
