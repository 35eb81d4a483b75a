package orderstore_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

func entry(id string) orderstore.DeadEntry {
	return orderstore.DeadEntry{PartitionID: 0, Epoch: 1, EntryID: id, Raw: []byte("\x00raw\xff"), Reason: "garbage"}
}

func TestHold_KeepsEverythingOfAnOrderAndCountsTries(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	o := order(7, 3, 50)
	raw := []byte("\x00\xff'\\raw\n")
	for try := 1; try <= 3; try++ {
		verdicts, err := f.Hold(f.ctx, []orderstore.Held{{Order: o, Raw: raw, Reason: "ünstorable"}})
		require.NoError(t, err)
		require.Equal(t, []orderstore.Verdict{{Kind: orderstore.Ended, Outcome: orderstore.OutcomeHeld}}, verdicts)
		letters := f.letters(orderstore.DeadLetterFilter{})
		require.Len(t, letters, 1)
		got := letters[0]
		require.Equal(t, o, got.Order, "times in UTC to the millisecond")
		require.Equal(t, raw, got.Raw)
		require.Equal(t, "ünstorable", got.Reason)
		require.Equal(t, try, got.Tries)
		require.EqualValues(t, 1, got.Units)
		require.Nil(t, got.Entry)
		require.Equal(t, o.Position, got.ID.Position)
		require.Equal(t, got.FirstSeen.UnixMilli(), got.ID.FirstSeen)
		require.WithinDuration(t, time.Now(), got.FirstSeen, time.Minute)
		require.False(t, got.LastSeen.Before(got.FirstSeen))
		require.Equal(t, time.UTC, got.LastSeen.Location())
	}
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM order_outcomes WHERE applied_at IS NOT NULL"), "settling tells the ledger")
	require.Equal(t, []orderstore.VerdictKind{orderstore.Ended}, f.persist(o))
	f.books(7, 0, 1)
}

func TestHold_FirstVerdictWins(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.persist(order(7, 1, 50), order(7, 2, 51))
	f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 3, 53, 'LOST'), (7, 1, 4, 54, 'HELD')")
	nobody := order(7, 1, 0)
	nobodyHeld := order(7, 3, -1)
	stale := order(7, 9, 9)
	stale.Epoch = 2
	unsound := order(7, 0, 9)
	held := []orderstore.Held{
		{Order: order(7, 1, 50)}, {Order: order(7, 2, 99)}, {Order: order(7, 3, 53)}, {Order: order(7, 4, 54)}, {Order: order(7, 4, 99)},
		{Order: nobody}, {Order: nobodyHeld}, {Order: stale}, {Order: unsound}, {Order: order(7, 5, 55)}, {Order: order(7, 5, 55)},
	}
	verdicts, err := f.Hold(f.ctx, held)
	require.NoError(t, err)
	require.Error(t, verdicts[8].Err)
	verdicts[8].Err = nil
	require.Equal(t, []orderstore.Verdict{
		{Kind: orderstore.Persisted},
		{Kind: orderstore.SamePosition},
		{Kind: orderstore.Ended, Outcome: orderstore.OutcomeLost},
		{Kind: orderstore.Ended, Outcome: orderstore.OutcomeHeld},
		{Kind: orderstore.SamePosition},
		{Kind: orderstore.Persisted, UserID: 50},
		{Kind: orderstore.Ended, Outcome: orderstore.OutcomeLost, UserID: 53},
		{Kind: orderstore.Stale},
		{Kind: orderstore.Unstorable},
		{Kind: orderstore.Ended, Outcome: orderstore.OutcomeHeld},
		{Kind: orderstore.Ended, Outcome: orderstore.OutcomeHeld},
	}, verdicts)
	f.books(7, 2, 3)
	require.EqualValues(t, 3, f.number("SELECT COUNT(*) FROM order_outcomes WHERE epoch = 1"), "nothing of the epoch that is over")
}

func TestPersist_OutcomeOfAnotherUserIsNotThisUsersVerdict(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.persist(order(7, 1, 100))
	require.Equal(t, []orderstore.VerdictKind{orderstore.Conflict}, f.persist(order(7, 2, 100)))
	require.Equal(t, []orderstore.VerdictKind{orderstore.SamePosition}, f.persist(order(7, 2, 200)))
	f.books(7, 1, 1)
}

