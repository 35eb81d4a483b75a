package pipeline

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// draw collects what something random answers: that all of 100 agree has no
// chance to happen by itself.
func draw(one func() time.Duration) (least, most time.Duration) {
	least = one()
	most = least
	for range 100 {
		d := one()
		least, most = min(least, d), max(most, d)
	}
	return least, most
}

// A fleet that lost the database together must not come back together.
func TestBackOff_JittersGrowsAndIsCapped(t *testing.T) {
	least, most := draw(func() time.Duration { return newBackOff().NextBackOff() })
	require.Less(t, least, most)
	require.GreaterOrEqual(t, least, retryMin/2)
	require.LessOrEqual(t, most, 2*retryMin)

	least, most = draw(func() time.Duration {
		b := newBackOff()
		for range 30 {
			b.NextBackOff()
		}
		return b.NextBackOff()
	})
	require.Less(t, least, most)
	require.GreaterOrEqual(t, least, retryMax/2)
	require.LessOrEqual(t, most, 3*retryMax/2)
}

// A fleet that started together must not scan together.
func TestScanPause_JittersAroundHalfOfMinIdle(t *testing.T) {
	least, most := draw(func() time.Duration { return scanPause(time.Minute) })
	require.Less(t, least, most)
	require.GreaterOrEqual(t, least, 24*time.Second)
	require.LessOrEqual(t, most, 36*time.Second)
}

// A wait that has grown does not put off the scan for what dead writers left.
func TestWaitFor_EndsWhenTheNextScanIsDue(t *testing.T) {
	const block = 100 * time.Millisecond
	require.Equal(t, 4*time.Second, waitFor(4*time.Second, block, time.Minute))
	require.Equal(t, time.Second, waitFor(4*time.Second, block, time.Second))
	require.Equal(t, block, waitFor(4*time.Second, block, -time.Second))
	require.Equal(t, block, waitFor(block, block, time.Minute))
}
