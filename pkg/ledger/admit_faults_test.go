package ledger

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/orderid"
)

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
	_, _, err = Orphans(b.ctx, b.client, b.partition, epoch, "", 10)
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
