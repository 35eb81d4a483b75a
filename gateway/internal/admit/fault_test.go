package admit

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
)

// proxied makes an Admitter that reaches the Redis through a proxy, with its
// connections made.
func proxied(t *testing.T, redis *devstack.Redis) (*Admitter, *devstack.Proxy) {
	t.Helper()
	proxy := devstack.TestProxy(t, redis.Addr())
	a := newAdmitter(t, ledgertest.Client(t, proxy.Addr()))
	require.Equal(t, StateOpen, a.partitions[0].refresh(context.Background(), time.Now()).state)
	// A call on a key picks one of up to four connections at random: make them all
	// first, since the handshake of a new one would meet the fault instead.
	client := a.cfg.Client
	for range 64 {
		require.NoError(t, client.Do(context.Background(), client.B().Exists().Key("x").Build()).Error())
	}
	return a, proxy
}

func flushScripts(t *testing.T, client rueidis.Client) {
	t.Helper()
	require.NoError(t, client.Do(context.Background(), client.B().ScriptFlush().Build()).Error())
}

func field(t *testing.T, client rueidis.Client, key, name, value string) {
	t.Helper()
	require.NoError(t, client.Do(context.Background(), client.B().Hset().Key(key).FieldValue().FieldValue(name, value).Build()).Error())
}

func TestGrab_SwallowedReplyStillGivesTheCallerItsOrder(t *testing.T) {
	redis, client, v := open(t, 5)
	a, proxy := proxied(t, redis)
	proxy.SwallowReplies()
	done := begin(a, 1, 1, patience)
	require.Eventually(t, func() bool {
		return ledgertest.Books(t, client, v).Seq == 1 && proxy.Swallowed() > 30 // longer than the answer to a PING
	}, patience, time.Millisecond)
	proxy.Pass()
	got := end(t, done)
	require.NoError(t, got.err)
	require.Equal(t, ledger.DecisionAdmitted, got.result.Decision)
	require.True(t, got.result.Replayed)
	require.Equal(t, int64(1), got.result.Order.Seq)
	books := ledgertest.Books(t, client, v)
	require.Equal(t, int64(4), books.Stock, "one unit is gone, whatever was run again")
	require.Equal(t, int64(1), books.Entries)
}

func TestGrab_SwallowedReplyOfTheLastUnitIsNeverSoldOut(t *testing.T) {
	redis, client, v := open(t, 1)
	a, proxy := proxied(t, redis)
	proxy.SwallowReplies()
	_, err := grab(a, 1, 1, 800*time.Millisecond)
	require.ErrorIs(t, err, ErrOutcomeUnknown)
	require.Zero(t, ledgertest.Books(t, client, v).Stock)
	proxy.Pass()
	require.Eventually(t, func() bool {
		got, err := grab(a, 1, 1, patience)
		if err != nil {
			require.NotErrorIs(t, err, ErrLedgerFault)
			return false
		}
		require.Equal(t, ledger.DecisionAdmitted, got.Decision)
		require.True(t, got.Replayed)
		return true
	}, patience, 10*time.Millisecond)
}

func TestGrab_CallHeldBeyondNotAfterAdmitsNobody(t *testing.T) {
	redis, client, v := open(t, 5)
	a, proxy := proxied(t, redis)
	var mu sync.Mutex
	var notAfter time.Time // of the last run
	inner := a.admit
	a.admit = func(ctx context.Context, call ledger.AdmitCall) (ledger.AdmitReply, error) {
		mu.Lock()
		notAfter = call.NotAfter
		mu.Unlock()
		return inner(ctx, call)
	}
	proxy.Hold()
	_, err := grab(a, 1, 1, 300*time.Millisecond)
	require.ErrorIs(t, err, ErrOutcomeUnknown)
	require.Positive(t, proxy.Held())
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(a.inFlight) == 0 && a.clock.now().After(notAfter.Add(10*time.Millisecond))
	}, patience, time.Millisecond)
	before := commandCalls(info(t, client), "evalsha")
	proxy.Release()
	require.Eventually(t, func() bool { return commandCalls(info(t, client), "evalsha") > before }, patience, time.Millisecond)
	books := ledgertest.Books(t, client, v)
	require.Equal(t, int64(5), books.Stock)
	require.Zero(t, books.Seq)
	proxy.Pass()
	require.Eventually(t, func() bool {
		got, err := grab(a, 1, 1, patience)
		return err == nil && got.Decision == ledger.DecisionAdmitted && !got.Replayed
	}, patience, 10*time.Millisecond)
}

