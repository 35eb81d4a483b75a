package ledger

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/orderid"
)

// resolution is a decision about an order of the book's voucher; a conflict is
// with 3.99.
func (b *book) resolution(user, seq int64, verdict Verdict) Resolution {
	r := Resolution{
		Partition: b.partition, Position: orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: b.epoch, Seq: seq},
		UserID: user, Verdict: verdict,
	}
	if verdict == VerdictConflict {
		r.Standing = orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: 3, Seq: 99}
	}
	return r
}

func (b *book) resolve(r Resolution) bool {
	b.t.Helper()
	done, err := Resolve(b.ctx, b.client, r)
	require.NoError(b.t, err)
	return done
}

// newHeld is a book in which orders 1 to n of users 1 to n are held.
func newHeld(t testing.TB, stock, n int64) *book {
	t.Helper()
	b := newBook(t, stock)
	b.hold(1, n)
	return b
}

// hold admits users and settles their orders as held.
func (b *book) hold(from, to int64) {
	b.t.Helper()
	var users []int64
	for user := from; user <= to; user++ {
		users = append(users, user)
	}
	b.admit(users...)
	entries := b.entries()
	require.True(b.t, b.settle(b.settlement(entries[len(entries)-1], VerdictHeld)).Settled)
}

// requireBooks holds the equations of the books against the ledger's figures.
func (b *book) requireBooks() Books {
	b.t.Helper()
	books := b.books()
	require.Equal(b.t, books.Opening+books.Returned, books.Stock+books.Seq)
	require.Equal(b.t, books.CarriedOver+books.Seq-books.Removed, books.Buyers)
	require.Equal(b.t, books.Meta.InFlight(), books.InFlight())
	return books
}

func TestResolve_TellsTheLedgerWhatWasDecided(t *testing.T) {
	b := newHeld(t, 10, 3)
	for i, c := range []struct {
		verdict                  Verdict
		mark, outcome            string
		stock, returned, removed int64
	}{
		{VerdictPersisted, "7.1p", "(nil)", 7, 0, 0},
		{VerdictConflict, "3.99p", "2:c:3.99", 8, 1, 0},
		{VerdictCancelled, "(nil)", "3:x:", 9, 2, 1},
	} {
		seq := int64(i + 1)
		require.True(t, b.resolve(b.resolution(seq, seq, c.verdict)))
		require.Equal(t, []string{c.mark, c.outcome}, []string{b.mark(seq), b.outcome(seq)})
		books := b.requireBooks()
		require.Equal(t, []int64{c.stock, c.returned, c.removed, 3}, []int64{books.Stock, books.Returned, books.Removed, books.Settled})
	}
	// Told once; whatever is told afterwards changes nothing.
	before := b.snapshot()
	for seq := int64(1); seq <= 3; seq++ {
		require.False(t, b.resolve(b.resolution(seq, seq, []Verdict{VerdictPersisted, VerdictConflict, VerdictCancelled}[seq-1])))
	}
	require.False(t, b.resolve(b.resolution(2, 2, VerdictCancelled)))
	require.False(t, b.resolve(b.resolution(3, 3, VerdictPersisted)))
	require.Equal(t, before, b.snapshot())
	// The cancelled one may buy again, the others have their orders.
	require.Equal(t, []Decision{8, 8, 1}, decisions(b.admit(1, 2, 3)))
	b.requireBooks()
}

func TestResolve_OfAnOrderWithoutAUserTouchesNoMark(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3)
	s := b.settlement(b.entries()[0], VerdictHeld)
	for i := range s.Orders {
		s.Orders[i].UserID = 0
	}
	marks := b.snapshot()[b.keys()["buyers"]]
	require.Equal(t, SettleResult{Settled: true}, b.settle(s))
	require.Equal(t, []string{"0:h:", "0:h:", "0:h:"}, []string{b.outcome(1), b.outcome(2), b.outcome(3)})
	require.Equal(t, marks, b.snapshot()[b.keys()["buyers"]])
	b.requireBooks()

	require.True(t, b.resolve(b.resolution(0, 1, VerdictCancelled)))
	require.True(t, b.resolve(b.resolution(0, 2, VerdictConflict)))
	require.True(t, b.resolve(b.resolution(0, 3, VerdictPersisted)))
	require.Equal(t, []string{"0:x:", "0:c:3.99", "(nil)"}, []string{b.outcome(1), b.outcome(2), b.outcome(3)})
	require.Equal(t, marks, b.snapshot()[b.keys()["buyers"]])
	books := b.requireBooks()
	require.Equal(t, []int64{9, 2, 0}, []int64{books.Stock, books.Returned, books.Removed})
}

