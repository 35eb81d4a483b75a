package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// What an error of this package is, for errors.Is. Some are several at a time:
// a Grab whose first attempt was lost and whose second met a closed partition is
// ErrOutcomeUnknown, ErrRebuilding and ErrUnavailable.
var (
	// ErrOverloaded: too many Grabs wait, at the server or in this client.
	ErrOverloaded = errors.New("seckill: overloaded")
	// ErrUnavailable: the server cannot decide now, or none can be reached.
	ErrUnavailable = errors.New("seckill: unavailable")
	// ErrRebuilding: the voucher's partition is closed until its ledger is proven.
	ErrRebuilding = errors.New("seckill: rebuilding")
	// ErrOutcomeUnknown: the order may exist. Repeat the Grab, or ask GetOrder.
	// An error of Grab that is not ErrOutcomeUnknown means that nothing was taken.
	ErrOutcomeUnknown = errors.New("seckill: outcome unknown")
	// ErrVoucherNotFound: no such voucher, or it was never opened.
	ErrVoucherNotFound = errors.New("seckill: voucher not found")
	// ErrVoucherArchived: the voucher's sale is over and its ledger was removed.
	ErrVoucherArchived = errors.New("seckill: voucher archived")
	// ErrOrderNotFound: the user has no such order.
	ErrOrderNotFound = errors.New("seckill: order not found")
	// ErrInvalid: a field is out of its bounds; Error.Violations names it.
	ErrInvalid = errors.New("seckill: invalid")
	// ErrClosed: the Client was closed.
	ErrClosed = errors.New("seckill: client closed")
)

// Error is every error of a call. It unwraps to context.Canceled and
// context.DeadlineExceeded where the caller's context ended the call, and
// status.Code understands it.
type Error struct {
	// Code is the gRPC code.
	Code codes.Code
	// Reason is the server's, ERROR_REASON_UNSPECIFIED where it gave none.
	Reason seckillv1.ErrorReason
	// Message is for people.
	Message string
	// RetryAfter is the delay that the server asked for; 0 is none.
	RetryAfter time.Duration
	// Violations say what is wrong with the call, with ErrInvalid.
	Violations []Violation
	// OutcomeUnknown is true where an attempt may have made an order that the
	// caller was not told of.
	OutcomeUnknown bool
	// Attempts counts how often the call was sent.
	Attempts int

	cause error // ErrClosed, or why the caller's context ended
	// unreached: the call ended before any gateway could be reached.
	unreached bool
	// lost: the stream broke under the call, which says nothing about the call.
	lost bool
}

// Violation is a field that is out of its bounds.
type Violation struct{ Field, Description string }

// Error implements error.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seckill: %s", e.Code)
	if e.Reason != 0 {
		b.WriteString(" " + strings.TrimPrefix(e.Reason.String(), "ERROR_REASON_"))
	}
	if e.Attempts > 1 {
		fmt.Fprintf(&b, " after %d attempts", e.Attempts)
	}
	b.WriteString(": " + e.Message)
	if e.OutcomeUnknown && e.Reason != seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN {
		b.WriteString(" (the order may exist)")
	}
	return b.String()
}

// Is implements errors.Is for the errors of this package.
func (e *Error) Is(target error) bool {
	switch target {
	case ErrOverloaded:
		return e.Code == codes.ResourceExhausted
	case ErrUnavailable:
		return e.Code == codes.Unavailable || e.unreached
	case ErrRebuilding:
		return e.Reason == seckillv1.ErrorReason_ERROR_REASON_REBUILDING
	case ErrOutcomeUnknown:
		return e.OutcomeUnknown
	case ErrVoucherNotFound:
		return e.Reason == seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND
	case ErrVoucherArchived:
		return e.Reason == seckillv1.ErrorReason_ERROR_REASON_VOUCHER_ARCHIVED
	case ErrOrderNotFound:
		return e.Reason == seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND
	case ErrInvalid:
		return e.Code == codes.InvalidArgument
	case context.DeadlineExceeded:
		return e.Code == codes.DeadlineExceeded
	}
	return false
}

// Unwrap implements errors.Is and errors.As for what ended the call.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus implements status.FromError, for services that pass it on.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// errorOfStatus reads the error of a unary call or of a stream.
func errorOfStatus(err error) *Error {
	st := status.Convert(err)
	e := &Error{Code: st.Code(), Message: st.Message()}
	for _, detail := range st.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == "seckill" {
				e.Reason = seckillv1.ErrorReason(seckillv1.ErrorReason_value[d.GetReason()])
			}
		case *errdetails.RetryInfo:
			e.RetryAfter = d.GetRetryDelay().AsDuration()
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				e.Violations = append(e.Violations, Violation{v.GetField(), v.GetDescription()})
			}
		}
	}
	return e.judged()
}

// errorOfAnswer reads the error of one Grab of a stream.
func errorOfAnswer(g *seckillv1.GrabError) *Error {
	if g.GetCode() == 0 { // neither a decision nor an error: no server of ours
		return &Error{Code: codes.Internal, Message: "the server gave an empty answer", OutcomeUnknown: true}
	}
	e := &Error{
		Code: codes.Code(g.GetCode()), Reason: g.GetReason(), Message: g.GetMessage(),
		RetryAfter: g.GetRetryAfter().AsDuration(),
	}
	for _, v := range g.GetFieldViolations() {
		e.Violations = append(e.Violations, Violation{v.GetField(), v.GetDescription()})
	}
	return e.judged()
}

// judged sets whether the Grab that was answered so may have taken something.
// The server says so of UNAVAILABLE by its reason; without one it was not our
// server that spoke, and the call may have reached it.
func (e *Error) judged() *Error {
	switch e.Code {
	case codes.Unavailable:
		e.OutcomeUnknown = e.Reason == seckillv1.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN || e.Reason == 0
	case codes.DeadlineExceeded, codes.Canceled, codes.Internal, codes.Unknown, codes.DataLoss, codes.Aborted:
		e.OutcomeUnknown = true
	}
	return e
}

func shuttingDown(e *Error) bool {
	return e.Code == codes.Unavailable && e.Reason == seckillv1.ErrorReason_ERROR_REASON_SHUTTING_DOWN
}

func errorOfClosed() *Error {
	return &Error{Code: codes.Canceled, Message: "the client was closed", cause: ErrClosed}
}

func errorOfInvalid(v Violation) *Error {
	return &Error{
		Code: codes.InvalidArgument, Reason: seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD,
		Message: v.Field + ": " + v.Description, Violations: []Violation{v},
	}
}

func errorOfFullQueue() *Error {
	return &Error{Code: codes.ResourceExhausted, Message: "too many grabs are waiting in this client; nothing was sent"}
}

// errorOfContext says that the caller's context, or its Timeout, ended the call.
func errorOfContext(cause error) *Error {
	if errors.Is(cause, context.Canceled) {
		return &Error{Code: codes.Canceled, Message: "the caller left", cause: cause}
	}
	return &Error{Code: codes.DeadlineExceeded, Message: "no answer in time", cause: context.DeadlineExceeded}
}
