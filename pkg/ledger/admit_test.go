package ledger

import (
	"fmt"
	"slices"
	"strconv"
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

func TestAdmit_NumbersOrdersDenselyOverBatches(t *testing.T) {
	b := newBook(t, 8)
	require.Equal(t, []Decision{1, 1, 1}, decisions(b.admit(1, 2, 3)))
	require.Equal(t, []Decision{8, 1, 8}, decisions(b.admit(1, 4, 2)))
	require.Equal(t, []Decision{8}, decisions(b.admit(4)))
	last := b.admit(5, 6, 7, 8, 9, 10)
	require.Equal(t, []Decision{1, 1, 1, 1, 2, 2}, decisions(last))
	require.Equal(t, int64(8), last.LastSeq)
	var seqs []int64
	for _, entry := range b.entries() {
		for _, order := range entry.Orders {
			require.Equal(t, order.Seq, order.UserID, "users were numbered in the order of admission")
			seqs = append(seqs, order.Seq)
		}
	}
	require.Equal(t, []int64{1, 2, 3, 4, 5, 6, 7, 8}, seqs)
	require.Equal(t, int64(0), b.admit(99).LastSeq, "an answer that names no order")
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

func TestAdmit_NeverWrapsAtTheLimitOfSeq(t *testing.T) {
	b := newBook(t, 10)
	b.must("HSET", b.keys()["voucher"], "seq", strconv.FormatInt(orderid.MaxSeq-2, 10))
	before := b.snapshot()
	_, err := Admit(b.ctx, b.client, b.call(1, 2, 3))
	require.ErrorIs(t, err, ErrFault)
	require.ErrorContains(t, err, "limit")
	require.Equal(t, before, b.snapshot())

	reply := b.admit(1, 2)
	require.Equal(t, int64(orderid.MaxSeq-1), reply.Answers[0].Order.Seq)
	require.Equal(t, int64(orderid.MaxSeq), reply.Answers[1].Order.Seq)
	require.Equal(t, int64(orderid.MaxSeq), b.entries()[0].Orders[1].Seq)
	before = b.snapshot()
	_, err = Admit(b.ctx, b.client, b.call(3))
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
	// A replay is still answered.
	reply = b.admit(2)
	require.Equal(t, int64(orderid.MaxSeq), reply.Answers[0].Order.Seq)
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	require.Equal(t, fmt.Sprintf("%d.%dp", epoch, int64(orderid.MaxSeq)), b.mark(2))
}

func TestAdmit_NeverWrapsAtTheLimitOfEpoch(t *testing.T) {
	for _, c := range []struct {
		epoch int64
		ok    bool
	}{{orderid.MaxEpoch, true}, {orderid.MaxEpoch + 1, false}, {1<<53 + 1, false}} {
		b := newEmptyBook(t, sharedClient(t))
		b.epoch, b.voucher.Epoch, b.voucher.Opening = c.epoch, c.epoch, 5
		require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, c.epoch, 100))
		require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, c.epoch, 100, DurabilityStrict, testRunID))
		require.NoError(t, LoadAdmit(b.ctx, b.client, b.partition, c.epoch))
		require.NoError(t, CreateVoucher(b.ctx, b.client, b.voucher))
		b.apply(VoucherOpen)
		before := b.snapshot()
		reply, err := Admit(b.ctx, b.client, b.call(1))
		if c.ok {
			require.NoError(t, err)
			require.Equal(t, []Decision{DecisionAdmitted}, decisions(reply))
			require.Equal(t, c.epoch, b.entries()[0].Epoch)
		} else {
			require.ErrorIs(t, err, ErrFault)
			require.Equal(t, before, b.snapshot())
		}
	}
}

