package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

func createRequest(voucherID, total int64) *seckillv1.CreateVoucherRequest {
	now := time.Now()
	return &seckillv1.CreateVoucherRequest{
		VoucherId: voucherID, Total: total,
		BeginTime: timestamppb.New(now.Add(-time.Minute)), EndTime: timestamppb.New(now.Add(time.Hour)),
	}
}

func died(t *testing.T, p *stack.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(patience):
		t.Fatalf("%s did not reach its point:\n%s", p.Name, p.Output())
	}
}

func TestWriter_SIGTERMUnderLoadLosesNothing(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Writers: 2, Partitions: partitions})
		s.MustOpenVoucher(t, 1, 100_000)
		stop := make(chan struct{})
		var load sync.WaitGroup
		var user atomic.Int64
		var failures sync.Map
		for range 32 {
			load.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					u := user.Add(1)
					if _, err := grab(ctx, s.Seckill(0), u, 1); err != nil {
						failures.Store(u, err)
					}
				}
			})
		}
		require.Eventually(t, func() bool { rows, err := s.Rows(ctx, 1); return err == nil && rows > 500 }, patience, 10*time.Millisecond)
		require.NoError(t, s.Writer(0).Stop(15*time.Second))
		require.Zero(t, s.Writer(0).ExitCode())
		close(stop)
		load.Wait()
		failures.Range(func(key, value any) bool { t.Errorf("user %v: %v", key, value); return true })
		proven(ctx, t, s, 1, user.Load())
	})
}

// The proxy delivers the script call and swallows the reply.
func TestGateway_SwallowedReplyStillAnswersTheOrder(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Gateways: -1, Writers: 1, Partitions: partitions})
		proxy := devstack.TestProxy(t, s.Redis.Addr())
		_, err := s.StartGateway(ctx, "--redis-addr="+proxy.Addr())
		require.NoError(t, err)
		s.MustOpenVoucher(t, 1, 10)
		// A call picks one of a few connections at random: make them all first, since
		// the handshake of a new one would meet the fault instead of the call.
		for range 64 {
			_, err := s.Seckill(0).GetOrder(ctx, &seckillv1.GetOrderRequest{UserId: 7, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: 1}})
			require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
		}
		before := proxy.Swallowed()
		proxy.SwallowReplies()
		done := make(chan *seckillv1.GrabResponse, 1)
		failed := make(chan error, 1)
		go func() {
			answer, err := grab(ctx, s.Seckill(0), 7, 1)
			if err != nil {
				failed <- err
				return
			}
			done <- answer
		}()
		require.Eventually(t, func() bool {
			books, err := s.Ledger(ctx, 1)
			return err == nil && books.Seq == 1
		}, patience, time.Millisecond, "the call was delivered")
		require.Eventually(t, func() bool { return proxy.Swallowed() > before }, patience, time.Millisecond)
		proxy.CutAll()
		proxy.Pass()
		select {
		case answer := <-done:
			require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, answer.GetOutcome())
			require.True(t, answer.GetReplayed())
			position, err := s.OrderIDs().Decode(answer.GetOrder().GetOrderId())
			require.NoError(t, err)
			require.Equal(t, int64(1), position.Seq)
		case err := <-failed:
			require.NoError(t, err)
		case <-time.After(patience):
			require.Fail(t, "no answer")
		}
		proven(ctx, t, s, 1, 1)
	})
}