func TestHold_StoresWhatNoColumnTakes(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	bad := order(7, 1, 50)
	bad.Reference = "\xff" + strings.Repeat("ü", 100)
	bad.AdmittedAt = time.Time{}
	bad.EntryID = "ü\xff" + strings.Repeat("1", 100)
	long := bytes.Repeat([]byte{0, '\''}, 20_000)
	verdicts, err := f.Hold(f.ctx, []orderstore.Held{{Order: bad, Raw: long, Reason: "\xff" + strings.Repeat("r", 1000)}})
	require.NoError(t, err)
	require.Equal(t, all(1, orderstore.Ended), kinds(verdicts))
	got := f.letters(orderstore.DeadLetterFilter{})[0]
	require.Equal(t, long[:16<<10], got.Raw)
	require.Contains(t, got.Reason, "the first 16384 of 40000 bytes are kept")
	require.True(t, got.AdmittedAt.IsZero())

	require.Equal(t, orderstore.ResultPersisted, f.requeue(got.ID).Result, "with what is left of it")
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM orders WHERE CHAR_LENGTH(reference) = 64 AND admitted_at > '2020-01-01'"))
}

func TestHold_RawLongerThanAPacketIsCut(t *testing.T) {
	server := devstack.TestDatabaseServer(t, devstack.DatabaseOptions{Args: []string{"--max-allowed-packet=16384"}})
	require.NoError(t, server.CreateDatabase(t.Context(), "small"))
	f := fixtureAt(t, server.DSN("small"))
	f.voucher(7, 1000)
	var held []orderstore.Held
	for _, o := range run(7, 1, 200, 0) {
		held = append(held, orderstore.Held{Order: o, Raw: bytes.Repeat([]byte{0}, 16<<10), Reason: strings.Repeat("r", 255)})
	}
	verdicts, err := f.Hold(f.ctx, held)
	require.NoError(t, err)
	require.Equal(t, all(200, orderstore.Ended), kinds(verdicts))
	e := entry("1-1")
	e.Raw = bytes.Repeat([]byte("x"), 1<<20)
	_, err = f.HoldEntry(f.ctx, e)
	require.NoError(t, err)
	letters := f.letters(orderstore.DeadLetterFilter{})
	require.Len(t, letters, 201)
	for _, l := range letters {
		require.NotEmpty(t, l.Raw)
		require.Contains(t, l.Reason, "bytes are kept")
	}
}

func TestHold_WithoutAVoucherUntilItAppears(t *testing.T) {
	f := newFixture(t)
	o := order(6, 1, 50)
	require.Equal(t, []orderstore.VerdictKind{orderstore.NoVoucher}, f.persist(o))
	f.hold(o)
	require.Equal(t, []orderstore.VerdictKind{orderstore.NoVoucher}, f.persist(o))
	stale := order(6, 2, 51)
	stale.Epoch = 2
	f.hold2(orderstore.Stale, stale)
	f.voucher(6, 10)
	require.Equal(t, []orderstore.VerdictKind{orderstore.Ended}, f.persist(o), "the first verdict stands")
	f.books(6, 0, 1)
	require.Equal(t, orderstore.ResultPersisted, f.requeue(idOf(o)).Result)
	f.books(6, 1, 0)
}

// As long as an order of no voucher is being held, the voucher cannot appear.
func TestHold_KeepsTheVoucherFromAppearingMeanwhile(t *testing.T) {
	f := newFixture(t)
	impatient := f.open(f.dsn, time.Second)
	proxy := newCutter(t, addrOf(t, f.dsn))
	s := f.open(proxy.through(t, f.dsn), 0)
	ran := false
	proxy.before("INSERT INTO `order_outcomes`", func() {
		ran = true
		_, err := impatient.CreateVoucher(f.ctx, orderstore.Voucher{ID: 6, Total: 10, BeginAt: begin, EndAt: begin.Add(time.Hour)})
		if err == nil {
			t.Error("the voucher was created in the middle")
		}
	})
	_, err := s.Hold(f.ctx, []orderstore.Held{{Order: order(6, 1, 50)}})
	require.NoError(t, err)
	require.True(t, ran)
	f.voucher(6, 10)
}

// A voucher that is created while an order of it is held and persisted: the order
// is a row or held, never both.
func TestHold_RacesTheVoucherAndAPeer(t *testing.T) {
	f := newFixture(t)
	for id := int64(1); id <= 40; id++ {
		o := order(id, 1, 50)
		var held, persisted []orderstore.Verdict
		var g errgroup.Group
		g.Go(func() error { f.voucher(id, 10); return nil })
		g.Go(func() (err error) {
			held, err = f.Hold(f.ctx, []orderstore.Held{{Order: o}})
			return err
		})
		g.Go(func() (err error) {
			persisted, err = persistUntilDecided(f, f.Store, []orderstore.Order{o})
			return err
		})
		require.NoError(t, g.Wait())
		rows := int64(0)
		if held[0].Kind == orderstore.Persisted {
			require.Equal(t, orderstore.Persisted, persisted[0].Kind)
			rows = 1
		} else {
			require.Equal(t, orderstore.OutcomeHeld, held[0].Outcome)
			require.NotEqual(t, orderstore.Persisted, persisted[0].Kind)
		}
		f.books(id, rows, 1-rows)
	}
}

