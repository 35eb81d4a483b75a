package ledger

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStream_TheGroupDeliversEntriesFromBeforeIt(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.must("XGROUP", "DESTROY", b.keys()["orders"], Group)
	b.admit(2)
	_, err := ReadNew(b.ctx, b.client, b.partition, epoch, "w", 10, time.Millisecond)
	require.ErrorIs(t, err, ErrNoGroup)
	require.NoError(t, EnsureGroup(b.ctx, b.client, b.partition, epoch))
	b.admit(3)
	raw := b.deliver("w")
	require.Len(t, raw, 3)
	for i := range raw {
		entry, err := DecodeEntry(b.partition, raw[i].ID, raw[i].Fields)
		require.NoError(t, err)
		require.Equal(t, int64(1+i), entry.Orders[0].UserID)
	}
	// It is left as it is where it exists.
	require.NoError(t, EnsureGroup(b.ctx, b.client, b.partition, epoch))
	require.Empty(t, b.deliver("w"))
	// Another group of the stream is not it.
	b.must("XGROUP", "DESTROY", b.keys()["orders"], Group)
	b.must("XGROUP", "CREATE", b.keys()["orders"], Group+"2", "0")
	require.NoError(t, EnsureGroup(b.ctx, b.client, b.partition, epoch))
	require.Len(t, b.deliver("w"), 3)
}

func TestStream_AGroupThatIsThereIsFoundWhenMemoryIsFull(t *testing.T) {
	b := newBookOn(t, connect(t, ownServer(t).Addr(), ""), 10)
	b.admit(1)
	b.must("CONFIG", "SET", "maxmemory", "1")
	require.NoError(t, EnsureGroup(b.ctx, b.client, b.partition, epoch))
	require.Len(t, b.deliver("w"), 1)
	b.must("XGROUP", "DESTROY", b.keys()["orders"], Group)
	require.ErrorIs(t, EnsureGroup(b.ctx, b.client, b.partition, epoch), ErrRefused)
}

func TestStream_AMissingStreamOrGroupIsNoGroup(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	all := func() map[string]error {
		_, read := ReadNew(b.ctx, b.client, b.partition, epoch, "w", 1, time.Millisecond)
		_, claim := Claim(b.ctx, b.client, b.partition, epoch, "w", 0, ClaimEnd, 1)
		_, pending := PendingByConsumer(b.ctx, b.client, b.partition, epoch)
		_, remove := RemoveConsumer(b.ctx, b.client, b.partition, epoch, "w")
		_, removeIdle := RemoveIdleConsumer(b.ctx, b.client, b.partition, epoch, "w", time.Minute)
		_, idle := IdleConsumers(b.ctx, b.client, b.partition, epoch, time.Minute)
		_, released := Release(b.ctx, b.client, b.partition, epoch, "w", time.Minute, []string{"1-1"})
		_, _, orphans := Orphans(b.ctx, b.client, b.partition, epoch, "", 10)
		return map[string]error{
			"read": read, "claim": claim, "pending": pending, "remove": remove, "remove idle": removeIdle, "idle": idle,
			"release": released, "orphans": orphans, "redeliver": RedeliverAll(b.ctx, b.client, b.partition, epoch),
		}
	}
	b.must("XGROUP", "DESTROY", b.keys()["orders"], Group)
	for name, err := range all() {
		require.ErrorIs(t, err, ErrNoGroup, name)
	}
	b.must("DEL", b.keys()["orders"])
	for name, err := range all() {
		require.ErrorIs(t, err, ErrNoGroup, name)
	}
	require.ErrorIs(t, EnsureGroup(b.ctx, b.client, b.partition, epoch), ErrNoGroup)
	require.NotContains(t, b.snapshot(), b.keys()["orders"], "a lost stream is never made again")
	raw, err := Scan(b.ctx, b.client, b.partition, epoch, "-", 10)
	require.NoError(t, err)
	require.Empty(t, raw)

	b.must("SET", b.keys()["orders"], "1")
	for name, err := range all() {
		require.ErrorIs(t, err, ErrFault, name)
	}
	require.ErrorIs(t, EnsureGroup(b.ctx, b.client, b.partition, epoch), ErrFault)
	_, err = Scan(b.ctx, b.client, b.partition, epoch, "-", 10)
	require.ErrorIs(t, err, ErrFault)
}

func TestReadNew_ABlockedReaderSeesThatTheStreamIsGone(t *testing.T) {
	server := ownServer(t)
	for name, destroy := range map[string]func(b *book){
		"stream deleted":  func(b *book) { b.must("DEL", b.keys()["orders"]) },
		"server flushed":  func(b *book) { b.must("FLUSHALL") },
		"group destroyed": func(b *book) { b.must("XGROUP", "DESTROY", b.keys()["orders"], Group) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBookOn(t, connect(t, server.Addr(), ""), 10)
			reader := connect(t, server.Addr(), "")
			read := make(chan error, 1)
			go func() {
				_, err := ReadNew(b.ctx, reader, b.partition, epoch, "w", 10, patience)
				read <- err
			}()
			require.Eventually(t, func() bool {
				info, err := b.do("INFO", "clients").ToString()
				return err == nil && parseInfo(info)["blocked_clients"] == "1"
			}, patience, 5*time.Millisecond)
			destroy(b)
			select {
			case err := <-read:
				require.ErrorIs(t, err, ErrNoGroup)
			case <-time.After(patience / 2):
				t.Fatal("the reader is still blocked")
			}
		})
	}
}

