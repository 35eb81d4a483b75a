package rpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/rueidis"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/guardian"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// partitionsAtOnce is how many partitions are read at the same time; each
	// costs Redis some hundred microseconds, beside the Grabs.
	partitionsAtOnce = 8
	// databasePatience bounds the look at the database: the backlog is asked for
	// when something is wrong, and a database that hangs must not hide the rest.
	databasePatience = 2 * time.Second

	databaseAvailable   = "available"
	databaseUnavailable = "unavailable"
)

// GetBacklog reads what lies between admission and the database. A database that
// is away is part of the answer.
func (s *WriterService) GetBacklog(ctx context.Context, _ *seckillv1.GetBacklogRequest) (*seckillv1.GetBacklogResponse, error) {
	l := s.ledger.Load()
	if l == nil {
		return nil, notConnected()
	}
	call, cancel := bounded(ctx)
	defer cancel()
	resp := &seckillv1.GetBacklogResponse{Partitions: make([]*seckillv1.PartitionBacklog, l.Partitions)}
	var reading errgroup.Group
	reading.SetLimit(partitionsAtOnce + 1)
	reading.Go(func() error {
		resp.DeadLetters, resp.DatabaseState = s.database(call, l)
		return nil
	})
	statuses := l.Guardian.Status()
	for p := range l.Partitions {
		var known guardian.Status
		if p < len(statuses) {
			known = statuses[p]
		}
		reading.Go(func() (err error) {
			resp.Partitions[p], err = readPartition(call, l.Client, p, known)
			return err
		})
	}
	if err := reading.Wait(); err != nil {
		if gone(ctx) {
			return nil, status.FromContextError(ctx.Err()).Err()
		}
		s.log.ErrorContext(ctx, "ledger error in a call", "doing", "reading the backlog", telemetry.KeyErr, err)
		return nil, redisStatus(err)
	}
	resp.ReadTime = timestamppb.Now()
	return resp, nil
}

// database tells how many dead letters there are, nil where it cannot tell, and
// whether orders can be written.
func (s *WriterService) database(ctx context.Context, l *WriterLedger) (*int64, string) {
	ctx, cancel := context.WithTimeout(ctx, databasePatience)
	defer cancel()
	n, err := s.store.CountDeadLetters(ctx, orderstore.DeadLetterFilter{})
	if err != nil {
		s.log.WarnContext(ctx, "database error in a call", "doing", "counting dead letters", telemetry.KeyErr, err)
		return nil, databaseUnavailable
	}
	// A database that only answers, being read-only or full, is found out by who
	// writes to it.
	for _, part := range l.Pipeline.Health() {
		if part.Name == "database" && !part.Serving {
			return &n, databaseUnavailable
		}
	}
	return &n, databaseAvailable
}

func readPartition(ctx context.Context, client rueidis.Client, partition int, known guardian.Status) (*seckillv1.PartitionBacklog, error) {
	meta, err := ledger.ReadMeta(ctx, client, partition)
	switch {
	case errors.Is(err, ledger.ErrFault):
		// Shown, for it is what an operator must see.
		return &seckillv1.PartitionBacklog{Partition: int32(partition), Reason: cmp.Or(known.Reason, "the ledger has a fault")}, nil
	case err != nil:
		return nil, err
	}
	p := &seckillv1.PartitionBacklog{Partition: int32(partition), Epoch: meta.Epoch, InFlight: meta.InFlight()}
	switch {
	case !meta.Exists:
		p.Reason = cmp.Or(known.Reason, "the ledger is missing")
		return p, nil
	case !meta.Open:
		p.Reason = cmp.Or(meta.Reason, known.Reason, "closed")
	case !known.Open:
		// Meta says open, and yet gateways may find no script.
		p.Reason = cmp.Or(known.Reason, "not looked at since it was opened")
	default:
		p.Open, p.Reason = true, known.Alarm
	}
	backlog, err := ledger.ReadBacklog(ctx, client, partition, meta.Epoch)
	switch {
	case errors.Is(err, ledger.ErrNoGroup), errors.Is(err, ledger.ErrFault):
		// Without a stream nothing is known of it, which is not nothing.
		p.Reason = cmp.Or(p.Reason, "the orders stream is missing or has a fault")
		return p, nil
	case err != nil:
		return nil, err
	}
	after, err := ledger.ReadMeta(ctx, client, partition)
	if err != nil {
		return nil, err
	}
	// With fewer entries than are not settled, some were removed by hand, and
	// nobody can tell whether those had been delivered.
	if backlog.Entries >= meta.EntriesIn-after.EntriesOut {
		p.LagEntries = backlog.Undelivered
	}
	if backlog.OldestID != "" {
		now, err := redisClock(ctx, client)
		if err != nil {
			return nil, err
		}
		// An entry's id may lie ahead where the clock was set back.
		p.OldestAge = durationpb.New(max(0, now.Sub(backlog.OldestAt)))
	}
	for _, c := range backlog.Consumers {
		p.Consumers = append(p.Consumers, &seckillv1.ConsumerBacklog{
			Name: c.Consumer, PendingEntries: c.Entries, Idle: durationpb.New(c.Idle),
		})
	}
	return p, nil
}

// redisClock is the time by which entries are named.
func redisClock(ctx context.Context, client rueidis.Client) (time.Time, error) {
	now, err := client.Do(ctx, client.B().Time().Build()).AsIntSlice() // seconds, and the microseconds of the next
	if err == nil && len(now) != 2 {
		err = fmt.Errorf("TIME answered %v", now)
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("reading redis' clock: %w", err)
	}
	return time.Unix(now[0], now[1]*1000), nil
}
