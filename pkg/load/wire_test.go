package load

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/seckill/seckill/proto/grabwire"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func TestCodec_WritesWhatTheGeneratedCodeReads(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sent := requests{timeoutMS: uint64(rapid.Uint32().Draw(t, "timeout"))}
		want := &seckillv1.GrabStreamRequest{}
		for range rapid.IntRange(0, MaxBatch).Draw(t, "n") {
			g := Grab{ID: rapid.Uint64().Draw(t, "id"), UserID: rapid.Int64().Draw(t, "user"), VoucherID: rapid.Int64().Draw(t, "voucher")}
			sent.grabs = append(sent.grabs, g)
			want.Grabs = append(want.Grabs, &seckillv1.StreamedGrab{CorrelationId: g.ID, UserId: g.UserID, VoucherId: g.VoucherID, TimeoutMs: uint32(sent.timeoutMS)})
		}
		data, err := codec{}.Marshal(&sent)
		require.NoError(t, err)
		got := &seckillv1.GrabStreamRequest{}
		require.NoError(t, proto.Unmarshal(data.Materialize(), got))
		require.True(t, proto.Equal(want, got))
		require.Empty(t, got.ProtoReflect().GetUnknown())
	})
}

func TestCodec_ReadsWhatTheGeneratedCodeWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sent, want := &seckillv1.GrabStreamResponse{}, []Answer(nil)
		for range rapid.IntRange(0, 50).Draw(t, "n") {
			id := rapid.Uint64().Draw(t, "id")
			answer := &seckillv1.StreamedAnswer{CorrelationId: id}
			expect := Answer{ID: id, Outcome: Failed}
			switch rapid.IntRange(0, 2).Draw(t, "kind") {
			case 0:
				outcome, replayed := seckillv1.Outcome(rapid.IntRange(0, 6).Draw(t, "outcome")), rapid.Bool().Draw(t, "replayed")
				answer.Result = &seckillv1.StreamedAnswer_Response{Response: &seckillv1.GrabResponse{
					Outcome: outcome, Replayed: replayed, Durability: seckillv1.Durability_DURABILITY_STRICT, DecidedAt: timestamppb.Now(),
					Order: &seckillv1.Order{OrderId: "0123456789ABCDEFGHJKMNPQRS", UserId: 1, VoucherId: 2},
				}}
				if expect.Outcome = outcomeOf(outcome, replayed); expect.Outcome == Failed {
					expect.Reason = "NO_OUTCOME"
				}
			case 1:
				answer.Result = &seckillv1.StreamedAnswer_Error{Error: &seckillv1.GrabError{
					Code: int32(codes.ResourceExhausted), Reason: seckillv1.ErrorReason_ERROR_REASON_OVERLOADED, Message: "busy", RetryAfter: durationpb.New(1e9),
				}}
				expect.Reason = "OVERLOADED"
			case 2:
				answer.Result = &seckillv1.StreamedAnswer_Error{Error: &seckillv1.GrabError{Code: int32(codes.DeadlineExceeded)}}
				expect.Reason = "DEADLINE_EXCEEDED"
			}
			sent.Answers, want = append(sent.Answers, answer), append(want, expect)
		}
		data, err := proto.Marshal(sent)
		require.NoError(t, err)
		var got answers
		require.NoError(t, codec{}.Unmarshal(split(t, data), &got))
		require.Equal(t, want, got.list)
	})
}

// split is data in pieces, as it may come.
func split(t *rapid.T, data []byte) (pieces mem.BufferSlice) {
	for len(data) > 0 {
		n := rapid.IntRange(1, len(data)).Draw(t, "piece")
		pieces, data = append(pieces, mem.SliceBuffer(data[:n])), data[n:]
	}
	return pieces
}

func TestCodec_RefusesWhatIsNoMessage(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var got answers
		_ = codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes"))}, &got) // does not panic
	})
	require.ErrorIs(t, codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer{0x0a, 0x05}}, new(answers)), grabwire.ErrForm)
	require.Error(t, codec{}.Unmarshal(nil, new(string)))
	_, err := codec{}.Marshal("x")
	require.Error(t, err)
}

func BenchmarkCodec_Marshal(b *testing.B) {
	sent := requests{grabs: make([]Grab, MaxBatch)}
	for i := range sent.grabs {
		sent.grabs[i] = Grab{ID: uint64(i), UserID: 1_000_000_000_000_000 + int64(i), VoucherID: 7}
	}
	b.ReportAllocs()
	for b.Loop() {
		_, _ = codec{}.Marshal(&sent)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/MaxBatch, "ns/grab")
}

func BenchmarkCodec_Unmarshal(b *testing.B) {
	sent := &seckillv1.GrabStreamResponse{}
	for i := range MaxBatch {
		sent.Answers = append(sent.Answers, &seckillv1.StreamedAnswer{CorrelationId: uint64(i), Result: &seckillv1.StreamedAnswer_Response{Response: &seckillv1.GrabResponse{
			Outcome: seckillv1.Outcome_OUTCOME_ADMITTED, Durability: seckillv1.Durability_DURABILITY_STRICT, DecidedAt: timestamppb.Now(),
			Order: &seckillv1.Order{OrderId: "0123456789ABCDEFGHJKMNPQRS", UserId: 1, VoucherId: 2, AdmittedAt: timestamppb.Now()},
		}}})
	}
	data, err := proto.Marshal(sent)
	require.NoError(b, err)
	var got answers
	b.ReportAllocs()
	for b.Loop() {
		got.list = got.list[:0]
		_ = codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, &got)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/MaxBatch, "ns/grab")
}
