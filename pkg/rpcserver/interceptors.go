package rpcserver

import (
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/pkg/telemetry"
)

// internalText is all that a caller learns of a fault that has no status.
const internalText = "internal error"

func internalError() error {
	return Error(codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL, internalText)
}

// A panic ends one call, not the process: the other calls of the batch have
// their answers to come. The log line is the only place that has the stack.
func (s *Server) recoverUnary() grpc.UnaryServerInterceptor {
	return recovery.UnaryServerInterceptor(recovery.WithRecoveryHandlerContext(s.panicked))
}

func (s *Server) recoverStream() grpc.StreamServerInterceptor {
	return recovery.StreamServerInterceptor(recovery.WithRecoveryHandlerContext(s.panicked))
}

func (s *Server) panicked(ctx context.Context, p any) error {
	method, _ := grpc.Method(ctx)
	s.log.ErrorContext(ctx, "panic in rpc handler",
		telemetry.KeyMethod, method, telemetry.KeyErr, p, telemetry.KeyStack, string(debug.Stack()))
	return internalError()
}

// except leaves an interceptor out for some methods.
func except(methods []string, interceptor grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	if len(methods) == 0 {
		return interceptor
	}
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if slices.Contains(methods, info.FullMethod) {
			return handler(ctx, req)
		}
		return interceptor(ctx, req, info, handler)
	}
}

func (s *Server) deadlineUnary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := ended(ctx); err != nil {
		return nil, err
	}
	deadline, ok := ctx.Deadline()
	switch {
	case !ok:
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.opts.DefaultDeadline)
		defer cancel()
	case time.Until(deadline) > s.opts.MaxDeadline:
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.opts.MaxDeadline)
		defer cancel()
	}
	return handler(ctx, req)
}

func (s *Server) deadlineStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := ss.Context()
	if err := ended(ctx); err != nil {
		return err
	}
	wrapped := middleware.WrapServerStream(ss)
	switch {
	case strings.HasPrefix(info.FullMethod, "/"+healthpb.Health_ServiceDesc.ServiceName+"/"):
		// A health watcher never ends by itself. It has been told NOT_SERVING
		// when the drain begins, and must not hold it up.
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(s.draining, cancel)()
		wrapped.WrappedContext = ctx
	case s.opts.MaxStreamDeadline > 0:
		ctx, cancel := context.WithTimeout(ctx, s.opts.MaxStreamDeadline)
		defer cancel()
		wrapped.WrappedContext = ctx
	default:
		return handler(srv, ss)
	}
	return handler(srv, wrapped)
}

// ended is the status of a call whose caller has gone already: it spent its time
// in a queue on the way, and running the handler could only waste a unit of
// stock on an answer that nobody reads.
func ended(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		return status.FromContextError(context.DeadlineExceeded).Err()
	}
	return nil
}

func (s *Server) lastGateUnary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if err != nil {
		return nil, s.lastGate(ctx, info.FullMethod, err)
	}
	return resp, nil
}

func (s *Server) lastGateStream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if err := handler(srv, ss); err != nil {
		return s.lastGate(ss.Context(), info.FullMethod, err)
	}
	return nil
}

// lastGate lets a status through, drops the text that was wrapped around it,
// and turns everything else into INTERNAL with a fixed text: no text of a driver
// leaves the process. A status UNKNOWN counts as no status, since that is what
// status.Convert makes of any error.
func (s *Server) lastGate(ctx context.Context, method string, err error) error {
	var carrier interface{ GRPCStatus() *status.Status }
	if errors.As(err, &carrier) {
		if st := carrier.GRPCStatus(); st.Code() != codes.OK && st.Code() != codes.Unknown {
			return st.Err()
		}
	}
	// The call's own end, as opposed to a timeout of some inner step.
	if end := ctx.Err(); end != nil && errors.Is(err, end) {
		return status.FromContextError(end).Err()
	}
	s.log.ErrorContext(ctx, "rpc failed without a status", telemetry.KeyMethod, method, telemetry.KeyErr, err)
	return internalError()
}
