package load

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// Unary is a Caller of plain calls.
type Unary struct {
	clients []seckillv1.SeckillServiceClient
	timeout time.Duration
	turn    atomic.Uint64
}

// DefaultTimeout is the deadline of a Grab where none is given, that of the
// server.
const DefaultTimeout = 2 * time.Second

// NewUnary makes a target of plain calls, which take the connections in turn.
// Each call gets a deadline of timeout; 0 is DefaultTimeout.
func NewUnary(conns []*grpc.ClientConn, timeout time.Duration) (*Unary, error) {
	if len(conns) == 0 {
		return nil, errors.New("no connection")
	}
	u := &Unary{timeout: timeout}
	if timeout == 0 {
		u.timeout = DefaultTimeout
	}
	for _, conn := range conns {
		u.clients = append(u.clients, seckillv1.NewSeckillServiceClient(conn))
	}
	return u, nil
}

// Grab calls Grab.
func (u *Unary) Grab(ctx context.Context, userID, voucherID int64) (Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, u.timeout)
	defer cancel()
	client := u.clients[u.turn.Add(1)%uint64(len(u.clients))]
	resp, err := client.Grab(ctx, &seckillv1.GrabRequest{UserId: userID, VoucherId: voucherID})
	if err != nil {
		return Failed, err
	}
	outcome := outcomeOf(resp.GetOutcome(), resp.GetReplayed())
	if outcome == Failed {
		return Failed, reasonError(reasonUnspecified)
	}
	return outcome, nil
}

// reasonUnspecified is of an answer that is neither an outcome nor an error.
const reasonUnspecified = "NO_OUTCOME"

func outcomeOf(outcome seckillv1.Outcome, replayed bool) Outcome {
	switch outcome {
	case seckillv1.Outcome_OUTCOME_ADMITTED:
		if replayed {
			return Replayed
		}
		return Admitted
	case seckillv1.Outcome_OUTCOME_SOLD_OUT:
		return SoldOut
	case seckillv1.Outcome_OUTCOME_NOT_STARTED:
		return NotStarted
	case seckillv1.Outcome_OUTCOME_ENDED:
		return Ended
	case seckillv1.Outcome_OUTCOME_PAUSED:
		return Paused
	}
	return Failed
}
