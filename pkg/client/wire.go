package client

import (
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that all else goes to
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/seckill/seckill/proto/grabwire"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// answers is a GrabStreamResponse, decoded by hand into memory that is used
// again: generated code would make eight objects an answer, which cost about as
// much as everything else here.
type answers struct{ list []answer }

// answer is a StreamedAnswer: a Result, or failed.
type answer struct {
	id     uint64
	result Result
	failed *Error
}

// codec is that of proto, but for answers.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

// Unmarshal implements encoding.CodecV2.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	a, ok := v.(*answers)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	buffer := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buffer.Free()
	return a.decode(buffer.ReadOnlyData())
}

func (a *answers) decode(b []byte) error {
	a.list = a.list[:0]
	return grabwire.Fields(b, func(field protowire.Number, _ uint64, data []byte) error {
		if field != grabwire.ResponseAnswers {
			return nil
		}
		a.list = append(a.list, answer{})
		return a.list[len(a.list)-1].decode(data)
	})
}

func (a *answer) decode(b []byte) error {
	decided := false
	err := grabwire.Fields(b, func(field protowire.Number, number uint64, data []byte) error {
		switch field {
		case grabwire.AnswerCorrelationID:
			a.id = number
		case grabwire.AnswerResponse:
			decided = true
			return a.result.decode(data)
		case grabwire.AnswerError:
			var e seckillv1.GrabError
			if err := proto.Unmarshal(data, &e); err != nil {
				return fmt.Errorf("decoding an answer: %w", err)
			}
			decided, a.failed = true, errorOfAnswer(&e)
		}
		return nil
	})
	if err == nil && a.failed == nil && (!decided || a.result.Outcome == 0) {
		a.failed = errorOfAnswer(nil)
	}
	return err
}

func (r *Result) decode(b []byte) error {
	return grabwire.Fields(b, func(field protowire.Number, number uint64, data []byte) (err error) {
		switch field {
		case grabwire.ResponseOutcome:
			r.Outcome = Outcome(number)
		case grabwire.ResponseOrder:
			err = r.Order.decode(data)
		case grabwire.ResponseReplayed:
			r.Replayed = number != 0
		case grabwire.ResponseDurability:
			r.Durability = Durability(number)
		case grabwire.ResponseDecidedAt:
			r.DecidedAt, err = decodeTime(data)
		}
		return err
	})
}

func (o *Order) decode(b []byte) error {
	return grabwire.Fields(b, func(field protowire.Number, number uint64, data []byte) (err error) {
		switch field {
		case grabwire.OrderID:
			o.ID, err = decodeText(data)
		case grabwire.OrderUserID:
			o.UserID = int64(number)
		case grabwire.OrderVoucherID:
			o.VoucherID = int64(number)
		case grabwire.OrderState:
			o.State = OrderState(number)
		case grabwire.OrderAdmittedAt:
			o.AdmittedAt, err = decodeTime(data)
		case grabwire.OrderReference:
			o.Reference, err = decodeText(data)
		}
		return err
	})
}

func decodeText(b []byte) (string, error) {
	if !utf8.Valid(b) {
		return "", fmt.Errorf("%w: a text is not UTF-8", grabwire.ErrForm)
	}
	return string(b), nil
}

func decodeTime(b []byte) (time.Time, error) {
	var seconds, nanos int64
	err := grabwire.Fields(b, func(field protowire.Number, number uint64, _ []byte) error {
		switch field {
		case grabwire.StampSeconds:
			seconds = int64(number)
		case grabwire.StampNanos:
			nanos = int64(int32(number))
		}
		return nil
	})
	return time.Unix(seconds, nanos).UTC(), err
}
