package orderstore_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

func TestPersist_StoresRowsAndTakesTheirUnits(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 2000)
	f.voucher(8, 10)
	batch := append(run(7, 1, 1000, 50), run(8, 1, 10, 50)...)
	slices.Reverse(batch)
	require.Equal(t, all(1010, orderstore.Persisted), f.persist(batch...))
	f.books(7, 1000, 0)
	f.books(8, 10, 0)

	require.Equal(t, all(1010, orderstore.Persisted), f.persist(batch...), "a redelivery")
	f.books(7, 1000, 0)
	require.Empty(t, f.persist(), "an empty batch")
}

func TestPersist_OverlappingBatchStoresOnlyWhatIsNew(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.persist(run(7, 1, 10, 0)...)
	require.Equal(t, all(15, orderstore.Persisted), f.persist(run(7, 6, 20, 0)...))
	f.books(7, 20, 0)
}

func TestPersist_UserWithAnotherOrderIsAConflict(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.persist(order(7, 1, 50))
	batch := []orderstore.Order{order(7, 2, 51), order(7, 3, 50)}
	verdicts, err := f.Persist(f.ctx, batch)
	require.NoError(t, err)
	require.Equal(t, orderstore.Persisted, verdicts[0].Kind)
	require.Equal(t, orderstore.Verdict{Kind: orderstore.Conflict, Standing: at(7, 1, 1), Outcome: orderstore.OutcomeConflict}, verdicts[1])
	f.books(7, 2, 1)
	require.EqualValues(t, 1, f.number(`SELECT COUNT(*) FROM order_outcomes WHERE voucher_id = 7 AND epoch = 1 AND seq = 3 AND user_id = 50
  AND kind = 'CONFLICT' AND standing_epoch = 1 AND standing_seq = 1 AND reference = 'ref-3' AND entry_id = '1-3' AND applied_at IS NOT NULL`))

	verdicts, err = f.Persist(f.ctx, batch)
	require.NoError(t, err)
	require.Equal(t, orderstore.Verdict{Kind: orderstore.Ended, Standing: at(7, 1, 1), Outcome: orderstore.OutcomeConflict}, verdicts[1], "a redelivery")
	f.books(7, 2, 1)
}

func TestPersist_StandingOrderOfAnEarlierEpochIsAConflict(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.persist(order(7, 9, 50))
	f.exec("UPDATE vouchers SET epoch = 2")
	o := order(7, 1, 50)
	o.Epoch = 2
	verdicts, err := f.Persist(f.ctx, []orderstore.Order{o})
	require.NoError(t, err)
	require.Equal(t, orderstore.Conflict, verdicts[0].Kind)
	require.Equal(t, at(7, 1, 9), verdicts[0].Standing)
}

func TestPersist_PositionOfAnotherUserIsNeverAcknowledged(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.persist(order(7, 1, 50))
	require.Equal(t, []orderstore.VerdictKind{orderstore.SamePosition, orderstore.Persisted}, f.persist(order(7, 1, 51), order(7, 2, 52)))
	f.books(7, 2, 0)
}

func TestPersist_BothKeysClashing(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.persist(order(7, 1, 50), order(7, 2, 51))
	// Position 1 is user 50's and user 51 has position 2: the position decides.
	require.Equal(t, []orderstore.VerdictKind{orderstore.SamePosition}, f.persist(order(7, 1, 51)))
	// Both keys are this order's own row.
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted}, f.persist(order(7, 2, 51)))
	f.books(7, 2, 0)
}

func TestPersist_DuplicatesInsideOneBatch(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	require.Equal(t, []orderstore.VerdictKind{
		orderstore.Persisted,    // the first
		orderstore.Persisted,    // the very same
		orderstore.Conflict,     // the same user elsewhere
		orderstore.SamePosition, // another user at its position
		orderstore.Persisted,
		orderstore.Conflict,
	}, f.persist(order(7, 1, 50), order(7, 1, 50), order(7, 2, 50), order(7, 1, 51), order(7, 3, 52), order(7, 4, 50)))
	f.books(7, 2, 2)
}

