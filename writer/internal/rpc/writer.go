package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/redis/rueidis"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// deadLettersAtOnce is how many dead letters are read in one statement: each
	// may carry a megabyte of what the stream held.
	deadLettersAtOnce = 50
	// maxPageBytes bounds what a page of dead letters carries of that, so that it
	// fits into the 4 MiB that a caller takes by default. The one that goes beyond
	// still comes along; none alone has more than a megabyte.
	maxPageBytes = 1 << 20
)

// finder finds one order.
type finder interface {
	FindByPosition(ctx context.Context, p orderid.Position) (orderstore.Found, error)
	FindByUser(ctx context.Context, userID, voucherID int64) (orderstore.Found, error)
	ActionOn(ctx context.Context, f orderstore.Found) (*orderstore.OperatorAction, error)
}

// lister lists committed orders.
type lister interface {
	OrdersOfVoucher(ctx context.Context, voucherID int64, after orderid.Position, limit int) ([]orderstore.Found, error)
	OrdersOfUser(ctx context.Context, userID, afterVoucher int64, limit int) ([]orderstore.Found, error)
}

// deadLetters lists what waits for an operator.
type deadLetters interface {
	DeadLetters(ctx context.Context, f orderstore.DeadLetterFilter, after orderstore.DeadLetterID, limit int) ([]orderstore.DeadLetter, error)
	CountDeadLetters(ctx context.Context, f orderstore.DeadLetterFilter) (int64, error)
}

// resolver carries out what an operator decides.
type resolver interface {
	Requeue(ctx context.Context, id orderstore.DeadLetterID, operator, reason string) (orderstore.Resolution, error)
	Cancel(ctx context.Context, id orderstore.DeadLetterID, operator, reason string) (orderstore.Resolution, error)
}

// WriterStore is the database as WriterService needs it.
type WriterStore interface {
	finder
	lister
	deadLetters
	resolver
}

// WriterOptions are what WriterService needs from the first call on.
type WriterOptions struct {
	Store    WriterStore
	OrderIDs *orderid.Codec
	Logger   *slog.Logger
	// Draining is closed when the server stops: a long stream then ends. Nil for
	// never.
	Draining <-chan struct{}
}

// WriterLedger is what GetBacklog needs of Redis and of what works on it: there
// only once Redis answered.
type WriterLedger struct {
	Client     rueidis.Client
	Partitions int
	// Guardian tells whether partitions are open, by number.
	Guardian interface{ Status() []guardian.Status }
	// Pipeline has a part named "database" that says whether batches are written.
	Pipeline interface{ Health() []telemetry.Part }
}

// WriterService answers the calls of WriterService.
type WriterService struct {
	seckillv1.UnimplementedWriterServiceServer

	store    WriterStore
	orderIDs *orderid.Codec
	log      *slog.Logger
	draining <-chan struct{}
	ledger   atomic.Pointer[WriterLedger]
	// deciding bounds how many decisions run at once over all calls: each holds a
	// connection to the database, which the pipeline needs more.
	deciding chan struct{}
}

// NewWriter returns a WriterService that answers what the database alone can
// answer, and UNAVAILABLE to GetBacklog until Bind.
func NewWriter(o WriterOptions) *WriterService {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &WriterService{
		store: o.Store, orderIDs: o.OrderIDs, log: o.Logger, draining: o.Draining,
		deciding: make(chan struct{}, maxDeciding),
	}
}

// Bind gives the service its ledger, once Redis can be reached.
func (s *WriterService) Bind(l WriterLedger) { s.ledger.Store(&l) }