func info(t *testing.T, client rueidis.Client) string {
	t.Helper()
	text, err := client.Do(context.Background(), client.B().Info().Section("commandstats").Build()).ToString()
	require.NoError(t, err)
	return text
}

func commandCalls(info, command string) int {
	_, rest, ok := strings.Cut(info, "cmdstat_"+command+":calls=")
	if !ok {
		return 0
	}
	calls := 0
	for _, c := range rest {
		if c < '0' || c > '9' {
			break
		}
		calls = 10*calls + int(c-'0')
	}
	return calls
}

// Connections are cut again and again under load: each caller that was told of
// an order has it, nobody was told sold out, no unit is lost or taken twice.
func TestGrab_CutConnectionsUnderLoad(t *testing.T) {
	redis, client, v := open(t, 10_000)
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
	var all []answered
	for range 3 {
		all = append(all, crowd(a, 1000, 1, 2*time.Second)...)
	}
	close(stop)
	cutter.Wait()
	proxy.Pass()
	orders := map[int64]int64{}
	for _, got := range all {
		if got.err != nil {
			require.True(t, errors.Is(got.err, ErrOutcomeUnknown) || errors.Is(got.err, ErrRedisUnreachable) || errors.Is(got.err, ErrOverloaded), "%v", got.err)
			continue
		}
		require.Equal(t, ledger.DecisionAdmitted, got.result.Decision)
		if seq, ok := orders[got.userID]; ok {
			require.Equal(t, seq, got.result.Order.Seq)
		}
		orders[got.userID] = got.result.Order.Seq
	}
	require.NotEmpty(t, orders)
	books := ledgertest.Books(t, client, v)
	require.Equal(t, books.Buyers, books.Seq)
	require.Equal(t, int64(10_000), books.Stock+books.Seq)
	for user, seq := range orders {
		lookup, err := ledger.FindOrder(context.Background(), client, 0, 1, 1, user, 0)
		require.NoError(t, err)
		require.Equal(t, seq, lookup.Mark.Seq)
	}
}

func TestGrab_PausedRedisEndsEveryCallByItsDeadline(t *testing.T) {
	redis, client, v := open(t, 10_000)
	a := newAdmitter(t, client)
	admitted(t, a, 1, 1)
	require.NoError(t, redis.Pause())
	started := time.Now()
	const within = time.Second
	for _, got := range crowd(a, 2000, 1, within) {
		require.Error(t, got.err)
		require.True(t, errors.Is(got.err, ErrOutcomeUnknown) || errors.Is(got.err, ErrRedisUnreachable), "%v", got.err)
	}
	require.Less(t, time.Since(started), within+2*time.Second)
	require.NoError(t, redis.Resume())
	require.Eventually(t, func() bool {
		got, err := grab(a, 1, 1, time.Second)
		return err == nil && got.Replayed
	}, patience, 10*time.Millisecond)
	books := ledgertest.Books(t, client, v)
	require.Equal(t, books.Buyers, books.Seq)
	require.Equal(t, int64(10_000), books.Stock+books.Seq)
}

func TestGrab_RedisKilledThenClosedUntilProven(t *testing.T) {
	redis, client, _ := open(t, 10)
	a := newAdmitter(t, client)
	want := admitted(t, a, 1, 1).Order
	redis.Kill()
	require.Eventually(t, func() bool {
		_, err := grab(a, 1, 1, time.Second)
		require.Error(t, err)
		return errors.Is(err, ErrRedisUnreachable)
	}, patience, 10*time.Millisecond, "a call that could not be sent is no unknown one")
	require.NoError(t, redis.Restart(context.Background()))
	require.Eventually(t, func() bool {
		_, err := grab(a, 1, 1, time.Second)
		require.Error(t, err, "nobody has proven the ledger")
		return errors.Is(err, ErrClosed)
	}, patience, 10*time.Millisecond)
	found, err := a.Find(context.Background(), 1, 1, 0)
	require.NoError(t, err)
	require.NotNil(t, found.Mark, "an order that is found is answered")
	found, err = a.Find(context.Background(), 1, 2, 0)
	require.NoError(t, err)
	require.ErrorIs(t, found.Refusal, ErrClosed, "what is not found is not known not to exist")
	require.NoError(t, ledger.LoadAdmit(context.Background(), ledgertest.Client(t, redis.Addr()), 0, 1))
	got := admitted(t, a, 1, 1)
	require.Equal(t, want, got.Order)
	require.True(t, got.Replayed)
}

