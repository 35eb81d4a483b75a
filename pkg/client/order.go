package client

import (
	"context"
	"time"

	"google.golang.org/grpc/connectivity"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// GetOrder finds a user's order of a voucher, for the caller that lost its
// answer. It reads only, and is repeated like a Grab. The order's AdmittedAt and
// Reference stay zero. Errors are an *Error, ErrOrderNotFound among them.
func (c *Client) GetOrder(ctx context.Context, userID, voucherID int64) (Order, error) {
	return c.look(ctx, &seckillv1.GetOrderRequest{UserId: userID, Key: &seckillv1.GetOrderRequest_VoucherId{VoucherId: voucherID}})
}

// GetOrderByID is GetOrder by the order's id. One that is forged, or another
// user's, is ErrOrderNotFound.
func (c *Client) GetOrderByID(ctx context.Context, userID int64, orderID string) (Order, error) {
	return c.look(ctx, &seckillv1.GetOrderRequest{UserId: userID, Key: &seckillv1.GetOrderRequest_OrderId{OrderId: orderID}})
}

func (c *Client) look(ctx context.Context, request *seckillv1.GetOrderRequest) (Order, error) {
	if !c.dispatcher.enter() {
		return Order{}, errorOfClosed()
	}
	defer c.dispatcher.exit()
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.config.Timeout)
		defer cancel()
	}
	var again retries
	for {
		response, err := c.anyReady().GetOrder(ctx, request)
		if err == nil && response.GetOrder() != nil {
			return orderOf(response.GetOrder()), nil
		}
		again.attempts++
		failed := errorOfAnswer(nil)
		if err != nil {
			failed = c.errorOfUnary(ctx, err)
		}
		failed.OutcomeUnknown = false // nothing is ever taken
		failed.Attempts = again.attempts
		delay, repeat := again.after(failed, c.config.OverloadRetries)
		if ofThatGateway(failed.Reason) && again.attempts < len(c.conns) {
			delay = 0 // the next one may be better off
		}
		if deadline, _ := ctx.Deadline(); !repeat || delay >= time.Until(deadline) {
			return Order{}, failed
		}
		if ended := c.sleep(ctx, delay); ended != nil {
			ended.Message += "; the attempt before: " + failed.Message
			ended.Attempts = again.attempts
			return Order{}, ended
		}
	}
}

// anyReady takes turns over the connections, of those that are connected if any
// is.
func (c *Client) anyReady() seckillv1.SeckillServiceClient {
	turn := int(c.next.Add(1) % uint32(len(c.rpcs)))
	for i := range c.rpcs {
		if at := (turn + i) % len(c.rpcs); c.conns[at].GetState() == connectivity.Ready {
			return c.rpcs[at]
		}
	}
	return c.rpcs[turn]
}
