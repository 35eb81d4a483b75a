package orderstore_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/seckill/seckill/migrations"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

var states = []string{
	orderstore.StateDraft, orderstore.StateOpen, orderstore.StatePaused, orderstore.StateClosed, orderstore.StateArchived,
}

func draft(id int64) orderstore.Voucher {
	return orderstore.Voucher{ID: id, Title: "Tea, 100 g", Total: 100, BeginAt: begin, EndAt: begin.Add(time.Hour)}
}

func TestCreateVoucher_IsIdempotent(t *testing.T) {
	f := newFixture(t)
	want := draft(7)
	want.BeginAt = begin.Add(999 * time.Microsecond).In(time.FixedZone("here", 3600))
	v, err := f.CreateVoucher(f.ctx, want)
	require.NoError(t, err)
	require.Equal(t, begin, v.BeginAt, "UTC, to the millisecond")
	require.False(t, v.Applied())
	require.WithinDuration(t, time.Now(), v.CreatedAt, time.Minute)
	require.Equal(t, orderstore.Voucher{
		ID: 7, Title: "Tea, 100 g", Total: 100, Stock: 100, Epoch: 1, State: orderstore.StateDraft,
		BeginAt: begin, EndAt: begin.Add(time.Hour), CreatedAt: v.CreatedAt, UpdatedAt: v.UpdatedAt,
	}, v)

	var g errgroup.Group
	for range 4 {
		g.Go(func() error { _, err := f.CreateVoucher(f.ctx, want); return err })
	}
	require.NoError(t, g.Wait())
	_, err = f.Transition(f.ctx, 7, []string{orderstore.StateDraft}, orderstore.StateOpen)
	require.NoError(t, err)
	again, err := f.CreateVoucher(f.ctx, want)
	require.NoError(t, err)
	require.Equal(t, orderstore.StateOpen, again.State)

	for name, change := range map[string]func(v *orderstore.Voucher){
		"title": func(v *orderstore.Voucher) { v.Title = "tea, 100 g" },
		"total": func(v *orderstore.Voucher) { v.Total++ },
		"begin": func(v *orderstore.Voucher) { v.BeginAt = begin.Add(time.Millisecond) },
		"end":   func(v *orderstore.Voucher) { v.EndAt = v.EndAt.Add(time.Millisecond) },
	} {
		other := draft(7)
		change(&other)
		_, err = f.CreateVoucher(f.ctx, other)
		require.ErrorIs(t, err, orderstore.ErrVoucherExists, name)
	}
}

func TestCreateVoucher_RefusesWhatTheTableRefuses(t *testing.T) {
	f := newFixture(t)
	for name, change := range map[string]func(v *orderstore.Voucher){
		"negative id":    func(v *orderstore.Voucher) { v.ID = -1 },
		"total 0":        func(v *orderstore.Voucher) { v.Total = 0 },
		"total below 0":  func(v *orderstore.Voucher) { v.Total = -1 },
		"total of 2^40":  func(v *orderstore.Voucher) { v.Total = 1 << 40 },
		"end at begin":   func(v *orderstore.Voucher) { v.EndAt = v.BeginAt },
		"no times":       func(v *orderstore.Voucher) { v.BeginAt = time.Time{} },
		"year 10000":     func(v *orderstore.Voucher) { v.EndAt = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) },
		"long title":     func(v *orderstore.Voucher) { v.Title = strings.Repeat("x", 201) },
		"title not UTF8": func(v *orderstore.Voucher) { v.Title = "\xff" },
	} {
		v := draft(7)
		change(&v)
		_, err := f.CreateVoucher(f.ctx, v)
		require.ErrorIs(t, err, orderstore.ErrInvalidVoucher, name)
	}
	v := draft(7)
	v.Title = strings.Repeat("ü", 200)
	_, err := f.CreateVoucher(f.ctx, v)
	require.NoError(t, err, "200 characters, not bytes")
}

func TestCreateVoucher_GivesAnIDAndFollowsThePartition(t *testing.T) {
	dsn := devstack.TestDatabase(t)
	s, err := orderstore.Open(t.Context(), orderstore.Options{DSN: dsn})
	require.NoError(t, err)
	defer s.Close()
	ctx := t.Context()
	require.NoError(t, migrations.Up(ctx, s.DB(), quiet))
	_, err = s.CreateVoucher(ctx, draft(0))
	require.ErrorIs(t, err, orderstore.ErrNotMigrated)
	require.NoError(t, s.InitPartitions(ctx, 8))
	_, err = s.DB().Exec("UPDATE partitions SET epoch = id + 1")
	require.NoError(t, err)
	seen := make(map[int64]bool)
	for range 20 {
		v, err := s.CreateVoucher(ctx, draft(0))
		require.NoError(t, err)
		require.Positive(t, v.ID)
		require.Less(t, v.ID, int64(1)<<53)
		require.EqualValues(t, v.ID%8, v.PartitionID)
		require.EqualValues(t, v.ID%8+1, v.Epoch)
		require.False(t, seen[v.ID])
		seen[v.ID] = true
	}
	var listed []int64
	for after := int64(0); ; {
		page, err := s.Vouchers(ctx, after, 7)
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		for _, v := range page {
			require.Greater(t, v.ID, after)
			after = v.ID
			listed = append(listed, v.ID)
		}
	}
	require.Len(t, listed, 20)
}

