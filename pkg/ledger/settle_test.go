package ledger

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/orderid"
)

// mixed settles the entry of five orders with all five verdicts, so that every
// kind of write is done; the third order is in conflict with 3.99.
func (b *book) mixed(entry Entry) Settlement {
	b.t.Helper()
	require.Len(b.t, entry.Orders, 5)
	s := b.settlement(entry, VerdictPersisted)
	for i, verdict := range []Verdict{VerdictPersisted, VerdictHeld, VerdictConflict, VerdictRejected, VerdictCancelled} {
		s.Orders[i].Verdict = verdict
	}
	s.Orders[2].Standing = orderid.Position{VoucherID: entry.VoucherID, Epoch: 3, Seq: 99}
	return s
}

func TestSettle_TellsTheLedgerEachVerdict(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4, 5)
	b.deliver("w")
	result := b.settle(b.mixed(b.entries()[0]))
	require.Equal(t, SettleResult{Settled: true, Units: 2}, result)

	require.Equal(t, []string{"7.1p", "7.2h", "3.99p", "(nil)", "(nil)"}, []string{b.mark(1), b.mark(2), b.mark(3), b.mark(4), b.mark(5)})
	require.Equal(t, []string{"(nil)", "2:h:", "3:c:3.99", "4:r:", "5:x:"}, []string{b.outcome(1), b.outcome(2), b.outcome(3), b.outcome(4), b.outcome(5)})
	books := b.books()
	require.Equal(t, Books{
		Now: books.Now, Buyers: 3, Entries: 0, Exists: true, State: VoucherOpen, Rev: 1,
		Meta:  Meta{Exists: true, Open: true, Epoch: epoch, Admitted: 5, Settled: 5, EntriesIn: 1, EntriesOut: 1},
		Stock: 7, Opening: 10, Seq: 5, Returned: 2, Settled: 5, CarriedOver: 0, Removed: 2,
	}, books)
	require.Zero(t, books.InFlight())
	pending, err := PendingByConsumer(b.ctx, b.client, b.partition, epoch)
	require.NoError(t, err)
	require.Equal(t, int64(0), pending[0].Entries)

	for seq, want := range map[int64]Outcome{
		2: {UserID: 2, Verdict: VerdictHeld},
		3: {UserID: 3, Verdict: VerdictConflict, Standing: orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: 3, Seq: 99}},
		4: {UserID: 4, Verdict: VerdictRejected},
		5: {UserID: 5, Verdict: VerdictCancelled},
		1: {},
	} {
		lookup, err := FindOrder(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID, seq, seq)
		require.NoError(t, err)
		require.Equal(t, want, lookup.Outcome)
	}

	// Users whose order is gone may buy again, the others have theirs.
	reply := b.admit(1, 2, 3, 4, 5)
	require.Equal(t, []Decision{8, 8, 8, 1, 1}, decisions(reply))
	require.Equal(t, orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: 3, Seq: 99}, reply.Answers[2].Order)
	require.Equal(t, []MarkState{'p', 'h', 'p', 'a', 'a'}, []MarkState{
		reply.Answers[0].State, reply.Answers[1].State, reply.Answers[2].State, reply.Answers[3].State, reply.Answers[4].State,
	})
}

func TestSettle_CountsAnEntryOnce(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4, 5)
	b.admit(6)
	b.deliver("w")
	settlement := b.mixed(b.entries()[0])
	// Also within one pipeline.
	results := Settle(b.ctx, b.client, []Settlement{settlement, settlement})
	require.Equal(t, []SettleResult{{Settled: true, Units: 2}, {}}, results)
	before := b.snapshot()
	require.Equal(t, SettleResult{}, b.settle(settlement))
	require.Equal(t, SettleResult{}, b.settle(b.settlement(Entry{ID: "1-1", Epoch: epoch, VoucherID: b.voucher.VoucherID, Orders: []Order{{UserID: 6}}}, VerdictCancelled)), "an entry that never was")
	require.Equal(t, before, b.snapshot())
	require.Empty(t, Settle(b.ctx, b.client, nil))
}

func TestSettle_AnEntryOfAnArchivedVoucherIsSettledAlready(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	settlement := b.settlement(b.entries()[0], VerdictPersisted)
	require.True(t, b.settle(settlement).Settled)
	b.apply(VoucherClosed)
	b.apply(VoucherArchived)
	before := b.snapshot()
	require.Equal(t, SettleResult{}, b.settle(settlement), "a writer that was paused meanwhile")
	require.Equal(t, before, b.snapshot())
}

