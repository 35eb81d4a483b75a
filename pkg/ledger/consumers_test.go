package ledger

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// foreign puts an entry into the stream that no admission wrote.
func (b *book) foreign(fields ...string) string {
	b.t.Helper()
	id, err := b.do(append([]string{"XADD", b.keys()["orders"], "*"}, fields...)...).ToString()
	require.NoError(b.t, err)
	return id
}

// holders maps entries to who holds them and how often they were delivered.
func (b *book) holders() map[string]string {
	b.t.Helper()
	reply, err := b.do("XPENDING", b.keys()["orders"], Group, "-", "+", "100000").ToArray()
	require.NoError(b.t, err)
	held := map[string]string{}
	for _, line := range reply {
		parts, err := line.ToArray()
		require.NoError(b.t, err)
		id, _ := parts[0].ToString()
		consumer, _ := parts[1].ToString()
		deliveries, _ := parts[3].AsInt64()
		held[id] = fmt.Sprintf("%s %d", consumer, deliveries)
	}
	return held
}

func (b *book) consumers() []string {
	b.t.Helper()
	list, err := PendingByConsumer(b.ctx, b.client, b.partition, b.epoch)
	require.NoError(b.t, err)
	names := []string{}
	for _, c := range list {
		names = append(names, c.Consumer)
	}
	slices.Sort(names)
	return names
}

func (b *book) scriptRefusals(t *testing.T, name string, commands []string, call func(b *book, denied string) error) {
	t.Helper()
	for _, command := range commands {
		before := b.snapshot()
		err := call(b, command)
		require.Error(t, err, "%s without %s", name, command)
		require.NotErrorIs(t, err, ErrUnknown)
		require.Equal(t, before, b.snapshot(), "%s without %s", name, command)
	}
}

func TestDiscard_TakesAwayWhatStandsForNothing(t *testing.T) {
	for name, move := range map[string]func(b *book, id string){
		"undelivered":           func(*book, string) {},
		"pending":               func(b *book, _ string) { b.deliver("w") },
		"trimmed while pending": func(b *book, id string) { b.deliver("w"); b.must("XDEL", b.keys()["orders"], id) },
		"without a group":       func(b *book, _ string) { b.must("XGROUP", "DESTROY", b.keys()["orders"], Group) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBook(t, 10)
			b.admit(1)
			clean := b.snapshot()
			id := b.foreign("v", EntryVersion, "voucher", "x")
			move(b, id)
			discarded, err := Discard(b.ctx, b.client, b.partition, epoch, id)
			require.NoError(t, err)
			require.True(t, discarded)
			after := b.snapshot()
			require.NotContains(t, after[b.keys()["orders"]], id)
			for _, key := range []string{"meta", "voucher", "buyers"} {
				require.Equal(t, clean[b.keys()[key]], after[b.keys()[key]], "nothing was counted")
			}
			books := b.requireBooks()
			require.Equal(t, books.Meta.EntriesIn-books.Meta.EntriesOut, books.Entries)
			discarded, err = Discard(b.ctx, b.client, b.partition, epoch, id)
			require.NoError(t, err)
			require.False(t, discarded)
			require.Equal(t, after, b.snapshot())
		})
	}
}

