// Package rpc is the edge of the gateway: it validates a request, hands it on,
// and shapes the answer. It decides nothing about a sale.
//
// service.go has the unary calls and what is checked, stream.go the streams,
// wire.go their messages, answers.go what callers are told.
package rpc

import (
	"context"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/metadata"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
)

// maxReference is the most bytes of a caller's reference.
const maxReference = 64

// Backend is what the service hands a valid request to.
type Backend interface {
	Submit(r admit.Receiver, grabs []*admit.Grab)
	Grab(ctx context.Context, userID, voucherID int64, reference, traceparent string) (admit.Result, error)
	Find(ctx context.Context, voucherID, userID, seq int64) (admit.Found, error)
}

// Options configures New. Zero durations take the defaults of rpcserver.
type Options struct {
	OrderIDs *orderid.Codec
	// DefaultDeadline is the time for a Grab of a stream that brings none, and
	// MaxDeadline the most that one may ask for, as a unary call has them.
	DefaultDeadline, MaxDeadline time.Duration
	// Draining is closed when streams shall end; nil is never.
	Draining   <-chan struct{}
	Registerer prometheus.Registerer // nil: no metrics
}

// Service is the SeckillService. Until Use it answers that Redis cannot be
// reached, which is what the gateway is waiting for.
type Service struct {
	seckillv1.UnimplementedSeckillServiceServer
	opts    Options
	ids     *orderid.Codec
	backend atomic.Pointer[Backend]
	cache   refusalCache
	streams streams
	invalid prometheus.Counter
}

// New makes a Service.
func New(o Options) (*Service, error) {
	if o.DefaultDeadline == 0 {
		o.DefaultDeadline = rpcserver.DefaultDeadline
	}
	if o.MaxDeadline == 0 {
		o.MaxDeadline = rpcserver.DefaultMaxDeadline
	}
	s := &Service{opts: o, ids: o.OrderIDs}
	if err := s.register(o.Registerer); err != nil {
		return nil, fmt.Errorf("registering stream metrics: %w", err)
	}
	return s, nil
}

// Use sets the backend. It may be called while the service is serving.
func (s *Service) Use(b Backend) { s.backend.Store(&b) }

// Grab implements SeckillService.
func (s *Service) Grab(ctx context.Context, req *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	if err := checkGrab(req.GetUserId(), req.GetVoucherId(), req.GetReference()); err != nil {
		s.invalid.Inc()
		return nil, err
	}
	backend := s.backend.Load()
	if backend == nil {
		return nil, grabError(errStarting)
	}
	result, err := (*backend).Grab(ctx, req.GetUserId(), req.GetVoucherId(), req.GetReference(), traceparent(ctx))
	if err != nil {
		return nil, grabError(err)
	}
	return s.answerGrab(req.GetUserId(), req.GetReference(), &result), nil
}

// GetOrder implements SeckillService.
func (s *Service) GetOrder(ctx context.Context, req *seckillv1.GetOrderRequest) (*seckillv1.GetOrderResponse, error) {
	if err := checkGetOrder(req); err != nil {
		return nil, err
	}
	at := orderid.Position{VoucherID: req.GetVoucherId()}
	if id, ok := req.GetKey().(*seckillv1.GetOrderRequest_OrderId); ok {
		var err error
		if at, err = s.ids.Decode(id.OrderId); err != nil {
			return nil, statusOrderNotFound // the form is right, so it is forged
		}
	}
	backend := s.backend.Load()
	if backend == nil {
		return nil, lookError(errStarting)
	}
	found, err := (*backend).Find(ctx, at.VoucherID, req.GetUserId(), at.Seq)
	if err != nil {
		return nil, lookError(err)
	}
	return s.answerGetOrder(req.GetUserId(), at, found)
}

func checkGrab(userID, voucherID int64, reference string) error {
	if userID > 0 && voucherID > 0 && len(reference) <= maxReference && utf8.ValidString(reference) {
		return nil
	}
	var violations []rpcserver.FieldViolation
	violations = checkID(violations, "user_id", userID)
	violations = checkID(violations, "voucher_id", voucherID)
	if n := len(reference); n > maxReference {
		violations = append(violations, rpcserver.FieldViolation{Field: "reference",
			Description: fmt.Sprintf("must be at most %d bytes, has %d", maxReference, n)})
	} else if !utf8.ValidString(reference) {
		violations = append(violations, rpcserver.FieldViolation{Field: "reference", Description: "must be valid UTF-8"})
	}
	return rpcserver.InvalidFields(violations)
}

func checkGetOrder(req *seckillv1.GetOrderRequest) error {
	var violations []rpcserver.FieldViolation
	violations = checkID(violations, "user_id", req.GetUserId())
	switch key := req.GetKey().(type) {
	case *seckillv1.GetOrderRequest_VoucherId:
		violations = checkID(violations, "voucher_id", key.VoucherId)
	case *seckillv1.GetOrderRequest_OrderId:
		if !orderIDForm(key.OrderId) {
			violations = append(violations, rpcserver.FieldViolation{Field: "order_id",
				Description: fmt.Sprintf("must be %d characters of 0-9 and A-Z without I, L, O and U", orderid.Length)})
		}
	default:
		violations = append(violations, rpcserver.FieldViolation{Field: "key", Description: "one of voucher_id and order_id is required"})
	}
	return rpcserver.InvalidFields(violations)
}

func checkID(violations []rpcserver.FieldViolation, field string, id int64) []rpcserver.FieldViolation {
	if id > 0 {
		return violations
	}
	return append(violations, rpcserver.FieldViolation{Field: field,
		Description: "must be from 1 to 2^63-1, is " + strconv.FormatInt(id, 10)})
}

func orderIDForm(id string) bool {
	if len(id) != orderid.Length {
		return false
	}
	for _, c := range []byte(id) {
		switch {
		case c >= '0' && c <= '9':
		case c >= 'A' && c <= 'Z' && c != 'I' && c != 'L' && c != 'O' && c != 'U':
		default:
			return false
		}
	}
	return true
}

// traceparent is the caller's W3C trace context, empty where there is none or
// it has another form: it is carried with the order, so nothing unchecked is.
func traceparent(ctx context.Context) string {
	values := metadata.ValueFromIncomingContext(ctx, "traceparent")
	if len(values) != 1 || !traceparentForm(values[0]) {
		return ""
	}
	return values[0]
}

// traceparentForm accepts version 00: 00-<32 hex>-<16 hex>-<2 hex>, lower case,
// ids not all zero.
func traceparentForm(s string) bool {
	const (
		length = 55
		zeros  = "00000000000000000000000000000000"
	)
	if len(s) != length || s[:3] != "00-" || s[35] != '-' || s[52] != '-' {
		return false
	}
	for _, part := range []string{s[3:35], s[36:52], s[53:]} {
		for _, c := range []byte(part) {
			if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
				return false
			}
		}
	}
	return s[3:35] != zeros && s[36:52] != zeros[:16]
}