func TestSettle_ChangesOnlyAMarkThatHoldsThisPosition(t *testing.T) {
	for _, other := range []string{"7.6a", "6.1p", "7.11a", "nil"} {
		b := newBook(t, 10)
		b.admit(1, 2, 3, 4, 5)
		for _, user := range []string{"1", "2", "3", "4", "5"} {
			if other == "nil" {
				b.must("HDEL", b.keys()["buyers"], user)
			} else {
				b.must("HSET", b.keys()["buyers"], user, other)
			}
		}
		before := b.snapshot()[b.keys()["buyers"]]
		require.Equal(t, SettleResult{Settled: true, Units: 0}, b.settle(b.mixed(b.entries()[0])))
		require.Equal(t, before, b.snapshot()[b.keys()["buyers"]])
		books := b.books()
		require.Equal(t, []int64{5, 0, 0, 5}, []int64{books.Stock, books.Returned, books.Removed, books.Settled})
		require.Equal(t, "4:r:", b.outcome(4), "the outcome is the position's, whoever holds the mark")
	}
}

func TestSettle_AHeldOrderThatIsPersistedLater(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.must("HSET", b.keys()["buyers"], "1", "7.1h")
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	require.Equal(t, "7.1p", b.mark(1))
	// A mark that holds the verdict already is left as it is.
	b.admit(2)
	b.must("HSET", b.keys()["buyers"], "2", "7.2p")
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	require.Equal(t, "7.2p", b.mark(2))
}

func TestSettle_AnEntryCountsWhereverItIs(t *testing.T) {
	for name, move := range map[string]func(b *book, id string){
		"undelivered": func(*book, string) {},
		"pending":     func(b *book, _ string) { b.deliver("w") },
		"trimmed while pending": func(b *book, id string) {
			b.deliver("w")
			b.must("XDEL", b.keys()["orders"], id)
		},
		"without a group": func(b *book, _ string) { b.must("XGROUP", "DESTROY", b.keys()["orders"], Group) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBook(t, 10)
			b.admit(1, 2, 3, 4, 5)
			settlement := b.mixed(b.entries()[0])
			move(b, settlement.EntryID)
			require.Equal(t, SettleResult{Settled: true, Units: 2}, b.settle(settlement))
			books := b.books()
			require.Equal(t, []int64{0, 5, 7, 1}, []int64{books.Entries, books.Settled, books.Stock, books.Meta.EntriesOut})
			require.NotContains(t, b.snapshot()[b.keys()["orders"]], "pending")
			require.Equal(t, SettleResult{}, b.settle(settlement))
		})
	}
}

func TestSettle_OfAnotherEpochHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	settlement := b.settlement(b.entries()[0], VerdictPersisted)
	b.must("HSET", b.keys()["meta"], "epoch", "8")
	before := b.snapshot()
	require.ErrorIs(t, b.settle(settlement).Err, ErrStaleEpoch)
	require.Equal(t, before, b.snapshot())
	b.must("DEL", b.keys()["meta"])
	before = b.snapshot()
	require.ErrorIs(t, b.settle(settlement).Err, ErrStaleEpoch)
	require.Equal(t, before, b.snapshot())
}

func TestSettle_AKeyOfAWrongTypeHasNoEffect(t *testing.T) {
	for _, name := range []string{"meta", "voucher", "buyers", "outcomes", "orders"} {
		for kind, put := range wrongTypes {
			t.Run(name+" is a "+kind, func(t *testing.T) {
				b := newBook(t, 10)
				b.admit(1, 2, 3, 4, 5)
				b.deliver("w")
				settlement := b.mixed(b.entries()[0])
				key := b.keys()[name]
				b.must("DEL", key)
				put(b, key)
				before := b.snapshot()
				result := b.settle(settlement)
				require.ErrorIs(t, result.Err, ErrFault)
				require.ErrorContains(t, result.Err, "WRONGTYPE")
				require.False(t, result.Settled)
				require.Equal(t, before, b.snapshot())
			})
		}
	}
}

func TestSettle_AFieldThatIsNoNumberHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4, 5)
	b.deliver("w")
	settlement := b.mixed(b.entries()[0])
	for name, fields := range map[string][]string{
		"meta":    {"settled", "entries_in", "entries_out"},
		"voucher": {"stock", "returned", "settled", "removed", "seq"},
	} {
		for _, field := range fields {
			for _, bad := range []string{"", "x", "-1", "1.5", "1e3", " 1", "1234567890123456", "nil"} {
				key := b.keys()[name]
				good := b.get(key, field)
				if bad == "nil" {
					b.must("HDEL", key, field)
				} else {
					b.must("HSET", key, field, bad)
				}
				before := b.snapshot()
				result := b.settle(settlement)
				require.ErrorIs(t, result.Err, ErrFault, "%s %s %q", name, field, bad)
				require.Equal(t, before, b.snapshot())
				b.must("HSET", key, field, good)
			}
		}
	}
	require.True(t, b.settle(settlement).Settled, "the token is still there")
}

