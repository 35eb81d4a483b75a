package ledger

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/orderid"
)

// at makes a copy of the partition's admission script whose clock stands still,
// so that an edge can be tested to the millisecond, and returns its SHA. The
// microseconds must be cut off, never rounded.
func (b *book) at(now time.Time) string {
	b.t.Helper()
	fixed := fmt.Sprintf("{'%d', '%d'}", now.Unix(), now.Nanosecond()/1000+999)
	source := admitScript(b.partition, b.epoch).source
	require.Equal(b.t, 1, strings.Count(source, "redis.call('TIME')"))
	s := newScript("admit", strings.Replace(source, "redis.call('TIME')", fixed, 1), admitKeys, admitArgs, admitRepeated)
	require.NoError(b.t, load(b.ctx, b.client, s))
	return s.sha
}

func (b *book) admitAt(now time.Time, users ...int64) AdmitReply {
	b.t.Helper()
	call := b.call(users...)
	call.SHA, call.NotAfter = b.at(now), now
	reply, err := Admit(b.ctx, b.client, call)
	require.NoError(b.t, err)
	require.Equal(b.t, AdmitOK, reply.Status)
	require.Equal(b.t, now, reply.Now)
	return reply
}

func TestAdmit_AnswersReplaysBeforeAnyRefusal(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(b *book, call *AdmitCall)
		others Decision
	}{
		{"sold out", func(b *book, _ *AdmitCall) { b.must("HSET", b.keys()["voucher"], "stock", "0") }, DecisionSoldOut},
		{"paused", func(b *book, _ *AdmitCall) { b.apply(VoucherPaused) }, DecisionPaused},
		{"closed", func(b *book, _ *AdmitCall) { b.apply(VoucherClosed) }, DecisionEnded},
		{"ended", func(b *book, _ *AdmitCall) {
			b.voucher.End = time.Now().Add(-time.Minute)
			b.apply(VoucherOpen)
		}, DecisionEnded},
		{"not started again", func(b *book, _ *AdmitCall) {
			b.voucher.Begin = time.Now().Add(time.Minute)
			b.apply(VoucherOpen)
		}, DecisionNotStarted},
		{"late", func(_ *book, call *AdmitCall) { call.NotAfter = time.Now().Add(-time.Second) }, DecisionLate},
		{"busy", func(b *book, _ *AdmitCall) { b.must("HSET", b.keys()["meta"], "bound", "2") }, DecisionBusy},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBook(t, 10)
			first := b.admit(1, 2)
			call := b.call(2, 3, 1)
			c.change(b, &call)
			before := b.snapshot()
			reply, err := Admit(b.ctx, b.client, call)
			require.NoError(t, err)
			require.Equal(t, AdmitOK, reply.Status)
			require.Equal(t, []Decision{DecisionReplayed, c.others, DecisionReplayed}, decisions(reply))
			require.Equal(t, first.Answers[1].Order, reply.Answers[0].Order)
			require.Equal(t, first.Answers[0].Order, reply.Answers[2].Order)
			require.Equal(t, MarkAdmitted, reply.Answers[0].State)
			require.Equal(t, orderid.Position{}, reply.Answers[1].Order)
			require.Equal(t, int64(2), reply.LastSeq)
			require.Equal(t, before, b.snapshot())
		})
	}
}

// All reasons to refuse hold at once, then the first is taken away, and so on.
func TestAdmit_RefusesForTheFirstReasonOfItsOrder(t *testing.T) {
	b := newBook(t, 1)
	now := time.Now().Truncate(time.Millisecond)
	b.admit(1) // sold out
	b.must("HSET", b.keys()["meta"], "bound", "1")
	b.voucher.Begin, b.voucher.End = now.Add(time.Hour), now.Add(-time.Hour)
	b.apply(VoucherPaused)
	call := b.call(2)
	call.SHA, call.NotAfter = b.at(now), now.Add(-time.Millisecond)
	next := func() Decision {
		reply, err := Admit(b.ctx, b.client, call)
		require.NoError(t, err)
		require.Equal(t, AdmitOK, reply.Status)
		return reply.Answers[0].Decision
	}
	require.Equal(t, DecisionLate, next())
	call.NotAfter = now
	require.Equal(t, DecisionPaused, next())
	b.apply(VoucherClosed)
	require.Equal(t, DecisionEnded, next())
	b.apply(VoucherOpen)
	require.Equal(t, DecisionNotStarted, next())
	b.voucher.Begin = now
	b.apply(VoucherOpen)
	require.Equal(t, DecisionEnded, next())
	b.voucher.End = now.Add(time.Hour)
	b.apply(VoucherOpen)
	require.Equal(t, DecisionSoldOut, next())
	b.voucher.Opening = 2
	b.apply(VoucherOpen)
	require.Equal(t, DecisionBusy, next())
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	require.Equal(t, DecisionAdmitted, next())
}

