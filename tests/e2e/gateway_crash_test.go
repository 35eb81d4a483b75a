package e2e

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/faultpoint"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

// A gateway is killed by SIGKILL right before or right after the script. Its
// callers hear nothing and repeat at another gateway: one order each, and who
// had one in the ledger already gets that one.
func TestGateway_KilledAroundTheScript(t *testing.T) {
	each(t, []int{1, 8}, func(t *testing.T, partitions int) {
		ctx := testContext(t)
		s := stack.Test(t, stack.Options{Partitions: partitions, BuildTags: []string{"faultpoint"}})
		voucher := int64(0)
		for _, point := range []faultpoint.Point{faultpoint.GatewayBeforeScript, faultpoint.GatewayAfterScript} {
			t.Run(string(point), func(t *testing.T) {
				voucher++
				const users = 40
				s.MustOpenVoucher(t, voucher, 2*users)
				dying, err := s.LaunchGateway(ctx, []string{faultpoint.Variable + "=" + string(point)})
				require.NoError(t, err)
				require.NoError(t, dying.AwaitServing(ctx, ""))
				client := seckillv1.NewSeckillServiceClient(dying.Conn())
				errs := make([]error, users+1)
				var callers sync.WaitGroup
				for user := int64(1); user <= users; user++ {
					callers.Go(func() { _, errs[user] = grab(ctx, client, user, voucher) })
				}
				callers.Wait()
				died(t, dying)
				for user := 1; user <= users; user++ {
					require.Equal(t, codes.Unavailable, status.Code(errs[user]), "user %d: %v", user, errs[user])
				}
				books, err := s.Ledger(ctx, voucher)
				require.NoError(t, err)
				inLedger := books.Seq
				if point == faultpoint.GatewayBeforeScript {
					require.Zero(t, inLedger)
				} else {
					require.Positive(t, inLedger)
				}

				answers, ids := map[int64]*seckillv1.GrabResponse{}, map[string]bool{}
				replayed := int64(0)
				for user := int64(1); user <= users; user++ {
					answer, err := grab(ctx, s.Seckill(0), user, voucher)
					require.NoError(t, err)
					require.Equal(t, seckillv1.Outcome_OUTCOME_ADMITTED, answer.GetOutcome())
					if answer.GetReplayed() {
						replayed++
						position, err := s.OrderIDs().Decode(answer.GetOrder().GetOrderId())
						require.NoError(t, err)
						require.LessOrEqual(t, position.Seq, inLedger, "it is the order that the dead gateway made")
					}
					answers[user], ids[answer.GetOrder().GetOrderId()] = answer, true
					again, err := grab(ctx, s.Seckill(0), user, voucher)
					require.NoError(t, err)
					require.Equal(t, answer.GetOrder().GetOrderId(), again.GetOrder().GetOrderId())
				}
				require.Equal(t, inLedger, replayed)
				require.Len(t, ids, users)
				proven(ctx, t, s, voucher, users)
				persisted(ctx, t, s, voucher, answers)
			})
		}
	})
}