// FindOrder finds one order, however it ended.
func (s *WriterService) FindOrder(ctx context.Context, req *seckillv1.FindOrderRequest) (*seckillv1.FindOrderResponse, error) {
	if err := checkFindOrder(req); err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	var found orderstore.Found
	var err error
	if pair := req.GetUserVoucher(); pair != nil {
		found, err = s.store.FindByUser(call, pair.GetUserId(), pair.GetVoucherId())
	} else {
		var at orderid.Position
		if at, err = s.orderIDs.Decode(req.GetOrderId()); err != nil {
			return nil, orderNotFound() // the form is right, so it is forged
		}
		found, err = s.store.FindByPosition(call, at)
	}
	if err != nil {
		return nil, s.databaseError(ctx, "finding an order", err)
	}
	action, err := s.store.ActionOn(call, found)
	if err != nil {
		return nil, s.databaseError(ctx, "finding what operators decided about an order", err)
	}
	if found.Outcome != orderstore.OutcomeConflict {
		return &seckillv1.FindOrderResponse{Order: s.shapeFound(found), Reason: whyNoRow(found), OperatorAction: shapeAction(action)}, nil
	}
	standing, err := s.store.FindByPosition(call, found.Standing)
	if errors.Is(err, orderstore.ErrOrderNotFound) || err == nil && standing.Outcome != "" {
		s.log.ErrorContext(ctx, "the order that a conflict names is no row", telemetry.KeyVoucherID, found.VoucherID,
			telemetry.KeyEpoch, found.Standing.Epoch, telemetry.KeySeq, found.Standing.Seq)
		return nil, rpcserver.Error(codes.Internal, seckillv1.ErrorReason_ERROR_REASON_INTERNAL,
			fmt.Sprintf("the order ended as a conflict with order %s, which is no row", s.orderIDs.Encode(found.Standing)))
	}
	if err != nil {
		return nil, s.databaseError(ctx, "finding the order that stands", err)
	}
	return &seckillv1.FindOrderResponse{
		Order: s.shapeFound(standing), OperatorAction: shapeAction(action),
		Reason: fmt.Sprintf("order %s ended as a conflict: the user's order that stands is %s", s.orderIDs.Encode(found.Position), s.orderIDs.Encode(standing.Position)),
	}, nil
}

// ListOrders reads one page of committed orders.
func (s *WriterService) ListOrders(ctx context.Context, req *seckillv1.ListOrdersRequest) (*seckillv1.ListOrdersResponse, error) {
	q, err := newOrdersQuery(req)
	if err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	page, err := q.read(call, s.store, q.size)
	if err != nil {
		return nil, s.databaseError(ctx, "listing orders", err)
	}
	resp := &seckillv1.ListOrdersResponse{Orders: make([]*seckillv1.Order, len(page))}
	for i, found := range page {
		resp.Orders[i] = s.shapeFound(found)
	}
	if len(page) < q.size {
		return resp, nil
	}
	// A full page may be the last: an empty one after it would be no page.
	q.after = page[len(page)-1].Position
	more, err := q.read(call, s.store, 1)
	if err != nil {
		return nil, s.databaseError(ctx, "listing orders", err)
	}
	if len(more) > 0 {
		resp.NextPageToken = q.token()
	}
	return resp, nil
}

// ListDeadLetters reads one page of what waits for an operator.
func (s *WriterService) ListDeadLetters(ctx context.Context, req *seckillv1.ListDeadLettersRequest) (*seckillv1.ListDeadLettersResponse, error) {
	q, err := newDeadLettersQuery(req)
	if err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	resp := &seckillv1.ListDeadLettersResponse{}
	for bytes := 0; ; {
		// One more than what fits tells whether there is another page.
		wanted := min(q.size-len(resp.DeadLetters)+1, deadLettersAtOnce)
		part, err := s.store.DeadLetters(call, q.filter, q.after, wanted)
		if err != nil {
			return nil, s.databaseError(ctx, "listing dead letters", err)
		}
		for _, letter := range part {
			if len(resp.DeadLetters) == q.size || bytes >= maxPageBytes {
				resp.NextPageToken = q.token()
				return resp, nil
			}
			resp.DeadLetters = append(resp.DeadLetters, s.shapeDeadLetter(letter))
			bytes += len(letter.Raw)
			q.after = letter.ID
		}
		if len(part) < wanted {
			return resp, nil
		}
	}
}

// databaseError is the status for an error of the database.
func (s *WriterService) databaseError(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(err, orderstore.ErrOrderNotFound):
		return orderNotFound()
	case errors.Is(err, orderstore.ErrDeadLetterNotFound):
		return deadLetterNotFound()
	case gone(ctx):
		return status.FromContextError(ctx.Err()).Err()
	}
	s.log.ErrorContext(ctx, "database error in a call", "doing", doing, telemetry.KeyErr, err)
	return databaseStatus(err)
}

func orderNotFound() error {
	return rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND,
		"the database has no such order; one that is in flight is not there yet")
}

func deadLetterNotFound() error {
	return rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_DEAD_LETTER_NOT_FOUND, "there never was such a dead letter")
}

var _ seckillv1.WriterServiceServer = (*WriterService)(nil)