func TestAdmit_KeepsEveryDigitOfTheLargestIDs(t *testing.T) {
	b := newBook(t, 10)
	b.voucher.VoucherID = 1<<63 - 1
	require.NoError(t, CreateVoucher(b.ctx, b.client, b.voucher))
	b.voucher.Rev = 0
	b.apply(VoucherOpen)
	users := []int64{1<<63 - 1, 1<<63 - 2, 1<<53 + 1, 1 << 53, 100_000_000_000_000, 1}
	reply := b.admit(users...)
	require.Equal(t, orderid.Position{VoucherID: 1<<63 - 1, Epoch: epoch, Seq: 1}, reply.Answers[0].Order)
	fields, err := b.do("HKEYS", "sk:{"+strconv.Itoa(b.partition)+"}:e7:buyers:9223372036854775807").AsStrSlice()
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"9223372036854775807", "9223372036854775806", "9007199254740993", "9007199254740992", "100000000000000", "1"}, fields)
	entry := b.entries()[0]
	require.Equal(t, int64(1<<63-1), entry.VoucherID)
	for i, user := range users {
		require.Equal(t, user, entry.Orders[i].UserID)
	}
	require.True(t, b.settle(b.settlement(entry, VerdictPersisted)).Settled)
	for i, user := range users {
		require.Equal(t, fmt.Sprintf("7.%dp", i+1), b.mark(user))
	}
}

func TestAdmit_KeepsEveryDigitOfLargeCounters(t *testing.T) {
	b := newBook(t, 10)
	for field, key := range map[string]string{"admitted": "meta", "settled": "meta", "entries_in": "meta", "stock": "voucher"} {
		b.must("HSET", b.keys()[key], field, "999999999999998")
	}
	b.admit(1)
	for field, want := range map[string]string{"admitted": "999999999999999", "entries_in": "999999999999999"} {
		require.Equal(t, want, b.get(b.keys()["meta"], field))
	}
	require.Equal(t, "999999999999997", b.get(b.keys()["voucher"], "stock"))
}

func TestAdmit_TakesAFullBatchAndNoMore(t *testing.T) {
	b := newBook(t, 1000)
	users := make([]int64, MaxBatch)
	for i := range users {
		users[i] = 1<<62 + int64(i)
	}
	reply := b.admit(users...)
	require.Equal(t, int64(MaxBatch), reply.LastSeq)
	entries := b.entries()
	require.Len(t, entries, 1)
	require.Len(t, entries[0].Orders, MaxBatch)
	require.Equal(t, users[MaxBatch-1], entries[0].Orders[MaxBatch-1].UserID)
	// All of them, with outcomes of every kind, also fit into one settlement.
	require.NoError(t, b.settle(b.settlement(entries[0], VerdictCancelled)).Err)
	require.Equal(t, int64(1000), b.books().Stock)

	before := b.snapshot()
	_, err := Admit(b.ctx, b.client, b.call(append(users, 1)...))
	require.ErrorIs(t, err, ErrFault)
	_, err = Admit(b.ctx, b.client, b.call())
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
}

func TestAdmit_EntryHoldsExactlyTheAdmittedInTheirOrder(t *testing.T) {
	b := newBook(t, 5)
	b.admit(2, 4)
	call := b.call()
	for _, user := range []int64{9, 4, 1, 9, 2, 7, 8} { // 7 takes the last unit
		call.Grabs = append(call.Grabs, Grab{UserID: user, Record: EncodeRecord(user, fmt.Sprintf("réf\x00%d", user), "00-aa-bb-0"+strconv.FormatInt(user, 10))})
	}
	reply, err := Admit(b.ctx, b.client, call)
	require.NoError(t, err)
	require.Equal(t, []Decision{1, 8, 1, 8, 8, 1, 2}, decisions(reply))
	entries := b.entries()
	require.Len(t, entries, 2)
	got := entries[1]
	require.Equal(t, reply.Now, got.AdmittedAt)
	require.Equal(t, b.partition, got.Partition)
	want := []Order{}
	for i, user := range []int64{9, 1, 7} {
		want = append(want, Order{
			Position: orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: epoch, Seq: int64(3 + i)},
			UserID:   user, Reference: fmt.Sprintf("réf\x00%d", user), Traceparent: "00-aa-bb-0" + strconv.FormatInt(user, 10),
		})
	}
	require.Equal(t, want, withoutRaw(got).Orders)
}

