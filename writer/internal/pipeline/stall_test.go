package pipeline_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/writer/internal/writertest"
)

const lock = "SELECT id FROM vouchers WHERE id = ? FOR UPDATE"

// The database was away, and when it answers again one voucher's row is locked.
func TestPipeline_LockedVoucherAfterAnOutageDoesNotStopTheOthers(t *testing.T) {
	f := newFixture(t, 2)
	g := f.Guarded()
	f.Voucher(g, 2, 100)
	f.Voucher(g, 3, 100)
	f.HoldRow(lock, 2)
	store := &flaky{store: f.Store}
	store.down.Store(true)
	var pings atomic.Int64
	o := f.options("w1")
	o.Store = store
	o.Ping = func(ctx context.Context) error {
		pings.Add(1)
		if store.down.Load() {
			return errors.New("down")
		}
		return f.Store.Ping(ctx)
	}
	p := f.pipeline(o)
	f.Admitted(2, 1)
	f.Run(p)
	available := func() bool {
		for _, part := range p.Health() {
			if part.Name == "database" {
				return part.Serving
			}
		}
		return false
	}
	require.Eventually(t, func() bool { return !available() }, writertest.Patience, 10*time.Millisecond)
	store.down.Store(false)
	require.Eventually(t, func() bool { return pings.Load() > 2 }, writertest.Patience, 10*time.Millisecond)
	f.Admitted(3, writertest.Users(1, 10)...)
	require.Eventually(t, func() bool { return f.rows(3) == 10 }, 15*time.Second, 50*time.Millisecond,
		"the database answers, voucher 2 is locked, and no order of voucher 3 is even read; available: %v, tries %d", available(), store.tried.Load())
}

// The same for ever: what was in hand is an entry that nobody can read.
func TestPipeline_DeadEntryAfterAnOutageDoesNotStopTheWriterForEver(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 2, 100)
	f.Voucher(g, 3, 100)
	release := f.HoldRow(lock, 2)
	var down atomic.Bool
	down.Store(true)
	o := f.options("w1")
	o.Ping = func(ctx context.Context) error {
		if down.Load() {
			return errors.New("down")
		}
		return f.Store.Ping(ctx)
	}
	p := f.pipeline(o)
	f.admitRaw(2, 1, []byte("\xff\xff"))
	f.Run(p)
	require.Eventually(t, func() bool { return !p.Health()[0].Serving }, writertest.Patience, 10*time.Millisecond)
	down.Store(false)
	time.Sleep(3 * time.Second)
	release() // nothing is wrong any more
	f.Admitted(3, writertest.Users(1, 10)...)
	require.Eventually(t, func() bool { return f.rows(3) == 10 }, 15*time.Second, 50*time.Millisecond,
		"all is well, and this writer reads nothing any more: %+v", p.Health())
}

// A voucher that was parked once and is free again waits for all of a locked one's.
func TestPipeline_ParkedVoucherThatIsFreeAgainIsNotHeldUpByALockedOne(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 2, 10_000)
	f.Voucher(g, 3, 10_000)
	f.HoldRow(lock, 2)
	release := f.HoldRow(lock, 3)
	f.Run(f.pipeline(f.options("w1")))
	for i := range int64(30) {
		f.Admitted(2, writertest.Users(1+i*64, 64)...)
	}
	f.Admitted(3, 1)
	time.Sleep(3 * time.Second) // all of them are parked
	f.Admitted(3, 2)
	release()
	began := time.Now()
	n := int64(2)
	require.Eventually(t, func() bool { return f.rows(3) == n }, 15*time.Second, 20*time.Millisecond, "nobody locks voucher 3")
	t.Logf("first after %v", time.Since(began))
	for user := int64(3); user < 8; user++ {
		f.Admitted(3, user)
		n++
		began = time.Now()
		require.Eventually(t, func() bool { return f.rows(3) == n }, 10*time.Second, 20*time.Millisecond, "order %d of a voucher that nobody locks", user)
		t.Logf("next after %v", time.Since(began))
	}
}

func TestPipeline_DeadEntriesOfALockedVoucherDoNotHoldUpTheOthers(t *testing.T) {
	f := newFixture(t, 1)
	g := f.Guarded()
	f.Voucher(g, 2, 10_000)
	f.Voucher(g, 3, 10_000)
	f.HoldRow(lock, 2)
	for i := range 200 {
		f.admitRaw(2, int64(i+1), []byte("\xff\xff"))
	}
	f.Admitted(3, writertest.Users(1, 10)...)
	f.Run(f.pipeline(f.options("w1")))
	require.Eventually(t, func() bool { return f.rows(3) == 10 }, 15*time.Second, 50*time.Millisecond, "voucher 3 waits")
}