func TestDiscard_AFaultHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	id := b.foreign("v", EntryVersion)
	b.deliver("w")
	before := b.snapshot()
	_, err := Discard(b.ctx, b.client, b.partition, epoch, "first")
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
	b.must("HSET", b.keys()["meta"], "epoch", "8")
	before = b.snapshot()
	_, err = Discard(b.ctx, b.client, b.partition, epoch, id)
	require.ErrorIs(t, err, ErrStaleEpoch)
	require.Equal(t, before, b.snapshot())
	b.must("HSET", b.keys()["meta"], "epoch", formatInt(epoch))

	discard := func(b *book, rules ...string) error {
		_, err := Discard(b.ctx, b.aclUser(sharedAddr(t), rules...), b.partition, epoch, id)
		return err
	}
	b.scriptRefusals(t, "discard", []string{"hget", "xpending", "xack", "xdel"}, func(b *book, denied string) error { return discard(b, "-"+denied) })
	for _, name := range []string{"meta", "orders"} {
		hidden := slices.DeleteFunc(b.readOnly(name), func(rule string) bool { return strings.HasPrefix(rule, "%R~") })
		b.scriptRefusals(t, "discard", []string{name}, func(b *book, _ string) error { return discard(b, hidden...) })
	}
	b.scriptRefusals(t, "discard", []string{"orders"}, func(b *book, _ string) error { return discard(b, b.readOnly("orders")...) })
	require.NoError(t, discard(b, "-@all", "+evalsha", "+hget", "+xpending", "+xack", "+xdel", "+hello", "+client", "+ping", "~*"))

	for _, name := range []string{"meta", "orders"} {
		for kind, put := range wrongTypes {
			b := newBook(t, 10)
			b.must("DEL", b.keys()[name])
			put(b, b.keys()[name])
			before := b.snapshot()
			_, err := Discard(b.ctx, b.client, b.partition, epoch, "1-1")
			require.ErrorIs(t, err, ErrFault, "%s is a %s", name, kind)
			require.Equal(t, before, b.snapshot())
		}
	}
}

func TestRemoveConsumer_OnlyWithNothingPending(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.deliver("w")
	before := b.snapshot()
	for _, remove := range []func() (bool, error){
		func() (bool, error) { return RemoveConsumer(b.ctx, b.client, b.partition, epoch, "w") },
		func() (bool, error) { return RemoveIdleConsumer(b.ctx, b.client, b.partition, epoch, "w", 0) },
	} {
		removed, err := remove()
		require.NoError(t, err)
		require.False(t, removed)
		require.Equal(t, before, b.snapshot())
	}
	// Also with nothing but an entry that was trimmed: a takeover is to find it.
	b.must("XDEL", b.keys()["orders"], b.entries()[0].ID)
	removed, err := RemoveConsumer(b.ctx, b.client, b.partition, epoch, "w")
	require.NoError(t, err)
	require.False(t, removed)
	page, err := Claim(b.ctx, b.client, b.partition, epoch, "taker", 0, ClaimEnd, 10)
	require.NoError(t, err)
	require.Len(t, page.Lost, 1)

	removed, err = RemoveConsumer(b.ctx, b.client, b.partition, epoch, "w")
	require.NoError(t, err)
	require.True(t, removed)
	require.NotContains(t, b.consumers(), "w")
}

func TestRemoveIdleConsumer_LooksAndRemovesInOneStep(t *testing.T) {
	b := newBook(t, 10)
	for _, name := range []string{"busy", "idle", ReleasedConsumer} {
		b.must("XGROUP", "CREATECONSUMER", b.keys()["orders"], Group, name)
	}
	b.admit(1)
	b.deliver("busy")
	const limit = 40 * time.Millisecond
	remove := func(name string, minIdle time.Duration) bool {
		removed, err := RemoveIdleConsumer(b.ctx, b.client, b.partition, epoch, name, minIdle)
		require.NoError(t, err)
		return removed
	}
	require.False(t, remove("idle", time.Hour))
	require.False(t, remove("nobody", limit))
	require.False(t, remove("nobody", 0))
	require.Equal(t, []string{"busy", "idle", ReleasedConsumer}, b.consumers(), "looking makes no consumer")

	var idle []Pending
	require.Eventually(t, func() bool {
		var err error
		idle, err = IdleConsumers(b.ctx, b.client, b.partition, epoch, limit)
		require.NoError(t, err)
		return len(idle) == 2
	}, patience, 5*time.Millisecond)
	for _, c := range idle {
		require.NotEqual(t, "busy", c.Consumer)
		require.GreaterOrEqual(t, c.Idle, limit)
	}
	require.False(t, remove("busy", limit), "it holds an entry")
	require.True(t, remove("idle", limit))
	require.False(t, remove("idle", limit))

	// The one that nobody is goes only when it is empty and idle.
	removed, err := RemoveConsumer(b.ctx, b.client, b.partition, epoch, ReleasedConsumer)
	require.NoError(t, err)
	require.False(t, removed)
	require.Equal(t, []string{"busy", ReleasedConsumer}, b.consumers())
	require.True(t, remove(ReleasedConsumer, limit))
	require.Equal(t, []string{"busy"}, b.consumers())
}

