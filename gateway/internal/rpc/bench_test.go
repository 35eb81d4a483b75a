package rpc

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
)

// A gateway's edge as it is run, metrics included, on a Redis that syncs once a
// second; client and server share the process.
func benchEdge(b *testing.B, stock int64, connections int) ([]seckillv1.SeckillServiceClient, *prometheus.Registry) {
	b.Helper()
	ctx := context.Background()
	redis, err := devstack.StartRedis(ctx, devstack.TestBinaries(b), devstack.RedisOptions{Args: []string{"--appendfsync", "everysec"}})
	require.NoError(b, err)
	b.Cleanup(redis.Close)
	client := ledgertest.Client(b, redis.Addr())
	ledgertest.Open(b, client, 1)
	require.NoError(b, client.Do(ctx, client.B().Hset().Key(ledger.MetaKey(0)).FieldValue().FieldValue("bound", "900000000000").Build()).Error())
	ledgertest.Sell(b, client, ledgertest.Voucher(1, 1, stock))
	registry := prometheus.NewRegistry()
	a, err := admit.New(admit.Config{Client: client, Partitions: 1, Registerer: registry})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, a.Close(ctx)) })
	ids, err := orderid.New(orderid.Key{Secret: [orderid.KeySize]byte{7}})
	require.NoError(b, err)
	server, err := rpcserver.New(rpcserver.Options{Addr: "127.0.0.1:0", Registerer: registry})
	require.NoError(b, err)
	service := newService(b, Options{OrderIDs: ids, Draining: server.Draining(), Registerer: registry})
	service.Use(a)
	seckillv1.RegisterSeckillServiceServer(server.GRPC(), service)
	require.NoError(b, server.Listen())
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- server.Run(running) }()
	b.Cleanup(func() { stop(); require.NoError(b, <-done) })
	var clients []seckillv1.SeckillServiceClient
	for range connections {
		conn, err := grpc.NewClient(server.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(b, err)
		b.Cleanup(func() { conn.Close() })
		clients = append(clients, seckillv1.NewSeckillServiceClient(conn))
	}
	return clients, registry
}

// reportBatches reports how many Grabs left together.
func reportBatches(b *testing.B, registry *prometheus.Registry) {
	families, err := registry.Gather()
	require.NoError(b, err)
	for _, f := range families {
		if f.GetName() == "seckill_gateway_batch_grabs" {
			h := f.GetMetric()[0].GetHistogram()
			b.ReportMetric(h.GetSampleSum()/float64(h.GetSampleCount()), "grabs/batch")
		}
	}
}

var benchUser atomic.Int64

// reportCPU reports the CPU time of the process, client and server, per Grab.
func reportCPU(b *testing.B, before time.Duration) {
	b.ReportMetric(float64((cpuTime()-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkUnary(b *testing.B) {
	for name, stock := range map[string]int64{"admitted": 900_000_000_000, "sold out": 0} {
		b.Run(name, func(b *testing.B) {
			clients, registry := benchEdge(b, stock, 4)
			benchGrabs(b, clients)
			reportBatches(b, registry)
		})
	}
}

// Four streams of four connections, each with a window of 512 Grabs in messages
// of up to 64.
func BenchmarkStream(b *testing.B) {
	for name, stock := range map[string]int64{"admitted": 900_000_000_000, "sold out": 0} {
		b.Run(name, func(b *testing.B) {
			clients, registry := benchEdge(b, stock, 4)
			b.ReportAllocs()
			b.ResetTimer()
			defer reportCPU(b, cpuTime())
			var left atomic.Int64
			left.Store(int64(b.N))
			var all sync.WaitGroup
			for _, client := range clients {
				stream, err := client.GrabStream(context.Background())
				require.NoError(b, err)
				all.Go(func() { benchStream(b, stream, &left) })
			}
			all.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "grabs/s")
			reportBatches(b, registry)
		})
	}
}

func benchStream(b *testing.B, stream grabClient, left *atomic.Int64) {
	const window, message = 512, 64
	places := make(chan int, window)
	for range window / message {
		places <- message
	}
	var owed atomic.Int64
	go func() {
		request := &seckillv1.GrabStreamRequest{}
		slots := make([]seckillv1.StreamedGrab, window)
		for i := range slots {
			request.Grabs = append(request.Grabs, &slots[i])
		}
		all := request.Grabs
		for n := range places {
			n = int(min(int64(n), left.Add(-int64(n))+int64(n)))
			if n <= 0 {
				break
			}
			for _, g := range all[:n] {
				user := benchUser.Add(1)
				g.CorrelationId, g.UserId, g.VoucherId = uint64(user), user, 1
			}
			request.Grabs = all[:n]
			owed.Add(int64(n))
			if err := stream.Send(request); err != nil {
				b.Error(err)
				return
			}
		}
		_ = stream.CloseSend()
		for range places { // the others are not needed any more
		}
	}()
	got := 0
	for {
		answers, err := stream.Recv()
		if err != nil {
			break
		}
		if e := answers.GetAnswers()[0].GetError(); e != nil {
			b.Error(e)
		}
		if got += len(answers.GetAnswers()); got >= message {
			places <- got
			got = 0
		}
	}
	close(places)
}

// What a message costs by itself, per answer and per Grab.
func BenchmarkMessage(b *testing.B) {
	ids, err := orderid.New(orderid.Key{Secret: [orderid.KeySize]byte{7}})
	require.NoError(b, err)
	s := newService(b, Options{OrderIDs: ids})
	answers := map[string]admit.Grab{
		"admitted": {Result: admit.Result{Decision: ledger.DecisionAdmitted, State: ledger.MarkAdmitted, Durability: ledger.DurabilityStrict,
			Order: orderid.Position{VoucherID: 1, Epoch: 1, Seq: 7}, DecidedAt: time.Now()}},
		"sold out": {Result: admit.Result{Decision: ledger.DecisionSoldOut, DecidedAt: time.Now()}},
		"busy":     {Err: fmt.Errorf("x: %w", admit.ErrBusy)},
	}
	for name, one := range answers {
		b.Run("encode/"+name, func(b *testing.B) {
			var grabs []*admit.Grab
			for i := range 64 {
				g := one
				g.UserID, g.CorrelationID = int64(i+1_000_000), uint64(i+1_000_000)
				grabs = append(grabs, &g)
			}
			b.ReportAllocs()
			m := &answerMessage{s, grabs}
			room := make([]byte, 0, m.SizeHint())
			for range b.N / 64 {
				m.AppendMessage(room)
			}
		})
	}
	b.Run("decode", func(b *testing.B) {
		raw, err := proto.Marshal(&seckillv1.GrabStreamRequest{Grabs: wishes(1, 1_000_000, 1_000_063)})
		require.NoError(b, err)
		b.ReportAllocs()
		m := &grabMessage{service: s}
		for range b.N / 64 {
			if err := m.DecodeMessage(raw); err != nil {
				b.Fatal(err)
			}
			m.free()
		}
	})
}