func TestSettle_AMissingVoucherHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	settlement := b.settlement(b.entries()[0], VerdictPersisted)
	b.must("DEL", b.keys()["voucher"])
	before := b.snapshot()
	require.ErrorIs(t, b.settle(settlement).Err, ErrFault)
	require.Equal(t, before, b.snapshot())
}

func TestSettle_WhatNoWriterSaysHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4, 5)
	b.deliver("w")
	good := b.mixed(b.entries()[0])
	before := b.snapshot()
	change := func(change func(s *Settlement)) Settlement {
		s := good
		s.Orders = slices.Clone(good.Orders)
		change(&s)
		return s
	}
	for name, bad := range map[string]Settlement{
		"verdict":               change(func(s *Settlement) { s.Orders[4].Verdict = 'q' }),
		"no verdict":            change(func(s *Settlement) { s.Orders[0].Verdict = 0 }),
		"conflict with nothing": change(func(s *Settlement) { s.Orders[2].Standing = orderid.Position{} }),
		"seq":                   change(func(s *Settlement) { s.Orders[0].Seq = -1 }),
		"no orders":             change(func(s *Settlement) { s.Orders = nil }),
		"entry id":              change(func(s *Settlement) { s.EntryID = "first" }),
	} {
		result := b.settle(bad)
		require.ErrorIs(t, result.Err, ErrFault, name)
		require.False(t, result.Settled)
		require.Equal(t, before, b.snapshot(), name)
	}
	require.True(t, b.settle(good).Settled)
}

// Each right is taken away while a settlement is made that does every kind of
// write; then the right is given back, and the token is still good.
func TestSettle_ARightTakenAwayHasNoEffect(t *testing.T) {
	b := newBook(t, 1000)
	cases := map[string][]string{}
	for _, command := range []string{"hmget", "xpending", "xack", "xdel", "hset", "hdel"} {
		cases[command] = []string{"-" + command}
	}
	cases["xack, hdel"] = []string{"-xack", "-hdel"}
	cases["xdel, hdel"] = []string{"-xdel", "-hdel"}
	cases["hset, xack, xdel"] = []string{"-hset", "-xack", "-xdel"}
	for _, name := range []string{"meta", "voucher", "buyers", "outcomes", "orders"} {
		cases[name+" read-only"] = b.readOnly(name)
		cases[name+" hidden"] = slices.DeleteFunc(b.readOnly(name), func(rule string) bool { return strings.HasPrefix(rule, "%R~") })
	}
	// The same in the middle: the command is allowed on all keys but one.
	for command, names := range map[string][]string{"hset": {"voucher", "meta", "buyers", "outcomes"}, "hdel": {"buyers", "outcomes"}} {
		for _, name := range names {
			selector := "(+" + command
			for other, key := range b.keys() {
				if other != name {
					selector += " ~" + key
				}
			}
			cases[command+" of "+name] = []string{"-" + command, selector + ")"}
		}
	}
	user := int64(1)
	for name, rules := range cases {
		for _, outcomesBefore := range []bool{false, true} {
			b.admit(user, user+1, user+2, user+3, user+4)
			user += 5
			b.deliver("w")
			settlement := b.mixed(b.entries()[0])
			if outcomesBefore { // told before, of a redelivery that ended otherwise
				for _, order := range settlement.Orders[1:4] {
					b.must("HSET", b.keys()["outcomes"], formatInt(order.Seq), "1:h:")
				}
			}
			client := b.aclUser(sharedAddr(t), rules...)
			before := b.snapshot()
			result := Settle(b.ctx, client, []Settlement{settlement})[0]
			require.Error(t, result.Err, name)
			require.NotErrorIs(t, result.Err, ErrUnknown, name)
			require.False(t, result.Settled)
			require.Equal(t, before, b.snapshot(), name)
			require.Equal(t, SettleResult{Settled: true, Units: 2}, b.settle(settlement))
		}
	}
	// An undelivered entry is found by XRANGE.
	b.admit(user)
	settlement := b.settlement(b.entries()[0], VerdictPersisted)
	before := b.snapshot()
	require.Error(t, Settle(b.ctx, b.aclUser(sharedAddr(t), "-xrange"), []Settlement{settlement})[0].Err)
	require.Equal(t, before, b.snapshot())

	// What a settlement needs, and no more.
	needs := []string{"-@all", "+evalsha", "+hmget", "+xpending", "+xrange", "+xack", "+xdel", "+hset", "+hdel", "+hello", "+client", "+ping", "~*"}
	require.True(t, Settle(b.ctx, b.aclUser(sharedAddr(t), needs...), []Settlement{settlement})[0].Settled)
}

