package rpc

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/seckill/seckill/proto/grabwire"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/pkg/ledger"
)

// The messages of a stream are written and read by hand: through the generated
// types a Grab takes a dozen objects, and more time than all else that the
// gateway does for it. Tests hold this file against the generated code.

// Bounds of encoded parts, for buffers.
const (
	stampRoom    = 2 * 11
	orderRoom    = 28 + 2*11 + 11 + 2 + stampRoom + 2 + maxReference
	responseRoom = 11 + 3 + orderRoom + 2 + 11 + 2 + stampRoom
	answerUsual  = 110 // an admission without a reference; refusals and most faults are shorter
)

// answerMessage is a GrabStreamResponse.
type answerMessage struct {
	service *Service
	answers []*admit.Grab
}

// SizeHint implements rpcserver.Encoder.
func (m *answerMessage) SizeHint() int { return answerUsual * len(m.answers) }

// AppendMessage implements rpcserver.Encoder.
func (m *answerMessage) AppendMessage(b []byte) []byte {
	var stampOf time.Time
	var stampBytes [stampRoom]byte
	var orderBytes [orderRoom]byte
	var responseBytes [responseRoom]byte
	var stamp []byte
	for _, g := range m.answers {
		number, body := grabwire.AnswerResponse, responseBytes[:0]
		if g.Err != nil {
			number, body = grabwire.AnswerError, streamErrorBytes(g.Err)
		} else {
			if stamp == nil || !g.Result.DecidedAt.Equal(stampOf) { // nearly all of a message are of one batch
				stampOf = g.Result.DecidedAt
				stamp = appendStamp(stampBytes[:0], stampOf)
			}
			body = m.service.appendResponse(body, orderBytes[:0], stamp, g)
		}
		size := protowire.SizeTag(number) + protowire.SizeBytes(len(body))
		if g.CorrelationID != 0 {
			size += protowire.SizeTag(grabwire.AnswerCorrelationID) + protowire.SizeVarint(g.CorrelationID)
		}
		b = protowire.AppendTag(b, grabwire.ResponseAnswers, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(size))
		b = appendNumber(b, grabwire.AnswerCorrelationID, g.CorrelationID)
		b = appendPart(b, number, body)
	}
	return b
}

// appendResponse appends a GrabResponse, as answerGrab makes it.
func (s *Service) appendResponse(b, scratch, stamp []byte, g *admit.Grab) []byte {
	r := &g.Result
	b = appendNumber(b, grabwire.ResponseOutcome, uint64(outcomes[r.Decision]))
	if r.Decision == ledger.DecisionAdmitted {
		id := s.ids.AppendEncode(scratch, r.Order)
		order := id[len(id):]
		order = appendPart(order, grabwire.OrderID, id)
		order = appendNumber(order, grabwire.OrderUserID, uint64(g.UserID))
		order = appendNumber(order, grabwire.OrderVoucherID, uint64(r.Order.VoucherID))
		order = appendNumber(order, grabwire.OrderState, uint64(markStates[r.State]))
		if !r.Replayed {
			order = appendPart(order, grabwire.OrderAdmittedAt, stamp)
			if g.Reference != "" {
				order = protowire.AppendTag(order, grabwire.OrderReference, protowire.BytesType)
				order = protowire.AppendString(order, g.Reference)
			}
		}
		b = appendPart(b, grabwire.ResponseOrder, order)
		b = appendNumber(b, grabwire.ResponseReplayed, protowire.EncodeBool(r.Replayed))
		b = appendNumber(b, grabwire.ResponseDurability, uint64(durabilities[r.Durability]))
	}
	return appendPart(b, grabwire.ResponseDecidedAt, stamp)
}

func appendStamp(b []byte, at time.Time) []byte {
	b = appendNumber(b, grabwire.StampSeconds, uint64(at.Unix()))
	return appendNumber(b, grabwire.StampNanos, uint64(at.Nanosecond()))
}

// appendNumber appends a field that is left out where it is 0.
func appendNumber(b []byte, number protowire.Number, value uint64) []byte {
	if value == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, number, protowire.VarintType), value)
}

func appendPart(b []byte, number protowire.Number, part []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, number, protowire.BytesType), part)
}

// streamErrorBytes is streamedError, encoded; for known faults once.
func streamErrorBytes(err error) []byte {
	if f := faultOf(err); f != nil {
		return f.encoded
	}
	return encodeError(streamedError(ownStatus(err)))
}

func encodeError(e *seckillv1.GrabError) []byte {
	b, err := proto.Marshal(e)
	if err != nil { // for text that is no UTF-8, of which there is none
		return nil
	}
	return b
}

// grabMessage is a GrabStreamRequest, read into Grabs that are used again.
type grabMessage struct {
	service *Service
	grabs   []*admit.Grab // at most maxMessage
	count   int           // how many there were
}

// DecodeMessage implements rpcserver.Decoder.
func (m *grabMessage) DecodeMessage(b []byte) error {
	m.grabs, m.count = m.grabs[:0], 0
	now := time.Now()
	for len(b) > 0 {
		number, kind, n := grabwire.ConsumeTag(b)
		if n < 0 {
			return m.malformed(n)
		}
		b = b[n:]
		if number != grabwire.RequestGrabs || kind != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
				return m.malformed(n)
			}
			b = b[n:]
			continue
		}
		one, n := protowire.ConsumeBytes(b)
		if n < 0 {
			return m.malformed(n)
		}
		b = b[n:]
		if m.count++; m.count > maxMessage {
			continue
		}
		g := grabs.Get().(*admit.Grab)
		m.grabs = append(m.grabs, g)
		if n := m.service.decodeGrab(g, one, now); n < 0 {
			return m.malformed(n)
		}
	}
	return nil
}

// malformed gives back what was read of a message that cannot be.
func (m *grabMessage) malformed(code int) error {
	m.free()
	return fmt.Errorf("decoding a message of grabs: %w", protowire.ParseError(code))
}

func (m *grabMessage) free() {
	free(m.grabs)
	m.grabs = m.grabs[:0]
}

// decodeGrab reads a StreamedGrab. Below 0 it is an error of protowire.
func (s *Service) decodeGrab(g *admit.Grab, b []byte, now time.Time) int {
	*g = admit.Grab{}
	timeout := uint32(0)
	for len(b) > 0 {
		number, kind, n := grabwire.ConsumeTag(b)
		if n < 0 {
			return n
		}
		b = b[n:]
		switch {
		case kind == protowire.VarintType && number <= grabwire.GrabTimeoutMs && number != grabwire.GrabReference:
			var value uint64
			if value, n = protowire.ConsumeVarint(b); n < 0 {
				return n
			}
			switch number {
			case grabwire.GrabCorrelationID:
				g.CorrelationID = value
			case grabwire.GrabUserID:
				g.UserID = int64(value)
			case grabwire.GrabVoucherID:
				g.VoucherID = int64(value)
			case grabwire.GrabTimeoutMs:
				timeout = uint32(value)
			}
		case kind == protowire.BytesType && (number == grabwire.GrabReference || number == grabwire.GrabTraceparent):
			var value []byte
			if value, n = protowire.ConsumeBytes(b); n < 0 {
				return n
			}
			if number == grabwire.GrabReference {
				g.Reference = string(value)
			} else if g.Traceparent = ""; traceparentForm(string(value)) {
				g.Traceparent = string(value)
			}
		default:
			if n = protowire.ConsumeFieldValue(number, kind, b); n < 0 {
				return n
			}
		}
		b = b[n:]
	}
	g.Deadline = now.Add(s.timeout(timeout))
	return 0
}
