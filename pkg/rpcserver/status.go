package rpcserver

import (
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// Domain is the domain of every ErrorInfo that a server of ours sends.
const Domain = "seckill"

// FieldViolation says what is wrong with one field of a request. Field is its
// path in the message, such as "orders[2].user_id"; Description is a sentence
// that names what was wanted.
type FieldViolation struct{ Field, Description string }

// Detail adds to the details of a status made by Error.
type Detail func(*details)

type details struct {
	info    *errdetails.ErrorInfo
	retry   *errdetails.RetryInfo
	request *errdetails.BadRequest
}

// WithRetryAfter adds a RetryInfo: the caller may try again after d.
func WithRetryAfter(d time.Duration) Detail {
	return func(t *details) { t.retry = &errdetails.RetryInfo{RetryDelay: durationpb.New(d)} }
}

// WithMetadata adds one entry to the metadata of the ErrorInfo.
func WithMetadata(key, value string) Detail {
	return func(t *details) {
		if t.info.Metadata == nil {
			t.info.Metadata = map[string]string{}
		}
		t.info.Metadata[key] = value
	}
}

func withViolations(violations []FieldViolation) Detail {
	return func(t *details) {
		t.request = &errdetails.BadRequest{}
		for _, v := range violations {
			t.request.FieldViolations = append(t.request.FieldViolations,
				&errdetails.BadRequest_FieldViolation{Field: v.Field, Description: v.Description})
		}
	}
}

// Error returns a status error that carries reason in an ErrorInfo. The message
// goes to the caller as it is: it must hold no text of a driver.
func Error(code codes.Code, reason seckillv1.ErrorReason, msg string, opts ...Detail) error {
	t := &details{info: &errdetails.ErrorInfo{Reason: reason.String(), Domain: Domain}}
	for _, opt := range opts {
		opt(t)
	}
	all := []protoadapt.MessageV1{t.info}
	if t.retry != nil {
		all = append(all, t.retry)
	}
	if t.request != nil {
		all = append(all, t.request)
	}
	st, err := status.New(code, msg).WithDetails(all...)
	if err != nil {
		// Only for code OK, or for text that is no UTF-8: a bug of the caller of
		// Error, which must still be answered as a fault.
		return status.Error(codes.Internal, internalText)
	}
	return st.Err()
}

// InvalidField returns INVALID_ARGUMENT with one field violation.
func InvalidField(field, description string) error {
	return InvalidFields([]FieldViolation{{Field: field, Description: description}})
}

// InvalidFields returns INVALID_ARGUMENT with a violation per field. The
// message quotes the first one and counts the others. It returns nil for an empty list, so that a
// validator can collect and return.
func InvalidFields(violations []FieldViolation) error {
	if len(violations) == 0 {
		return nil
	}
	msg := violations[0].Field + ": " + violations[0].Description
	if more := len(violations) - 1; more > 0 {
		msg += fmt.Sprintf(", and %d more", more)
	}
	return Error(codes.InvalidArgument, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD, msg, withViolations(violations))
}

// Reason reads the reason back from an error of a call. It is false for nil,
// for an error without an ErrorInfo of our Domain, and for a reason that this
// version does not know.
func Reason(err error) (seckillv1.ErrorReason, bool) {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.Domain == Domain {
			v, known := seckillv1.ErrorReason_value[info.Reason]
			return seckillv1.ErrorReason(v), known
		}
	}
	return seckillv1.ErrorReason_ERROR_REASON_UNSPECIFIED, false
}

// RetryAfter reads the RetryInfo back from an error of a call.
func RetryAfter(err error) (time.Duration, bool) {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			return info.RetryDelay.AsDuration(), true
		}
	}
	return 0, false
}