func TestHold_TransientErrorDecidesNothing(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	f.exec(`CREATE TRIGGER refuse BEFORE INSERT ON order_outcomes FOR EACH ROW
IF NEW.seq = 55 THEN SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'staged'; END IF`)
	var held []orderstore.Held
	for _, o := range run(7, 1, 60, 0) {
		held = append(held, orderstore.Held{Order: o})
	}
	verdicts, err := f.Hold(f.ctx, held)
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.Equal(t, all(60, orderstore.Undecided), kinds(verdicts))
	e := entry("1-1")
	e.VoucherID, e.FirstSeq, e.Units = 7, 1, 60
	_, err = f.HoldEntry(f.ctx, e)
	require.ErrorIs(t, err, orderstore.ErrTransient)
	f.books(7, 0, 0)
	require.Empty(t, f.letters(orderstore.DeadLetterFilter{}))
	f.exec("DROP TRIGGER refuse")
	verdicts, err = f.Hold(f.ctx, held)
	require.NoError(t, err)
	require.Equal(t, all(60, orderstore.Ended), kinds(verdicts))
}

func TestHoldEntry_ThatStandsForNothing(t *testing.T) {
	f := newFixture(t)
	for range 3 {
		verdicts, err := f.HoldEntry(f.ctx, entry("7-1"))
		require.NoError(t, err)
		require.Empty(t, verdicts)
	}
	letters := f.letters(orderstore.DeadLetterFilter{})
	require.Len(t, letters, 1)
	got := letters[0]
	require.Equal(t, "7-1", got.Entry.EntryID)
	require.Equal(t, entry("7-1").Raw, got.Raw)
	require.Equal(t, 3, got.Tries)
	require.Zero(t, got.Units)
	require.Equal(t, time.UTC, got.FirstSeen.Location())

	r := f.requeue(got.ID)
	require.Equal(t, orderstore.ResultHeld, r.Result)
	require.Contains(t, r.Detail, "only be cancelled")
	require.Equal(t, orderstore.ResultCancelled, f.cancel(got.ID).Result)
	require.Equal(t, orderstore.ResultCancelled, f.requeue(got.ID).Result)
	require.Empty(t, f.updates(0))
	require.Empty(t, f.letters(orderstore.DeadLetterFilter{}))
	require.Equal(t, []string{"ada REQUEUE entry 0/1/7-1 HELD", "ada CANCEL entry 0/1/7-1 CANCELLED"}, f.actions())

	_, err := f.HoldEntry(f.ctx, entry("7-1"))
	require.NoError(t, err)
	require.Empty(t, f.letters(orderstore.DeadLetterFilter{}), "what was cancelled is not held again")
	require.EqualValues(t, 3, f.number("SELECT tries FROM dead_entries"))

	f.exec("UPDATE partitions SET epoch = 2")
	_, err = f.HoldEntry(f.ctx, entry("8-1"))
	require.ErrorIs(t, err, orderstore.ErrEpochMoved)
	require.EqualValues(t, 1, f.number("SELECT COUNT(*) FROM dead_entries"))
}