func TestGrab_NoScriptIsClosedAndRecovers(t *testing.T) {
	_, client, _ := open(t, 10)
	a := newAdmitter(t, client)
	admitted(t, a, 1, 1)
	flushScripts(t, client)
	_, err := grab(a, 2, 1, patience)
	require.ErrorIs(t, err, ErrClosed)
	require.Equal(t, StateUnproven, a.Status()[0].State)
	require.NoError(t, ledger.LoadAdmit(context.Background(), client, 0, 1))
	admitted(t, a, 2, 1)
}

func TestGrab_AMarkThatIsNoMarkIsAFaultOfItsUserAlone(t *testing.T) {
	_, client, v := open(t, 10)
	a := newAdmitter(t, client)
	field(t, client, ledger.BuyersKey(0, 1, 1), "1", "no mark")
	for _, got := range crowd(a, 3, 1, patience) {
		if got.userID == 1 {
			require.ErrorIs(t, got.err, ErrLedgerFault)
			require.NotErrorIs(t, got.err, ErrOutcomeUnknown)
			continue
		}
		require.NoError(t, got.err)
		require.Equal(t, ledger.DecisionAdmitted, got.result.Decision)
	}
	require.Equal(t, int64(2), ledgertest.Books(t, client, v).Seq)
}

func TestGrab_ScriptOfAnotherVersion(t *testing.T) {
	_, client, _ := open(t, 10)
	a := newAdmitter(t, client)
	flushScripts(t, client)
	field(t, client, ledger.MetaKey(0), "admit_sha", strings.Repeat("0", 40))
	_, err := grab(a, 1, 1, patience)
	require.ErrorIs(t, err, ErrScriptVersion)
	require.NotErrorIs(t, err, ErrClosed)
	require.Equal(t, StateVersion, a.Status()[0].State)

	// During an upgrade both versions are loaded: this one goes on, and says so.
	require.NoError(t, ledger.LoadAdmit(context.Background(), client, 0, 1))
	admitted(t, a, 1, 1)
	require.Equal(t, StateOpen, a.partitions[0].refresh(context.Background(), time.Now()).state)
}

func TestGrab_FollowsANewEpoch(t *testing.T) {
	_, client, _ := open(t, 10)
	a := newAdmitter(t, client)
	require.Equal(t, int64(1), admitted(t, a, 1, 1).Order.Epoch)
	ledgertest.Raise(t, client, 0, 2)
	v := ledgertest.Voucher(1, 1, 10)
	v.Epoch = 2
	ledgertest.Sell(t, client, v)
	require.Equal(t, int64(2), admitted(t, a, 2, 1).Order.Epoch, "within the same call")
}

func TestGrab_MissingLedgerIsClosedAndSellsNothing(t *testing.T) {
	_, client, _ := open(t, 10)
	a := newAdmitter(t, client)
	admitted(t, a, 1, 1)
	require.NoError(t, client.Do(context.Background(), client.B().Flushall().Build()).Error())
	_, err := grab(a, 2, 1, patience)
	require.ErrorIs(t, err, ErrClosed)
	require.Equal(t, StateMissing, a.Status()[0].State)
	size, err := client.Do(context.Background(), client.B().Dbsize().Build()).AsInt64()
	require.NoError(t, err)
	require.Zero(t, size)

	fresh := newAdmitter(t, client) // never saw an epoch
	_, err = grab(fresh, 2, 1, patience)
	require.ErrorIs(t, err, ErrClosed)
	_, err = fresh.Find(context.Background(), 1, 1, 0)
	require.ErrorIs(t, err, ErrClosed)
}