func TestAdmit_WindowBeginsInclusiveAndEndsExclusive(t *testing.T) {
	b := newBook(t, 10)
	begin := time.Now().UTC().Truncate(time.Second)
	b.voucher.Begin, b.voucher.End = begin, begin.Add(10*time.Millisecond)
	b.apply(VoucherOpen)
	for i, c := range []struct {
		now  time.Time
		want Decision
	}{
		{b.voucher.Begin.Add(-time.Millisecond), DecisionNotStarted},
		{b.voucher.Begin, DecisionAdmitted},
		{b.voucher.Begin.Add(time.Millisecond), DecisionAdmitted},
		{b.voucher.End.Add(-time.Millisecond), DecisionAdmitted},
		{b.voucher.End, DecisionEnded},
		{b.voucher.End.Add(time.Millisecond), DecisionEnded},
	} {
		require.Equal(t, []Decision{c.want}, decisions(b.admitAt(c.now, int64(1+i))), "%d", i)
	}
}

func TestAdmit_NotAfterIsInclusive(t *testing.T) {
	b := newBook(t, 10)
	now := time.Now().UTC().Truncate(time.Millisecond)
	call := b.call(1)
	call.SHA = b.at(now)
	for _, c := range []struct {
		notAfter time.Time
		want     Decision
	}{{now.Add(-time.Millisecond), DecisionLate}, {now, DecisionAdmitted}} {
		call.NotAfter = c.notAfter
		reply, err := Admit(b.ctx, b.client, call)
		require.NoError(t, err)
		require.Equal(t, []Decision{c.want}, decisions(reply))
	}
}

// The same with the server's real clock: whatever moment a call meets, its
// answer agrees with the time that the answer names.
func TestAdmit_DecidesByTheRedisClock(t *testing.T) {
	b := newBook(t, 1_000_000)
	reply, err := b.do("TIME").AsIntSlice()
	require.NoError(t, err)
	now := time.Unix(reply[0], reply[1]*1000).UTC().Truncate(time.Millisecond)
	b.voucher.Begin = now.Add(100 * time.Millisecond)
	b.apply(VoucherOpen)
	user := int64(0)
	until := func(last Decision) AdmitReply {
		t.Helper()
		for {
			user++
			got := b.admit(user)
			want := DecisionAdmitted
			if got.Now.Before(b.voucher.Begin) {
				want = DecisionNotStarted
			} else if !got.Now.Before(b.voucher.End) {
				want = DecisionEnded
			}
			require.Equal(t, want, got.Answers[0].Decision, "at %s", got.Now)
			if want == last {
				return got
			}
		}
	}
	b.voucher.End = until(DecisionAdmitted).Now.Add(100 * time.Millisecond)
	b.apply(VoucherOpen)
	until(DecisionEnded)
}

func TestAdmit_SameUserTwiceInABatchIsOneOrder(t *testing.T) {
	b := newBook(t, 10)
	reply := b.admit(5, 6, 5, 5, 6)
	require.Equal(t, []Decision{DecisionAdmitted, DecisionAdmitted, DecisionReplayed, DecisionReplayed, DecisionReplayed}, decisions(reply))
	for i, seq := range []int64{1, 2, 1, 1, 2} {
		require.Equal(t, orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: epoch, Seq: seq}, reply.Answers[i].Order)
		require.Equal(t, MarkAdmitted, reply.Answers[i].State)
	}
	entries := b.entries()
	require.Len(t, entries, 1)
	require.Len(t, entries[0].Orders, 2)
	books := b.books()
	require.Equal(t, []int64{8, 2, 2, 2}, []int64{books.Stock, books.Seq, books.Buyers, books.Meta.Admitted})
}

func TestAdmit_BoundsOrdersInFlight(t *testing.T) {
	b := newBook(t, 6)
	b.must("HSET", b.keys()["meta"], "bound", "3")
	require.Equal(t, []Decision{DecisionAdmitted, DecisionAdmitted, DecisionAdmitted, DecisionBusy, DecisionBusy}, decisions(b.admit(1, 2, 3, 4, 5)))
	require.Equal(t, []Decision{DecisionBusy}, decisions(b.admit(4)))
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	require.Equal(t, []Decision{DecisionAdmitted, DecisionAdmitted, DecisionAdmitted, DecisionSoldOut}, decisions(b.admit(4, 5, 6, 7)),
		"sold out is not hidden by a backlog")
	// A bound below what is in flight refuses and does no harm.
	b.voucher.Opening = 10
	b.apply(VoucherOpen)
	b.must("HSET", b.keys()["meta"], "bound", "1")
	require.Equal(t, []Decision{DecisionBusy}, decisions(b.admit(8)))
}

