package orderstore

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
)

func TestLock_PingTellsOfALockThatIsGoneWhileTheSessionLives(t *testing.T) {
	s, err := Open(t.Context(), Options{DSN: devstack.TestDatabase(t)})
	require.NoError(t, err)
	defer s.Close()
	l, ok, err := s.TryLock(t.Context(), "partition-0")
	require.NoError(t, err)
	require.True(t, ok)
	defer l.Release(t.Context())
	var timeout int
	require.NoError(t, l.conn.QueryRowContext(t.Context(), "SELECT @@wait_timeout").Scan(&timeout))
	require.Equal(t, 15, timeout, "how long a hung holder keeps it")
	require.NoError(t, l.Ping(t.Context()))
	_, err = l.conn.ExecContext(t.Context(), "DO RELEASE_LOCK(?)", l.name)
	require.NoError(t, err)
	require.ErrorIs(t, l.Ping(t.Context()), ErrLockLost)
}
