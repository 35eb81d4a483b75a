// Package admit turns concurrent Grabs into admissions by the ledger: it
// combines the Grabs of one voucher into batches, runs the admission script,
// and decides what a caller may be told when an answer was lost.
//
// A Grab moves through the files in this order: grab.go (it is handed in and
// handed back), lane.go (Grabs of a voucher gather), batch.go (some of them leave
// together), run.go (they meet the script, again if need be), partition.go and
// clock.go (what is believed of the ledger meanwhile), fault.go (who is told of
// what must not be). admitter.go makes and ends all that; find.go looks up orders
// and changes nothing.
package admit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
)

// Defaults of Config.
const (
	// DefaultMaxWaiting bounds the Grabs that have no answer yet. 20,000 are 80
	// full batches, some hundred milliseconds of work: whoever comes later would
	// rather hear so at once than wait for his deadline.
	DefaultMaxWaiting = 20_000
	// DefaultMaxInFlight bounds the calls in flight over all vouchers. It lies
	// below the ring of one connection (1,024 commands): rueidis does not honour
	// a context while that is full.
	DefaultMaxInFlight = 256
	// DefaultDeadline is given to a Grab whose context has none.
	DefaultDeadline = 2 * time.Second
	// DefaultRefresh is the time between two looks at every partition while
	// nothing goes wrong. It bounds how late health tells of a change.
	DefaultRefresh = time.Second
)

const (
	// maxLaneBatches is the most calls in flight for one voucher. More would only
	// queue up in Redis, which runs one script at a time.
	maxLaneBatches = 4
	// attemptWindow is how long after it was sent a call may still admit. A
	// second run can refuse nobody before it is over, so it is short; it is far
	// above the time of a call in good days, below the 2 s that a caller waits.
	attemptWindow = 500 * time.Millisecond
	// attemptGrace is how long an answer is waited for beyond the window.
	attemptGrace = 100 * time.Millisecond
	// answerMargin is how long before its deadline a Grab is answered, so that
	// the answer says what is known instead of being cut off on its way. A tenth
	// of the time where that is less.
	answerMargin = 100 * time.Millisecond
	// sweepLeast is the least time between two looks at the deadlines of a lane:
	// one look may pass thousands of Grabs.
	sweepLeast = time.Millisecond
	// maxReads bounds the lookups of GetOrder in flight.
	maxReads = 256
)

// What ends a Grab without an answer of the sale. With all but
// ErrOutcomeUnknown nothing was taken.
var (
	// ErrOverloaded: too many Grabs wait, or this one waited until its deadline.
	ErrOverloaded = errors.New("too many grabs are waiting")
	// ErrBusy: too many orders of the partition are in flight.
	ErrBusy = errors.New("too many orders are in flight")
	// ErrVoucherNotFound: no such voucher, or never opened.
	ErrVoucherNotFound = errors.New("voucher not found")
	// ErrVoucherArchived: the voucher's ledger was removed.
	ErrVoucherArchived = errors.New("voucher is archived")
	// ErrClosed: the partition admits nobody until its ledger is proven.
	ErrClosed = errors.New("partition is closed")
	// ErrScriptVersion: the partition is open, but for another version of the
	// admission script.
	ErrScriptVersion = errors.New("partition is open for another version of the admission script")
	// ErrRedisUnreachable: Redis cannot be reached or refused the call.
	ErrRedisUnreachable = errors.New("redis is unreachable")
	// ErrLedgerFault: the ledger answered what it never should.
	ErrLedgerFault = errors.New("ledger fault")
	// ErrClosing: the admitter takes no more.
	ErrClosing = errors.New("gateway is shutting down")
	// ErrOutcomeUnknown: the order may exist.
	ErrOutcomeUnknown = errors.New("outcome is unknown")
)

// Result is the answer of the sale to a Grab.
type Result struct {
	// Decision is DecisionAdmitted or a refusal: DecisionSoldOut,
	// DecisionNotStarted, DecisionEnded or DecisionPaused.
	Decision ledger.Decision
	// Replayed tells that the order was there before this Grab, or may have been
	// made by a run of it whose answer was lost. Order, State and Durability are
	// set with DecisionAdmitted only.
	Replayed   bool
	Order      orderid.Position
	State      ledger.MarkState
	Durability ledger.Durability
	// DecidedAt is the time of the Redis clock.
	DecidedAt time.Time
}

