package load

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// Reason is the name under which an error is counted: what its method
// "Reason() string" says, if it has one; the reason in its ErrorInfo, as
// "OVERLOADED"; else the name of its gRPC code, as "DEADLINE_EXCEEDED".
func Reason(err error) string {
	var named interface{ Reason() string }
	if errors.As(err, &named) {
		return named.Reason()
	}
	st := status.Convert(err)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		st = status.FromContextError(err)
	}
	for _, detail := range st.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return strings.TrimPrefix(info.GetReason(), reasonPrefix)
		}
	}
	return codeName(st.Code())
}

const reasonPrefix = "ERROR_REASON_"

func codeName(c codes.Code) string { return code.Code(c).String() }

// reasonOf is the same for a GrabError.
func reasonOf(c codes.Code, reason seckillv1.ErrorReason) string {
	if reason == seckillv1.ErrorReason_ERROR_REASON_UNSPECIFIED {
		return codeName(c)
	}
	return strings.TrimPrefix(reason.String(), reasonPrefix)
}

// reasonError is an error that is its reason.
type reasonError string

func (e reasonError) Error() string  { return string(e) }
func (e reasonError) Reason() string { return string(e) }
