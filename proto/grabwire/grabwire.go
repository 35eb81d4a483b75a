// Package grabwire is the form of GrabStream's messages on the wire, for those
// who write and read them by hand: the gateway, the Go client and the load
// generator. The generated code makes about ten objects of each Grab and answer,
// which costs more than all else that is done for one.
package grabwire

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// ErrForm means that bytes are not of the form of a message.
var ErrForm = errors.New("not the form of a message of GrabStream")

// Numbers of the fields, from seckill_service.proto and order.proto. A test holds
// them against the generated code.
const (
	// Of GrabStreamRequest and GrabStreamResponse.
	RequestGrabs    protowire.Number = 1
	ResponseAnswers protowire.Number = 1

	// Of StreamedGrab.
	GrabCorrelationID protowire.Number = 1
	GrabUserID        protowire.Number = 2
	GrabVoucherID     protowire.Number = 3
	GrabReference     protowire.Number = 4
	GrabTimeoutMs     protowire.Number = 5
	GrabTraceparent   protowire.Number = 6

	// Of StreamedAnswer.
	AnswerCorrelationID protowire.Number = 1
	AnswerResponse      protowire.Number = 2
	AnswerError         protowire.Number = 3

	// Of GrabResponse.
	ResponseOutcome    protowire.Number = 1
	ResponseOrder      protowire.Number = 2
	ResponseReplayed   protowire.Number = 3
	ResponseDurability protowire.Number = 4
	ResponseDecidedAt  protowire.Number = 5

	// Of Order.
	OrderID         protowire.Number = 1
	OrderUserID     protowire.Number = 2
	OrderVoucherID  protowire.Number = 3
	OrderState      protowire.Number = 4
	OrderAdmittedAt protowire.Number = 5
	OrderReference  protowire.Number = 7

	// Of GrabError, as far as it is read by hand.
	ErrorCode   protowire.Number = 1
	ErrorReason protowire.Number = 2

	// Of google.protobuf.Timestamp.
	StampSeconds protowire.Number = 1
	StampNanos   protowire.Number = 2
)

// Fields calls each for every field of a message: with the number for one of
// varint type, with the data for one of bytes, which lie in message. Fields of
// other types are of later versions and skipped. An error is that of each, or
// ErrForm.
func Fields(message []byte, each func(field protowire.Number, number uint64, data []byte) error) error {
	for len(message) > 0 {
		field, kind, n := ConsumeTag(message)
		if n < 0 {
			return fmt.Errorf("%w: %w", ErrForm, protowire.ParseError(n))
		}
		message = message[n:]
		var number uint64
		var data []byte
		known := true
		switch kind {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			data, n = protowire.ConsumeBytes(message)
		default:
			known, n = false, protowire.ConsumeFieldValue(field, kind, message)
		}
		if n < 0 {
			return fmt.Errorf("%w: %w", ErrForm, protowire.ParseError(n))
		}
		message = message[n:]
		if !known {
			continue
		}
		if err := each(field, number, data); err != nil {
			return err
		}
	}
	return nil
}

// ConsumeTag is protowire.ConsumeTag, and also refuses the numbers between what
// protobuf allows and what protowire can hold, as the generated code does.
func ConsumeTag(b []byte) (protowire.Number, protowire.Type, int) {
	field, kind, n := protowire.ConsumeTag(b)
	if field > protowire.MaxValidNumber {
		_, _, n = protowire.ConsumeTag([]byte{0}) // its error for a number that is none
	}
	return field, kind, n
}