// The user of a held order that could not be read is found later: by the
// database, or by his mark.
func TestResolve_OfAnOrderWithoutAUserTakesTheOneThatIsGiven(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3)
	s := b.settlement(b.entries()[0], VerdictHeld)
	for i := range s.Orders {
		s.Orders[i].UserID = 0
	}
	require.True(t, b.settle(s).Settled)
	require.True(t, b.resolve(b.resolution(1, 1, VerdictCancelled)))
	require.Equal(t, []string{"1:x:", "(nil)"}, []string{b.outcome(1), b.mark(1)})
	require.True(t, b.resolve(b.resolution(0, 2, VerdictCancelled)))
	require.Equal(t, []string{"0:x:", "7.2a"}, []string{b.outcome(2), b.mark(2)})
	require.Equal(t, int64(2), b.requireBooks().Returned)

	// Only his mark goes, only where it holds this order, and only once.
	before := b.snapshot()
	require.False(t, b.resolve(b.resolution(3, 2, VerdictCancelled)), "another order's mark")
	require.False(t, b.resolve(b.resolution(2, 2, VerdictPersisted)), "another verdict")
	require.Equal(t, before, b.snapshot())
	require.True(t, b.resolve(b.resolution(2, 2, VerdictCancelled)))
	require.Equal(t, []string{"2:x:", "(nil)"}, []string{b.outcome(2), b.mark(2)})
	require.False(t, b.resolve(b.resolution(2, 2, VerdictCancelled)))
	require.False(t, b.resolve(b.resolution(0, 2, VerdictCancelled)))
	books := b.requireBooks()
	require.Equal(t, []int64{9, 2, 2, 3}, []int64{books.Stock, books.Returned, books.Removed, books.Settled})
	require.Equal(t, []Decision{DecisionAdmitted, DecisionAdmitted, DecisionReplayed}, decisions(b.admit(1, 2, 3)))
	b.requireBooks()
}

func TestHolders_FindsWhoseMarksHoldSomeOrders(t *testing.T) {
	b := newBook(t, 2000)
	for first := int64(1); first <= 2000; first += 100 {
		var users []int64
		for user := first; user < first+100; user++ {
			users = append(users, 1<<53+user)
		}
		b.admit(users...)
	}
	b.must("HSET", b.keys()["buyers"], "77", "6.1500p", "78", "not a mark", "79", "7.2001p")
	wanted := map[int64]bool{3: true, 1500: true, 2000: true, 2002: true}
	before := b.snapshot()
	found, pages := map[int64]int64{}, 0
	for cursor := uint64(0); ; pages++ {
		users, next, err := Holders(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID, wanted, cursor, 100)
		require.NoError(t, err)
		for seq, user := range users {
			found[seq] = user
		}
		if cursor = next; cursor == 0 {
			break
		}
	}
	require.Equal(t, map[int64]int64{3: 1<<53 + 3, 1500: 1<<53 + 1500, 2000: 1<<53 + 2000}, found)
	require.Greater(t, pages, 5, "each call looks at a few")
	require.Equal(t, before, b.snapshot())

	_, _, err := Holders(b.ctx, b.aclUser(sharedAddr(t), "-hscan"), b.partition, epoch, b.voucher.VoucherID, wanted, 0, 100)
	require.ErrorIs(t, err, ErrRefused)
	b.must("HSET", b.keys()["buyers"], "nobody", "7.3a")
	_, _, err = Holders(b.ctx, b.client, b.partition, epoch, b.voucher.VoucherID, map[int64]bool{3: true}, 0, 10_000)
	require.ErrorIs(t, err, ErrFault)
}

