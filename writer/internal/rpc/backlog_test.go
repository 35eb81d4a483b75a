package rpc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func (o *operators) backlog() *seckillv1.GetBacklogResponse {
	o.T.Helper()
	resp, err := o.GetBacklog(o.Ctx, &seckillv1.GetBacklogRequest{})
	require.NoError(o.T, err)
	require.Len(o.T, resp.GetPartitions(), o.Partitions)
	require.WithinDuration(o.T, time.Now(), resp.GetReadTime().AsTime(), time.Minute)
	return resp
}

func TestGetBacklog_TellsWhatLiesWhere(t *testing.T) {
	o := newOperators(t, 3)
	o.Voucher(o.guardian, 7, 100)
	quiet := o.backlog()
	for i, p := range quiet.GetPartitions() {
		require.EqualValues(t, i, p.GetPartition())
		require.EqualValues(t, 1, p.GetEpoch())
		require.True(t, p.GetOpen())
		require.Empty(t, p.GetReason())
		require.Zero(t, p.GetInFlight())
		require.NotNil(t, p.LagEntries)
		require.Zero(t, p.GetLagEntries())
		require.Nil(t, p.GetOldestAge())
	}
	require.NotNil(t, quiet.DeadLetters)
	require.Zero(t, quiet.GetDeadLetters())
	require.Equal(t, "available", quiet.GetDatabaseState())

	o.Admitted(7, 1, 2, 3)
	o.Admitted(7, 4)
	o.Admitted(7, 5)
	_, err := ledger.ReadNew(o.Ctx, o.Client, 1, 1, "w1", 1, time.Millisecond)
	require.NoError(t, err)
	busy := o.backlog().GetPartitions()[1]
	require.EqualValues(t, 5, busy.GetInFlight())
	require.EqualValues(t, 2, busy.GetLagEntries())
	require.Equal(t, map[string]int64{"w1": 1}, pendingOf(busy))

	_, err = ledger.ReadNew(o.Ctx, o.Client, 1, 1, "w2", 2, time.Millisecond)
	require.NoError(t, err)
	busy = o.backlog().GetPartitions()[1]
	require.EqualValues(t, 0, busy.GetLagEntries())
	require.NotNil(t, busy.LagEntries)
	require.Equal(t, map[string]int64{"w1": 1, "w2": 2}, pendingOf(busy))
	for i, p := range o.backlog().GetPartitions() {
		require.True(t, i == 1 || p.GetInFlight() == 0 && len(p.GetConsumers()) == 0, "each partition by itself")
	}
}

// pendingOf is how many entries each consumer holds.
func pendingOf(p *seckillv1.PartitionBacklog) map[string]int64 {
	held := map[string]int64{}
	for _, c := range p.GetConsumers() {
		held[c.GetName()] = c.GetPendingEntries()
	}
	return held
}

func TestGetBacklog_TheOldestEntryAndIdleConsumersGrowOlder(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	begin := time.Now()
	o.Admitted(7, 1)
	_, err := ledger.ReadNew(o.Ctx, o.Client, 0, 1, "w1", 1, time.Millisecond)
	require.NoError(t, err)
	const older = 300 * time.Millisecond
	var p *seckillv1.PartitionBacklog
	require.Eventually(t, func() bool {
		p = o.backlog().GetPartitions()[0]
		return p.GetOldestAge().AsDuration() >= older && p.GetConsumers()[0].GetIdle().AsDuration() >= older
	}, patience, pollTime)
	o.Admitted(7, 2)
	_, err = ledger.ReadNew(o.Ctx, o.Client, 0, 1, "w2", 1, time.Millisecond)
	require.NoError(t, err)
	p = o.backlog().GetPartitions()[0]
	require.GreaterOrEqual(t, p.GetOldestAge().AsDuration(), older, "that of the oldest, not of the newest")
	// A millisecond, for that is what an entry's id tells.
	require.LessOrEqual(t, p.GetOldestAge().AsDuration(), time.Since(begin)+time.Millisecond)
	for _, c := range p.GetConsumers() {
		require.LessOrEqual(t, c.GetIdle().AsDuration(), time.Since(begin))
		if c.GetName() == "w1" {
			require.GreaterOrEqual(t, c.GetIdle().AsDuration(), older)
		}
	}
	require.NoError(t, ledger.RedeliverAll(o.Ctx, o.Client, 0, 1))
	o.Drained()
	require.Nil(t, o.backlog().GetPartitions()[0].GetOldestAge())
}

