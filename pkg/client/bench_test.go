package client_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/client"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

const serverVariable = "SECKILL_CLIENT_BENCHMARK_SERVER"

// echo admits everybody at once and remembers nothing.
type echo struct {
	seckillv1.UnimplementedSeckillServiceServer
}

func (echo) GrabStream(rpc grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
	for {
		message, err := rpc.Recv()
		if err != nil {
			return nil
		}
		now := timestamppb.Now()
		answers := &seckillv1.GrabStreamResponse{Answers: make([]*seckillv1.StreamedAnswer, 0, len(message.GetGrabs()))}
		for _, g := range message.GetGrabs() {
			answers.Answers = append(answers.Answers, decided(g, &seckillv1.GrabResponse{
				Outcome: client.Admitted, Durability: seckillv1.Durability_DURABILITY_STRICT, DecidedAt: now, Order: &seckillv1.Order{
					OrderId: "0Y6XM4R9ENDB71KART84R6ER2B", UserId: g.GetUserId(), VoucherId: g.GetVoucherId(),
					State: seckillv1.OrderState_ORDER_STATE_PENDING, AdmittedAt: now, Reference: g.GetReference(),
				},
			}))
		}
		if err := rpc.Send(answers); err != nil {
			return err
		}
	}
}

func (echo) Grab(_ context.Context, r *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	now := timestamppb.Now()
	return &seckillv1.GrabResponse{
		Outcome: client.Admitted, Durability: seckillv1.Durability_DURABILITY_STRICT, DecidedAt: now,
		Order: &seckillv1.Order{OrderId: "0Y6XM4R9ENDB71KART84R6ER2B", UserId: r.GetUserId(), VoucherId: r.GetVoucherId(), AdmittedAt: now},
	}, nil
}

// serveBenchmark is the other process, so that the CPU of this one is the
// client's alone. It ends with its standard input.
func serveBenchmark() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	s := grpc.NewServer()
	seckillv1.RegisterSeckillServiceServer(s, echo{})
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); s.Stop() }()
	fmt.Println(l.Addr())
	_ = s.Serve(l)
}

func benchmarkServer(b *testing.B) (addr string) {
	b.Helper()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), serverVariable+"=1")
	stdin, err := command.StdinPipe()
	require.NoError(b, err)
	stdout, err := command.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, command.Start())
	b.Cleanup(func() { _ = stdin.Close(); _ = command.Wait() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(b, err)
	return strings.TrimSpace(line)
}

// cpu is what this process has used so far.
func cpu(b *testing.B) time.Duration {
	var usage syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// concurrently runs do b.N times in all, by so many goroutines, and reports the
// CPU of this process for each.
func concurrently(b *testing.B, callers int, do func(user int64) error) {
	b.Helper()
	b.ReportAllocs()
	b.SetParallelism(max(callers/runtime.GOMAXPROCS(0), 1))
	var users atomic.Int64
	used := cpu(b)
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := do(users.Add(1)); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.StopTimer()
	b.ReportMetric(float64((cpu(b)-used).Nanoseconds())/float64(b.N), "cpu-ns/op")
}

// BenchmarkGrab is a Grab over streams at saturation, server in another process.
func BenchmarkGrab(b *testing.B) {
	for _, callers := range []int{64, 512, 2048} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			c, err := client.New(client.Config{Addresses: []string{benchmarkServer(b)}, DialOptions: []grpc.DialOption{
				grpc.WithTransportCredentials(insecure.NewCredentials()),
			}})
			require.NoError(b, err)
			defer c.Close(context.Background())
			ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
			defer cancel()
			_, err = c.Grab(ctx, 1, 1)
			require.NoError(b, err)
			concurrently(b, callers, func(user int64) error {
				_, err := c.Grab(ctx, user, 1)
				return err
			})
		})
	}
}

// BenchmarkUnary is what a Grab costs without this package.
func BenchmarkUnary(b *testing.B) {
	for _, callers := range []int{64, 512} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			conn, err := grpc.NewClient(benchmarkServer(b), grpc.WithTransportCredentials(insecure.NewCredentials()))
			require.NoError(b, err)
			defer conn.Close()
			rpc := seckillv1.NewSeckillServiceClient(conn)
			ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
			defer cancel()
			concurrently(b, callers, func(user int64) error {
				_, err := rpc.Grab(ctx, &seckillv1.GrabRequest{UserId: user, VoucherId: 1})
				return err
			})
		})
	}
}