// A held order that was cancelled before its entry was settled.
func TestSettle_ACancelledOrderWithoutAUserGivesItsUnitBack(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1, 2, 3, 4)
	s := b.settlement(b.entries()[0], VerdictCancelled)
	for i, verdict := range []Verdict{VerdictCancelled, VerdictHeld, VerdictPersisted, VerdictRejected} {
		s.Orders[i].UserID, s.Orders[i].Verdict = 0, verdict
	}
	require.Equal(t, SettleResult{Settled: true, Units: 1}, b.settle(s))
	require.Equal(t, []string{"0:x:", "0:h:", "(nil)", "0:r:"}, []string{b.outcome(1), b.outcome(2), b.outcome(3), b.outcome(4)})
	books := b.requireBooks()
	require.Equal(t, []int64{7, 1, 0, 4}, []int64{books.Stock, books.Returned, books.Removed, books.Buyers})
	require.Equal(t, SettleResult{}, b.settle(s))
}

func TestResolve_ChangesOnlyAMarkThatHoldsThisPosition(t *testing.T) {
	for _, other := range []string{"7.4a", "6.1p", "7.11h", "nil"} {
		b := newHeld(t, 10, 3)
		for _, user := range []string{"1", "2", "3"} {
			if other == "nil" {
				b.must("HDEL", b.keys()["buyers"], user)
			} else {
				b.must("HSET", b.keys()["buyers"], user, other)
			}
		}
		before := b.snapshot()[b.keys()["buyers"]]
		require.True(t, b.resolve(b.resolution(1, 1, VerdictPersisted)))
		require.True(t, b.resolve(b.resolution(2, 2, VerdictConflict)))
		require.True(t, b.resolve(b.resolution(3, 3, VerdictCancelled)))
		require.Equal(t, before, b.snapshot()[b.keys()["buyers"]])
		require.Equal(t, []string{"(nil)", "2:c:3.99", "3:x:"}, []string{b.outcome(1), b.outcome(2), b.outcome(3)})
		books := b.books()
		require.Equal(t, []int64{9, 2, 0}, []int64{books.Stock, books.Returned, books.Removed})
	}
}

// A writer that committed an order as held may still say so to the ledger after
// an operator's decision was told: then that has to be told again.
func TestResolve_WaitsUntilTheOrderIsSettled(t *testing.T) {
	for _, verdict := range []Verdict{VerdictPersisted, VerdictConflict, VerdictCancelled} {
		b := newBook(t, 10)
		b.admit(1)
		s := b.settlement(b.entries()[0], VerdictHeld)
		before := b.snapshot()
		done, err := Resolve(b.ctx, b.client, b.resolution(1, 1, verdict))
		require.ErrorIs(t, err, ErrInFlight)
		require.False(t, done)
		done, err = Resolve(b.ctx, b.client, b.resolution(0, 1, verdict))
		require.ErrorIs(t, err, ErrInFlight)
		require.False(t, done)
		require.Equal(t, before, b.snapshot())
		require.True(t, b.settle(s).Settled)
		require.True(t, b.resolve(b.resolution(1, 1, verdict)))
		require.NotEqual(t, "7.1h", b.mark(1))
		b.requireBooks()
	}
	// Settled with what was decided: nothing is left to tell.
	for _, verdict := range []Verdict{VerdictPersisted, VerdictConflict, VerdictCancelled} {
		b := newBook(t, 10)
		b.admit(1)
		s := b.settlement(b.entries()[0], verdict)
		s.Orders[0].Standing = b.resolution(1, 1, VerdictConflict).Standing
		require.True(t, b.settle(s).Settled)
		before := b.snapshot()
		require.False(t, b.resolve(b.resolution(1, 1, verdict)))
		require.Equal(t, before, b.snapshot())
	}
}