func TestHoldEntry_HoldsThePositionsThatHaveNoVerdictYet(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.persist(order(7, 12, 50))
	f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 13, 53, 'LOST')")
	f.hold(order(7, 14, 54))
	e := entry("7-1")
	e.VoucherID, e.FirstSeq, e.Units = 7, 11, 5
	heldVerdict := orderstore.Verdict{Kind: orderstore.Ended, Outcome: orderstore.OutcomeHeld}
	ofUser := heldVerdict
	ofUser.UserID = 54
	for range 2 {
		verdicts, err := f.HoldEntry(f.ctx, e)
		require.NoError(t, err)
		require.Equal(t, []orderstore.Verdict{
			heldVerdict,
			{Kind: orderstore.Persisted, UserID: 50},
			{Kind: orderstore.Ended, Outcome: orderstore.OutcomeLost, UserID: 53},
			ofUser,
			heldVerdict,
		}, verdicts)
		f.books(7, 1, 4)
	}
	letters := f.letters(orderstore.DeadLetterFilter{VoucherID: 7})
	require.Len(t, letters, 2, "the order held by itself and the entry, not its positions")
	require.EqualValues(t, 1, letters[0].Units)
	require.EqualValues(t, 5, letters[1].Units)
	require.EqualValues(t, 11, letters[1].Entry.FirstSeq)
	require.Equal(t, 2, letters[1].Tries)
	require.Len(t, f.letters(orderstore.DeadLetterFilter{UserID: 54}), 1)
	require.Equal(t, []orderstore.VerdictKind{orderstore.Ended, orderstore.Persisted}, f.persist(order(7, 15, 60), order(7, 16, 61)))

	require.Equal(t, orderstore.Resolution{Result: orderstore.ResultCancelled, Detail: "2 units"}, f.cancel(letters[1].ID))
	require.Equal(t, []orderstore.LedgerUpdate{
		{Position: at(7, 1, 11), Outcome: orderstore.ResultCancelled}, {Position: at(7, 1, 15), Outcome: orderstore.ResultCancelled},
	}, f.updates(0))
	require.Len(t, f.letters(orderstore.DeadLetterFilter{}), 1)
	verdicts, err := f.HoldEntry(f.ctx, e)
	require.NoError(t, err)
	require.Equal(t, orderstore.Verdict{Kind: orderstore.Ended, Outcome: orderstore.OutcomeCancelled}, verdicts[0])
	require.Equal(t, ofUser, verdicts[3])
	f.books(7, 2, 4)
	for _, u := range f.updates(0) {
		require.NoError(t, f.MarkTold(f.ctx, u))
	}
	require.Zero(t, f.number("SELECT COUNT(*) FROM order_outcomes WHERE applied_at IS NULL"))

	stale := e
	stale.EntryID = "7-2"
	stale.Epoch = 2
	_, err = f.HoldEntry(f.ctx, stale)
	require.ErrorIs(t, err, orderstore.ErrEpochMoved)
}

func TestHoldEntry_CancelledByTwoOperatorsAtOnce(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 1000)
	for i := range int64(10) {
		e := entry(fmt.Sprintf("9-%d", i))
		e.VoucherID, e.FirstSeq, e.Units = 7, 1+i*50, 50
		_, err := f.HoldEntry(f.ctx, e)
		require.NoError(t, err)
		id := orderstore.DeadLetterID{Epoch: 1, EntryID: e.EntryID}
		var g errgroup.Group
		for range 3 {
			g.Go(func() error {
				r, err := f.Cancel(f.ctx, id, "ada", "at once")
				if err == nil && r.Result != orderstore.ResultCancelled {
					return fmt.Errorf("came to %v", r)
				}
				return err
			})
		}
		g.Go(func() error {
			_, err := f.HoldEntry(f.ctx, e)
			return err
		})
		require.NoError(t, g.Wait())
		require.Len(t, f.actions(), int(i)+1)
		require.Len(t, f.updates(0), int(i+1)*50)
	}
	f.books(7, 0, 500)
}

func TestHoldEntry_RefusesWhatItCannotStandFor(t *testing.T) {
	dsn := devstack.TestDatabase(t)
	f := fixtureAt(t, dsn)
	f.voucher(7, 10)
	f.exec("UPDATE vouchers SET partition_id = 3")
	for name, change := range map[string]func(e *orderstore.DeadEntry){
		"another partition": func(e *orderstore.DeadEntry) {},
		"no entry id":       func(e *orderstore.DeadEntry) { e.EntryID = "abc" },
		"no epoch":          func(e *orderstore.DeadEntry) { e.Epoch = 0 },
		"no partition":      func(e *orderstore.DeadEntry) { e.PartitionID = -1 },
		"negative":          func(e *orderstore.DeadEntry) { e.Units = -1 },
		"too many":          func(e *orderstore.DeadEntry) { e.Units = 257 },
		"no seq":            func(e *orderstore.DeadEntry) { e.FirstSeq = 0 },
		"seqs too high":     func(e *orderstore.DeadEntry) { e.FirstSeq = 1<<40 - 1 },
		"no voucher":        func(e *orderstore.DeadEntry) { e.VoucherID = 0 },
	} {
		e := entry("7-1")
		e.VoucherID, e.FirstSeq, e.Units = 7, 1, 2
		change(&e)
		_, err := f.HoldEntry(f.ctx, e)
		require.Error(t, err, name)
		require.NotErrorIs(t, err, orderstore.ErrTransient, name)
	}
	require.Zero(t, f.number("SELECT (SELECT COUNT(*) FROM dead_entries) + (SELECT COUNT(*) FROM order_outcomes)"))
}