func TestSettle_AnswersEachEntryByItself(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.admit(2)
	b.admit(3)
	entries := b.entries()
	wrong := b.settlement(entries[1], 'q')
	stale := b.settlement(entries[1], VerdictPersisted)
	stale.Epoch = 6
	b.must("SCRIPT", "FLUSH") // each loads for itself
	results := Settle(b.ctx, b.client, []Settlement{b.settlement(entries[0], VerdictPersisted), wrong, stale, b.settlement(entries[2], VerdictPersisted)})
	require.True(t, results[0].Settled)
	require.ErrorIs(t, results[1].Err, ErrFault)
	require.ErrorIs(t, results[2].Err, ErrStaleEpoch)
	require.True(t, results[3].Settled)
	require.Equal(t, int64(1), b.books().InFlight())
	require.NoError(t, LoadAdmit(b.ctx, b.client, b.partition, epoch))
}

func TestSettle_ALostReplyIsUnknownAndTheRepeatCountsNothing(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4, 5)
	b.deliver("w")
	settlement := b.mixed(b.entries()[0])
	require.NoError(t, load(b.ctx, b.client, settle))
	proxy := testProxy(t, sharedAddr(t))
	client := connect(t, proxy.Addr(), "")
	require.NoError(t, client.Do(b.ctx, client.B().Ping().Build()).Error())
	proxy.SwallowReplies()
	result := Settle(shortly(t, 300*time.Millisecond), client, []Settlement{settlement})[0]
	require.ErrorIs(t, result.Err, ErrUnknown)
	require.Eventually(t, func() bool { return b.books().Settled == 5 }, patience, 5*time.Millisecond)
	before := b.snapshot()
	require.Equal(t, SettleResult{}, b.settle(settlement))
	require.Equal(t, before, b.snapshot())
}

func TestSettle_AnAnswerThatNobodyWroteIsAFault(t *testing.T) {
	b := newBook(t, 10)
	for _, body := range []string{"return {}", "return {'WHAT'}", "return {'SETTLED'}", "return {'SETTLED', 1, 'x'}", "return {{}}"} {
		s := newScript("other", "#!lua\n"+body, nil, nil, nil)
		reply, err := s.run(b.ctx, b.client, nil, nil)
		if err == nil {
			err = parseSettleReply(Settlement{}, reply).Err
		}
		require.ErrorIs(t, err, ErrFault, body)
	}
	require.ErrorIs(t, parseSettleReply(Settlement{}, nil).Err, ErrFault)
}

// stray adds an entry by hand that names positions which an admission may have
// given away, and returns its settlement.
func (b *book) stray(first int64, users []int64, verdict Verdict) Settlement {
	b.t.Helper()
	id, err := b.do("XADD", b.keys()["orders"], "*", "v", EntryVersion).ToString()
	require.NoError(b.t, err)
	s := Settlement{Partition: b.partition, EntryID: id, Epoch: b.epoch, VoucherID: b.voucher.VoucherID}
	for i, user := range users {
		s.Orders = append(s.Orders, Settled{UserID: user, Seq: first + int64(i), Verdict: verdict})
	}
	return s
}

func TestSettle_AnEntryThatWasNeverAdmittedChangesNothing(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4, 5)
	require.True(t, b.settle(b.mixed(b.entries()[0])).Settled)
	b.admit(6, 7)
	ours := b.settlement(b.entries()[0], VerdictPersisted)
	before := b.snapshot()
	for _, verdict := range []Verdict{VerdictPersisted, VerdictHeld, VerdictRejected, VerdictCancelled} {
		for _, s := range []Settlement{b.stray(8, []int64{6}, verdict), b.stray(901, []int64{0}, verdict), b.stray(7, []int64{7, 0}, verdict)} {
			b.deliver("w")
			require.Equal(t, SettleResult{Settled: true, Stranger: true}, b.settle(s))
			require.Equal(t, SettleResult{}, b.settle(s))
		}
	}
	b.must("XGROUP", "SETID", b.keys()["orders"], Group, "0")
	b.must("XACK", b.keys()["orders"], Group, ours.EntryID)
	require.Equal(t, before, b.snapshot())
	require.Equal(t, SettleResult{Settled: true}, b.settle(ours))
}

