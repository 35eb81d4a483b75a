package load

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// codec writes GrabStreamRequest and reads of GrabStreamResponse what is
// counted. The generated code makes some ten objects of each answer; on a machine
// that runs the load beside the servers, that would be a good part of what is
// measured.
type codec struct{}

// Name is that of the form on the wire, which is the usual one.
func (codec) Name() string { return "proto" }

// requests are a GrabStreamRequest.
type requests struct {
	grabs     []Grab
	timeoutMS uint64
}

// answers are a GrabStreamResponse.
type answers struct{ list []Answer }

// Numbers of the fields, from seckill_service.proto.
const (
	requestGrabs = 1 // GrabStreamRequest

	grabID, grabUser, grabVoucher, grabTimeout = 1, 2, 3, 5 // StreamedGrab

	responseAnswers = 1 // GrabStreamResponse

	answerID, answerResponse, answerError = 1, 2, 3 // StreamedAnswer

	responseOutcome, responseReplayed = 1, 3 // GrabResponse

	errorCode, errorReason = 1, 2 // GrabError
)

// Marshal is of *requests.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	r, ok := v.(*requests)
	if !ok {
		return nil, fmt.Errorf("writing %T, which is no batch of grabs", v)
	}
	// One Grab takes at most 3 numbers of 10 bytes, one of 5, 4 tags and what frames it.
	out := make([]byte, 0, len(r.grabs)*48)
	for _, g := range r.grabs {
		size := 3 + protowire.SizeVarint(g.ID) + protowire.SizeVarint(uint64(g.UserID)) + protowire.SizeVarint(uint64(g.VoucherID))
		if r.timeoutMS > 0 {
			size += 1 + protowire.SizeVarint(r.timeoutMS)
		}
		out = protowire.AppendTag(out, requestGrabs, protowire.BytesType)
		out = protowire.AppendVarint(out, uint64(size))
		out = protowire.AppendVarint(protowire.AppendTag(out, grabID, protowire.VarintType), g.ID)
		out = protowire.AppendVarint(protowire.AppendTag(out, grabUser, protowire.VarintType), uint64(g.UserID))
		out = protowire.AppendVarint(protowire.AppendTag(out, grabVoucher, protowire.VarintType), uint64(g.VoucherID))
		if r.timeoutMS > 0 {
			out = protowire.AppendVarint(protowire.AppendTag(out, grabTimeout, protowire.VarintType), r.timeoutMS)
		}
	}
	return mem.BufferSlice{mem.SliceBuffer(out)}, nil
}

// Unmarshal is of *answers, which it appends to.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	a, ok := v.(*answers)
	if !ok {
		return fmt.Errorf("reading %T, which are no answers", v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	return fields(buf.ReadOnlyData(), func(field protowire.Number, _ uint64, content []byte) error {
		if field != responseAnswers {
			return nil
		}
		answer, err := readAnswer(content)
		a.list = append(a.list, answer)
		return err
	})
}

func readAnswer(message []byte) (Answer, error) {
	answer := Answer{Outcome: Failed, Reason: reasonUnspecified}
	err := fields(message, func(field protowire.Number, number uint64, content []byte) error {
		switch field {
		case answerID:
			answer.ID = number
		case answerResponse:
			outcome, replayed := uint64(0), uint64(0)
			err := fields(content, func(field protowire.Number, number uint64, _ []byte) error {
				switch field {
				case responseOutcome:
					outcome = number
				case responseReplayed:
					replayed = number
				}
				return nil
			})
			if answer.Outcome = outcomeOf(seckillv1.Outcome(int32(outcome)), replayed != 0); answer.Outcome != Failed {
				answer.Reason = ""
			}
			return err
		case answerError:
			code, reason := uint64(0), uint64(0)
			err := fields(content, func(field protowire.Number, number uint64, _ []byte) error {
				switch field {
				case errorCode:
					code = number
				case errorReason:
					reason = number
				}
				return nil
			})
			answer.Outcome, answer.Reason = Failed, reasonOf(codes.Code(uint32(code)), seckillv1.ErrorReason(int32(reason)))
			return err
		}
		return nil
	})
	return answer, err
}

var errWire = errors.New("reading answers: not a protobuf message")

// fields calls do for every field of a message, with its number or its content.
func fields(message []byte, do func(field protowire.Number, number uint64, content []byte) error) error {
	for len(message) > 0 {
		field, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return errWire
		}
		message = message[n:]
		var number uint64
		var content []byte
		switch kind {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			content, n = protowire.ConsumeBytes(message)
		default:
			n = protowire.ConsumeFieldValue(field, kind, message)
		}
		if n < 0 {
			return errWire
		}
		if err := do(field, number, content); err != nil {
			return err
		}
		message = message[n:]
	}
	return nil
}