// FLUSHALL with orders in flight, then a writer restarts: nothing is sold,
// nothing is made again, the reason is shown.
func TestRedis_FlushallStaysClosedAndSaysWhy(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Writers: 1, Partitions: partitions})
		s.MustOpenVoucher(t, 1, 200)
		require.NoError(t, s.Writer(0).Pause())
		answers, errs := crowd(ctx, t, s, 1, 1, 100)
		require.Empty(t, errs)
		require.Equal(t, int64(100), count(answers, seckillv1.Outcome_OUTCOME_ADMITTED))
		require.NoError(t, s.Client().Do(ctx, s.Client().B().Flushall().Build()).Error())
		s.Writer(0).Kill()
		writer, err := s.LaunchWriter(ctx, nil)
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			page, err := healthz(ctx, writer)
			return err == nil && strings.Contains(page, "ledger is missing")
		}, patience, 50*time.Millisecond)
		// The same in metrics, for alerts, and in the log.
		partition := ledger.Partition(1, s.Partitions())
		require.Eventually(t, func() bool {
			page, err := metrics(ctx, writer)
			return err == nil && strings.Contains(page, fmt.Sprintf("\nseckill_partition_open{partition=\"%d\"} 0\n", partition)) &&
				strings.Contains(page, fmt.Sprintf("\nseckill_partition_closed_reason{partition=\"%d\",reason=\"ledger_missing\"} 1\n", partition))
		}, patience, 50*time.Millisecond)
		require.Regexp(t, fmt.Sprintf(`(?m)^.*(partition=%d .*ledger is missing|ledger is missing.* partition=%d\b)`, partition, partition), writer.Output())
		for user := int64(1); user <= 10; user++ { // buyers and strangers alike
			_, err := grab(ctx, s.Seckill(0), user*50, 1)
			require.Equal(t, codes.Unavailable, status.Code(err))
			requireReason(t, err, seckillv1.ErrorReason_ERROR_REASON_REBUILDING)
			_, retry := reason(err)
			require.True(t, retry)
		}
		exists, err := s.Client().Do(ctx, s.Client().B().Exists().Key(ledger.MetaKey(partition), ledger.VoucherKey(partition, 1, 1)).Build()).AsInt64()
		require.NoError(t, err)
		require.Zero(t, exists)
	})
}

func TestRedis_DeletedVoucherIsNotMadeAgain(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Writers: 2, Partitions: partitions})
		partition := ledger.Partition(1, s.Partitions())
		s.MustOpenVoucher(t, 1, 200)
		_, errs := crowd(ctx, t, s, 1, 1, 50)
		require.Empty(t, errs)
		require.NoError(t, s.Client().Do(ctx, s.Client().B().Del().Key(ledger.VoucherKey(partition, 1, 1)).Build()).Error())
		require.Eventually(t, func() bool {
			_, err := grab(ctx, s.Seckill(0), 999, 1)
			name, _ := reason(err)
			return name == seckillv1.ErrorReason_ERROR_REASON_REBUILDING.String()
		}, patience, 50*time.Millisecond)
		require.NoError(t, s.Writer(0).Stop(15*time.Second))
		_, err := s.LaunchWriter(ctx, nil)
		require.NoError(t, err)
		require.Never(t, func() bool {
			exists, err := s.Client().Do(ctx, s.Client().B().Exists().Key(ledger.VoucherKey(partition, 1, 1)).Build()).AsInt64()
			return err != nil || exists != 0
		}, 2*time.Second, 100*time.Millisecond)
	})
}

// Redis is killed by SIGKILL in the middle of a sale and comes back: every
// acknowledged order becomes a row, and the sale goes on by itself.
func TestRedis_KilledUnderLoadLosesNoAcknowledgedOrder(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Gateways: 2, Writers: 2, Partitions: partitions})
		const users = 4000
		s.MustOpenVoucher(t, 1, 100_000)
		answers, errs := map[int64]*seckillv1.GrabResponse{}, map[int64]error{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			answers, errs = crowd(ctx, t, s, 1, 1, users)
		}()
		require.Eventually(t, func() bool { books, err := s.Ledger(ctx, 1); return err == nil && books.Seq > 1000 }, patience, time.Millisecond)
		s.Redis.Kill()
		select {
		case <-done:
			require.Fail(t, "the crowd was through before Redis was gone")
		default: // whoever has no answer yet meets a dead Redis
		}
		require.NoError(t, s.Redis.Restart(ctx))
		<-done
		require.Len(t, answers, users-len(errs))
		for _, err := range errs {
			require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
			name, retry := reason(err)
			require.NotEmpty(t, name)
			require.True(t, retry)
		}
		// The sale goes on, and whoever got no answer repeats.
		require.NoError(t, s.Gateway(0).AwaitServing(ctx, fmt.Sprintf("seckill.partition.%d", ledger.Partition(1, s.Partitions()))))
		again := map[int64]*seckillv1.GrabResponse{}
		for user := range errs {
			require.Eventually(t, func() bool {
				answer, err := grab(ctx, s.Seckill(0), user, 1)
				again[user] = answer
				return err == nil
			}, patience, 50*time.Millisecond)
		}
		proven(ctx, t, s, 1, users)
		persisted(ctx, t, s, 1, answers)
		persisted(ctx, t, s, 1, again)
	})
}

