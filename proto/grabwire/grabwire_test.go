package grabwire

import (
	"errors"
	"maps"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// Without a library for tests: this module brings nothing but gRPC and protobuf.
func TestNumbers_AreThoseOfTheGeneratedCode(t *testing.T) {
	for _, of := range []struct {
		message proto.Message
		fields  map[protoreflect.Name]protowire.Number
	}{
		{&seckillv1.GrabStreamRequest{}, map[protoreflect.Name]protowire.Number{"grabs": RequestGrabs}},
		{&seckillv1.GrabStreamResponse{}, map[protoreflect.Name]protowire.Number{"answers": ResponseAnswers}},
		{&seckillv1.StreamedGrab{}, map[protoreflect.Name]protowire.Number{
			"correlation_id": GrabCorrelationID, "user_id": GrabUserID, "voucher_id": GrabVoucherID,
			"reference": GrabReference, "timeout_ms": GrabTimeoutMs, "traceparent": GrabTraceparent,
		}},
		{&seckillv1.StreamedAnswer{}, map[protoreflect.Name]protowire.Number{
			"correlation_id": AnswerCorrelationID, "response": AnswerResponse, "error": AnswerError,
		}},
		{&seckillv1.GrabResponse{}, map[protoreflect.Name]protowire.Number{
			"outcome": ResponseOutcome, "order": ResponseOrder, "replayed": ResponseReplayed,
			"durability": ResponseDurability, "decided_at": ResponseDecidedAt,
		}},
		{&seckillv1.Order{}, map[protoreflect.Name]protowire.Number{
			"order_id": OrderID, "user_id": OrderUserID, "voucher_id": OrderVoucherID, "state": OrderState,
			"admitted_at": OrderAdmittedAt, "reference": OrderReference,
		}},
		{&seckillv1.GrabError{}, map[protoreflect.Name]protowire.Number{"code": ErrorCode, "reason": ErrorReason}},
		{&timestamppb.Timestamp{}, map[protoreflect.Name]protowire.Number{"seconds": StampSeconds, "nanos": StampNanos}},
	} {
		described := of.message.ProtoReflect().Descriptor()
		for name, number := range of.fields {
			if field := described.Fields().ByName(name); field == nil || field.Number() != number {
				t.Errorf("%s.%s: here it is %d, there %v", described.FullName(), name, number, field)
			}
		}
	}
}

func TestFields_SkipsTypesOfLaterVersions(t *testing.T) {
	b := protowire.AppendFixed64(protowire.AppendTag(nil, 1, protowire.Fixed64Type), 9)
	b = protowire.AppendVarint(protowire.AppendTag(b, 2, protowire.VarintType), 7)
	b = protowire.AppendString(protowire.AppendTag(b, 3, protowire.BytesType), "text")
	seen := map[protowire.Number]any{}
	err := Fields(b, func(field protowire.Number, number uint64, data []byte) error {
		if seen[field] = number; data != nil {
			seen[field] = string(data)
		}
		return nil
	})
	if err != nil || !maps.Equal(seen, map[protowire.Number]any{2: uint64(7), 3: "text"}) {
		t.Fatal(seen, err)
	}
}

func TestFields_RefusesWhatIsNoMessage(t *testing.T) {
	ignore := func(protowire.Number, uint64, []byte) error { return nil }
	for name, b := range map[string][]byte{
		"a tag cut off":           {0x80},
		"a number cut off":        {0x08, 0x80},
		"bytes cut off":           {0x0a, 5, 'a'},
		"field number 0":          {0x00, 1},
		"a number above protobuf": protowire.AppendVarint(nil, uint64(protowire.MaxValidNumber+1)<<3),
	} {
		if err := Fields(b, ignore); !errors.Is(err, ErrForm) {
			t.Errorf("%s: %v", name, err)
		}
	}
	own := errors.New("enough")
	if err := Fields([]byte{0x08, 1}, func(protowire.Number, uint64, []byte) error { return own }); !errors.Is(err, own) {
		t.Error(err)
	}
}
