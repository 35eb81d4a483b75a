package ledger

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// serverCPU is the CPU time in seconds that the server has used.
func serverCPU(b *book) float64 {
	b.t.Helper()
	text, err := b.do("INFO", "cpu").ToString()
	require.NoError(b.t, err)
	info := parseInfo(text)
	var sum float64
	for _, name := range []string{"used_cpu_user", "used_cpu_sys"} {
		value, err := strconv.ParseFloat(info[name], 64)
		require.NoError(b.t, err)
		sum += value
	}
	return sum
}

// reportCPU is run with what the server had used before.
func reportCPU(tb *testing.B, b *book, before float64, orders int) {
	tb.StopTimer()
	tb.ReportMetric((serverCPU(b)-before)*1e6/float64(orders), "redis-us/order")
	tb.ReportMetric(float64(orders)/tb.Elapsed().Seconds(), "orders/s")
}

func benchBook(tb *testing.B) *book {
	tb.Helper()
	server := ownServer(tb)
	b := newBookOn(tb, connect(tb, server.Addr(), ""), 900_000_000_000)
	b.ctx = context.Background()
	b.must("HSET", b.keys()["meta"], "bound", "900000000000")
	return b
}

var benchSizes = []int{1, 8, 32, 128, MaxBatch}

func (b *book) benchCall(next *atomic.Int64, size int) AdmitCall {
	call := b.call()
	for range size {
		user := 1<<60 + next.Add(1)
		call.Grabs = append(call.Grabs, Grab{UserID: user, Record: EncodeRecord(user, "", "")})
	}
	return call
}

// The durable ledger as it is run, four calls in flight as a gateway has them.
// An operation is a call; redis-us/order is what counts.
func BenchmarkAdmit(tb *testing.B) {
	for _, size := range benchSizes {
		tb.Run(fmt.Sprintf("batch=%d", size), func(tb *testing.B) {
			b := benchBook(tb)
			var next atomic.Int64
			before := serverCPU(b)
			tb.SetParallelism(2)
			tb.ResetTimer()
			tb.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					reply, err := Admit(b.ctx, b.client, b.benchCall(&next, size))
					if err != nil || reply.Status != AdmitOK || reply.LastSeq == 0 {
						tb.Errorf("admit: %v %v", reply.Status, err)
						return
					}
				}
			})
			reportCPU(tb, b, before, tb.N*size)
		})
	}
}

// Entries of each size, all persisted, sixteen in a pipeline as a writer
// settles a batch.
func BenchmarkSettle(tb *testing.B) {
	for _, size := range benchSizes {
		tb.Run(fmt.Sprintf("batch=%d", size), func(tb *testing.B) {
			b := benchBook(tb)
			require.NoError(tb, load(b.ctx, b.client, settle))
			var next atomic.Int64
			for range tb.N {
				_, err := Admit(b.ctx, b.client, b.benchCall(&next, size))
				require.NoError(tb, err)
			}
			settlements := make([]Settlement, 0, tb.N)
			for {
				raw, err := ReadNew(b.ctx, b.client, b.partition, epoch, "w", 100, 1e6)
				require.NoError(tb, err)
				if len(raw) == 0 {
					break
				}
				for _, r := range raw {
					entry, err := DecodeEntry(b.partition, r.ID, r.Fields)
					require.NoError(tb, err)
					settlements = append(settlements, b.settlement(entry, VerdictPersisted))
				}
			}
			require.Len(tb, settlements, tb.N)
			before := serverCPU(b)
			tb.ResetTimer()
			for len(settlements) > 0 {
				n := min(16, len(settlements))
				for _, result := range Settle(b.ctx, b.client, settlements[:n]) {
					require.NoError(tb, result.Err)
					require.True(tb, result.Settled)
				}
				settlements = settlements[n:]
			}
			reportCPU(tb, b, before, tb.N*size)
		})
	}
}