func TestPersist_ManyPositionsOfOneUserInOneBatch(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 1)
	f.voucher(8, 1000)
	f.persist(order(7, 1, 1))
	var short, lost []orderstore.Order
	for seq := int64(2); seq <= 201; seq++ {
		short = append(short, order(7, seq, 50))
		lost = append(lost, order(8, seq, 50))
		f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (8, 1, ?, 50, 'LOST')", seq)
	}
	require.Equal(t, all(200, orderstore.Rejected), f.persist(short...))
	require.Equal(t, all(200, orderstore.Ended), f.persist(short...), "a redelivery")
	require.Equal(t, all(200, orderstore.Ended), f.persist(lost...))
	f.books(7, 1, 200)
	f.books(8, 0, 200)
}

func TestPersist_ShortStockGoesBySeqAndTheRestIsRejected(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 3)
	f.voucher(8, 100)
	batch := append(run(7, 1, 5, 50), order(8, 1, 1))
	batch[0].UserID = 999 // the highest user has the lowest seq
	slices.Reverse(batch[:5])
	require.Equal(t, []orderstore.VerdictKind{
		orderstore.Rejected, orderstore.Rejected, orderstore.Persisted, orderstore.Persisted, orderstore.Persisted, orderstore.Persisted,
	}, f.persist(batch...))
	f.books(7, 3, 2)
	f.books(8, 1, 0)

	verdicts, err := f.Persist(f.ctx, batch)
	require.NoError(t, err)
	require.Equal(t, orderstore.Verdict{Kind: orderstore.Ended, Outcome: orderstore.OutcomeRejected}, verdicts[0])
	require.Equal(t, []orderstore.VerdictKind{
		orderstore.Ended, orderstore.Ended, orderstore.Persisted, orderstore.Persisted, orderstore.Persisted, orderstore.Persisted,
	}, kinds(verdicts))
	f.books(7, 3, 2)

	f.exec("UPDATE vouchers SET total = 100, stock = 97 WHERE id = 7")
	require.Equal(t, orderstore.Ended, f.persist(batch[0])[0], "the first verdict stands also when there is stock again")
	f.books(7, 3, 2)
}

func TestPersist_StaleEpochIsLeftAlone(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.voucher(8, 100)
	f.persist(order(7, 1, 50))
	f.exec("UPDATE vouchers SET epoch = 2 WHERE id = 7")
	require.Equal(t, []orderstore.VerdictKind{orderstore.Stale, orderstore.Stale, orderstore.Persisted, orderstore.Persisted},
		f.persist(order(7, 2, 51), order(7, 3, 50), order(8, 1, 50), order(7, 1, 50)),
		"new, a conflict, another voucher, a row that was stored in time")
	f.books(7, 1, 0)
	f.books(8, 1, 0)
}

func TestPersist_TwoEpochsOfOneVoucherInOneBatch(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	newer := order(7, 1, 51)
	newer.Epoch = 2
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted, orderstore.Stale}, f.persist(order(7, 1, 50), newer))
	f.books(7, 1, 0)
}

func TestPersist_NoVoucher(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	require.Equal(t, []orderstore.VerdictKind{orderstore.NoVoucher, orderstore.Persisted}, f.persist(order(6, 1, 50), order(7, 1, 50)))
	require.Zero(t, f.number("SELECT COUNT(*) FROM orders WHERE voucher_id = 6"))
}

func TestPersist_OutcomeThatStandsIsNeverOverruled(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 2000)
	f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 500, 550, 'LOST')")
	want := all(1000, orderstore.Persisted)
	want[499] = orderstore.Ended
	verdicts, err := f.Persist(f.ctx, run(7, 1, 1000, 50))
	require.NoError(t, err)
	require.Equal(t, want, kinds(verdicts))
	require.Equal(t, orderstore.OutcomeLost, verdicts[499].Outcome)
	f.books(7, 999, 1)

	// Far apart seqs are looked up one by one.
	f.exec("INSERT INTO order_outcomes (voucher_id, epoch, seq, user_id, kind) VALUES (7, 1, 900000, 1, 'CANCELLED')")
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted, orderstore.Ended, orderstore.Persisted},
		f.persist(order(7, 5000, 2), order(7, 900000, 1), order(7, 90000000, 3)))
}