// With nothing in flight: whatever the stranger's entry names and however it
// ended, nothing is counted, given back or told a second time.
func TestSettle_AnEntryTooManyCountsNothing(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4, 5)
	require.True(t, b.settle(b.mixed(b.entries()[0])).Settled)
	b.admit(6)
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	before := b.snapshot()
	for _, verdict := range []Verdict{VerdictPersisted, VerdictHeld, VerdictRejected, VerdictCancelled} {
		for _, users := range [][]int64{{1, 2, 3, 4, 5, 6}, {0, 0, 0, 0, 0, 0}} {
			require.Equal(t, SettleResult{Settled: true, Stranger: true}, b.settle(b.stray(1, users, verdict)))
			require.Equal(t, before, b.snapshot())
		}
	}
}

// A stranger's entry that is settled before those that were admitted counts in
// their place; when all are settled, the books are right all the same.
func TestSettle_AStrangersEntryAheadOfOthersLeavesTheBooksRight(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5} {
		b := newBook(t, 10)
		b.admit(1)
		b.admit(2, 3, 4, 5, 6)
		entries := b.entries()
		require.True(t, b.settle(b.stray(1, []int64{1, 2, 3, 4, 5}[:n], VerdictPersisted)).Settled)
		first := b.settle(b.settlement(entries[0], VerdictPersisted))
		last := b.settle(b.settlement(entries[1], VerdictCancelled))
		require.True(t, first.Settled && last.Settled)
		require.True(t, first.Stranger || last.Stranger)
		books := b.books()
		require.Equal(t, []int64{6, 6, 6, 2, 2, 0}, []int64{books.Settled, books.Meta.Settled, books.Meta.Admitted, books.Meta.EntriesIn, books.Meta.EntriesOut, books.Entries})
		require.Equal(t, "(nil)", b.mark(6), "an order in flight is told how it ended")
		require.Equal(t, "6:x:", b.outcome(6))
		require.Equal(t, books.Seq-books.Removed, books.Buyers)
		require.Equal(t, books.Opening+books.Returned, books.Stock+books.Seq)
	}
}

func TestAdmittedSeq_TellsHowFarTheLedgerHasAdmitted(t *testing.T) {
	b := newBook(t, 10)
	seq, err := AdmittedSeq(b.ctx, b.client, b.partition, b.epoch, b.voucher.VoucherID)
	require.NoError(t, err)
	require.Zero(t, seq)
	b.admit(1, 2, 3)
	seq, err = AdmittedSeq(b.ctx, b.client, b.partition, b.epoch, b.voucher.VoucherID)
	require.NoError(t, err)
	require.Equal(t, int64(3), seq)
	_, err = AdmittedSeq(b.ctx, b.client, b.partition, b.epoch, 1)
	require.ErrorIs(t, err, ErrMissing)
	for _, bad := range []string{"", "x", "-1"} {
		b.must("HSET", b.keys()["voucher"], "seq", bad)
		_, err = AdmittedSeq(b.ctx, b.client, b.partition, b.epoch, b.voucher.VoucherID)
		require.ErrorIs(t, err, ErrFault, bad)
	}
	b.must("DEL", b.keys()["voucher"])
	b.must("SET", b.keys()["voucher"], "x")
	_, err = AdmittedSeq(b.ctx, b.client, b.partition, b.epoch, b.voucher.VoucherID)
	require.ErrorIs(t, err, ErrFault)
}

// The script is told the first seq alone, so what is not one run must not reach it.
func TestSettle_OrdersThatAreNotOneRunAreRefused(t *testing.T) {
	b := newBook(t, 10)
	reply := b.admit(1, 2, 3)
	require.Equal(t, AdmitOK, reply.Status)
	entry := b.entries()[0]
	gap := b.settlement(entry, VerdictPersisted)
	gap.Orders = append(gap.Orders[:1:1], gap.Orders[2])
	none := b.settlement(entry, VerdictPersisted)
	none.Orders = nil
	results := Settle(b.ctx, b.client, []Settlement{gap, none, b.settlement(entry, VerdictPersisted)})
	require.ErrorIs(t, results[0].Err, ErrFault)
	require.ErrorIs(t, results[1].Err, ErrFault)
	require.NoError(t, results[2].Err)
	require.True(t, results[2].Settled)
}
