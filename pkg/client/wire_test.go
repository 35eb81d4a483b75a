package client

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/seckill/seckill/proto/grabwire"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func drawTime(t *rapid.T) *timestamppb.Timestamp {
	if rapid.Bool().Draw(t, "no time") {
		return nil
	}
	return &timestamppb.Timestamp{
		Seconds: rapid.Int64Range(-62135596800, 253402300799).Draw(t, "seconds"), Nanos: rapid.Int32Range(0, 999_999_999).Draw(t, "nanos"),
	}
}

func drawAnswer(t *rapid.T) *seckillv1.StreamedAnswer {
	a := &seckillv1.StreamedAnswer{CorrelationId: rapid.Uint64().Draw(t, "id")}
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
	case 1:
		a.Result = &seckillv1.StreamedAnswer_Error{Error: &seckillv1.GrabError{
			Code: rapid.Int32Range(0, 16).Draw(t, "code"), Reason: seckillv1.ErrorReason(rapid.Int32Range(0, 20).Draw(t, "reason")),
			Message: rapid.String().Draw(t, "message"), RetryAfter: durationpb.New(time.Duration(rapid.Int64Range(0, 1<<40).Draw(t, "retry"))),
			FieldViolations: []*seckillv1.FieldViolation{{Field: "f", Description: rapid.String().Draw(t, "description")}},
		}}
	default:
		r := &seckillv1.GrabResponse{
			Outcome: seckillv1.Outcome(rapid.Int32Range(0, 6).Draw(t, "outcome")), Replayed: rapid.Bool().Draw(t, "replayed"),
			Durability: seckillv1.Durability(rapid.Int32Range(0, 5).Draw(t, "durability")), DecidedAt: drawTime(t),
		}
		if rapid.Bool().Draw(t, "order") {
			r.Order = &seckillv1.Order{
				OrderId: rapid.String().Draw(t, "order_id"), UserId: rapid.Int64().Draw(t, "user"), VoucherId: rapid.Int64().Draw(t, "voucher"),
				State: seckillv1.OrderState(rapid.Int32Range(0, 6).Draw(t, "state")), AdmittedAt: drawTime(t), PersistedAt: drawTime(t),
				Reference: rapid.String().Draw(t, "reference"),
			}
		}
		a.Result = &seckillv1.StreamedAnswer_Response{Response: r}
	}
	return a
}

// The decoder reads what the generated code reads, fields of later versions left
// out, also into memory that held other answers.
func TestAnswers_DecodeAsGeneratedCodeDoes(t *testing.T) {
	var got answers
	rapid.Check(t, func(t *rapid.T) {
		message := &seckillv1.GrabStreamResponse{}
		for range rapid.IntRange(0, 5).Draw(t, "answers") {
			a := drawAnswer(t)
			if rapid.Bool().Draw(t, "later version") {
				unknown := protowire.AppendTag(nil, 90, protowire.Fixed32Type)
				unknown = protowire.AppendFixed32(unknown, 7)
				unknown = protowire.AppendTag(unknown, 91, protowire.BytesType)
				unknown = protowire.AppendString(unknown, "later")
				a.ProtoReflect().SetUnknown(unknown)
			}
			message.Answers = append(message.Answers, a)
		}
		b, err := proto.Marshal(message)
		require.NoError(t, err)
		require.NoError(t, got.decode(b))
		require.Len(t, got.list, len(message.Answers))
		for i, a := range message.Answers {
			want := answer{id: a.GetCorrelationId()}
			if r := a.GetResponse(); r != nil {
				want.result = resultOf(r)
			}
			if want.result.Outcome == 0 {
				want.failed = errorOfAnswer(a.GetError())
			}
			require.Equal(t, want, got.list[i])
		}
	})
}

// Whatever comes, it is read or refused: real answers cut off, and with bytes
// changed.
func TestAnswers_DecodeOfTornBytesEnds(t *testing.T) {
	var got answers
	rapid.Check(t, func(t *rapid.T) {
		b, err := proto.Marshal(&seckillv1.GrabStreamResponse{Answers: []*seckillv1.StreamedAnswer{drawAnswer(t), drawAnswer(t)}})
		require.NoError(t, err)
		b = b[:rapid.IntRange(0, len(b)).Draw(t, "length")]
		for range rapid.IntRange(0, 3).Draw(t, "changes") {
			if len(b) > 0 {
				b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
			}
		}
		if got.decode(b) == nil {
			require.LessOrEqual(t, len(got.list), len(b)/2)
		}
	})
	require.ErrorIs(t, got.decode([]byte{0x0a}), grabwire.ErrForm)
	require.ErrorIs(t, got.decode([]byte{0x0a, 0x02, 0x08}), grabwire.ErrForm)
}