func TestAdmit_NamesTheDurabilityThatHolds(t *testing.T) {
	b := newBook(t, 10)
	require.Equal(t, DurabilityStrict, b.admit(1).Durability)
	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 100, DurabilityFast, testRunID))
	require.Equal(t, DurabilityFast, b.admit(1).Durability)
	b.must("HDEL", b.keys()["meta"], "durability")
	require.Equal(t, Durability(""), b.admit(2).Durability)
}

// wrongTypes puts something of another type in a key's place.
var wrongTypes = map[string]func(b *book, key string){
	"string": func(b *book, key string) { b.must("SET", key, "1") },
	"list":   func(b *book, key string) { b.must("RPUSH", key, "1") },
	"set":    func(b *book, key string) { b.must("SADD", key, "1") },
	"other": func(b *book, key string) { // a hash for the stream, a stream for a hash
		if strings.HasSuffix(key, ":orders") {
			b.must("HSET", key, "1", "1")
		} else {
			b.must("XADD", key, "*", "1", "1")
		}
	},
}

func TestAdmit_AKeyOfAWrongTypeHasNoEffect(t *testing.T) {
	for _, name := range []string{"meta", "voucher", "buyers", "orders"} {
		for kind, put := range wrongTypes {
			t.Run(name+" is a "+kind, func(t *testing.T) {
				b := newBook(t, 10)
				b.admit(1)
				key := b.keys()[name]
				b.must("DEL", key)
				put(b, key)
				before := b.snapshot()
				_, err := Admit(b.ctx, b.client, b.call(2, 3))
				require.ErrorIs(t, err, ErrFault)
				require.ErrorContains(t, err, "WRONGTYPE")
				require.Equal(t, before, b.snapshot())
			})
		}
	}
}

func TestAdmit_AFieldThatIsNoNumberHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	fields := map[string][]string{
		"meta":    {"bound", "admitted", "settled", "entries_in"},
		"voucher": {"stock", "seq", "begin_ms", "end_ms"},
	}
	for name, list := range fields {
		for _, field := range list {
			for _, bad := range []string{"", "x", "-1", "1.5", "1e3", " 1", "0x10", "1\n", "1234567890123456", "nil"} {
				key := b.keys()[name]
				good := b.get(key, field)
				if bad == "nil" {
					b.must("HDEL", key, field)
				} else {
					b.must("HSET", key, field, bad)
				}
				before := b.snapshot()
				_, err := Admit(b.ctx, b.client, b.call(2, 3))
				require.ErrorIs(t, err, ErrFault, "%s %s %q", name, field, bad)
				require.ErrorContains(t, err, "LEDGER_FAULT")
				require.Equal(t, before, b.snapshot())
				b.must("HSET", key, field, good)
			}
		}
	}
	for _, bad := range []string{"", "OPEN", "sold"} {
		b.must("HSET", b.keys()["voucher"], "state", bad)
		before := b.snapshot()
		_, err := Admit(b.ctx, b.client, b.call(2))
		require.ErrorIs(t, err, ErrFault)
		require.Equal(t, before, b.snapshot())
	}
	b.must("HDEL", b.keys()["voucher"], "state")
	_, err := Admit(b.ctx, b.client, b.call(2))
	require.ErrorIs(t, err, ErrFault)
	b.apply(VoucherOpen)
	require.Equal(t, int64(2), b.admit(2).LastSeq)
}

// One bad mark says nothing of the others: they are admitted, and the answer
// says so.
func TestAdmit_AMarkThatIsNoMarkIsAFaultOfThatUserAlone(t *testing.T) {
	b := newBook(t, 100)
	b.admit(9)
	for i, bad := range []string{
		"", "7.1", "7.1Z", "7.1aa", "x.1a", "7.xa", "0.1a", "7.0a", "71aa", "7.1a ", " 7.1a", "-7.1a", "7.+1a", "7.1.1a", "7.1099511627776a", "16777216.1a",
	} {
		b.must("HSET", b.keys()["buyers"], "1", bad)
		before := b.snapshot()
		reply := b.admit(1, 9, 1)
		require.Equal(t, []Decision{DecisionFault, DecisionReplayed, DecisionFault}, decisions(reply), "%q", bad)
		require.Equal(t, Answer{Decision: DecisionFault}, reply.Answers[0])
		require.Equal(t, before, b.snapshot())

		user, seq := int64(100+i), int64(2+i)
		reply = b.admit(1, user, 9)
		require.Equal(t, []Decision{DecisionFault, DecisionAdmitted, DecisionReplayed}, decisions(reply), "%q", bad)
		require.Equal(t, seq, reply.Answers[1].Order.Seq)
		require.Equal(t, seq, reply.LastSeq)
		require.Equal(t, seq, b.books().Seq)
		require.Equal(t, bad, b.mark(1), "left as it is")
		entries := b.entries()
		require.Equal(t, []int64{user}, []int64{entries[len(entries)-1].Orders[0].UserID})
	}
	b.apply(VoucherPaused)
	require.Equal(t, []Decision{DecisionFault, DecisionPaused}, decisions(b.admit(1, 2)), "also where others are refused")
}