func TestRemoveConsumer_AnAnswerThatNobodyWroteIsAFault(t *testing.T) {
	b := newBook(t, 10)
	was := *removeConsumer
	defer func() { *removeConsumer = was }()
	*removeConsumer = *newScript("remove_consumer", "#!lua\nreturn {'WHAT'}\n", was.keys, was.args, was.repeated)
	_, err := RemoveConsumer(b.ctx, b.client, b.partition, epoch, "w")
	require.ErrorIs(t, err, ErrFault)
}

// What XINFO CONSUMERS answers in the versions of Redis that there are.
func TestParseConsumers_TellsWhatIdleCountsByVersion(t *testing.T) {
	b := newBook(t, 10)
	parse := func(fields string) (Pending, error) {
		reply, err := b.do("EVAL", "return {{"+fields+"}}", "0").ToArray()
		require.NoError(t, err)
		list, err := parseConsumers(reply)
		if err != nil {
			return Pending{}, err
		}
		require.Len(t, list, 1)
		return list[0], nil
	}
	c, err := parse("'name', 'w', 'pending', 3, 'idle', 1500")
	require.NoError(t, err)
	require.Equal(t, Pending{Consumer: "w", Entries: 3, Idle: 1500 * time.Millisecond}, c)
	c, err = parse("'name', 'w', 'pending', 0, 'idle', 20, 'inactive', 90000, 'later', 1")
	require.NoError(t, err)
	inactive := 90 * time.Second
	require.Equal(t, Pending{Consumer: "w", Idle: 20 * time.Millisecond, CountsAttempts: true, Inactive: &inactive}, c)
	c, err = parse("'name', 'w', 'pending', 0, 'idle', 20, 'inactive', -1")
	require.NoError(t, err)
	require.Equal(t, Pending{Consumer: "w", Idle: 20 * time.Millisecond, CountsAttempts: true}, c)
	for _, bad := range []string{"", "'name'", "'name', 'w'", "'name', 'w', 'pending', 1", "'name', 'w', 'pending', 'x', 'idle', 1", "'pending', 1, 'idle', 1"} {
		_, err := parse(bad)
		require.ErrorIs(t, err, ErrFault, bad)
	}
}

