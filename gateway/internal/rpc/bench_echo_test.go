package rpc

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
)

// echo answers at once with a message of a Grab's size.
type echo struct {
	seckillv1.UnimplementedSeckillServiceServer
	answer *seckillv1.GrabResponse
}

func (e *echo) Grab(context.Context, *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	return e.answer, nil
}

func newEcho(b *testing.B) *echo {
	ids, err := orderid.New(orderid.Key{Secret: [orderid.KeySize]byte{7}})
	require.NoError(b, err)
	s := newService(b, Options{OrderIDs: ids})
	return &echo{answer: s.answerGrab(1_000_000, "", &admit.Result{Decision: ledger.DecisionAdmitted, State: ledger.MarkAdmitted,
		Durability: ledger.DurabilityStrict, Order: orderid.Position{VoucherID: 1, Epoch: 1, Seq: 7}, DecidedAt: time.Now()})}
}

// The floor of a unary Grab: a bare server with the defaults of grpc-go, and the
// server that ours is built on.
func BenchmarkEcho(b *testing.B) {
	b.Run("bare", func(b *testing.B) { benchEcho(b) })
	b.Run("workers", func(b *testing.B) { benchEcho(b, grpc.NumStreamWorkers(64)) })
	b.Run("write buffer 128k", func(b *testing.B) { benchEcho(b, grpc.WriteBufferSize(128<<10)) })
	b.Run("read buffer 128k", func(b *testing.B) { benchEcho(b, grpc.ReadBufferSize(128<<10)) })
	for _, name := range []string{"ours without metrics", "ours"} {
		b.Run(name, func(b *testing.B) {
			var reg prometheus.Registerer
			if name == "ours" {
				reg = prometheus.NewRegistry()
			}
			server, err := rpcserver.New(rpcserver.Options{Addr: "127.0.0.1:0", Registerer: reg})
			require.NoError(b, err)
			seckillv1.RegisterSeckillServiceServer(server.GRPC(), newEcho(b))
			require.NoError(b, server.Listen())
			running, stop := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- server.Run(running) }()
			defer func() { stop(); require.NoError(b, <-done) }()
			benchCalls(b, server.Addr())
		})
	}
}

func benchEcho(b *testing.B, options ...grpc.ServerOption) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	server := grpc.NewServer(options...)
	seckillv1.RegisterSeckillServiceServer(server, newEcho(b))
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	benchCalls(b, listener.Addr().String())
}

// benchCalls makes unary Grabs over four connections.
func benchCalls(b *testing.B, addr string) {
	var clients []seckillv1.SeckillServiceClient
	for range 4 {
		conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(b, err)
		defer conn.Close()
		clients = append(clients, seckillv1.NewSeckillServiceClient(conn))
	}
	benchGrabs(b, clients)
}

// benchGrabs makes unary Grabs, of 128 callers for each processor.
func benchGrabs(b *testing.B, clients []seckillv1.SeckillServiceClient) {
	b.ReportAllocs()
	b.SetParallelism(128)
	b.ResetTimer()
	defer reportCPU(b, cpuTime())
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			user := benchUser.Add(1)
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			_, err := clients[user%int64(len(clients))].Grab(ctx, &seckillv1.GrabRequest{UserId: user, VoucherId: 1})
			cancel()
			if err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "grabs/s")
}