func TestGetBacklog_CountsDeadLetters(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	o.hold(7, 1, 2)
	require.EqualValues(t, 2, o.backlog().GetDeadLetters())
}

func TestGetBacklog_LagThatIsNotKnownIsNotZero(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	o.stopGuardian()
	o.Admitted(7, 1)
	require.NoError(t, o.Do("XGROUP", "DESTROY", ledger.OrdersKey(0, 1), ledger.Group).Error())
	p := o.backlog().GetPartitions()[0]
	require.Nil(t, p.LagEntries)
	require.EqualValues(t, 1, p.GetInFlight())
	require.NoError(t, o.Do("DEL", ledger.OrdersKey(0, 1)).Error())
	p = o.backlog().GetPartitions()[0]
	require.Nil(t, p.LagEntries)
	require.Contains(t, p.GetReason(), "stream is missing")
	require.NoError(t, o.Do("SET", ledger.OrdersKey(0, 1), "x").Error())
	require.Contains(t, o.backlog().GetPartitions()[0].GetReason(), "fault")
}

// Nobody can tell whether what is gone had been delivered.
func TestGetBacklog_LagIsNotKnownWhereEntriesWereRemoved(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	o.stopGuardian()
	o.Admitted(7, 1)
	o.Admitted(7, 2)
	o.Admitted(7, 3)
	_, err := ledger.ReadNew(o.Ctx, o.Client, 0, 1, "w1", 1, time.Millisecond)
	require.NoError(t, err)
	require.EqualValues(t, 2, o.backlog().GetPartitions()[0].GetLagEntries())
	require.NoError(t, o.Do("XTRIM", ledger.OrdersKey(0, 1), "MAXLEN", "=", "2").Error())
	p := o.backlog().GetPartitions()[0]
	require.Nil(t, p.LagEntries)
	require.EqualValues(t, 3, p.GetInFlight())
	require.Equal(t, map[string]int64{"w1": 1}, pendingOf(p))
}

func TestGetBacklog_SaysWhyAPartitionIsClosed(t *testing.T) {
	o := newOperators(t, 1)
	o.stopGuardian()
	require.NoError(t, ledger.ClosePartition(o.Ctx, o.Client, 0, 1, ledger.FaultPrefix+"for a test"))
	p := o.backlog().GetPartitions()[0]
	require.False(t, p.GetOpen())
	require.Equal(t, "fault: for a test", p.GetReason())
	require.NoError(t, o.Do("DEL", ledger.MetaKey(0)).Error())
	p = o.backlog().GetPartitions()[0]
	require.False(t, p.GetOpen())
	require.Zero(t, p.GetEpoch())
	require.Equal(t, "the ledger is missing", p.GetReason())
}

func TestGetBacklog_WhileAServerIsAway(t *testing.T) {
	o := newOperators(t, 1)
	o.Voucher(o.guardian, 7, 100)
	o.Admitted(7, 1)
	o.database.Serving = false
	readOnly := o.backlog()
	require.Equal(t, "unavailable", readOnly.GetDatabaseState(), "it answers, and nothing can be written")
	require.NotNil(t, readOnly.DeadLetters)

	o.sqlProxy.Refuse()
	away := o.backlog()
	require.Equal(t, "unavailable", away.GetDatabaseState())
	require.Nil(t, away.DeadLetters, "not known is not zero")
	require.EqualValues(t, 1, away.GetPartitions()[0].GetInFlight(), "the rest is there")

	o.redisProxy.Refuse()
	_, err := o.GetBacklog(o.Ctx, &seckillv1.GetBacklogRequest{})
	requireStatus(t, err, codes.Unavailable, reasonRedis)
}
