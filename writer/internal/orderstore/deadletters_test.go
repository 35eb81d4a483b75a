package orderstore_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/writer/internal/orderstore"
)

func (f *fixture) letters(filter orderstore.DeadLetterFilter) []orderstore.DeadLetter {
	f.t.Helper()
	list, err := f.DeadLetters(f.ctx, filter, orderstore.DeadLetterID{}, 1000)
	require.NoError(f.t, err)
	n, err := f.CountDeadLetters(f.ctx, filter)
	require.NoError(f.t, err)
	require.EqualValues(f.t, len(list), n)
	return list
}

func TestDeadLetterID_ReadsOnlyWhatItWrote(t *testing.T) {
	for _, id := range []orderstore.DeadLetterID{
		{FirstSeen: 1893553445678, Position: at(math.MaxInt64, 1<<24-1, 1<<40-1)},
		{FirstSeen: 0, Position: at(1, 1, 1)},
		{FirstSeen: 5, PartitionID: 7, Epoch: 3, EntryID: "1893553445678-18446744073709551615"},
	} {
		got, err := orderstore.ParseDeadLetterID(id.String())
		require.NoError(t, err)
		require.Equal(t, id, got)
	}
	for _, text := range []string{"", "o", "o.1.1.1", "o.0.1.1.0", "o.1.1.1.0.0", "o.01.1.1.0", "o.1.1.1.0 ", "x.1.1.1.0", "o.-1.1.1.0",
		"o.1.1.5", "o.1.1.5.", "o.1.1.5.x", "o.1.1.5.-1", "o.1.1.5.0.9999", "o.1.1.5.9223372036854775807", "e.-1.1.1-1.0", "e.0.-1.1-1.0", "e.0.1.1-1.0.0",
		"e.0.1.abc.0", "e.0.1..0", "e.0.1.1-1", "o.99999999999999999999.1.1.0", "e 0 1 1-1 0"} {
		_, err := orderstore.ParseDeadLetterID(text)
		require.ErrorIs(t, err, orderstore.ErrDeadLetterNotFound, "%q", text)
	}
}

// Once a dead letter is requeued nothing knows when it was first seen.
func TestDeadLetterID_FirstSeenIsNoPartOfItsIdentity(t *testing.T) {
	f := newFixture(t)
	f.voucher(1, 10)
	f.hold(order(1, 5, 50))
	listed := f.letters(orderstore.DeadLetterFilter{})[0].ID
	for _, text := range []string{"o.1.1.5.9999", listed.String()} {
		id, err := orderstore.ParseDeadLetterID(text)
		require.NoError(t, err, text)
		require.Equal(t, orderstore.ResultPersisted, f.requeue(id).Result)
	}
	id, err := orderstore.ParseDeadLetterID("o.1.1.6.9999")
	require.NoError(t, err)
	_, err = f.Requeue(f.ctx, id, "ada", "because")
	require.ErrorIs(t, err, orderstore.ErrDeadLetterNotFound)
}

