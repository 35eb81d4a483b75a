package pipeline_test

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/writertest"
)

var readCalls = regexp.MustCompile(`cmdstat_xreadgroup:calls=(\d+)`)

// reads is how many reads for new entries the server has seen.
func (f *fixture) reads() int {
	f.T.Helper()
	text, err := f.Do("INFO", "commandstats").ToString()
	require.NoError(f.T, err)
	found := readCalls.FindStringSubmatch(text)
	if found == nil {
		return 0
	}
	n, err := strconv.Atoi(found[1])
	require.NoError(f.T, err)
	return n
}

// blocked waits until one reader is blocked in a read.
func (f *fixture) blocked() {
	f.T.Helper()
	require.Eventually(f.T, func() bool {
		text, err := f.Do("INFO", "clients").ToString()
		return err == nil && strings.Contains(text, "blocked_clients:1\r\n")
	}, writertest.Patience, time.Millisecond)
}

func TestReader_WaitsLongerWhereNothingComesAndShorterAgainWhenSomethingDoes(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	o := f.options("w1")
	o.MinIdle, o.Block = time.Minute, 10*time.Millisecond
	f.Run(f.pipeline(o))
	// In a second and a half Block passes 150 times.
	require.Eventually(t, func() bool {
		before := f.reads()
		time.Sleep(1500 * time.Millisecond)
		return f.reads() <= before+1
	}, writertest.Patience, time.Millisecond, "an idle partition is read all the time")

	f.Admitted(7, 1)
	f.settled(0)
	before := f.reads()
	require.Eventually(t, func() bool { return f.reads() >= before+5 }, 3*time.Second, 10*time.Millisecond,
		"the next wait after an entry is as long as before it")
}

// What a dead writer left is looked for in time, also where nothing new ends the
// reads that wait.
func TestReader_TakesOverWhileItsReadsWait(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	f.Admitted(7, 1)
	raw, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, "dead", 1, 0)
	require.NoError(t, err)
	require.Len(t, raw, 1)
	o := f.options("w1")
	o.MinIdle = 2 * time.Second
	f.Run(f.pipeline(o))
	f.settled(0)
	require.Equal(t, int64(1), f.rows(7))
}

// A writer with nothing to do does not make a stop wait for its next read.
func TestPipeline_StopEndsTheWaitOfARead(t *testing.T) {
	f := newFixture(t, 1)
	f.Guarded()
	o := f.options("w1")
	o.Block, o.MinIdle = 2*writertest.Patience, 5*writertest.Patience
	stop := f.Run(f.pipeline(o))
	f.blocked()
	ended(t, stop)
	consumers, err := ledger.PendingByConsumer(f.Ctx, f.Client, 0, 1)
	require.NoError(t, err)
	require.Empty(t, consumers)
}

// The entry was delivered, its reader does not know, and the process stops.
func TestPipeline_EntryDeliveredToAReadThatIsGivenUpIsHandedBack(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	proxy := devstack.TestProxy(t, f.Redis.Addr())
	o := f.options("w1")
	o.Reader, o.Block, o.MinIdle = f.Dial(proxy.Addr()), 2*writertest.Patience, time.Hour
	stop := f.Run(f.pipeline(o))
	f.blocked()
	proxy.SwallowReplies()
	f.Admitted(7, 1, 2)
	require.Eventually(t, func() bool {
		ids, err := ledger.PendingIDs(f.Ctx, f.Client, 0, 1, "w1", 10)
		return err == nil && len(ids) == 1
	}, writertest.Patience, 10*time.Millisecond)
	stop()
	require.Equal(t, 1.0, f.metric("seckill_writer_entries_released_total"))

	peer := withRegistry(f.options("w2"))
	peer.MinIdle = time.Hour
	f.Run(f.pipeline(peer))
	f.settled(0)
	require.Equal(t, int64(2), f.rows(7))
	f.proven(7)
	f.nothingPending(0)
}

// Another epoch is another stream: a read that waits at the old one ends with it.
func TestReader_ReadThatWaitsEndsWithItsStream(t *testing.T) {
	f := newFixture(t, 1)
	f.Guarded()
	o := f.options("w1")
	o.Block, o.MinIdle = 2*writertest.Patience, 5*writertest.Patience
	p := f.pipeline(o)
	f.Run(p)
	f.blocked()
	require.NoError(t, f.Do("UNLINK", ledger.OrdersKey(0, 1)).Error())
	require.Eventually(t, func() bool { return f.metric("seckill_writer_read_errors_total") > 0 }, writertest.Patience, 10*time.Millisecond)
}

// The answer to a read comes a second after its wait was over, with an entry: it
// is not given up, and the entry not taken over.
func TestReader_AnswerThatComesLateIsStillRead(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 7, 100)
	proxy := devstack.TestProxy(t, f.Redis.Addr())
	o := f.options("w1")
	o.Reader, o.MinIdle = f.Dial(proxy.Addr()), time.Hour
	f.Run(f.pipeline(o))
	f.blocked()
	proxy.Hold()
	require.Eventually(t, func() bool { return proxy.Held() > 0 }, writertest.Patience, time.Millisecond, "no read is on its way")
	f.Admitted(7, 1)
	time.Sleep(o.Block + time.Second)
	proxy.Release()
	f.settled(0)
	require.Zero(t, f.metric("seckill_writer_read_errors_total"))
	require.Zero(t, f.metric("seckill_writer_orders_reclaimed_total"))
}
