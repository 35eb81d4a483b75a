package rpc

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/gateway/internal/ledgertest"
	"github.com/seckill/seckill/pkg/rpcserver"
)

// Streams under load when the gateway is told to stop: no order is made of
// which its caller does not hear.
func TestGrabStream_DrainAnswersAllThatWasRead(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 10_000_000)
	const streams = 8
	var admitted, enough atomic.Int64
	ends := make(chan error, streams)
	for i := range int64(streams) {
		stream := openStream(t, t.Context(), e)
		go func() { // the sender, who ends when it is told that the stream has
			for user := i << 40; ; user += 50 {
				if stream.Send(&seckillv1.GrabStreamRequest{Grabs: wishes(7, user+1, user+50)}) != nil {
					return
				}
			}
		}()
		go func() {
			for {
				message, err := stream.Recv()
				if err != nil {
					ends <- err
					return
				}
				for _, answer := range message.GetAnswers() {
					if answer.GetResponse().GetOutcome() == seckillv1.Outcome_OUTCOME_ADMITTED {
						admitted.Add(1)
					}
				}
				enough.Add(int64(len(message.GetAnswers())))
			}
		}()
	}
	require.Eventually(t, func() bool { return enough.Load() > 5000 }, patience, time.Millisecond)
	e.stop()
	for range streams {
		requireStatus(t, <-ends, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	}
	require.Equal(t, admitted.Load(), ledgertest.Books(t, e.client, v).Seq)
	require.Zero(t, e.service.streams.owed.Load())
}

// busyStream is a stream whose next answers are there before the last are sent,
// and the backend that gives them.
type busyStream struct {
	Backend
	grpc.ServerStream
	ctx      context.Context
	turns    chan struct{} // one for each message that may be read
	answered chan struct{}
	sends    atomic.Int64
}

func (b *busyStream) Context() context.Context { return b.ctx }

func (b *busyStream) RecvMsg(m any) error {
	select {
	case <-b.turns:
	case <-b.ctx.Done():
		return b.ctx.Err()
	}
	message, err := proto.Marshal(&seckillv1.GrabStreamRequest{Grabs: wishes(7, 1, 1)})
	if err != nil {
		return err
	}
	return m.(rpcserver.Decoder).DecodeMessage(message)
}

func (b *busyStream) Submit(r admit.Receiver, grabs []*admit.Grab) {
	first := b.sends.Load() == 0 // nobody waits for its answer
	r.Answered(grabs)
	if !first {
		b.answered <- struct{}{}
	}
}

func (b *busyStream) SendMsg(any) error {
	b.sends.Add(1)
	b.turns <- struct{}{}
	select {
	case <-b.answered:
	case <-time.After(time.Second): // no more is read
	}
	return nil
}

func TestGrabStream_DrainIsNoticedWhereAnswersNeverCease(t *testing.T) {
	draining := make(chan struct{})
	s := newService(t, Options{Draining: draining})
	busy := &busyStream{ctx: t.Context(), turns: make(chan struct{}, 1), answered: make(chan struct{}, 1)}
	s.Use(busy)
	ended := make(chan error, 1)
	go func() {
		ended <- s.GrabStream(&grpc.GenericServerStream[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]{ServerStream: busy})
	}()
	busy.turns <- struct{}{}
	require.Eventually(t, func() bool { return busy.sends.Load() > 100 }, patience, time.Millisecond)
	close(draining)
	select {
	case err := <-ended:
		requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
	case <-time.After(patience):
		require.FailNow(t, "it goes on and on")
	}
}

func TestGrabStream_DrainEndsIdleStreamsAtOnce(t *testing.T) {
	e := newEdge(t)
	stream := openStream(t, t.Context(), e)
	require.Eventually(t, func() bool { return e.service.streams.open.Load() == 1 }, patience, time.Millisecond)
	e.stop()
	_, err := stream.Recv()
	requireStatus(t, err, codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
}