func TestGrab_VoucherOfAWrongTypeIsAFaultTheGuardianHearsOf(t *testing.T) {
	_, client, _ := open(t, 10)
	a := newAdmitter(t, client)
	count := countCalls(a)
	heard := make(chan string, 16)
	listener, hangUp := client.Dedicate()
	defer hangUp()
	listener.SetPubSubHooks(rueidis.PubSubHooks{OnMessage: func(m rueidis.PubSubMessage) { heard <- m.Message }})
	require.NoError(t, listener.Do(context.Background(), client.B().Subscribe().Channel(ledger.FaultsChannel(0)).Build()).Error())

	key := ledger.VoucherKey(0, 1, 9)
	require.NoError(t, client.Do(context.Background(), client.B().Set().Key(key).Value("x").Build()).Error())
	for range 3 {
		_, err := grab(a, 1, 9, patience)
		require.ErrorIs(t, err, ErrLedgerFault)
	}
	require.Equal(t, 3, count(), "no retry")
	select {
	case text := <-heard:
		require.Contains(t, text, "voucher 9")
	case <-time.After(patience):
		require.FailNow(t, "the guardian was not told")
	}
	require.Empty(t, heard, "told once, not per Grab")
	admitted(t, a, 1, 1) // the others go on
}

func TestGrab_LedgerThatWentBackwardsIsAFault(t *testing.T) {
	_, client, v := open(t, 10)
	a := newAdmitter(t, client)
	for user := range int64(3) {
		admitted(t, a, user+1, 1)
	}
	field(t, client, ledger.VoucherKey(0, 1, 1), "seq", "2")
	field(t, client, ledger.VoucherKey(0, 1, 1), "stock", "8")
	_, err := grab(a, 9, 1, patience)
	require.ErrorIs(t, err, ErrLedgerFault)
	require.Equal(t, int64(2), ledgertest.Books(t, client, v).Seq)
}

func TestGrab_RefusedByRedis(t *testing.T) {
	_, client, v := open(t, 10)
	a := newAdmitter(t, client)
	admitted(t, a, 1, 1)
	config := func(value string) {
		require.NoError(t, client.Do(context.Background(), client.B().ConfigSet().ParameterValue().ParameterValue("maxmemory", value).Build()).Error())
	}
	config("1")
	_, err := grab(a, 2, 1, patience)
	require.ErrorIs(t, err, ErrRedisUnreachable)
	config("0")
	require.Equal(t, int64(1), ledgertest.Books(t, client, v).Seq)
	admitted(t, a, 2, 1)
}

func TestGrab_WrongClockCostsOneRun(t *testing.T) {
	for _, off := range []time.Duration{-time.Hour, time.Hour} {
		_, client, _ := open(t, 10)
		a := newAdmitter(t, client)
		a.partitions[0].refresh(context.Background(), time.Now())
		a.clock.offset += off
		count := countCalls(a)
		admitted(t, a, 1, 1)
		require.LessOrEqual(t, count(), 2)
		require.WithinDuration(t, time.Now(), a.clock.now(), time.Minute)
	}
}

func TestRun_LooksAtIdlePartitions(t *testing.T) {
	redis, client, _ := open(t, 10)
	var mu sync.Mutex
	var last []Status
	a := newAdmitter(t, client, func(c *Config) {
		c.Refresh = 20 * time.Millisecond
		c.OnStatus = func(all []Status) { mu.Lock(); last = all; mu.Unlock() }
	})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { a.Run(ctx); close(done) }()
	defer func() { stop(); <-done }()
	becomes := func(want State) {
		t.Helper()
		require.Eventually(t, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(last) == 1 && last[0].State == want
		}, patience, 5*time.Millisecond)
	}
	becomes(StateOpen)
	require.NoError(t, ledger.ClosePartition(context.Background(), client, 0, 1, "why not"))
	becomes(StateClosed)
	redis.Kill()
	becomes(StateUnreachable)
	require.NoError(t, redis.Restart(context.Background()))
	becomes(StateClosed)
	field(t, ledgertest.Client(t, redis.Addr()), ledger.MetaKey(0), "admitted", "x")
	becomes(StateFault)
}
