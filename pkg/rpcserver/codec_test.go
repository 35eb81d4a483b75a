package rpcserver

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// own is a message that encodes and decodes itself.
type own struct {
	text []byte
	hint int
	err  error
}

func (o *own) AppendMessage(b []byte) []byte { return append(b, o.text...) }
func (o *own) SizeHint() int                 { return o.hint }

func (o *own) DecodeMessage(b []byte) error {
	o.text = bytes.Clone(b)
	return o.err
}

func TestCodec_AMessageIsSentWholeWhateverItsHint(t *testing.T) {
	for _, size := range []int{0, 1, 300, 5000, 100_000} {
		for _, hint := range []int{0, 1, 300, 5000, 2 << 20} {
			text := bytes.Repeat([]byte("ab\x00"), size)
			data, err := newCodec().Marshal(&own{text: text, hint: hint})
			require.NoError(t, err)
			require.True(t, bytes.Equal(text, data.Materialize()), "size %d, hint %d", len(text), hint)
			data.Free()
		}
	}
}

// A message that is on its way shares its memory with no other.
func TestCodec_MemoryIsUsedAgainOnlyWhenItIsFree(t *testing.T) {
	var sent []mem.BufferSlice
	for i := range byte(50) {
		data, err := newCodec().Marshal(&own{text: bytes.Repeat([]byte{i}, 3000), hint: 2000})
		require.NoError(t, err)
		sent = append(sent, data)
	}
	for i, data := range sent {
		require.Equal(t, bytes.Repeat([]byte{byte(i)}, 3000), data.Materialize())
		data.Free()
	}
}

func TestCodec_AMessageThatCameInPiecesIsDecodedAtOnce(t *testing.T) {
	var got own
	require.NoError(t, newCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer("ab"), mem.SliceBuffer(""), mem.SliceBuffer("c")}, &got))
	require.Equal(t, "abc", string(got.text))
	require.NoError(t, newCodec().Unmarshal(nil, &got))
	require.Empty(t, got.text)
	got.err = errors.New("of a test")
	require.ErrorIs(t, newCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer("x")}, &got), got.err)
}

func TestCodec_OtherMessagesAreProtobuf(t *testing.T) {
	data, err := newCodec().Marshal(wrapperspb.String("text"))
	require.NoError(t, err)
	var got wrapperspb.StringValue
	require.NoError(t, newCodec().Unmarshal(data, &got))
	require.Equal(t, "text", got.GetValue())
}
