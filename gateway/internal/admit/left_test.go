package admit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
)

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