func TestAdmit_AnyMarkOfAnotherEpochOrVersionIsAnOrder(t *testing.T) {
	b := newBook(t, 10)
	for mark, want := range map[string]Answer{
		"3.12h":                   {Order: orderid.Position{Epoch: 3, Seq: 12}, State: MarkHeld},
		"3.12z":                   {Order: orderid.Position{Epoch: 3, Seq: 12}, State: 'z'},
		"16777215.1099511627775p": {Order: orderid.Position{Epoch: orderid.MaxEpoch, Seq: orderid.MaxSeq}, State: MarkPersisted},
	} {
		b.must("HSET", b.keys()["buyers"], "1", mark)
		before := b.snapshot()
		reply := b.admit(1)
		want.Decision, want.Order.VoucherID = DecisionReplayed, b.voucher.VoucherID
		require.Equal(t, want, reply.Answers[0], mark)
		require.Zero(t, reply.LastSeq, "a position of another epoch says nothing of this one's seq")
		require.Equal(t, before, b.snapshot())
	}
}

func TestAdmit_AMissingStreamHasNoEffectAndIsNotMade(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.must("DEL", b.keys()["orders"])
	before := b.snapshot()
	_, err := Admit(b.ctx, b.client, b.call(2))
	require.ErrorIs(t, err, ErrFault)
	require.ErrorContains(t, err, "stream is missing")
	require.Equal(t, before, b.snapshot())
	require.Equal(t, []Decision{DecisionReplayed}, decisions(b.admit(1)))
}

// A right that is taken away between two writes: the first may have been done
// when the second fails.
func TestAdmit_ARightTakenAwayHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	cases := map[string][]string{
		"time":       {"-time"},
		"hmget":      {"-hmget"},
		"xadd":       {"-xadd"},
		"hset":       {"-hset"},
		"xdel":       {"-xdel"},
		"hset, xdel": {"-hset", "-xdel"},
	}
	for _, name := range []string{"meta", "voucher", "buyers", "orders"} {
		cases[name+" read-only"] = b.readOnly(name)
		hidden := b.readOnly(name)
		cases[name+" hidden"] = slices.DeleteFunc(hidden, func(rule string) bool { return strings.HasPrefix(rule, "%R~") })
	}
	// The same in the middle: HSET is allowed on some of the keys only.
	keys := b.keys()
	cases["hset of meta"] = []string{"-hset", "(+hset ~" + keys["voucher"] + " ~" + keys["buyers"] + ")"}
	cases["hset of buyers"] = []string{"-hset", "(+hset ~" + keys["voucher"] + " ~" + keys["meta"] + ")"}
	cases["hset of voucher"] = []string{"-hset", "(+hset ~" + keys["meta"] + " ~" + keys["buyers"] + ")"}
	for name, rules := range cases {
		t.Run(name, func(t *testing.T) {
			client := b.aclUser(sharedAddr(t), rules...)
			before := b.snapshot()
			_, err := Admit(b.ctx, client, b.call(2, 3))
			require.Error(t, err)
			require.NotErrorIs(t, err, ErrUnknown)
			require.NotErrorIs(t, err, ErrNoScript)
			require.Equal(t, before, b.snapshot())
		})
	}
	require.Equal(t, int64(3), b.admit(2, 3).LastSeq, "dense all the same")
	// What a gateway needs, and no more.
	needs := []string{"-@all", "+evalsha", "+time", "+hmget", "+hset", "+xadd", "+xdel", "+hello", "+client", "+ping", "~sk:{" + strconv.Itoa(b.partition) + "}:*"}
	reply, err := Admit(b.ctx, b.aclUser(sharedAddr(t), needs...), b.call(4))
	require.NoError(t, err)
	require.Equal(t, []Decision{DecisionAdmitted}, decisions(reply))
}

