package load

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/seckill/seckill/proto/grabwire"
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
		out = protowire.AppendTag(out, grabwire.RequestGrabs, protowire.BytesType)
		out = protowire.AppendVarint(out, uint64(size))
		out = protowire.AppendVarint(protowire.AppendTag(out, grabwire.GrabCorrelationID, protowire.VarintType), g.ID)
		out = protowire.AppendVarint(protowire.AppendTag(out, grabwire.GrabUserID, protowire.VarintType), uint64(g.UserID))
		out = protowire.AppendVarint(protowire.AppendTag(out, grabwire.GrabVoucherID, protowire.VarintType), uint64(g.VoucherID))
		if r.timeoutMS > 0 {
			out = protowire.AppendVarint(protowire.AppendTag(out, grabwire.GrabTimeoutMs, protowire.VarintType), r.timeoutMS)
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
	return grabwire.Fields(buf.ReadOnlyData(), func(field protowire.Number, _ uint64, content []byte) error {
		if field != grabwire.ResponseAnswers {
			return nil
		}
		answer, err := readAnswer(content)
		a.list = append(a.list, answer)
		return err
	})
}

func readAnswer(message []byte) (Answer, error) {
	answer := Answer{Outcome: Failed, Reason: reasonUnspecified}
	err := grabwire.Fields(message, func(field protowire.Number, number uint64, content []byte) error {
		switch field {
		case grabwire.AnswerCorrelationID:
			answer.ID = number
		case grabwire.AnswerResponse:
			outcome, replayed := uint64(0), uint64(0)
			err := grabwire.Fields(content, func(field protowire.Number, number uint64, _ []byte) error {
				switch field {
				case grabwire.ResponseOutcome:
					outcome = number
				case grabwire.ResponseReplayed:
					replayed = number
				}
				return nil
			})
			if answer.Outcome = outcomeOf(seckillv1.Outcome(int32(outcome)), replayed != 0); answer.Outcome != Failed {
				answer.Reason = ""
			}
			return err
		case grabwire.AnswerError:
			code, reason := uint64(0), uint64(0)
			err := grabwire.Fields(content, func(field protowire.Number, number uint64, _ []byte) error {
				switch field {
				case grabwire.ErrorCode:
					code = number
				case grabwire.ErrorReason:
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
