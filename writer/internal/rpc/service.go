// Package rpc is the edge of the writer: VoucherService and WriterService. It
// validates, changes the database, has the ledger brought to what the database
// says, and shapes the answer.
//
// Read in this order: service.go (the calls of VoucherService), validate.go (what
// a request may hold), memory.go (whether a voucher fits into Redis), page.go
// (page tokens), shape.go (what a voucher and its books look like) and answers.go
// (which error becomes which status); then writer.go (the calls of WriterService
// that read the database), backlog.go, resolve.go (what operators decide about
// dead letters), query.go (what a request may hold), cursor.go (page tokens) and
// writershape.go (what orders and dead letters look like).
package rpc

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/orderid"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/books"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// answerMargin is how much of a call's time is kept back at most for its
	// answer: what fails by time inside then fails before the caller has gone,
	// and the caller learns what failed and whether the change is recorded.
	answerMargin = 500 * time.Millisecond
	// maxViolationOrders is how many order ids a violation names.
	maxViolationOrders = 100
)

// vouchers is the database.
type vouchers interface {
	CreateVoucher(ctx context.Context, v orderstore.Voucher) (orderstore.Voucher, error)
	Voucher(ctx context.Context, id int64) (orderstore.Voucher, error)
	Vouchers(ctx context.Context, after int64, limit int) ([]orderstore.Voucher, error)
	Transition(ctx context.Context, id int64, from []string, to string) (orderstore.Voucher, error)
	LiveVouchers(ctx context.Context, partition int) ([]orderstore.Voucher, error)
}

// carrier brings the ledger to a voucher's row and notes it in the database.
type carrier interface {
	Carry(ctx context.Context, v orderstore.Voucher) error
}

// reckoner reckons a voucher's books.
type reckoner interface {
	Reckon(ctx context.Context, voucherID int64) (books.Books, error)
}

// Options are what the service needs from the first call on.
type Options struct {
	Vouchers vouchers
	OrderIDs *orderid.Codec
	Logger   *slog.Logger
}

// Ledger is what the service needs of Redis: there only once Redis answered.
type Ledger struct {
	// Client asks the server for its memory.
	Client     rueidis.Client
	Partitions int
	Carrier    carrier
	Reckoner   reckoner
}

// Service answers the calls of VoucherService.
type Service struct {
	seckillv1.UnimplementedVoucherServiceServer

	vouchers vouchers
	orderIDs *orderid.Codec
	log      *slog.Logger
	ledger   atomic.Pointer[Ledger]
	// opening is held from the look at Redis' memory until the voucher counts as
	// open, so that two vouchers that fit one by one are not opened together. It
	// holds within this process; across processes noeviction is the last guard:
	// a full Redis refuses Grabs, and loses none.
	opening chan struct{}
}

// New returns a Service that answers what the database alone can answer, and
// UNAVAILABLE to everything else until Bind.
func New(o Options) *Service {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return &Service{vouchers: o.Vouchers, orderIDs: o.OrderIDs, log: o.Logger, opening: make(chan struct{}, 1)}
}

// Bind gives the service its ledger, once Redis can be reached.
func (s *Service) Bind(l Ledger) { s.ledger.Store(&l) }

// CreateVoucher records a DRAFT.
func (s *Service) CreateVoucher(ctx context.Context, req *seckillv1.CreateVoucherRequest) (*seckillv1.CreateVoucherResponse, error) {
	wanted, err := newVoucher(req)
	if err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	v, err := s.vouchers.CreateVoucher(call, wanted)
	if err != nil {
		return nil, s.databaseError(ctx, "creating a voucher", wanted.ID, err)
	}
	return &seckillv1.CreateVoucherResponse{Voucher: shapeVoucher(v)}, nil
}

// GetVoucher reads one voucher.
func (s *Service) GetVoucher(ctx context.Context, req *seckillv1.GetVoucherRequest) (*seckillv1.GetVoucherResponse, error) {
	if err := checkVoucherID(req.GetVoucherId()); err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	v, err := s.vouchers.Voucher(call, req.GetVoucherId())
	if err != nil {
		return nil, s.databaseError(ctx, "reading a voucher", req.GetVoucherId(), err)
	}
	return &seckillv1.GetVoucherResponse{Voucher: shapeVoucher(v)}, nil
}

