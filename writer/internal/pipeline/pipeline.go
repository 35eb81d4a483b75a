// Package pipeline carries admitted orders from the partitions' streams into
// the database: read and take over, gather into batches, persist, settle. An
// entry stays pending in its consumer group until every order of it has a
// committed verdict, so whatever dies, somebody else finds it there.
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// Persister gives every order of a batch its verdict in the database. An error
// means that nothing is wrong with the orders: run the same batch again later.
type Persister interface {
	Persist(ctx context.Context, orders []orderstore.Order) ([]orderstore.Verdict, error)
}

// Holder makes dead letters of what the database refuses or nobody can read. An
// error means that nothing is decided: run the same again later.
type Holder interface {
	// Hold gives every order a verdict, HELD where nothing stands already.
	Hold(ctx context.Context, held []orderstore.Held) ([]orderstore.Verdict, error)
	// HoldEntry does so for the positions that an entry stands for.
	HoldEntry(ctx context.Context, e orderstore.DeadEntry) ([]orderstore.Verdict, error)
	// Voucher is for entries of vouchers that have no ledger; it is
	// orderstore.ErrVoucherNotFound where there is none.
	Voucher(ctx context.Context, id int64) (orderstore.Voucher, error)
}

// Alarm hears of what a pipeline must not decide by itself. It does not block.
type Alarm interface {
	// PartitionFault: the partition's ledger contradicts the database or lost
	// entries. It must not admit any further.
	PartitionFault(partition int, reason string)
	// VoucherFault: the voucher must not sell any further.
	VoucherFault(voucherID int64, reason string)
}

// Options are the settings of a pipeline.
type Options struct {
	// Reader is for blocking reads only, one connection for each partition.
	Reader rueidis.Client
	// Client is for everything else.
	Client rueidis.Client
	Store  Persister
	Holder Holder
	// Ping asks the database for a sign of life: one that works and is slow, or
	// holds a lock, is no outage. Nil: every failure counts as one.
	Ping       func(context.Context) error
	Alarm      Alarm
	Partitions int
	// Consumer is this process in the consumer groups. It must be unique: two of
	// the same name would each take the other's entries for their own.
	Consumer string
	// Committers is the number of transactions in flight.
	Committers int
	// BatchMax is about how many orders one transaction inserts; the entry that
	// passes it is still taken, so up to ledger.MaxBatch-1 more.
	BatchMax int
	// BatchTimeout bounds one run of a transaction with its read-back. Twice
	// that must be less than MinIdle, so that nobody takes over what is being
	// worked on.
	BatchTimeout time.Duration
	// MinIdle is how long an entry must have been pending before it is taken
	// over.
	MinIdle time.Duration
	// Block is how long a read waits for a new entry. Where none comes the wait
	// grows, up to blockMost if that is longer.
	Block time.Duration
	// DrainTimeout bounds the end: finishing what is in hand and settling it.
	DrainTimeout time.Duration
	// SlotsMax is the most orders in hand.
	SlotsMax   int
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// readMargin is what a read may take beyond its wait. Where it is given up
// together with its BLOCK, entries are delivered that nobody sees.
const readMargin = 2 * time.Second

// Validate names the first setting that does not fit.
func (o Options) Validate() error {
	switch {
	case o.Consumer == "" || o.Consumer == ledger.Group || o.Consumer == ledger.ReleasedConsumer:
		return fmt.Errorf("consumer %q: must be a name of its own", o.Consumer)
	case o.Partitions < 1:
		return fmt.Errorf("partitions %d: must be at least 1", o.Partitions)
	case o.Committers < 1:
		return fmt.Errorf("committers %d: must be at least 1", o.Committers)
	case o.BatchMax < 1:
		return fmt.Errorf("batch max %d: must be at least 1", o.BatchMax)
	case o.SlotsMax < o.BatchMax+ledger.MaxBatch*o.Partitions:
		return fmt.Errorf("slots %d: must be at least a batch of %d and one entry of %d for each of %d partitions",
			o.SlotsMax, o.BatchMax, ledger.MaxBatch, o.Partitions)
	case o.Block < time.Millisecond || o.BatchTimeout <= 0 || o.DrainTimeout <= 0:
		return errors.New("block, batch timeout and drain timeout must be greater than 0")
	case 2*o.BatchTimeout >= o.MinIdle:
		return fmt.Errorf("2 x batch timeout (%v) must be less than min idle (%v), else entries are taken over while they are worked on",
			o.BatchTimeout, o.MinIdle)
	}
	return nil
}

// Pipeline is one process's share of the writing.
type Pipeline struct {
	Options
	metrics *metrics
	slots   *slots
	// entries are in hand, on their way to a committer. Its capacity is SlotsMax,
	// since each holds a slot at least: a send never waits for long.
	entries  chan work
	readers  []*reader
	parking  *parking
	limit    *batchLimit
	database database
}

// New checks the options and makes a pipeline.
func New(o Options) (*Pipeline, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("making the pipeline: %w", err)
	}
	p := &Pipeline{
		Options: o,
		metrics: newMetrics(o.Registerer),
		slots:   newSlots(o.SlotsMax),
		limit:   newBatchLimit(o.BatchMax),
		entries: make(chan work, o.SlotsMax+ledger.MaxBatch*o.Partitions),
	}
	p.database.gauge = p.metrics.available
	// Half of the slots, and never those that the readers need for an entry each.
	p.parking = newParking(min(o.SlotsMax/2, o.SlotsMax-ledger.MaxBatch*o.Partitions), p.drop)
	for partition := range o.Partitions {
		p.readers = append(p.readers, newReader(p, partition))
	}
	return p, nil
}

