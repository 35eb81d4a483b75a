package admit

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
)

func TestMain(m *testing.M) {
	// devstack keeps one goroutine for ever, which starts processes.
	if first, err := devstack.StartProcess(context.Background(), devstack.ProcessOptions{Path: "true"}); err == nil {
		_ = first.Wait()
	}
	known := goleak.IgnoreCurrent()
	code := devstack.Main(m)
	if code == 0 {
		if err := goleak.Find(known); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// patience bounds what must happen soon; a test that waits that long has failed.
const patience = 20 * time.Second

// newAdmitter makes an Admitter on a client and closes it with the test.
func newAdmitter(t testing.TB, client rueidis.Client, change ...func(*Config)) *Admitter {
	t.Helper()
	cfg := Config{Client: client, Partitions: 1, Registerer: prometheus.NewRegistry()}
	for _, c := range change {
		c(&cfg)
	}
	a, err := New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, a.Close(ctx))
		for i := range a.shards {
			require.Empty(t, a.shards[i].lanes, "an idle voucher costs nothing")
		}
		require.Zero(t, a.waiting.Load())
		require.Empty(t, a.inFlight)
	})
	return a
}

// open starts a Redis with one open partition and a voucher 1 of some units.
func open(t testing.TB, stock int64) (*devstack.Redis, rueidis.Client, ledger.Voucher) {
	t.Helper()
	redis := devstack.TestRedis(t)
	client := ledgertest.Client(t, redis.Addr())
	ledgertest.Open(t, client, 1)
	v := ledgertest.Voucher(1, 1, stock)
	ledgertest.Sell(t, client, v)
	return redis, client, v
}

func grab(a *Admitter, userID, voucherID int64, within time.Duration) (Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	return a.Grab(ctx, userID, voucherID, "", "")
}

// admitted grabs for a user and wants an order.
func admitted(t testing.TB, a *Admitter, userID, voucherID int64) Result {
	t.Helper()
	result, err := grab(a, userID, voucherID, patience)
	require.NoError(t, err)
	require.Equal(t, ledger.DecisionAdmitted, result.Decision)
	return result
}

// answered is what one of many callers got.
type answered struct {
	userID int64
	result Result
	err    error
}

// crowd grabs for users 1 to n at once.
func crowd(a *Admitter, n int, voucherID int64, within time.Duration) []answered {
	all := make([]answered, n)
	var callers sync.WaitGroup
	for i := range all {
		callers.Go(func() {
			result, err := grab(a, int64(i+1), voucherID, within)
			all[i] = answered{int64(i + 1), result, err}
		})
	}
	callers.Wait()
	return all
}

// script is an admission script that a test answers for.
type script struct {
	calls chan *scriptCall
}

type scriptCall struct {
	ledger.AdmitCall
	reply chan scriptReply
}

type scriptReply struct {
	reply ledger.AdmitReply
	err   error
}

// scripted makes an Admitter whose script is answered by the test, with a
// partition that it believes open.
func scripted(t *testing.T, change ...func(*Config)) (*Admitter, *script) {
	t.Helper()
	s := &script{calls: make(chan *scriptCall, 1024)}
	a := newAdmitter(t, nil, change...)
	a.admit = func(ctx context.Context, call ledger.AdmitCall) (ledger.AdmitReply, error) {
		call.Grabs = slices.Clone(call.Grabs) // the caller's, and used again
		c := &scriptCall{call, make(chan scriptReply, 1)}
		s.calls <- c
		select {
		case r := <-c.reply:
			return r.reply, r.err
		case <-ctx.Done():
			return ledger.AdmitReply{}, fmt.Errorf("%w: %w", ledger.ErrUnknown, ctx.Err())
		}
	}
	now := time.Now()
	a.clock.learn(now, now, now)
	for _, p := range a.partitions {
		p.view.Store(&view{began: now.Add(time.Hour), epoch: 1, sha: "sha", state: StateOpen})
	}
	return a, s
}

func (s *script) next(t *testing.T) *scriptCall {
	t.Helper()
	select {
	case c := <-s.calls:
		return c
	case <-time.After(patience):
		require.FailNow(t, "no call")
		return nil
	}
}

func (s *script) none(t *testing.T) {
	t.Helper()
	select {
	case c := <-s.calls:
		require.FailNow(t, "an unexpected call", "%d grabs", len(c.Grabs))
	case <-time.After(50 * time.Millisecond):
	}
}

// all answers every Grab of the call alike, at a server time.
func (c *scriptCall) all(d ledger.Decision, now time.Time) {
	reply := ledger.AdmitReply{Status: ledger.AdmitOK, Now: now, Durability: ledger.DurabilityStrict}
	for i := range c.Grabs {
		answer := ledger.Answer{Decision: d}
		if d == ledger.DecisionAdmitted || d == ledger.DecisionReplayed {
			answer.Order.VoucherID, answer.Order.Epoch, answer.Order.Seq = c.VoucherID, c.Epoch, int64(i+1)
			answer.State = ledger.MarkAdmitted
		}
		reply.Answers = append(reply.Answers, answer)
	}
	c.reply <- scriptReply{reply: reply}
}

func (c *scriptCall) fail(err error) { c.reply <- scriptReply{err: err} }

func (c *scriptCall) status(s ledger.AdmitStatus, now time.Time) {
	c.reply <- scriptReply{reply: ledger.AdmitReply{Status: s, Now: now}}
}

func (c *scriptCall) users() []int64 {
	var ids []int64
	for _, g := range c.Grabs {
		ids = append(ids, g.UserID)
	}
	return ids
}
