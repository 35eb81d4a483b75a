package rpc

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/ledgertest"
)

func TestGrabStream_MessageOfTooManyEndsTheStreamAfterItsAnswers(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 1000)
	e.grab(t, 1<<40, 7)
	require.NoError(t, e.redis.Pause())
	stream := openStream(t, t.Context(), e)
	send(t, stream, wishes(7, 1, 10)...)
	require.NoError(t, stream.Send(&seckillv1.GrabStreamRequest{Grabs: wishes(7, 100, 100+maxMessage)}))
	e.owed(t, 10)
	require.NoError(t, e.redis.Resume())
	all, err := drainStream(t, stream)
	require.Len(t, all, 10)
	requireStatus(t, err, codes.InvalidArgument, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD)
	require.Equal(t, []string{"grabs"}, violated(err))
	require.Equal(t, int64(11), ledgertest.Books(t, e.client, v).Seq)
}

// grpc-go ends the stream itself, without waiting for answers.
func TestGrabStream_MessageThatIsTooLargeBreaksItsStreamOnly(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 1000)
	other := openStream(t, t.Context(), e)
	stream := openStream(t, t.Context(), e)
	send(t, stream, wishes(7, 1, 10)...)
	receive(t, stream, 10)
	large := wishes(7, 100, 100+maxMessage-1)
	for _, g := range large {
		g.Traceparent = strings.Repeat("x", 300)
	}
	require.NoError(t, stream.Send(&seckillv1.GrabStreamRequest{Grabs: large}))
	_, err := stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, int64(10), ledgertest.Books(t, e.client, v).Seq, "it took nothing")
	send(t, other, wishes(7, 11, 20)...)
	receive(t, other, 10)
	require.Eventually(t, func() bool { return e.service.streams.open.Load() == 1 }, patience, time.Millisecond)
}

// rawCodec sends bytes as they are.
type rawCodec struct{ encoding.CodecV2 }

func (c rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.([]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// rawStream is a stream on which a client may send any bytes.
func (e *edge) rawStream(t testing.TB) grpc.ClientStream {
	t.Helper()
	stream, err := e.dial(t).NewStream(t.Context(), &seckillv1.SeckillService_ServiceDesc.Streams[0],
		seckillv1.SeckillService_GrabStream_FullMethodName, grpc.ForceCodecV2(rawCodec{encoding.GetCodecV2(protocodec.Name)}))
	require.NoError(t, err)
	return stream
}

func TestGrabStream_MessageThatCannotBeDecodedBreaksItsStreamOnly(t *testing.T) {
	e := newEdge(t)
	v := e.sell(t, 7, 1000)
	other := openStream(t, t.Context(), e)
	whole, err := proto.Marshal(&seckillv1.GrabStreamRequest{Grabs: wishes(7, 1, 3)})
	require.NoError(t, err)
	for name, b := range map[string][]byte{
		"cut off":             whole[:len(whole)-1],
		"a group without end": append(bytes.Clone(whole), 0x7b),
		"groups in groups":    bytes.Repeat([]byte{0x7b}, 60_000),
		"no field number":     {0x00},
	} {
		t.Run(name, func(t *testing.T) {
			stream := e.rawStream(t)
			require.NoError(t, stream.SendMsg(b))
			require.Equal(t, codes.Internal, status.Code(stream.RecvMsg(&seckillv1.GrabStreamResponse{})))
		})
	}
	require.Zero(t, ledgertest.Books(t, e.client, v).Seq, "they took nothing")
	send(t, other, wishes(7, 11, 20)...)
	receive(t, other, 10)
}

// Fields of a later version are passed over.
func TestGrabStream_FieldsThatItDoesNotKnow(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 1000)
	grab, err := proto.Marshal(&seckillv1.StreamedGrab{CorrelationId: 5, UserId: 1, VoucherId: 7})
	require.NoError(t, err)
	var later []byte
	later = protowire.AppendVarint(protowire.AppendTag(later, 7, protowire.VarintType), 1)
	later = protowire.AppendString(protowire.AppendTag(later, 99, protowire.BytesType), "more")
	later = protowire.AppendFixed64(protowire.AppendTag(later, 1<<20, protowire.Fixed64Type), 1)
	message := append(bytes.Clone(later), protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), append(bytes.Clone(later), grab...))...)
	stream := e.rawStream(t)
	require.NoError(t, stream.SendMsg(append(message, later...)))
	var response seckillv1.GrabStreamResponse
	require.NoError(t, stream.RecvMsg(&response))
	require.Len(t, response.GetAnswers(), 1)
	require.Equal(t, uint64(5), response.GetAnswers()[0].GetCorrelationId())
	require.Equal(t, int64(1), requireAdmitted(t, response.GetAnswers()[0]).UserId)
}

// trickle is a connection on which every byte travels alone.
type trickle struct{ net.Conn }

func (c trickle) Write(b []byte) (int, error) {
	for i := range b {
		if _, err := c.Conn.Write(b[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(b), nil
}

func (c trickle) Read(b []byte) (int, error) { return c.Conn.Read(b[:min(1, len(b))]) }

func TestGrabStream_OneByteAtATime(t *testing.T) {
	e := newEdge(t)
	e.sell(t, 7, 1000)
	conn := e.dial(t, grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		return trickle{conn}, err
	}))
	stream := openStream(t, t.Context(), seckillv1.NewSeckillServiceClient(conn))
	send(t, stream, wishes(7, 1, 300)...)
	require.NoError(t, stream.CloseSend())
	all, err := drainStream(t, stream)
	require.ErrorIs(t, err, io.EOF)
	require.Len(t, all, 300)
	for user, answer := range all {
		require.Equal(t, int64(user), requireAdmitted(t, answer).UserId)
	}
}