func TestPersist_IsolatesTheOneRowThatTheDatabaseRefuses(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 2000)
	f.exec("ALTER TABLE orders ADD CONSTRAINT superstition CHECK (user_id <> 666)")
	want := all(1000, orderstore.Persisted)
	want[665] = orderstore.Unstorable
	verdicts, err := f.Persist(f.ctx, run(7, 1, 1000, 0))
	require.NoError(t, err)
	require.Equal(t, want, kinds(verdicts))
	require.ErrorContains(t, verdicts[665].Err, "superstition")
	require.Regexp(t, `^check constraint \(error (4025|3819)\)$`, verdicts[665].Reason)
	f.books(7, 999, 0)
}

func TestPersist_ValuesOutOfRangeAreUnstorable(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	spoil := func(change func(o *orderstore.Order)) orderstore.Order {
		o := order(7, 1, 50)
		change(&o)
		return o
	}
	bad := []orderstore.Order{
		spoil(func(o *orderstore.Order) { o.UserID = 0 }),
		spoil(func(o *orderstore.Order) { o.UserID = -1 }),
		spoil(func(o *orderstore.Order) { o.Seq = 0 }),
		spoil(func(o *orderstore.Order) { o.Seq = 1 << 40 }),
		spoil(func(o *orderstore.Order) { o.Epoch = 1 << 24 }),
		spoil(func(o *orderstore.Order) { o.VoucherID = -7 }),
		spoil(func(o *orderstore.Order) { o.Reference = strings.Repeat("x", 65) }),
		spoil(func(o *orderstore.Order) { o.Reference = "\xff" }),
		spoil(func(o *orderstore.Order) { o.AdmittedAt = time.Time{} }),
		spoil(func(o *orderstore.Order) { o.AdmittedAt = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }),
	}
	verdicts, err := f.Persist(f.ctx, append(bad, order(7, 2, 51)))
	require.NoError(t, err)
	require.Equal(t, append(all(len(bad), orderstore.Unstorable), orderstore.Persisted), kinds(verdicts))
	for i := range bad {
		require.Error(t, verdicts[i].Err)
		require.NotEmpty(t, verdicts[i].Reason)
	}
	f.books(7, 1, 0)
}

func TestPersist_IDsAndTimesRoundTripExactly(t *testing.T) {
	server := devstack.TestDatabaseServer(t, devstack.DatabaseOptions{Args: []string{"--default-time-zone=+09:00"}})
	require.NoError(t, server.CreateDatabase(t.Context(), "elsewhere"))
	f := fixtureAt(t, server.DSN("elsewhere"))
	f.voucher(math.MaxInt64, 100)
	v, err := f.Voucher(f.ctx, math.MaxInt64)
	require.NoError(t, err)
	require.Equal(t, begin, v.BeginAt)
	require.Equal(t, begin.Add(time.Hour), v.EndAt)
	require.WithinDuration(t, time.Now(), v.CreatedAt, time.Minute)
	require.Equal(t, time.UTC, v.CreatedAt.Location())

	o := order(math.MaxInt64, 1<<40-1, math.MaxInt64)
	o.Reference = strings.Repeat("ü'\\\"%_", 10)
	o.AdmittedAt = begin.Add(999 * time.Microsecond).In(time.FixedZone("here", -5*3600))
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted}, f.persist(o))
	require.Equal(t, []orderstore.VerdictKind{orderstore.Persisted}, f.persist(o), "read back")
	var voucherID, seq, userID int64
	var reference string
	var admitted, persisted time.Time
	require.NoError(t, f.sql.QueryRow("SELECT voucher_id, seq, user_id, reference, admitted_at, persisted_at FROM orders").
		Scan(&voucherID, &seq, &userID, &reference, &admitted, &persisted))
	require.EqualValues(t, math.MaxInt64, voucherID)
	require.EqualValues(t, 1<<40-1, seq)
	require.EqualValues(t, math.MaxInt64, userID)
	require.Equal(t, o.Reference, reference)
	require.Equal(t, begin, admitted, "cut to the millisecond, not rounded")
	require.WithinDuration(t, time.Now(), persisted, time.Minute)
	top, err := f.MaxSeq(f.ctx, math.MaxInt64, 1)
	require.NoError(t, err)
	require.EqualValues(t, 1<<40-1, top)
}