func TestAdmit_FullMemoryHasNoEffectAndSettlingWorks(t *testing.T) {
	server := ownServer(t)
	b := newBookOn(t, connect(t, server.Addr(), ""), 100)
	b.admit(1, 2, 3)
	b.admit(4, 5)
	b.must("XADD", b.keys()["orders"], "*", "v", EntryVersion)
	b.must("XADD", b.keys()["orders"], "*", "v", EntryVersion)
	b.must("CONFIG", "SET", "maxmemory", "1000000")
	before := b.snapshot()
	for _, call := range []AdmitCall{b.call(6, 7), b.call(1)} {
		_, err := Admit(b.ctx, b.client, call)
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, "OOM")
	}
	require.ErrorIs(t, CreatePartition(b.ctx, b.client, b.partition+1000, epoch, 1), ErrRefused)
	other := b.voucher
	other.VoucherID = 5
	require.ErrorIs(t, CreateVoucher(b.ctx, b.client, other), ErrRefused)
	require.Equal(t, before, b.snapshot())

	// What frees memory, and what stops a sale, works. Also after the script
	// cache is gone.
	b.must("SCRIPT", "FLUSH")
	raw, err := Scan(b.ctx, b.client, b.partition, epoch, "-", 2)
	require.NoError(t, err)
	for i, verdict := range []Verdict{VerdictHeld, VerdictCancelled} {
		entry, err := DecodeEntry(b.partition, raw[i].ID, raw[i].Fields)
		require.NoError(t, err)
		result := b.settle(b.settlement(entry, verdict))
		require.NoError(t, result.Err)
		require.True(t, result.Settled)
	}
	books := b.books()
	require.Equal(t, []int64{2, 5, 97, 3}, []int64{books.Entries, books.Settled, books.Stock, books.Buyers})
	for seq, verdict := range map[int64]Verdict{1: VerdictPersisted, 2: VerdictConflict, 3: VerdictCancelled} {
		done, err := Resolve(b.ctx, b.client, b.resolution(seq, seq, verdict))
		require.NoError(t, err)
		require.True(t, done)
	}
	_, err = ReadBacklog(b.ctx, b.client, b.partition, epoch)
	require.NoError(t, err)
	_, err = Orphans(b.ctx, b.client, b.partition, epoch, 10)
	require.NoError(t, err)
	require.NoError(t, RedeliverAll(b.ctx, b.client, b.partition, epoch))
	b.apply(VoucherPaused)
	b.apply(VoucherClosed)
	b.apply(VoucherArchived)
	require.NoError(t, EnsureGroup(b.ctx, b.client, b.partition, epoch))
	require.NoError(t, TunePartition(b.ctx, b.client, b.partition, epoch, 2, DurabilityFast))
	require.NoError(t, ClosePartition(b.ctx, b.client, b.partition, epoch, "memory is full"))
	require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, epoch, 1, DurabilityStrict, testRunID))
	raw = b.deliver("w")
	require.Len(t, raw, 2, "reading works")
	released, err := Release(b.ctx, b.client, b.partition, epoch, "w", time.Minute, []string{raw[0].ID})
	require.NoError(t, err)
	require.Equal(t, 1, released)
	for _, r := range raw {
		discarded, err := Discard(b.ctx, b.client, b.partition, epoch, r.ID)
		require.NoError(t, err)
		require.True(t, discarded)
	}
	removed, err := RemoveConsumer(b.ctx, b.client, b.partition, epoch, "w")
	require.NoError(t, err)
	require.True(t, removed)
}