// Run works until ctx ends and then stops in this order:
//
//  1. Readers take no more; the wait of a read is ended.
//  2. Committers finish and settle what is in hand, within DrainTimeout.
//  3. What is still pending in its name is handed back, so that peers take it at
//     once instead of after MinIdle.
//  4. The process removes its consumers where they hold nothing.
//
// What could not be handed back either is taken over by others in time.
func (p *Pipeline) Run(ctx context.Context) error {
	// Work in hand outlives ctx, by DrainTimeout at most.
	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()

	var committers sync.WaitGroup
	for range p.Committers {
		committers.Go(func() { p.commitLoop(working, ctx) })
	}
	var parked sync.WaitGroup
	parked.Go(func() { p.parkedLoop(working, ctx) })
	var readers sync.WaitGroup
	for _, r := range p.readers {
		readers.Go(func() { r.run(ctx) })
	}
	<-ctx.Done()

	drain := time.AfterFunc(p.DrainTimeout, stop)
	defer drain.Stop()
	readers.Wait()
	close(p.entries)
	committers.Wait()
	parked.Wait()
	if left := p.slots.inUse(); left > 0 {
		p.Logger.Warn("stopped before all was written; others take it over", telemetry.KeyOrders, left)
	}
	p.handBack(ctx)
	p.removeConsumers(ctx)
	return nil
}

// handBack gives up what this process could not finish. It asks the stream what
// that is: an entry may also have been delivered with an answer that got lost.
func (p *Pipeline) handBack(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), partingTimeout)
	defer cancel()
	for _, r := range p.readers {
		epoch := r.epoch.Load()
		for released := 1; epoch != 0 && released > 0; {
			ids, err := ledger.PendingIDs(ctx, p.Client, r.partition, epoch, p.Consumer, releasePage)
			if err == nil && len(ids) > 0 {
				faultpoint.Reach(faultpoint.WriterBeforeRelease)
				released, err = ledger.Release(ctx, p.Client, r.partition, epoch, p.Consumer, p.MinIdle, ids)
				faultpoint.Reach(faultpoint.WriterAfterRelease)
				p.metrics.released.Add(float64(released))
			}
			if err != nil {
				p.Logger.Warn("handing entries back; they are taken over in time", telemetry.KeyPartition, r.partition, telemetry.KeyErr, err)
			}
			if err != nil || len(ids) < releasePage {
				break
			}
		}
	}
}

// removeConsumers leaves no consumer behind that would have to be found out to
// be dead. One that still holds entries stays: it goes when they are taken over.
func (p *Pipeline) removeConsumers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), partingTimeout)
	defer cancel()
	for _, r := range p.readers {
		epoch := r.epoch.Load()
		if epoch == 0 {
			continue
		}
		faultpoint.Reach(faultpoint.WriterBeforeRemoval)
		if _, err := ledger.RemoveConsumer(ctx, p.Client, r.partition, epoch, p.Consumer); err != nil {
			p.Logger.Warn("removing the own consumer", telemetry.KeyPartition, r.partition, telemetry.KeyErr, err)
		}
		faultpoint.Reach(faultpoint.WriterAfterRemoval)
	}
}

const (
	// partingTimeout bounds two courtesies: what is not handed back is taken over,
	// a consumer that is not removed is found to be idle.
	partingTimeout = 2 * time.Second
	// releasePage is how many entries are handed back at a time.
	releasePage = 1000
)

// Health tells what the pipeline can do now.
func (p *Pipeline) Health() []telemetry.Part {
	parts := []telemetry.Part{p.database.part()}
	for _, r := range p.readers {
		parts = append(parts, r.part())
	}
	return parts
}
