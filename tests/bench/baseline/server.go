package baseline

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync/atomic"

	"github.com/redis/rueidis"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// queueLength is the tutorial's bound of its queue in memory.
const queueLength = 1024 * 1024

// Stage is one of the tutorial's.
type Stage string

// The stages, see the package.
const (
	StageSync   Stage = "sync"
	StageQueue  Stage = "queue"
	StageStream Stage = "stream"
)

// Server is a stage behind the front that seckill has. Only Grab is served.
type Server struct {
	seckillv1.UnimplementedSeckillServiceServer
	stage  Stage
	client rueidis.Client
	db     *sql.DB
	admit  *rueidis.Lua
	queue  chan order
	log    *slog.Logger
	tokens atomic.Int64
}

// New makes a Server. Run must run for the stages that write later.
func New(stage Stage, client rueidis.Client, db *sql.DB, log *slog.Logger) (*Server, error) {
	switch stage {
	case StageSync, StageQueue, StageStream:
	default:
		return nil, fmt.Errorf("unknown stage %q", stage)
	}
	return &Server{
		stage: stage, client: client, db: db, log: log,
		admit: rueidis.NewLuaScript(admitScript), queue: make(chan order, queueLength),
	}, nil
}

// Run writes the orders of the stages queue and stream until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	switch s.stage {
	case StageQueue:
		return s.drainQueue(ctx)
	case StageStream:
		return s.drainStream(ctx)
	}
	<-ctx.Done()
	return nil
}

// Grab implements SeckillService.
func (s *Server) Grab(ctx context.Context, req *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	o := order{userID: req.GetUserId(), voucherID: req.GetVoucherId()}
	var err error
	if s.stage == StageSync {
		o.id, err = s.grabNow(ctx, o)
	} else {
		o.id, err = s.grabLater(ctx, o)
	}
	switch {
	case errors.Is(err, errSoldOut), errors.Is(err, errOrdered):
		// The tutorial has no answer that names the order a user has.
		return &seckillv1.GrabResponse{Outcome: seckillv1.Outcome_OUTCOME_SOLD_OUT}, nil
	case errors.Is(err, errQueueFull):
		return nil, status.Error(codes.ResourceExhausted, err.Error())
	case err != nil:
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &seckillv1.GrabResponse{
		Outcome: seckillv1.Outcome_OUTCOME_ADMITTED, DecidedAt: timestamppb.Now(),
		Order: &seckillv1.Order{OrderId: strconv.FormatInt(o.id, 10), UserId: o.userID, VoucherId: o.voucherID},
	}, nil
}

// grabNow is stage sync.
func (s *Server) grabNow(ctx context.Context, o order) (int64, error) {
	if err := checkVoucher(ctx, s.db, o.voucherID); err != nil {
		return 0, err
	}
	free, err := s.write(ctx, &o)
	if err == nil && !free {
		err = errOrdered
	}
	return o.id, err
}

// grabLater is the front of the stages queue and stream.
func (s *Server) grabLater(ctx context.Context, o order) (int64, error) {
	args := []string{strconv.FormatInt(o.voucherID, 10), strconv.FormatInt(o.userID, 10)}
	id, err := nextID(ctx, s.client)
	if err != nil {
		return 0, err
	}
	if s.stage == StageStream {
		args = append(args, strconv.FormatInt(id, 10))
	}
	answer, err := s.admit.Exec(ctx, s.client, nil, args).AsInt64()
	switch {
	case err != nil:
		return 0, fmt.Errorf("running the script: %w", err)
	case answer == 1:
		return 0, errSoldOut
	case answer != 0:
		return 0, errOrdered
	}
	o.id = id
	if s.stage == StageQueue {
		select {
		case s.queue <- o:
		default:
			return 0, errQueueFull
		}
	}
	return id, nil
}

var errQueueFull = errors.New("the queue is full")

// write creates an order under the lock of its user; false: somebody has that.
func (s *Server) write(ctx context.Context, o *order) (bool, error) {
	return locked(ctx, s.client, o.userID, strconv.FormatInt(s.tokens.Add(1), 10), func() error {
		if o.id == 0 {
			id, err := nextID(ctx, s.client)
			if err != nil {
				return err
			}
			o.id = id
		}
		return createOrder(ctx, s.db, *o)
	})
}

// drainQueue is the one goroutine of stage queue. What is refused is lost.
func (s *Server) drainQueue(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case o := <-s.queue:
			if free, err := s.write(ctx, &o); (err != nil || !free) && ctx.Err() == nil {
				s.log.Error("order lost", "user_id", o.userID, "err", err)
			}
		}
	}
}

// drainStream is the one consumer of stage stream: COUNT 1, row by row. An
// order that fails is tried again from the consumer's pending list; one whose
// lock is taken, or whose user has an order, is acknowledged and lost.
func (s *Server) drainStream(ctx context.Context) error {
	err := s.client.Do(ctx, s.client.B().XgroupCreate().Key(Stream).Group(group).Id("0").Mkstream().Build()).Error()
	if err != nil && !rueidis.IsRedisBusyGroup(err) {
		return fmt.Errorf("making the group: %w", err)
	}
	from := ">"
	for ctx.Err() == nil {
		answer, err := s.client.Do(ctx, s.client.B().Xreadgroup().Group(group, consumer).Count(1).Block(2000).Streams().Key(Stream).Id(from).Build()).AsXRead()
		if err != nil && !rueidis.IsRedisNil(err) {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("reading the stream: %w", err)
		}
		if from != ">" && len(answer[Stream]) == 0 {
			from = ">"
		}
		for _, entry := range answer[Stream] {
			if err := s.handle(ctx, entry); err != nil && ctx.Err() == nil {
				s.log.Error("order failed", "err", err)
				from = "0"
			}
		}
	}
	return nil
}

func (s *Server) handle(ctx context.Context, entry rueidis.XRangeEntry) error {
	o, err := parseEntry(entry)
	if err != nil {
		return err
	}
	free, err := s.write(ctx, &o)
	switch {
	case err == nil && !free, errors.Is(err, errOrdered), errors.Is(err, errSoldOut):
		s.log.Error("order lost", "user_id", o.userID, "err", err)
	case err != nil:
		return err
	}
	return s.client.Do(ctx, s.client.B().Xack().Key(Stream).Group(group).Id(entry.ID).Build()).Error()
}

func parseEntry(entry rueidis.XRangeEntry) (o order, err error) {
	for name, to := range map[string]*int64{"id": &o.id, "userId": &o.userID, "voucherId": &o.voucherID} {
		if *to, err = strconv.ParseInt(entry.FieldValues[name], 10, 64); err != nil {
			return o, fmt.Errorf("entry %s: %s: %w", entry.ID, name, err)
		}
	}
	return o, nil
}