func TestRelease_APeerTakesOverAtOnce(t *testing.T) {
	b := newBook(t, 1000)
	for user := int64(1); user <= 450; user++ { // more than two calls' worth
		b.admit(user)
	}
	raw := b.deliver("stopping")
	var ids []string
	for _, r := range raw {
		ids = append(ids, r.ID)
	}
	// The first was taken over by a peer, the second settled, the third trimmed.
	b.must("XCLAIM", b.keys()["orders"], Group, "peer", "0", ids[0])
	require.True(t, b.settle(b.settlement(b.entries()[1], VerdictPersisted)).Settled)
	b.must("XDEL", b.keys()["orders"], ids[2])

	released, err := Release(b.ctx, b.client, b.partition, epoch, "stopping", time.Hour, ids)
	require.NoError(t, err)
	require.Equal(t, 447, released)
	held := b.holders()
	require.Len(t, held, 449)
	require.Equal(t, "peer 2", held[ids[0]])
	require.Equal(t, "stopping 1", held[ids[2]], "a takeover is to raise the alarm")
	for _, id := range ids[3:] {
		require.Equal(t, ReleasedConsumer+" 1", held[id])
	}
	released, err = Release(b.ctx, b.client, b.partition, epoch, "stopping", time.Hour, ids)
	require.NoError(t, err)
	require.Zero(t, released, "they are no longer its own")
	require.Equal(t, held, b.holders())

	removed, err := RemoveConsumer(b.ctx, b.client, b.partition, epoch, "stopping")
	require.NoError(t, err)
	require.False(t, removed, "it holds the trimmed one")

	// Whoever waits for an hour takes them, and nobody who waits longer.
	page, err := Claim(b.ctx, b.client, b.partition, epoch, "patient", 2*time.Hour, ClaimEnd, 1000)
	require.NoError(t, err)
	require.Empty(t, page.Entries)
	require.Equal(t, []string{ids[2]}, page.Lost)
	page, err = Claim(b.ctx, b.client, b.partition, epoch, "taker", time.Hour, ClaimEnd, 1000)
	require.NoError(t, err)
	require.Len(t, page.Entries, 447)
	require.Equal(t, raw[3], page.Entries[0])

	none, err := Release(b.ctx, b.client, b.partition, epoch, "stopping", time.Hour, nil)
	require.NoError(t, err)
	require.Zero(t, none)
	none, err = Release(b.ctx, b.client, b.partition, epoch, "nobody", time.Hour, ids[:3])
	require.NoError(t, err)
	require.Zero(t, none)
}

func TestRelease_AFaultHasNoEffect(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.admit(2)
	raw := b.deliver("w")
	ids := []string{raw[0].ID, raw[1].ID}
	before := b.snapshot()
	_, err := Release(b.ctx, b.client, b.partition, epoch, "w", time.Hour, append(slices.Clone(ids), "last"))
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
	call := func(rules ...string) error {
		_, err := Release(b.ctx, b.aclUser(sharedAddr(t), rules...), b.partition, epoch, "w", time.Hour, ids)
		return err
	}
	b.scriptRefusals(t, "release", []string{"xpending", "xrange", "xclaim"}, func(_ *book, denied string) error { return call("-" + denied) })
	b.scriptRefusals(t, "release", []string{"orders"}, func(b *book, _ string) error { return call(b.readOnly("orders")...) })
	require.NoError(t, call("-@all", "+evalsha", "+xpending", "+xrange", "+xclaim", "+hello", "+client", "+ping", "~*"))
	require.Equal(t, map[string]string{ids[0]: "released 1", ids[1]: "released 1"}, b.holders())

	for _, body := range []string{"return {'RELEASED'}", "return {'RELEASED', 'x'}"} {
		was := *release
		*release = *newScript("release", "#!lua\n"+body+"\n", was.keys, was.args, was.repeated)
		_, err := Release(b.ctx, b.client, b.partition, epoch, "w", time.Hour, ids)
		*release = was
		require.ErrorIs(t, err, ErrFault, body)
	}
}

