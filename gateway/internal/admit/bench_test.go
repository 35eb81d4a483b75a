package admit

import (
	"context"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
)

// instant makes an Admitter whose script answers at once, so that what is left is
// the gateway's own work.
func instant(b *testing.B, decision ledger.Decision) *Admitter {
	a := newAdmitter(b, nil)
	a.admit = func(_ context.Context, call ledger.AdmitCall) (ledger.AdmitReply, error) {
		reply := ledger.AdmitReply{Status: ledger.AdmitOK, Now: time.Now(), Durability: ledger.DurabilityStrict, Answers: make([]ledger.Answer, len(call.Grabs))}
		for i := range reply.Answers {
			reply.Answers[i].Decision = decision
			reply.Answers[i].Order.Seq = int64(i + 1)
		}
		return reply, nil
	}
	now := time.Now()
	a.clock.learn(now, now, now)
	for _, p := range a.partitions {
		p.view.Store(&view{began: now.Add(time.Hour), epoch: 1, sha: "sha", state: StateOpen})
	}
	return a
}

// onRedis makes an Admitter on a Redis that syncs once a second, so that its disk
// is not what is measured.
func onRedis(b *testing.B, stock int64) *Admitter {
	ctx := context.Background()
	redis, err := devstack.StartRedis(ctx, devstack.TestBinaries(b), devstack.RedisOptions{Args: []string{"--appendfsync", "everysec"}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(redis.Close)
	client := ledgertest.Client(b, redis.Addr())
	ledgertest.Open(b, client, 1)
	if err := client.Do(ctx, client.B().Hset().Key(ledger.MetaKey(0)).FieldValue().FieldValue("bound", "900000000000").Build()).Error(); err != nil {
		b.Fatal(err)
	}
	ledgertest.Sell(b, client, ledgertest.Voucher(1, 1, stock))
	a := newAdmitter(b, client)
	a.partitions[0].refresh(ctx, time.Now())
	return a
}

var benchUser atomic.Int64

// reportCPU reports the CPU time of the process per operation, which says more
// than the clock where others use the machine. Run it deferred, with cpuTime().
func reportCPU(b *testing.B, before time.Duration) {
	b.ReportMetric(float64((cpuTime()-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func benchGrab(b *testing.B, a *Admitter, callers int) {
	b.ReportAllocs()
	b.SetParallelism(callers / 2)
	b.ResetTimer()
	defer reportCPU(b, cpuTime())
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			_, err := a.Grab(ctx, benchUser.Add(1), 1, "", "")
			cancel()
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func BenchmarkGrab_Instant(b *testing.B)   { benchGrab(b, instant(b, ledger.DecisionAdmitted), 256) }
func BenchmarkGrab_Refused(b *testing.B)   { benchGrab(b, instant(b, ledger.DecisionSoldOut), 256) }
func BenchmarkGrab_Alone(b *testing.B)     { benchGrab(b, instant(b, ledger.DecisionAdmitted), 2) }
func BenchmarkGrab_Redis(b *testing.B)     { benchGrab(b, onRedis(b, 900_000_000_000), 256) }
func BenchmarkGrab_RedisSold(b *testing.B) { benchGrab(b, onRedis(b, 0), 256) }
