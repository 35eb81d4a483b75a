package guardian_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/writertest"
)

// lastDelivered is the group's place in the stream: 0-0 once all is delivered
// again.
func lastDelivered(t *testing.T, f *writertest.Fixture) string {
	t.Helper()
	groups, err := f.Do("XINFO", "GROUPS", ledger.OrdersKey(0, 1)).ToArray()
	require.NoError(t, err)
	require.Len(t, groups, 1)
	group, err := groups[0].AsStrMap()
	require.NoError(t, err)
	return group["last-delivered-id"]
}

// taken has a consumer take all that was not delivered yet.
func taken(t *testing.T, f *writertest.Fixture, consumer string) {
	t.Helper()
	entries, err := ledger.ReadNew(f.Ctx, f.Client, 0, 1, consumer, 10_000, 0)
	require.NoError(t, err)
	require.NotEmpty(t, entries)
}

func TestGuardian_OrphansAreDeliveredAgainWhenTwoRoundsAgree(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	f.Voucher(g, 7, 100)
	orphaned := func(user int64) {
		t.Helper()
		f.Admitted(7, user)
		taken(t, f, "gone")
		require.NoError(t, f.Do("XGROUP", "DELCONSUMER", ledger.OrdersKey(0, 1), ledger.Group, "gone").Error())
	}
	orphaned(1)
	look()
	require.NotEqual(t, "0-0", lastDelivered(t, f), "one round alone decides nothing")
	look()
	require.Equal(t, "0-0", lastDelivered(t, f))
	taken(t, f, "w")
	// It begins anew after that.
	orphaned(2)
	look()
	require.NotEqual(t, "0-0", lastDelivered(t, f))
	look()
	require.Equal(t, "0-0", lastDelivered(t, f))
}

// However many entries somebody holds, those that nobody holds are found behind
// them.
func TestGuardian_OrphanBehindALongBacklogIsDeliveredAgain(t *testing.T) {
	f := writertest.New(t, 1)
	g, look := stepped(t, f)
	f.Voucher(g, 7, 10_000)
	for user := int64(1); user <= 1500; user++ {
		f.Admitted(7, user)
	}
	taken(t, f, "slow")
	f.Admitted(7, 1501)
	taken(t, f, "gone")
	require.NoError(t, f.Do("XGROUP", "DELCONSUMER", ledger.OrdersKey(0, 1), ledger.Group, "gone").Error())
	looks := 0
	for ; lastDelivered(t, f) != "0-0"; looks++ {
		require.Less(t, looks, 3, "%+v", g.Status()[0])
		look()
	}
	require.Equal(t, 3, looks, "the first looks at a bounded number, the second finds it, the third agrees")
}