func TestTransition_OverAllPairsOfStates(t *testing.T) {
	f := newFixture(t)
	allowed := map[string]string{
		"DRAFT": "OPEN", "OPEN": "PAUSED CLOSED", "PAUSED": "OPEN CLOSED", "CLOSED": "ARCHIVED",
	}
	id := int64(0)
	for _, from := range states {
		for _, to := range states {
			id++
			_, err := f.CreateVoucher(f.ctx, draft(id))
			require.NoError(t, err)
			f.exec("UPDATE vouchers SET state = ?, rev = 5, applied_at = CURRENT_TIMESTAMP(3) WHERE id = ?", from, id)
			v, err := f.Transition(f.ctx, id, states, to)
			switch {
			case from == to:
				require.NoError(t, err)
				require.EqualValues(t, 5, v.Rev, "%s is there already", from)
				require.True(t, v.Applied())
			case strings.Contains(allowed[from], to):
				require.NoError(t, err, "%s to %s", from, to)
				require.Equal(t, to, v.State)
				require.EqualValues(t, 6, v.Rev)
				require.False(t, v.Applied())
			default:
				var e *orderstore.StateError
				require.ErrorAs(t, err, &e, "%s to %s", from, to)
				require.Equal(t, orderstore.StateError{State: from, To: to}, *e)
				v, err = f.Voucher(f.ctx, id)
				require.NoError(t, err)
				require.Equal(t, from, v.State)
				require.EqualValues(t, 5, v.Rev)
			}
		}
	}
	_, err := f.Transition(f.ctx, 999, states, orderstore.StateOpen)
	require.ErrorIs(t, err, orderstore.ErrVoucherNotFound)
}

func TestTransition_OnlyFromWhereTheCallerSays(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	_, err := f.Transition(f.ctx, 7, []string{orderstore.StateOpen}, orderstore.StatePaused)
	require.NoError(t, err)
	_, err = f.Transition(f.ctx, 7, []string{orderstore.StateDraft}, orderstore.StateOpen)
	var e *orderstore.StateError
	require.ErrorAs(t, err, &e, "to open is not to resume")
	v, err := f.Transition(f.ctx, 7, []string{orderstore.StatePaused}, orderstore.StateOpen)
	require.NoError(t, err)
	require.EqualValues(t, 3, v.Rev)
}

func TestTransition_ManyAtOnceCountOneRev(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	var g errgroup.Group
	for range 8 {
		g.Go(func() error {
			_, err := f.Transition(f.ctx, 7, []string{orderstore.StateOpen}, orderstore.StatePaused)
			return err
		})
	}
	require.NoError(t, g.Wait())
	v, err := f.Voucher(f.ctx, 7)
	require.NoError(t, err)
	require.EqualValues(t, 2, v.Rev)
}

func TestLiveVouchers_AreThoseTheLedgerMustKnow(t *testing.T) {
	f := newFixture(t)
	for i, state := range states {
		id := int64(i + 1)
		_, err := f.CreateVoucher(f.ctx, draft(id))
		require.NoError(t, err)
		f.exec("UPDATE vouchers SET state = ? WHERE id = ?", state, id)
	}
	require.Equal(t, []int64{2, 3, 4, 5}, live(t, f, 0))
	require.Empty(t, live(t, f, 1))
	require.NoError(t, f.MarkApplied(f.ctx, 5, 0))
	require.NoError(t, f.MarkApplied(f.ctx, 4, 0))
	require.Equal(t, []int64{2, 3, 4}, live(t, f, 0))
}

func live(t *testing.T, f *fixture, partition int) (ids []int64) {
	t.Helper()
	list, err := f.LiveVouchers(f.ctx, partition)
	require.NoError(t, err)
	for _, v := range list {
		ids = append(ids, v.ID)
	}
	return ids
}

func TestMarks_HoldOnlyForTheEpochAndRevTheyWereMadeFor(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	require.ErrorIs(t, f.MarkLedgerCreated(f.ctx, 7, 2), orderstore.ErrEpochMoved)
	require.ErrorIs(t, f.MarkLedgerCreated(f.ctx, 8, 1), orderstore.ErrVoucherNotFound)
	require.NoError(t, f.MarkLedgerCreated(f.ctx, 7, 1))
	require.NoError(t, f.MarkLedgerCreated(f.ctx, 7, 1), "again")
	v, err := f.Voucher(f.ctx, 7)
	require.NoError(t, err)
	require.EqualValues(t, 1, v.LedgerEpoch)

	require.ErrorIs(t, f.MarkApplied(f.ctx, 7, 0), orderstore.ErrRevMoved)
	require.ErrorIs(t, f.MarkApplied(f.ctx, 8, 1), orderstore.ErrVoucherNotFound)
	require.NoError(t, f.MarkApplied(f.ctx, 7, 1))
	v, err = f.Voucher(f.ctx, 7)
	require.NoError(t, err)
	require.True(t, v.Applied())
	require.NoError(t, f.MarkApplied(f.ctx, 7, 1), "again")
	again, err := f.Voucher(f.ctx, 7)
	require.NoError(t, err)
	require.Equal(t, v.AppliedAt, again.AppliedAt, "the first time stays")
}