// Config is what an Admitter needs. Zero numbers take their defaults.
type Config struct {
	Client     rueidis.Client
	Partitions int
	Logger     *slog.Logger
	Registerer prometheus.Registerer

	MaxWaiting  int           // Grabs without an answer
	MaxInFlight int           // calls in flight over all vouchers
	MaxBatch    int           // Grabs a call, at most ledger.MaxBatch
	Deadline    time.Duration // of a Grab whose context has none
	Refresh     time.Duration // between two looks at the partitions
	// OnStatus, if set, is called by Run after each look.
	OnStatus func([]Status)
}

// Admitter admits Grabs. Make one with New, keep Run running, Close it last.
type Admitter struct {
	cfg        Config
	log        *slog.Logger
	metrics    *metrics
	clock      *clock
	partitions []*partition
	shards     [shards]shard
	faults     *faultLimiter

	waiting  atomic.Int64
	inFlight chan struct{} // a place for each call
	reads    chan struct{} // a place for each lookup

	base    context.Context // of all calls; ended by Close
	cancel  context.CancelFunc
	running sync.WaitGroup

	// admit runs the script once.
	admit func(context.Context, ledger.AdmitCall) (ledger.AdmitReply, error)
}

// New makes an Admitter. It does not touch Redis.
func New(cfg Config) (*Admitter, error) {
	if cfg.Partitions < 1 {
		return nil, fmt.Errorf("making an admitter: %d partitions", cfg.Partitions)
	}
	if cfg.MaxBatch == 0 {
		cfg.MaxBatch = ledger.MaxBatch
	}
	if cfg.MaxBatch < 1 || cfg.MaxBatch > ledger.MaxBatch {
		return nil, fmt.Errorf("making an admitter: a batch of %d grabs is not in 1..%d", cfg.MaxBatch, ledger.MaxBatch)
	}
	if cfg.MaxWaiting == 0 {
		cfg.MaxWaiting = DefaultMaxWaiting
	}
	if cfg.MaxInFlight == 0 {
		cfg.MaxInFlight = DefaultMaxInFlight
	}
	if cfg.Deadline == 0 {
		cfg.Deadline = DefaultDeadline
	}
	if cfg.Refresh == 0 {
		cfg.Refresh = DefaultRefresh
	}
	if cfg.MaxWaiting < 0 || cfg.MaxInFlight < 0 || cfg.Deadline < 0 || cfg.Refresh < 0 {
		return nil, errors.New("making an admitter: a bound or a duration is negative")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	a := &Admitter{
		cfg: cfg, log: cfg.Logger, clock: newClock(), faults: newFaultLimiter(),
		inFlight: make(chan struct{}, cfg.MaxInFlight), reads: make(chan struct{}, maxReads),
	}
	a.admit = func(ctx context.Context, call ledger.AdmitCall) (ledger.AdmitReply, error) {
		return ledger.Admit(ctx, cfg.Client, call)
	}
	var err error
	if a.metrics, err = newMetrics(cfg.Registerer, a); err != nil {
		return nil, fmt.Errorf("registering admission metrics: %w", err)
	}
	a.base, a.cancel = context.WithCancel(context.Background())
	for number := range cfg.Partitions {
		a.partitions = append(a.partitions, newPartition(a, number))
	}
	for i := range a.shards {
		a.shards[i].init()
	}
	return a, nil
}

// Run looks at every partition again and again until ctx ends, so that idle
// ones are known as well.
func (a *Admitter) Run(ctx context.Context) {
	tick := time.NewTicker(a.cfg.Refresh)
	defer tick.Stop()
	for {
		looks := time.Now()
		var all sync.WaitGroup
		for _, p := range a.partitions {
			all.Go(func() { p.refresh(ctx, looks) })
		}
		all.Wait()
		if ctx.Err() == nil && a.cfg.OnStatus != nil {
			a.cfg.OnStatus(a.Status())
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// Status is what is believed of every partition, from memory.
func (a *Admitter) Status() []Status {
	all := make([]Status, len(a.partitions))
	for i, p := range a.partitions {
		all[i] = p.status()
	}
	return all
}

// Close takes no more Grabs, waits until those that wait have their answers,
// or ctx ends, and then ends every call.
func (a *Admitter) Close(ctx context.Context) error {
	for i := range a.shards {
		a.shards[i].close()
	}
	done := make(chan struct{})
	go func() { a.running.Wait(); close(done) }()
	select {
	case <-done:
		a.cancel()
		return nil
	case <-ctx.Done():
		a.cancel()
		return fmt.Errorf("closing the admitter: calls are still in flight: %w", ctx.Err())
	}
}