func TestDeadLetters_Filters(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.voucher(8, 10)
	for _, h := range []orderstore.Held{
		{Order: order(7, 1, 50), Reason: "100% bad"}, {Order: order(7, 2, 51), Reason: "100x bad"}, {Order: order(8, 1, 50), Reason: "a|b_c"},
	} {
		_, err := f.Hold(f.ctx, []orderstore.Held{h})
		require.NoError(t, err)
	}
	e := entry("7-1")
	e.VoucherID, e.FirstSeq, e.Units, e.Reason = 8, 5, 2, "a|bxc"
	_, err := f.HoldEntry(f.ctx, e)
	require.NoError(t, err)
	f.exec("UPDATE order_outcomes SET first_seen_at = '2029-01-01 00:00:00.001' WHERE voucher_id = 7 AND seq = 2")
	for name, c := range map[string]struct {
		filter orderstore.DeadLetterFilter
		n      int
	}{
		"all":           {orderstore.DeadLetterFilter{}, 4},
		"voucher":       {orderstore.DeadLetterFilter{VoucherID: 8}, 2},
		"user":          {orderstore.DeadLetterFilter{UserID: 50}, 2},
		"both":          {orderstore.DeadLetterFilter{UserID: 50, VoucherID: 8}, 1},
		"percent":       {orderstore.DeadLetterFilter{ReasonPrefix: "100%"}, 1},
		"underscore":    {orderstore.DeadLetterFilter{ReasonPrefix: "a|b_"}, 1},
		"prefix":        {orderstore.DeadLetterFilter{ReasonPrefix: "a|b"}, 2},
		"not in it":     {orderstore.DeadLetterFilter{ReasonPrefix: "bad"}, 0},
		"case":          {orderstore.DeadLetterFilter{ReasonPrefix: "A"}, 0},
		"before":        {orderstore.DeadLetterFilter{SeenBefore: time.Date(2029, 1, 1, 0, 0, 0, 1e6, time.UTC)}, 3},
		"before, later": {orderstore.DeadLetterFilter{SeenBefore: time.Date(2029, 1, 1, 9, 0, 0, 2e6, time.FixedZone("", 9*3600))}, 4},
		"other voucher": {orderstore.DeadLetterFilter{VoucherID: 9}, 0},
	} {
		require.Len(t, f.letters(c.filter), c.n, name)
	}
	_, err = f.DeadLetters(f.ctx, orderstore.DeadLetterFilter{SeenBefore: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, orderstore.DeadLetterID{}, 10)
	require.Error(t, err)
}

// manyDeadLetters stores n dead letters, of vouchers 1 to 4 and users 1 to n, and
// one entry to ten orders, many of them first seen in one millisecond.
func (f *fixture) manyDeadLetters(n int64) {
	f.t.Helper()
	for id := int64(1); id <= 4; id++ {
		f.voucher(id, 1_000_000)
	}
	for from := int64(1); from <= n; from += 500 {
		var values, entries []string
		for i := from; i < from+500 && i <= n; i++ {
			seen := fmt.Sprintf("'2026-01-01 00:00:%02d.%03d'", i%7, i%5)
			values = append(values, fmt.Sprintf("(%d, 1, %d, %d, 'HELD', '2026-01-01', 'reason %d', '1-1', 'raw', %s, %s, 1)", 1+i%4, i, i, i%10, seen, seen))
			if i%10 == 0 {
				entries = append(entries, fmt.Sprintf("(%d, 1, '%d-0', 0, 'garbage', %s)", i%3, i, seen))
			}
		}
		f.exec(`INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind, admitted_at, reason, entry_id, raw, first_seen_at, last_seen_at, tries) VALUES ` +
			strings.Join(values, ","))
		f.exec(`INSERT INTO dead_entries (partition_id, epoch, entry_id, units, reason, first_seen_at) VALUES ` + strings.Join(entries, ","))
	}
}

// handlerReads is how many rows and index entries this connection has looked at.
func handlerReads(t *testing.T, s *orderstore.Store) (n int64) {
	t.Helper()
	rows, err := s.DB().Query("SHOW SESSION STATUS LIKE 'Handler_read%'")
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var name string
		var value int64
		require.NoError(t, rows.Scan(&name, &value))
		n += value
	}
	require.NoError(t, rows.Err())
	return n
}