// The database is gone for a while: the sale goes on, nothing is lost.
func TestDatabase_KilledUnderLoadDelaysAndLosesNothing(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Writers: 2, Partitions: partitions})
		s.MustOpenVoucher(t, 1, 10_000)
		first, errs := crowd(ctx, t, s, 1, 1, 500)
		require.Empty(t, errs)
		s.Database.Kill()
		second, errs := crowd(ctx, t, s, 1, 501, 1500)
		require.Empty(t, errs, "the gateway needs no database")
		require.Eventually(t, func() bool {
			callCtx, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			_, err := s.Vouchers(0).GetVoucher(callCtx, &seckillv1.GetVoucherRequest{VoucherId: 1})
			name, _ := reason(err)
			return status.Code(err) == codes.Unavailable && name == seckillv1.ErrorReason_ERROR_REASON_DATABASE_UNREACHABLE.String()
		}, patience, 100*time.Millisecond)
		require.NoError(t, s.Database.Restart(ctx))
		proven(ctx, t, s, 1, 2000)
		persisted(ctx, t, s, 1, first)
		persisted(ctx, t, s, 1, second)
	})
}

// Both processes start before their servers, wait, and then serve.
func TestStart_WaitsForServersThatAreDown(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Writers: 1, Partitions: 1})
	s.MustOpenVoucher(t, 1, 10)
	require.NoError(t, s.Gateway(0).Stop(15*time.Second))
	require.NoError(t, s.Writer(0).Stop(15*time.Second))
	s.Redis.Kill()
	s.Database.Kill()
	gateway, err := s.LaunchGateway(ctx, nil)
	require.NoError(t, err)
	writer, err := s.LaunchWriter(ctx, nil)
	require.NoError(t, err)
	for _, waiting := range []struct {
		p                     *stack.Process
		service               string
		part, state, awaiting string
	}{
		{gateway, seckillv1.SeckillService_ServiceDesc.ServiceName, "redis", "connecting", s.Redis.Addr()},
		{writer, seckillv1.VoucherService_ServiceDesc.ServiceName, "database", "connecting", "refused"},
	} {
		// It has tried, and goes on.
		require.Eventually(t, func() bool { return strings.Contains(waiting.p.Output(), "level=WARN") }, patience, 10*time.Millisecond)
		var page struct {
			Parts []struct{ Name, State, Reason string }
		}
		require.Eventually(t, func() bool {
			code, text, err := admin(ctx, waiting.p, "/healthz")
			require.NoError(t, err)
			require.Equal(t, http.StatusServiceUnavailable, code, text)
			require.NoError(t, json.Unmarshal([]byte(text), &page), text)
			require.NotEmpty(t, page.Parts, text)
			return strings.Contains(page.Parts[0].Reason, waiting.awaiting)
		}, patience, 20*time.Millisecond, "%s says what it waits for", waiting.p.Name)
		require.Equal(t, waiting.part, page.Parts[0].Name)
		require.Equal(t, waiting.state, page.Parts[0].State)
		for _, service := range []string{"", waiting.service} {
			answer, err := healthpb.NewHealthClient(waiting.p.Conn()).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
			require.NoError(t, err)
			require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, answer.GetStatus())
		}
		require.NoError(t, waiting.p.Signal(syscall.Signal(0)), "%s is alive", waiting.p.Name)
	}
	require.NoError(t, s.Database.Restart(ctx))
	require.NoError(t, s.Redis.Restart(ctx))
	require.NoError(t, writer.AwaitServing(ctx, ""))
	require.NoError(t, gateway.AwaitServing(ctx, "", "seckill.partition.0"))
	require.NotContains(t, gateway.Output()+writer.Output(), "goroutine ")
	answer, err := grab(ctx, seckillv1.NewSeckillServiceClient(gateway.Conn()), 1, 1)
	require.NoError(t, err)
	require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, answer.GetOutcome())
	proven(ctx, t, s, 1, 1)
}

func healthz(ctx context.Context, p *stack.Process) (string, error) {
	_, page, err := admin(ctx, p, "/healthz")
	return page, err
}

func metrics(ctx context.Context, p *stack.Process) (string, error) {
	_, page, err := admin(ctx, p, "/metrics")
	return page, err
}

// admin reads a page of the admin port.
func admin(ctx context.Context, p *stack.Process, path string) (code int, page string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.Admin+path, nil)
	if err != nil {
		return 0, "", err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}
