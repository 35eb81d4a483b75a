package client

import (
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that all else goes to
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

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

var errForm = errors.New("decoding an answer: not the form of a message")

// fields calls each for every field of a message: number for one of varint type,
// data for one of bytes. Others are of later versions and skipped.
func fields(b []byte, each func(field protowire.Number, number uint64, data []byte) error) error {
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return errForm
		}
		b = b[n:]
		var number uint64
		var data []byte
		switch kind {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			data, n = protowire.ConsumeBytes(b)
		default:
			if n = protowire.ConsumeFieldValue(field, kind, b); n >= 0 {
				b = b[n:]
				continue
			}
		}
		if n < 0 {
			return errForm
		}
		b = b[n:]
		if err := each(field, number, data); err != nil {
			return err
		}
	}
	return nil
}

func (a *answers) decode(b []byte) error {
	a.list = a.list[:0]
	return fields(b, func(field protowire.Number, _ uint64, data []byte) error {
		if field != 1 {
			return nil
		}
		a.list = append(a.list, answer{})
		return a.list[len(a.list)-1].decode(data)
	})
}

func (a *answer) decode(b []byte) error {
	decided := false
	err := fields(b, func(field protowire.Number, number uint64, data []byte) error {
		switch field {
		case 1:
			a.id = number
		case 2:
			decided = true
			return a.result.decode(data)
		case 3:
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
	return fields(b, func(field protowire.Number, number uint64, data []byte) (err error) {
		switch field {
		case 1:
			r.Outcome = Outcome(number)
		case 2:
			err = r.Order.decode(data)
		case 3:
			r.Replayed = number != 0
		case 4:
			r.Durability = Durability(number)
		case 5:
			r.DecidedAt, err = decodeTime(data)
		}
		return err
	})
}

func (o *Order) decode(b []byte) error {
	return fields(b, func(field protowire.Number, number uint64, data []byte) (err error) {
		switch field {
		case 1:
			o.ID, err = decodeText(data)
		case 2:
			o.UserID = int64(number)
		case 3:
			o.VoucherID = int64(number)
		case 4:
			o.State = OrderState(number)
		case 5:
			o.AdmittedAt, err = decodeTime(data)
		case 7:
			o.Reference, err = decodeText(data)
		}
		return err
	})
}

func decodeText(b []byte) (string, error) {
	if !utf8.Valid(b) {
		return "", errForm
	}
	return string(b), nil
}

func decodeTime(b []byte) (time.Time, error) {
	var seconds, nanos int64
	err := fields(b, func(field protowire.Number, number uint64, _ []byte) error {
		switch field {
		case 1:
			seconds = int64(number)
		case 2:
			nanos = int64(int32(number))
		}
		return nil
	})
	return time.Unix(seconds, nanos).UTC(), err
}