func TestAdmit_AnAnswerThatCannotBeReadIsUnknown(t *testing.T) {
	b := newBook(t, 10) // its script has run: what it did cannot be told
	call := b.call(1, 2)
	for _, body := range []string{
		"return {}", "return {'OK'}", "return {1, 2, 3}", "return {'OK', 'x', 1, 'strict', 1, 1}", "return {'WHAT', 1}",
		"return {'OK', 1, 1, 'strict', 1}", "return {'OK', 1, 'x', 'strict', 1, 1}", "return {'OK', 1, 1, 1, 1, 1}",
		"return {'OK', 1, 1, 'strict', 1, 8}", "return {'OK', 1, 1, 'strict', 1, 10}", "return {'OK', 1, 1, 'strict', 0, 1}", "return {'OK', 1, 1, 'strict', 1, {}}",
		"return {'OK', 1, 1, 'strict', 1, 'mark'}", "return {{}, 1}",
	} {
		s := newScript("other", "#!lua\n"+body, nil, nil, nil)
		require.NoError(t, load(b.ctx, b.client, s))
		call.SHA = s.sha
		_, err := Admit(b.ctx, b.client, call)
		require.ErrorIs(t, err, ErrUnknown, body)
		require.NotErrorIs(t, err, ErrFault, body)
	}
}

func TestAdmit_ALostReplyIsUnknownAndTheSecondRunAReplay(t *testing.T) {
	b := newBook(t, 10)
	proxy := testProxy(t, sharedAddr(t))
	client := connect(t, proxy.Addr(), "")
	require.NoError(t, client.Do(b.ctx, client.B().Ping().Build()).Error())
	proxy.SwallowReplies()
	_, err := Admit(shortly(t, 300*time.Millisecond), client, b.call(1, 2))
	require.ErrorIs(t, err, ErrUnknown)
	require.Eventually(t, func() bool { return b.books().Seq == 2 }, patience, 5*time.Millisecond, "the call has run")
	proxy.Pass()

	client = connect(t, proxy.Addr(), "")
	reply, err := Admit(b.ctx, client, b.call(1, 2))
	require.NoError(t, err)
	require.Equal(t, []Decision{DecisionReplayed, DecisionReplayed}, decisions(reply))
	require.Equal(t, int64(2), reply.Answers[1].Order.Seq)
	require.Equal(t, int64(8), b.books().Stock)

	// A connection that is cut while the call is held back.
	proxy.Hold()
	cut := make(chan error, 1)
	go func() {
		_, err := Admit(b.ctx, client, b.call(3))
		cut <- err
	}()
	require.Eventually(t, func() bool { return proxy.Held() > 0 }, patience, 5*time.Millisecond)
	proxy.CutAll()
	require.ErrorIs(t, <-cut, ErrUnknown)
	require.Equal(t, int64(2), b.books().Seq)
}

func TestAdmit_ACallThatWasStuckBeyondItsTimeAdmitsNobody(t *testing.T) {
	b := newBook(t, 10)
	proxy := testProxy(t, sharedAddr(t))
	client := connect(t, proxy.Addr(), "")
	require.NoError(t, client.Do(b.ctx, client.B().Ping().Build()).Error())
	proxy.Hold()
	call := b.call(1)
	call.NotAfter = time.Now().Add(50 * time.Millisecond)
	_, err := Admit(shortly(t, 200*time.Millisecond), client, call)
	require.ErrorIs(t, err, ErrUnknown)
	calls := commandCalls(b, "evalsha")
	proxy.Release()
	require.Eventually(t, func() bool { return commandCalls(b, "evalsha") > calls }, patience, 5*time.Millisecond, "the call has arrived")
	require.Equal(t, int64(0), b.books().Seq)
	require.Equal(t, []Decision{DecisionAdmitted}, decisions(b.admit(1)))
}

// commandCalls is how often the server has run a command.
func commandCalls(b *book, name string) int {
	b.t.Helper()
	text, err := b.do("INFO", "commandstats").ToString()
	require.NoError(b.t, err)
	for _, line := range strings.Split(text, "\r\n") {
		if rest, ok := strings.CutPrefix(line, "cmdstat_"+name+":calls="); ok {
			number, _, _ := strings.Cut(rest, ",")
			calls, err := strconv.Atoi(number)
			require.NoError(b.t, err)
			return calls
		}
	}
	return 0
}
