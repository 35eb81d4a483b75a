package rpcserver

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Encoder is a message that encodes itself, for handlers that send so many that
// the general way costs more than all the rest. What it appends must be the
// bytes of a protobuf message.
type Encoder interface {
	// AppendMessage appends the encoded message to b.
	AppendMessage(b []byte) []byte
	// SizeHint is how many bytes it will hardly exceed.
	SizeHint() int
}

// Decoder is a message that decodes itself.
type Decoder interface {
	// DecodeMessage takes in the bytes of a protobuf message. They are used again
	// afterwards, so it keeps none of them.
	DecodeMessage(b []byte) error
}

// codec is the one of grpc-go for protobuf, but for messages that are an Encoder
// or a Decoder.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(proto.Name)} }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	e, ok := v.(Encoder)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	pool := mem.DefaultBufferPool()
	buf := pool.Get(e.SizeHint())
	b := e.AppendMessage((*buf)[:0])
	if cap(b) != cap(*buf) { // it has outgrown the buffer
		pool.Put(buf)
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	*buf = b
	return mem.BufferSlice{mem.NewBuffer(buf, pool)}, nil
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	d, ok := v.(Decoder)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	return d.DecodeMessage(buf.ReadOnlyData())
}