func TestDeadLetters_TwentyThousandAreListedByPagesAndResolvedByFilter(t *testing.T) {
	f := newFixture(t)
	const n = 20_000
	f.manyDeadLetters(n)
	count, err := f.CountDeadLetters(f.ctx, orderstore.DeadLetterFilter{})
	require.NoError(t, err)
	require.EqualValues(t, n+n/10, count)

	one, err := orderstore.Open(f.ctx, orderstore.Options{DSN: f.dsn, MaxConns: 2})
	require.NoError(t, err)
	defer one.Close()
	one.DB().SetMaxOpenConns(1) // so that the session's counters are those of the list
	seen := make(map[orderstore.DeadLetterID]bool)
	var after orderstore.DeadLetterID
	var before time.Time
	for page := 0; ; page++ {
		reads := handlerReads(t, one)
		letters, err := one.DeadLetters(f.ctx, orderstore.DeadLetterFilter{}, after, 500)
		require.NoError(t, err)
		// Two lists of 500, their keys and rows, and some for the settings.
		require.Less(t, handlerReads(t, one)-reads, int64(4000), "page %d is not read from the index", page)
		for _, l := range letters {
			require.False(t, seen[l.ID], "%v is listed twice", l.ID)
			require.False(t, l.FirstSeen.Before(before), "oldest first")
			seen[l.ID], before = true, l.FirstSeen
		}
		if len(letters) == 0 {
			break
		}
		after = letters[len(letters)-1].ID
		parsed, err := orderstore.ParseDeadLetterID(after.String())
		require.NoError(t, err)
		require.Equal(t, after, parsed)
	}
	require.Len(t, seen, n+n/10)

	filter := orderstore.DeadLetterFilter{VoucherID: 3, ReasonPrefix: "reason 2"}
	count, err = f.CountDeadLetters(f.ctx, filter)
	require.NoError(t, err)
	require.EqualValues(t, n/20, count)
	after = orderstore.DeadLetterID{}
	for done := 0; ; {
		letters, err := f.DeadLetters(f.ctx, filter, after, 300)
		require.NoError(t, err)
		if len(letters) == 0 {
			require.Equal(t, n/20, done)
			break
		}
		for i, l := range letters {
			if i%2 == 0 {
				require.Equal(t, orderstore.ResultCancelled, f.cancel(l.ID).Result)
			} else {
				require.Equal(t, orderstore.ResultPersisted, f.requeue(l.ID).Result)
			}
		}
		done += len(letters)
		after = letters[len(letters)-1].ID
	}
	require.Empty(t, f.letters(filter))
	count, err = f.CountDeadLetters(f.ctx, orderstore.DeadLetterFilter{})
	require.NoError(t, err)
	require.EqualValues(t, n+n/10-n/20, count)
	f.books(3, n/40, n/4-n/40)
	require.EqualValues(t, n/20, f.number("SELECT COUNT(*) FROM ledger_updates"))
	require.Len(t, f.updates(0), 1000)
}

// The pages of what was there are the same, whatever comes and goes meanwhile.
func TestDeadLetters_PagesAreStableWhileOthersComeAndGo(t *testing.T) {
	f := newFixture(t)
	f.manyDeadLetters(300)
	old := make(map[orderstore.DeadLetterID]bool)
	for _, l := range f.letters(orderstore.DeadLetterFilter{}) {
		old[l.ID] = true
	}
	require.Len(t, old, 330)
	var after orderstore.DeadLetterID
	listed := make(map[orderstore.DeadLetterID]bool)
	for page := int64(0); len(listed) < 3000; page++ {
		letters, err := f.DeadLetters(f.ctx, orderstore.DeadLetterFilter{}, after, 50)
		require.NoError(t, err)
		if len(letters) == 0 {
			break
		}
		for _, l := range letters {
			require.False(t, listed[l.ID])
			listed[l.ID] = true
		}
		after = letters[len(letters)-1].ID
		f.cancel(after) // the very row that the next page begins behind
		if page < 5 {
			f.hold(run(1, 1000+page*10, 1009+page*10, 0)...)
			f.hold(order(4, 1000+page, 9000+page))
			_, err = f.HoldEntry(f.ctx, entry(fmt.Sprintf("5-%d", page)))
			require.NoError(t, err)
		}
	}
	for id := range old {
		require.True(t, listed[id], "%v is missing", id)
	}
	require.Len(t, listed, 330+5*12, "what came meanwhile lies behind")
}