func TestReadNew_WaitsForAnEntryAndNoneIsNoError(t *testing.T) {
	b := newBook(t, 10)
	began := time.Now()
	raw, err := ReadNew(b.ctx, b.client, b.partition, epoch, "w", 10, 50*time.Millisecond)
	require.NoError(t, err)
	require.Empty(t, raw)
	require.GreaterOrEqual(t, time.Since(began), 45*time.Millisecond)

	got := make(chan []RawEntry, 1)
	go func() {
		raw, _ := ReadNew(b.ctx, b.client, b.partition, epoch, "w", 10, patience)
		got <- raw
	}()
	b.admit(1)
	require.Len(t, <-got, 1)
	b.admit(2)
	b.admit(3)
	b.admit(4)
	raw, err = ReadNew(b.ctx, b.client, b.partition, epoch, "w", 2, patience)
	require.NoError(t, err)
	require.Len(t, raw, 2, "at most count")
}

// XAUTOCLAIM looks at ten times COUNT entries a call: with 300 pending of which
// only the last is idle, page after page is empty.
func TestClaim_FollowsTheCursorPastEmptyPages(t *testing.T) {
	b := newBook(t, 1000)
	for user := int64(1); user <= 300; user++ {
		b.admit(user)
	}
	raw := b.deliver("gone")
	require.Len(t, raw, 300)
	idle := func(id string) {
		b.must("XCLAIM", b.keys()["orders"], Group, "gone", "0", id, "IDLE", "3600000", "JUSTID")
	}
	idle(raw[299].ID)

	var entries []RawEntry
	pages, cursor := 0, ClaimEnd
	for {
		page, err := Claim(b.ctx, b.client, b.partition, epoch, "taker", 30*time.Minute, cursor, 1)
		require.NoError(t, err)
		require.Empty(t, page.Lost)
		entries = append(entries, page.Entries...)
		pages++
		require.Less(t, pages, 1000)
		if cursor = page.Next; cursor == ClaimEnd {
			break
		}
	}
	require.Equal(t, []RawEntry{raw[299]}, entries)
	require.Greater(t, pages, 10, "the entry lay behind empty pages")

	// Ids that were trimmed while they were pending are named once.
	for _, i := range []int{5, 150} {
		idle(raw[i].ID)
		b.must("XDEL", b.keys()["orders"], raw[i].ID)
	}
	idle(raw[151].ID)
	var lost []string
	entries, cursor = nil, ClaimEnd
	for {
		page, err := Claim(b.ctx, b.client, b.partition, epoch, "taker", 30*time.Minute, cursor, 10)
		require.NoError(t, err)
		lost = append(lost, page.Lost...)
		entries = append(entries, page.Entries...)
		if cursor = page.Next; cursor == ClaimEnd {
			break
		}
	}
	require.Equal(t, []string{raw[5].ID, raw[150].ID}, lost)
	require.Equal(t, []RawEntry{raw[151]}, entries)

	held := map[string]int64{}
	consumers, err := PendingByConsumer(b.ctx, b.client, b.partition, epoch)
	require.NoError(t, err)
	for _, c := range consumers {
		held[c.Consumer] = c.Entries
		require.Less(t, c.Idle, patience)
	}
	require.Equal(t, map[string]int64{"gone": 296, "taker": 2}, held)
}

func TestClaim_LeavesWhatIsNotIdleLongEnough(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	b.deliver("w")
	page, err := Claim(b.ctx, b.client, b.partition, epoch, "taker", time.Hour, ClaimEnd, 10)
	require.NoError(t, err)
	require.Equal(t, Claimed{Entries: []RawEntry{}, Lost: []string{}, Next: ClaimEnd}, page)
	page, err = Claim(b.ctx, b.client, b.partition, epoch, "taker", 0, ClaimEnd, 10)
	require.NoError(t, err)
	require.Len(t, page.Entries, 1)
}

func TestScan_ReadsInPagesWhateverIsHeld(t *testing.T) {
	b := newBook(t, 10)
	for user := int64(1); user <= 5; user++ {
		b.admit(user)
	}
	b.deliver("w")
	var users []int64
	from := "-"
	for {
		raw, err := Scan(b.ctx, b.client, b.partition, epoch, from, 2)
		require.NoError(t, err)
		if len(raw) == 0 {
			break
		}
		for _, r := range raw {
			entry, err := DecodeEntry(b.partition, r.ID, r.Fields)
			require.NoError(t, err)
			users = append(users, entry.Orders[0].UserID)
			from = "(" + r.ID
		}
	}
	require.Equal(t, []int64{1, 2, 3, 4, 5}, users)
}
