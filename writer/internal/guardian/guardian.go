// Package guardian decides who may open the door of a partition. One writer at
// a time is the guardian of a partition, by a lock in the database: it makes a
// ledger that never was, proves one that Redis brought back, and only then
// loads the admission script, without which no gateway gets in. It carries
// what the database says of vouchers over to the ledger, and closes a
// partition whose figures contradict each other.
//
// The lock is for order only. Every write of a guardian to the ledger is a
// script that refuses another epoch or an older rev, so one that was paused and
// wakes up does no harm.
package guardian

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// Options are the settings of a guardian.
type Options struct {
	Store      *orderstore.Store
	Client     rueidis.Client
	Partitions int
	// Bound is the most orders in flight of a partition.
	Bound int64
	// Durability is the least that the server's configuration must give, else
	// partitions stay closed.
	Durability ledger.Durability
	// Interval is the time between two looks at a partition.
	Interval time.Duration
	// AlarmAge is how long an admitted order may take to become a row before it
	// is looked for; 0 is DefaultAlarmAge.
	AlarmAge time.Duration
	// ConsumerIdle is how long a consumer that holds nothing may go without a
	// read before it is removed; 0 is DefaultConsumerIdle.
	ConsumerIdle time.Duration
	// OrderKeys are the fingerprints of the order_id keys, for the layout.
	OrderKeys  map[int]string
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

// DefaultConsumerIdle is far beyond any pause of a writer that lives.
const DefaultConsumerIdle = 15 * time.Minute

// DefaultAlarmAge is far beyond what an order takes from admission to its row
// in good days, some 20 ms, and short enough for a lost one to be named within
// seconds.
const DefaultAlarmAge = 3 * time.Second

// Status is what a process knows of a partition.
type Status struct {
	Partition int
	Epoch     int64
	// Guardian tells whether this process is the partition's guardian.
	Guardian bool
	// Open tells whether gateways may admit.
	Open bool
	// Reason tells why not.
	Reason string
	// Alarm is a rule of the books that does not hold, also where the partition
	// is open all the same. Known to the guardian only.
	Alarm string
	// Stray is an entry, the oldest one, that no writer of this version can read or
	// settle: its orders stay in flight, if it has any.
	Stray string
}

// Guardian stands ready for all partitions.
type Guardian struct {
	Options
	keepers []*keeper
	metrics *metrics
	// voucherFaults are waiting to be closed. A full queue drops one: the writer
	// meets the next order of the voucher, and tells again.
	voucherFaults chan voucherFault
	reading       serverReading
}

type voucherFault struct {
	voucherID int64
	reason    string
}

// voucherFaultsMax bounds the vouchers that wait to be closed.
const voucherFaultsMax = 64

// New makes a guardian.
func New(o Options) *Guardian {
	if o.ConsumerIdle == 0 {
		o.ConsumerIdle = DefaultConsumerIdle
	}
	if o.AlarmAge == 0 {
		o.AlarmAge = DefaultAlarmAge
	}
	g := &Guardian{Options: o, metrics: newMetrics(o.Registerer), voucherFaults: make(chan voucherFault, voucherFaultsMax)}
	for partition := range o.Partitions {
		g.keepers = append(g.keepers, newKeeper(g, partition))
	}
	return g
}

// Run watches all partitions until ctx ends, and gives its locks back.
func (g *Guardian) Run(ctx context.Context) error {
	var running sync.WaitGroup
	for _, k := range g.keepers {
		running.Go(func() { k.run(ctx) })
	}
	running.Go(func() { g.listen(ctx) })
	running.Go(func() { g.closeFaulty(ctx) })
	running.Wait()
	return nil
}

// Status answers for all partitions.
func (g *Guardian) Status() []Status {
	all := make([]Status, len(g.keepers))
	for i, k := range g.keepers {
		all[i] = k.current()
	}
	return all
}

// Health answers for all partitions as health parts.
func (g *Guardian) Health() []telemetry.Part {
	parts := make([]telemetry.Part, 0, len(g.keepers))
	for _, s := range g.Status() {
		state := "closed"
		if s.Open {
			state = "open"
		}
		if s.Guardian {
			state += ", guarded here"
		}
		parts = append(parts, telemetry.Part{Name: fmt.Sprintf("partition.%d", s.Partition), Serving: s.Open, State: state, Reason: words(s)})
	}
	return parts
}

// words are why a partition is closed, and what is wrong in it besides.
func words(s Status) string {
	all := s.Reason
	for _, more := range []string{s.Alarm, s.Stray} {
		switch {
		case all == "":
			all = more
		case more != "" && !strings.Contains(all, more):
			all += "; " + more
		}
	}
	return all
}

// PartitionFault closes a partition for a fault that a writer or a gateway met,
// whoever its guardian is. It does not block.
func (g *Guardian) PartitionFault(partition int, reason string) {
	if partition >= 0 && partition < len(g.keepers) {
		g.keepers[partition].fault(reason)
	}
}

// VoucherFault ends the sale of a voucher. It does not block.
func (g *Guardian) VoucherFault(voucherID int64, reason string) {
	select {
	case g.voucherFaults <- voucherFault{voucherID, reason}:
	default:
	}
}

func (g *Guardian) closeFaulty(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case fault := <-g.voucherFaults:
			if err := g.closeVoucher(ctx, fault); err != nil {
				g.Logger.Error("closing a faulty voucher; trying on", telemetry.KeyVoucherID, fault.voucherID, telemetry.KeyReason, fault.reason, telemetry.KeyErr, err)
				// Behind the others: one that cannot be closed must not keep them selling.
				g.VoucherFault(fault.voucherID, fault.reason)
				pause(ctx, g.Interval)
			}
		}
	}
}

func (g *Guardian) closeVoucher(ctx context.Context, fault voucherFault) error {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	voucher, err := g.Store.Voucher(ctx, fault.voucherID)
	if errors.Is(err, orderstore.ErrVoucherNotFound) {
		// There is no row whose state could be carried over.
		g.PartitionFault(ledger.Partition(fault.voucherID, g.Partitions), fmt.Sprintf("voucher %d: %s", fault.voucherID, fault.reason))
		return nil
	}
	if err != nil {
		return err
	}
	if voucher.State == orderstore.StateOpen || voucher.State == orderstore.StatePaused {
		voucher, err = g.Store.Transition(ctx, fault.voucherID, []string{orderstore.StateOpen, orderstore.StatePaused}, orderstore.StateClosed)
		if err != nil {
			return err
		}
		g.Logger.Error("sale closed", telemetry.KeyVoucherID, fault.voucherID, telemetry.KeyReason, fault.reason)
	}
	if voucher.Applied() {
		return nil
	}
	if err := g.Carry(ctx, voucher); err != nil {
		// Recorded it is, and the guardian of its partition carries it over.
		g.Logger.Warn("carrying a faulty voucher over to its ledger", telemetry.KeyVoucherID, voucher.ID, telemetry.KeyErr, err)
	}
	return nil
}

// listen hears what gateways report of a partition's ledger.
func (g *Guardian) listen(ctx context.Context) {
	for ctx.Err() == nil {
		err := ledger.ListenFaults(ctx, g.Client, g.Partitions, func(partition int, kind ledger.FaultKind, text string) {
			g.keepers[partition].report(kind, text)
		})
		if ctx.Err() == nil {
			g.Logger.Debug("listening to gateways", telemetry.KeyErr, err)
			pause(ctx, g.Interval)
		}
	}
}

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