func TestOrphans_AreFoundAndBroughtBack(t *testing.T) {
	b := newBook(t, 100)
	orphans := func(limit int) []string {
		ids, _, err := Orphans(b.ctx, b.client, b.partition, epoch, "", limit)
		require.NoError(t, err)
		return ids
	}
	require.Empty(t, orphans(10), "an empty stream")
	for user := int64(1); user <= 3; user++ {
		b.admit(user)
	}
	require.Empty(t, orphans(10), "undelivered entries are the group's")
	lost := b.deliver("gone")
	b.admit(4)
	kept := b.deliver("w")
	b.admit(5)
	require.Empty(t, orphans(10))
	b.must("XGROUP", "DELCONSUMER", b.keys()["orders"], Group, "gone")
	want := []string{lost[0].ID, lost[1].ID, lost[2].ID}
	before := b.snapshot()
	require.Equal(t, want, orphans(10))
	require.Equal(t, want, orphans(1_000_000))
	require.Equal(t, want[:2], orphans(2))
	require.Equal(t, want[:1], orphans(0), "at least one is looked at")
	require.Equal(t, before, b.snapshot())

	// Neither a read nor a takeover brings them back, but delivering anew does.
	undelivered := b.deliver("w")
	require.Len(t, undelivered, 1)
	page, err := Claim(b.ctx, b.client, b.partition, epoch, "taker", 0, ClaimEnd, 100)
	require.NoError(t, err)
	require.Len(t, page.Entries, 2)
	require.NoError(t, RedeliverAll(b.ctx, b.client, b.partition, epoch))
	require.Empty(t, orphans(10))
	again := b.deliver("peer")
	require.Equal(t, append(append(slices.Clone(lost), kept...), undelivered...), again)
	require.Empty(t, orphans(10))
	for _, entry := range b.entries() {
		require.Equal(t, "peer 1", b.holders()[entry.ID])
	}
	// What two writers then hold counts once.
	s := b.settlement(b.entries()[0], VerdictPersisted)
	require.Equal(t, []SettleResult{{Settled: true}, {}}, Settle(b.ctx, b.client, []Settlement{s, s}))
	b.requireBooks()
}

// Page by page, each entry is looked at once.
func TestOrphans_AreFoundBehindWhateverIsSound(t *testing.T) {
	b := newBook(t, 100)
	for user := int64(1); user <= 7; user++ {
		b.admit(user)
		b.deliver(map[bool]string{true: "gone", false: "w"}[user == 2 || user == 7])
	}
	b.admit(8)
	b.must("XGROUP", "DELCONSUMER", b.keys()["orders"], Group, "gone")
	entries := b.entries()
	var found, ends []string
	for after := ""; ; {
		ids, next, err := Orphans(b.ctx, b.client, b.partition, epoch, after, 3)
		require.NoError(t, err)
		found, ends = append(found, ids...), append(ends, next)
		if after = next; next == "" {
			break
		}
	}
	require.Equal(t, []string{entries[1].ID, entries[6].ID}, found)
	require.Equal(t, []string{entries[2].ID, entries[5].ID, ""}, ends)
}

func TestOrphans_AFaultIsTold(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.deliver("w")
	for _, denied := range []string{"exists", "xinfo", "xrange", "xpending"} {
		_, _, err := Orphans(b.ctx, b.aclUser(sharedAddr(t), "-"+denied), b.partition, epoch, "", 10)
		require.Error(t, err, denied)
	}
	_, _, err := Orphans(b.ctx, b.aclUser(sharedAddr(t), "-@all", "+evalsha", "+exists", "+xinfo|groups", "+xrange", "+xpending", "+hello", "+client", "+ping", "~*"), b.partition, epoch, "", 10)
	require.NoError(t, err)
	for _, body := range []string{"return {'WHAT'}", "return {{}}", "return {'OK'}", "return {'OK', {}}", "return {'OK', '', {}}"} {
		was := *findOrphans
		*findOrphans = *newScript("find_orphans", "#!lua\n"+body+"\n", was.keys, was.args, was.repeated)
		_, _, err := Orphans(b.ctx, b.client, b.partition, epoch, "", 10)
		*findOrphans = was
		require.ErrorIs(t, err, ErrFault, body)
	}
}