// ListVouchers reads one page.
func (s *Service) ListVouchers(ctx context.Context, req *seckillv1.ListVouchersRequest) (*seckillv1.ListVouchersResponse, error) {
	after, size, err := checkPage(req)
	if err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	page, err := s.vouchers.Vouchers(call, after, size)
	if err != nil {
		return nil, s.databaseError(ctx, "listing vouchers", 0, err)
	}
	resp := &seckillv1.ListVouchersResponse{Vouchers: make([]*seckillv1.Voucher, len(page))}
	for i, v := range page {
		resp.Vouchers[i] = shapeVoucher(v)
	}
	if len(page) < size {
		return resp, nil
	}
	// A full page may be the last: an empty one after it would be no page.
	last := page[len(page)-1].ID
	more, err := s.vouchers.Vouchers(call, last, 1)
	if err != nil {
		return nil, s.databaseError(ctx, "listing vouchers", 0, err)
	}
	if len(more) > 0 {
		resp.NextPageToken = pageToken(last)
	}
	return resp, nil
}

// OpenVoucher brings a DRAFT on sale if it fits into Redis' memory.
func (s *Service) OpenVoucher(ctx context.Context, req *seckillv1.OpenVoucherRequest) (*seckillv1.OpenVoucherResponse, error) {
	if err := checkVoucherID(req.GetVoucherId()); err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	l, err := s.bound()
	if err != nil {
		return nil, err
	}
	v, err := s.open(ctx, call, l, req.GetVoucherId())
	if err != nil {
		return nil, err
	}
	if v, err = s.carry(ctx, call, l, v); err != nil {
		return nil, err
	}
	return &seckillv1.OpenVoucherResponse{Voucher: shapeVoucher(v)}, nil
}

// open records the opening, if the memory is there.
func (s *Service) open(ctx, call context.Context, l *Ledger, id int64) (orderstore.Voucher, error) {
	select {
	case s.opening <- struct{}{}:
		defer func() { <-s.opening }()
	case <-call.Done():
		return orderstore.Voucher{}, s.busyOpening(ctx)
	}
	v, err := s.vouchers.Voucher(call, id)
	if err != nil {
		return orderstore.Voucher{}, s.databaseError(ctx, "reading a voucher", id, err)
	}
	// Any other state needs no more memory than it has: it is open already, or
	// the step is refused.
	if v.State == orderstore.StateDraft {
		if err := s.checkWindow(ctx, call, l, v); err != nil {
			return orderstore.Voucher{}, err
		}
		if err := s.checkMemory(ctx, call, l, v); err != nil {
			return orderstore.Voucher{}, err
		}
	}
	if v, err = s.vouchers.Transition(call, id, []string{orderstore.StateDraft}, orderstore.StateOpen); err != nil {
		return orderstore.Voucher{}, s.databaseError(ctx, "opening a voucher", id, err)
	}
	return v, nil
}

// checkWindow refuses a sale that is over before it begins, by the clock that
// decides about its Grabs.
func (s *Service) checkWindow(ctx, call context.Context, l *Ledger, v orderstore.Voucher) error {
	now, err := redisClock(call, l.Client)
	if err != nil {
		return s.redisError(ctx, "opening a voucher", v.ID, err)
	}
	if !now.Before(v.EndAt) {
		return windowOver(v)
	}
	return nil
}

// PauseVoucher stops an OPEN voucher for a while.
func (s *Service) PauseVoucher(ctx context.Context, req *seckillv1.PauseVoucherRequest) (*seckillv1.PauseVoucherResponse, error) {
	v, err := s.step(ctx, req.GetVoucherId(), []string{orderstore.StateOpen}, orderstore.StatePaused)
	if err != nil {
		return nil, err
	}
	return &seckillv1.PauseVoucherResponse{Voucher: shapeVoucher(v)}, nil
}

// ResumeVoucher lets a PAUSED voucher sell again.
func (s *Service) ResumeVoucher(ctx context.Context, req *seckillv1.ResumeVoucherRequest) (*seckillv1.ResumeVoucherResponse, error) {
	v, err := s.step(ctx, req.GetVoucherId(), []string{orderstore.StatePaused}, orderstore.StateOpen)
	if err != nil {
		return nil, err
	}
	return &seckillv1.ResumeVoucherResponse{Voucher: shapeVoucher(v)}, nil
}