func TestResolve_OfAnotherEpochOrAnArchivedVoucherHasNoEffect(t *testing.T) {
	b := newHeld(t, 10, 1)
	b.apply(VoucherClosed)
	b.must("HSET", b.keys()["meta"], "epoch", "8")
	before := b.snapshot()
	_, err := Resolve(b.ctx, b.client, b.resolution(1, 1, VerdictCancelled))
	require.ErrorIs(t, err, ErrStaleEpoch)
	b.must("HDEL", b.keys()["meta"], "epoch")
	_, err = Resolve(b.ctx, b.client, b.resolution(1, 1, VerdictCancelled))
	require.ErrorIs(t, err, ErrStaleEpoch)
	b.must("HSET", b.keys()["meta"], "epoch", "8")
	require.Equal(t, before, b.snapshot())

	b.must("HSET", b.keys()["meta"], "epoch", formatInt(epoch))
	b.apply(VoucherArchived)
	before = b.snapshot()
	require.False(t, b.resolve(b.resolution(1, 1, VerdictCancelled)))
	require.Equal(t, before, b.snapshot())
}

// decisionsOf is one decision of each kind about held orders from, from+1 and
// from+2.
func (b *book) decisionsOf(from int64) []Resolution {
	return []Resolution{
		b.resolution(from, from, VerdictPersisted), b.resolution(from+1, from+1, VerdictConflict), b.resolution(from+2, from+2, VerdictCancelled),
	}
}

func TestResolve_AKeyOfAWrongTypeHasNoEffect(t *testing.T) {
	for _, name := range []string{"meta", "voucher", "buyers", "outcomes"} {
		for kind, put := range wrongTypes {
			b := newHeld(t, 10, 3)
			key := b.keys()[name]
			b.must("DEL", key)
			put(b, key)
			before := b.snapshot()
			for _, r := range b.decisionsOf(1) {
				done, err := Resolve(b.ctx, b.client, r)
				require.ErrorIs(t, err, ErrFault, "%s is a %s", name, kind)
				require.ErrorContains(t, err, "WRONGTYPE")
				require.False(t, done)
				require.Equal(t, before, b.snapshot())
			}
		}
	}
}

func TestResolve_AFieldThatIsNoNumberHasNoEffect(t *testing.T) {
	b := newHeld(t, 10, 3)
	key := b.keys()["voucher"]
	for _, field := range []string{"stock", "returned", "removed"} {
		for _, bad := range []string{"", "x", "-1", "1.5", "1e3", " 1", "1234567890123456", "nil"} {
			good := b.get(key, field)
			if bad == "nil" {
				b.must("HDEL", key, field)
			} else {
				b.must("HSET", key, field, bad)
			}
			before := b.snapshot()
			for _, r := range b.decisionsOf(1) {
				_, err := Resolve(b.ctx, b.client, r)
				require.ErrorIs(t, err, ErrFault, "%s %q", field, bad)
			}
			require.Equal(t, before, b.snapshot())
			b.must("HSET", key, field, good)
		}
	}
	for _, r := range b.decisionsOf(1) {
		require.True(t, b.resolve(r), "the token is still there")
	}
	b.must("DEL", key)
	before := b.snapshot()
	_, err := Resolve(b.ctx, b.client, b.resolution(1, 1, VerdictCancelled))
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
}

func TestResolve_WhatNobodyDecidesHasNoEffect(t *testing.T) {
	b := newHeld(t, 10, 1)
	before := b.snapshot()
	for _, verdict := range []Verdict{VerdictHeld, VerdictRejected, 'q', 0} {
		_, err := Resolve(b.ctx, b.client, b.resolution(1, 1, verdict))
		require.ErrorIs(t, err, ErrFault)
	}
	nothing := b.resolution(1, 1, VerdictConflict)
	nothing.Standing = orderid.Position{}
	_, err := Resolve(b.ctx, b.client, nothing)
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
}