func TestReadBacklog_TellsWhatWaitsAndWhoHoldsIt(t *testing.T) {
	b := newBook(t, 100)
	read := func() Backlog {
		backlog, err := ReadBacklog(b.ctx, b.client, b.partition, epoch)
		require.NoError(t, err)
		return backlog
	}
	known := func(n int64) *int64 { return &n }
	require.Equal(t, Backlog{Undelivered: known(0), Consumers: []Pending{}}, read())

	first := b.admit(1, 2)
	b.admit(3)
	b.deliver("one")
	b.admit(4)
	b.deliver("two")
	b.admit(5)
	backlog := read()
	oldest := b.entries()[0].ID
	require.Equal(t, []any{int64(4), int64(3), known(1), oldest}, []any{backlog.Entries, backlog.Pending, backlog.Undelivered, backlog.OldestID})
	require.WithinDuration(t, first.Now, backlog.OldestAt, time.Millisecond)
	held := map[string]int64{}
	for _, c := range backlog.Consumers {
		held[c.Consumer] = c.Entries
	}
	require.Equal(t, map[string]int64{"one": 2, "two": 1}, held)

	for _, entry := range b.entries() {
		require.True(t, b.settle(b.settlement(entry, VerdictPersisted)).Settled)
	}
	backlog = read()
	require.Equal(t, []any{int64(0), int64(0), known(0), "", true}, []any{backlog.Entries, backlog.Pending, backlog.Undelivered, backlog.OldestID, backlog.OldestAt.IsZero()})
	require.Len(t, backlog.Consumers, 2)
}

func TestReadBacklog_WhatIsNotKnownIsNotZero(t *testing.T) {
	b := newBook(t, 100)
	b.admit(1)
	b.admit(2)
	b.deliver("w")
	b.must("XDEL", b.keys()["orders"], b.entries()[0].ID)
	backlog, err := ReadBacklog(b.ctx, b.client, b.partition, epoch)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2}, []int64{backlog.Entries, backlog.Pending})
	require.Nil(t, backlog.Undelivered)

	b.must("XGROUP", "DESTROY", b.keys()["orders"], Group)
	backlog, err = ReadBacklog(b.ctx, b.client, b.partition, epoch)
	require.NoError(t, err)
	require.Equal(t, int64(1), backlog.Entries)
	require.NotEmpty(t, backlog.OldestID)
	require.False(t, backlog.OldestAt.IsZero())
	require.Nil(t, backlog.Undelivered)
	require.Empty(t, backlog.Consumers)

	b.must("DEL", b.keys()["orders"])
	_, err = ReadBacklog(b.ctx, b.client, b.partition, epoch)
	require.ErrorIs(t, err, ErrNoGroup)
	b.must("SET", b.keys()["orders"], "1")
	_, err = ReadBacklog(b.ctx, b.client, b.partition, epoch)
	require.ErrorIs(t, err, ErrFault)
}

func TestReadBacklog_AFaultIsTold(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	for _, denied := range []string{"exists", "xlen", "xrange", "xpending", "xinfo"} {
		_, err := ReadBacklog(b.ctx, b.aclUser(sharedAddr(t), "-"+denied), b.partition, epoch)
		require.Error(t, err, denied)
	}
	_, err := ReadBacklog(b.ctx, b.aclUser(sharedAddr(t), "-@all", "+evalsha", "+exists", "+xlen", "+xrange", "+xpending", "+xinfo|consumers", "+hello", "+client", "+ping", "~*"), b.partition, epoch)
	require.NoError(t, err)
	for _, body := range []string{
		"return {{}}", "return {'WHAT'}", "return {'OK', 1, ''}", "return {'NO_GROUP', 1}", "return {'OK', 'x', '', 0, {}}", "return {'OK', 1, {}, 0, {}}",
		"return {'OK', 1, 'x', 0, {}}", "return {'OK', 1, '1-1', 'x', {}}", "return {'OK', 1, '1-1', 0, 'x'}", "return {'OK', 1, '1-1', 0, {1}}",
	} {
		was := *readBacklog
		*readBacklog = *newScript("read_backlog", "#!lua\n"+body+"\n", was.keys, was.args, was.repeated)
		_, err := ReadBacklog(b.ctx, b.client, b.partition, epoch)
		*readBacklog = was
		require.Error(t, err, body)
		require.NotErrorIs(t, err, ErrUnknown, body)
	}
}
