package orderstore_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/writer/internal/orderstore"
)

// A writer was stopped in the middle of its transaction and stays: its session
// is alive and holds the rows that a peer must write.
func TestPersist_GetsPastASessionThatFellSilentInItsTransaction(t *testing.T) {
	f := newFixture(t)
	f.voucher(7, 10)
	silent, err := orderstore.Open(f.ctx, orderstore.Options{DSN: f.dsn, Logger: quiet})
	require.NoError(t, err)
	defer func() { _ = silent.Close() }() // its connection is dead by then
	conn, err := silent.DB().Conn(f.ctx)
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = conn.ExecContext(f.ctx, "BEGIN")
	require.NoError(t, err)
	_, err = conn.ExecContext(f.ctx, "UPDATE vouchers SET stock = stock - 1, sold = sold + 1 WHERE id = 7")
	require.NoError(t, err)

	impatient := f.open(f.dsn, time.Second)
	orders := []orderstore.Order{order(7, 1, 1)}
	_, err = impatient.Persist(f.ctx, orders)
	require.ErrorIs(t, err, orderstore.ErrTransient)
	require.Eventually(t, func() bool {
		verdicts, err := impatient.Persist(f.ctx, orders)
		if errors.Is(err, orderstore.ErrTransient) {
			return false
		}
		require.NoError(t, err)
		require.Equal(t, orderstore.Persisted, verdicts[0].Kind)
		return true
	}, time.Minute, 10*time.Millisecond)
	require.Equal(t, int64(9), f.number("SELECT stock FROM vouchers WHERE id = 7"))
}