// CloseVoucher ends a sale for good.
func (s *Service) CloseVoucher(ctx context.Context, req *seckillv1.CloseVoucherRequest) (*seckillv1.CloseVoucherResponse, error) {
	v, err := s.step(ctx, req.GetVoucherId(), []string{orderstore.StateOpen, orderstore.StatePaused}, orderstore.StateClosed)
	if err != nil {
		return nil, err
	}
	return &seckillv1.CloseVoucherResponse{Voucher: shapeVoucher(v)}, nil
}

// step takes a voucher from one of the given states to another: the database
// first, then the ledger. Without Redis the change is recorded all the same,
// for it may be a sale that must stop.
func (s *Service) step(ctx context.Context, id int64, from []string, to string) (orderstore.Voucher, error) {
	if err := checkVoucherID(id); err != nil {
		return orderstore.Voucher{}, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	v, err := s.vouchers.Transition(call, id, from, to)
	if err != nil {
		return orderstore.Voucher{}, s.databaseError(ctx, "changing a voucher's state", id, err)
	}
	l := s.ledger.Load()
	if l == nil {
		return orderstore.Voucher{}, notCarried(v, notConnected())
	}
	return s.carry(ctx, call, l, v)
}

// ArchiveVoucher removes the ledger of a voucher whose sale is over and proven.
func (s *Service) ArchiveVoucher(ctx context.Context, req *seckillv1.ArchiveVoucherRequest) (*seckillv1.ArchiveVoucherResponse, error) {
	id := req.GetVoucherId()
	if err := checkVoucherID(id); err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	l, err := s.bound()
	if err != nil {
		return nil, err
	}
	v, err := s.vouchers.Voucher(call, id)
	if err != nil {
		return nil, s.databaseError(ctx, "reading a voucher", id, err)
	}
	if v.State == orderstore.StateClosed {
		// Books count only once the ledger knows of the closing: before, a Grab
		// may still be admitted behind them.
		if v, err = s.carry(ctx, call, l, v); err != nil {
			return nil, err
		}
		reckoned, err := l.Reckoner.Reckon(call, id)
		if err != nil {
			return nil, s.reckonError(ctx, id, err)
		}
		if reckoned.Verdict != books.Proven {
			return nil, notProven(reckoned)
		}
	}
	if v, err = s.vouchers.Transition(call, id, []string{orderstore.StateClosed}, orderstore.StateArchived); err != nil {
		return nil, s.databaseError(ctx, "archiving a voucher", id, err)
	}
	if v, err = s.carry(ctx, call, l, v); err != nil {
		return nil, err
	}
	return &seckillv1.ArchiveVoucherResponse{Voucher: shapeVoucher(v)}, nil
}

// GetBooks reckons a voucher's books.
func (s *Service) GetBooks(ctx context.Context, req *seckillv1.GetBooksRequest) (*seckillv1.GetBooksResponse, error) {
	if err := checkVoucherID(req.GetVoucherId()); err != nil {
		return nil, err
	}
	call, cancel := bounded(ctx)
	defer cancel()
	l, err := s.bound()
	if err != nil {
		return nil, err
	}
	reckoned, err := l.Reckoner.Reckon(call, req.GetVoucherId())
	if err != nil {
		return nil, s.reckonError(ctx, req.GetVoucherId(), err)
	}
	return &seckillv1.GetBooksResponse{Books: s.shapeBooks(reckoned)}, nil
}

// carry brings the ledger to v, unless it is there, and returns the voucher as
// it is then.
func (s *Service) carry(ctx, call context.Context, l *Ledger, v orderstore.Voucher) (orderstore.Voucher, error) {
	if v.Applied() {
		return v, nil
	}
	err := l.Carrier.Carry(call, v)
	// Somebody changed the voucher meanwhile: theirs is the change to carry, and
	// what the voucher is now is the answer.
	if err != nil && !errors.Is(err, orderstore.ErrRevMoved) {
		return orderstore.Voucher{}, s.carryError(ctx, v, err)
	}
	now, err := s.vouchers.Voucher(call, v.ID)
	if err != nil {
		return orderstore.Voucher{}, s.databaseError(ctx, "reading a voucher", v.ID, err)
	}
	return now, nil
}

// bound is the ledger, or the answer while there is none.
func (s *Service) bound() (*Ledger, error) {
	if l := s.ledger.Load(); l != nil {
		return l, nil
	}
	return nil, notConnected()
}

// bounded keeps some of the call's time back for its answer.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(answerMargin, time.Until(deadline)/5)))
}

var _ seckillv1.VoucherServiceServer = (*Service)(nil)
