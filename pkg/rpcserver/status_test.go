package rpcserver

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func TestError_CarriesItsDetails(t *testing.T) {
	err := Error(codes.Unavailable, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, "partition 3 is closed",
		WithRetryAfter(1500*time.Millisecond), WithMetadata("partition", "3"), WithMetadata("epoch", "7"))
	st := status.Convert(err)
	require.Equal(t, codes.Unavailable, st.Code())
	require.Equal(t, "partition 3 is closed", st.Message())
	require.Len(t, st.Details(), 2)
	info := st.Details()[0].(*errdetails.ErrorInfo)
	require.Equal(t, "ERROR_REASON_REBUILDING", info.Reason)
	require.Equal(t, "seckill", info.Domain)
	require.Equal(t, map[string]string{"partition": "3", "epoch": "7"}, info.Metadata)

	reason, ok := Reason(err)
	require.True(t, ok)
	require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_REBUILDING, reason)
	after, ok := RetryAfter(err)
	require.True(t, ok)
	require.Equal(t, 1500*time.Millisecond, after)
}

func TestReason_IsFalseForWhatIsNotOurs(t *testing.T) {
	foreign, err := status.New(codes.NotFound, "x").WithDetails(&errdetails.ErrorInfo{Reason: "ERROR_REASON_INTERNAL", Domain: "elsewhere"})
	require.NoError(t, err)
	newer, err := status.New(codes.NotFound, "x").WithDetails(&errdetails.ErrorInfo{Reason: "ERROR_REASON_OF_TOMORROW", Domain: Domain})
	require.NoError(t, err)
	for _, err := range []error{nil, errors.New("plain"), context.Canceled, status.Error(codes.NotFound, "bare"), foreign.Err(), newer.Err()} {
		_, ok := Reason(err)
		require.False(t, ok, "%v", err)
		_, ok = RetryAfter(err)
		require.False(t, ok, "%v", err)
	}
}

func TestInvalidFields_NamesEach(t *testing.T) {
	require.NoError(t, InvalidFields(nil))
	err := InvalidFields([]FieldViolation{{"user_id", "must be greater than 0"}, {"reference", "must be at most 64 bytes"}})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	reason, _ := Reason(err)
	require.Equal(t, seckillv1.ErrorReason_ERROR_REASON_INVALID_FIELD, reason)
	require.Equal(t, "user_id: must be greater than 0, and 1 more", status.Convert(err).Message())
	bad := status.Convert(err).Details()[1].(*errdetails.BadRequest)
	require.Len(t, bad.FieldViolations, 2)
	require.Equal(t, "reference", bad.FieldViolations[1].Field)
	require.Equal(t, "must be at most 64 bytes", bad.FieldViolations[1].Description)
	require.Equal(t, "user_id: must be greater than 0", status.Convert(InvalidField("user_id", "must be greater than 0")).Message())
}

func TestError_IsStillAFaultWhereDetailsAreImpossible(t *testing.T) {
	require.Equal(t, codes.Internal, status.Code(Error(codes.OK, seckillv1.ErrorReason_ERROR_REASON_INTERNAL, "x")))
}
