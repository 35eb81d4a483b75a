package guardian_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// A guardian looks less often only where nothing was sold since its last look,
// nothing is in flight, and every rule of the books holds.
func TestGuardian_IsQuietOnlyWhereNothingHappens(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	f.Voucher(g, 7, 100)
	quiet := func() bool {
		look()
		return g.Quiet(0)
	}
	require.True(t, quiet(), "nothing was sold yet")
	f.Admitted(7, 1)
	require.False(t, quiet(), "sold since")
	require.False(t, quiet(), "in flight")
	f.Drained()
	require.True(t, quiet(), "settled")

	require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 7), "stock", "-1").Error())
	require.False(t, quiet(), "a rule does not hold")
	require.NoError(t, f.Do("HINCRBY", ledger.VoucherKey(0, 1, 7), "stock", "1").Error())
	require.True(t, quiet(), "put right")

	f.Admitted(7, 2)
	f.Drained()
	require.False(t, quiet(), "sold and settled since")
	require.True(t, quiet(), "nothing since")
	require.NoError(t, f.Do("HSET", ledger.MetaKey(0), "state", "closed", "reason", "by hand").Error())
	require.False(t, quiet(), "it was closed")
}