func TestPersist_BatchLongerThanAPacketIsSplit(t *testing.T) {
	server := devstack.TestDatabaseServer(t, devstack.DatabaseOptions{Args: []string{"--max-allowed-packet=32768"}})
	require.NoError(t, server.CreateDatabase(t.Context(), "small"))
	f := fixtureAt(t, server.DSN("small"))
	f.voucher(7, 1000)
	batch := run(7, 1, 1000, 0)
	for i := range batch {
		batch[i].Reference = strings.Repeat("r", 64)
	}
	require.Equal(t, all(1000, orderstore.Persisted), f.persist(batch...))
	require.Equal(t, all(1000, orderstore.Persisted), f.persist(batch...), "read back")
	for i := range batch {
		batch[i].Seq += 1000
	}
	require.Equal(t, all(1000, orderstore.Conflict), f.persist(batch...))
	f.books(7, 1000, 1000)
}

func TestPersist_ErrorsThatPassDecideNothing(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	batch := run(7, 1, 20, 0)
	for _, number := range []int{1205, 1213, 1020, 1040, 1021, 1114, 1053, 1317, 1836, 1290, 1142, 1364, 5999} {
		f.exec("DROP TRIGGER IF EXISTS refuse")
		f.exec(fmt.Sprintf(`CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW
IF NEW.user_id = 13 THEN SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = %d, MESSAGE_TEXT = 'staged'; END IF`, number))
		verdicts, err := f.Persist(f.ctx, batch)
		require.ErrorIs(t, err, orderstore.ErrTransient, "error %d", number)
		require.Equal(t, all(20, orderstore.Undecided), kinds(verdicts), "error %d", number)
		f.books(7, 0, 0)
	}
	f.exec("DROP TRIGGER refuse")
	require.Equal(t, all(20, orderstore.Persisted), f.persist(batch...))
	f.books(7, 20, 0)
}

func TestPersist_DataErrorOfTheUpdateCondemnsNoOrder(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.exec("ALTER TABLE vouchers ADD CONSTRAINT jinx CHECK (sold < 5)")
	verdicts, err := f.Persist(f.ctx, run(7, 1, 5, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.Equal(t, all(5, orderstore.Undecided), kinds(verdicts))
	f.books(7, 0, 0)
}

func TestPersist_UnknownErrorIsLoggedWithItsNumber(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.exec(`CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 5999, MESSAGE_TEXT = 'staged'`)
	var out bytes.Buffer
	s, err := orderstore.Open(f.ctx, orderstore.Options{DSN: f.dsn, Logger: slog.New(slog.NewTextHandler(&out, nil))})
	require.NoError(t, err)
	defer s.Close()
	_, err = s.Persist(f.ctx, run(7, 1, 2, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.Contains(t, out.String(), "mysql_error=5999")
}

func TestPersist_DuplicateThatIsNeverFoundIsTransient(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	f.exec(`CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW
IF NEW.user_id = 13 THEN SIGNAL SQLSTATE '23000' SET MYSQL_ERRNO = 1062, MESSAGE_TEXT = 'staged'; END IF`)
	verdicts, err := f.Persist(f.ctx, run(7, 1, 20, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.Equal(t, all(20, orderstore.Undecided), kinds(verdicts))
	f.exec("DROP TRIGGER refuse")
	require.Equal(t, all(20, orderstore.Persisted), f.persist(run(7, 1, 20, 0)...))
}

func TestPersist_ContextThatEndedIsTransient(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 100)
	ctx, cancel := context.WithCancel(f.ctx)
	cancel()
	verdicts, err := f.Persist(ctx, run(7, 1, 2, 0))
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, all(2, orderstore.Undecided), kinds(verdicts))
	f.books(7, 0, 0)
}
