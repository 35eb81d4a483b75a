package limits

import (
	"context"
	"errors"
	"io"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// Echo answers Grabs with messages of the size that real answers have, and does
// nothing else: no interceptor, no metrics, no decision. Over a stream it answers
// message by message.
type Echo struct {
	seckillv1.UnimplementedSeckillServiceServer
}

// answer has every field of an admission set.
func answer(userID, voucherID int64) *seckillv1.GrabResponse {
	now := timestamppb.Now()
	return &seckillv1.GrabResponse{
		Outcome: seckillv1.Outcome_OUTCOME_ADMITTED, Durability: seckillv1.Durability_DURABILITY_STRICT, DecidedAt: now,
		Order: &seckillv1.Order{
			OrderId: "0123456789ABCDEFGHJKMNPQRS", UserId: userID, VoucherId: voucherID,
			State: seckillv1.OrderState_ORDER_STATE_PENDING, AdmittedAt: now,
		},
	}
}

// Grab implements SeckillService.
func (Echo) Grab(_ context.Context, req *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	return answer(req.GetUserId(), req.GetVoucherId()), nil
}

// GrabStream implements SeckillService: message by message.
func (Echo) GrabStream(stream grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		resp := &seckillv1.GrabStreamResponse{Answers: make([]*seckillv1.StreamedAnswer, len(req.GetGrabs()))}
		for i, grab := range req.GetGrabs() {
			resp.Answers[i] = &seckillv1.StreamedAnswer{
				CorrelationId: grab.GetCorrelationId(),
				Result:        &seckillv1.StreamedAnswer_Response{Response: answer(grab.GetUserId(), grab.GetVoucherId())},
			}
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
}

// ServeEcho serves Echo on a listener until ctx ends.
func ServeEcho(ctx context.Context, l net.Listener) error {
	server := grpc.NewServer(grpc.MaxConcurrentStreams(1024))
	seckillv1.RegisterSeckillServiceServer(server, Echo{})
	defer context.AfterFunc(ctx, server.Stop)()
	return server.Serve(l)
}