// Each right is taken away while each decision is told; then it is given back,
// and the token is still good.
func TestResolve_ARightTakenAwayHasNoEffect(t *testing.T) {
	b := newBook(t, 10_000)
	cases := map[string][]string{}
	for _, command := range []string{"hget", "hmget", "hset", "hdel"} {
		cases[command] = []string{"-" + command}
	}
	cases["hset, hdel"] = []string{"-hset", "-hdel"}
	names := []string{"meta", "voucher", "buyers", "outcomes"}
	for _, name := range names {
		cases[name+" read-only"] = b.readOnly(name)
		cases[name+" hidden"] = slices.DeleteFunc(b.readOnly(name), func(rule string) bool { return strings.HasPrefix(rule, "%R~") })
	}
	// The same in the middle, and with the undoing at risk: a command is allowed
	// on some of the keys only.
	for _, command := range []string{"hset", "hdel"} {
		for set := 0; set < 1<<3; set++ {
			selector := "(+" + command + " ~none"
			for i, name := range names[1:] {
				if set&(1<<i) != 0 {
					selector += " ~" + b.keys()[name]
				}
			}
			cases[command+" of "+selector] = []string{"-" + command, selector + ")"}
		}
	}
	user := int64(1)
	refused := 0
	for name, rules := range cases {
		b.hold(user, user+2)
		client := b.aclUser(sharedAddr(t), rules...)
		for _, r := range b.decisionsOf(user) {
			before := b.snapshot()
			done, err := Resolve(b.ctx, client, r)
			if err == nil { // this decision has no need of the right
				require.True(t, done)
				continue
			}
			refused++
			require.NotErrorIs(t, err, ErrUnknown, name)
			require.False(t, done)
			require.Equal(t, before, b.snapshot(), "%s %c", name, r.Verdict)
			require.True(t, b.resolve(r))
		}
		user += 3
		b.requireBooks()
	}
	require.Greater(t, refused, 2*len(cases), "of three decisions a case")

	// What it needs, and no more.
	b.hold(user, user+2)
	needs := []string{"-@all", "+evalsha", "+hget", "+hmget", "+hset", "+hdel", "+hello", "+client", "+ping", "~*"}
	client := b.aclUser(sharedAddr(t), needs...)
	for _, r := range b.decisionsOf(user) {
		done, err := Resolve(b.ctx, client, r)
		require.NoError(t, err)
		require.True(t, done)
	}
}

func TestResolve_ALostReplyIsUnknownAndTheRepeatCountsNothing(t *testing.T) {
	b := newHeld(t, 10, 1)
	require.NoError(t, load(b.ctx, b.client, resolve))
	proxy := testProxy(t, sharedAddr(t))
	client := connect(t, proxy.Addr(), "")
	require.NoError(t, client.Do(b.ctx, client.B().Ping().Build()).Error())
	proxy.SwallowReplies()
	_, err := Resolve(shortly(t, 300*time.Millisecond), client, b.resolution(1, 1, VerdictCancelled))
	require.ErrorIs(t, err, ErrUnknown)
	require.Eventually(t, func() bool { return b.books().Returned == 1 }, patience, 5*time.Millisecond)
	before := b.snapshot()
	require.False(t, b.resolve(b.resolution(1, 1, VerdictCancelled)))
	require.Equal(t, before, b.snapshot())
}

func TestResolve_KeepsEveryDigit(t *testing.T) {
	b := newBook(t, 10)
	user := int64(1<<63 - 1)
	b.must("HSET", b.keys()["voucher"], "seq", "1099511627774", "settled", "1099511627774", "stock", "999999999999998", "returned", "999999999999997")
	b.must("HSET", b.keys()["meta"], "admitted", "1099511627774", "settled", "1099511627774")
	b.admit(user)
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictHeld)).Settled)
	require.True(t, b.resolve(b.resolution(user, orderid.MaxSeq, VerdictCancelled)))
	require.Equal(t, "9223372036854775807:x:", b.outcome(orderid.MaxSeq))
	require.Equal(t, []string{"999999999999998", "999999999999998"}, []string{b.get(b.keys()["voucher"], "stock"), b.get(b.keys()["voucher"], "returned")})
}