// More are in flight than may be where the bound was lowered. That hides nothing
// either.
func TestAdmit_SoldOutComesBeforeBusyWhereMoreAreInFlightThanTheBound(t *testing.T) {
	b := newBook(t, 3)
	b.admit(1, 2, 3)
	b.must("HSET", b.keys()["meta"], "bound", "1")
	require.Equal(t, []Decision{DecisionSoldOut, DecisionReplayed, DecisionSoldOut}, decisions(b.admit(4, 1, 5)))
	b.voucher.Opening = 4
	b.apply(VoucherOpen)
	require.Equal(t, []Decision{DecisionBusy, DecisionReplayed, DecisionBusy}, decisions(b.admit(4, 1, 5)))
}

func TestAdmit_AnswersForTheWholeBatch(t *testing.T) {
	type setting struct {
		name   string
		change func(b *book, call *AdmitCall)
		status AdmitStatus
		detail string
	}
	for _, c := range []setting{
		{"ledger behind what was seen", func(_ *book, call *AdmitCall) { call.Seen = 3 }, AdmitRewound, "2"},
		{"stale epoch", func(b *book, _ *AdmitCall) { b.must("HSET", b.keys()["meta"], "epoch", "8") }, AdmitStaleEpoch, "8"},
		{"meta missing", func(b *book, _ *AdmitCall) { b.must("DEL", b.keys()["meta"]) }, AdmitClosed, "ledger missing"},
		{"meta without state", func(b *book, _ *AdmitCall) { b.must("HDEL", b.keys()["meta"], "state") }, AdmitClosed, "ledger missing"},
		{"partition closed", func(b *book, _ *AdmitCall) {
			require.NoError(b.t, ClosePartition(b.ctx, b.client, b.partition, epoch, "books do not hold"))
		}, AdmitClosed, "books do not hold"},
		{"partition closed without a reason", func(b *book, _ *AdmitCall) {
			b.must("HSET", b.keys()["meta"], "state", "closed")
			b.must("HDEL", b.keys()["meta"], "reason")
		}, AdmitClosed, ""},
		{"partition in a state that nobody knows", func(b *book, _ *AdmitCall) { b.must("HSET", b.keys()["meta"], "state", "opening", "reason", "why") }, AdmitClosed, "why"},
		{"voucher missing", func(b *book, _ *AdmitCall) { b.must("DEL", b.keys()["voucher"]) }, AdmitNotFound, ""},
		{"voucher unknown", func(b *book, call *AdmitCall) { call.VoucherID = 4711 }, AdmitNotFound, ""},
		{"voucher draft", func(b *book, _ *AdmitCall) { b.must("HSET", b.keys()["voucher"], "state", "draft") }, AdmitNotFound, ""},
		{"voucher archived", func(b *book, _ *AdmitCall) {
			require.True(b.t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
			b.apply(VoucherClosed)
			b.apply(VoucherArchived)
		}, AdmitArchived, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBook(t, 10)
			b.admit(1, 2)
			call := b.call(1, 3)
			c.change(b, &call)
			before := b.snapshot()
			reply, err := Admit(b.ctx, b.client, call)
			require.NoError(t, err)
			require.Equal(t, c.status, reply.Status)
			require.Equal(t, c.detail, reply.Detail)
			require.Empty(t, reply.Answers)
			require.WithinDuration(t, time.Now(), reply.Now, patience)
			require.Equal(t, before, b.snapshot())
		})
	}
}

func TestAdmit_AcceptsWhatItHasSeen(t *testing.T) {
	b := newBook(t, 10)
	call := b.call(3)
	call.Seen = b.admit(1, 2).LastSeq
	reply, err := Admit(b.ctx, b.client, call)
	require.NoError(t, err)
	require.Equal(t, []Decision{DecisionAdmitted}, decisions(reply))
}

func TestAdmit_NamesTheDurabilityThatHolds(t *testing.T) {
	b := newBook(t, 10)
	require.Equal(t, DurabilityStrict, b.admit(1).Durability)
	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 100, DurabilityFast, testRunID))
	require.Equal(t, DurabilityFast, b.admit(1).Durability)
	b.must("HDEL", b.keys()["meta"], "durability")
	require.Equal(t, Durability(""), b.admit(2).Durability)
}
