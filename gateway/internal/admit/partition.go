package admit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
)

const (
	// refreshSpacing is the least time between two readings of a partition: while
	// it is closed every batch asks for one, and they share it.
	refreshSpacing = 50 * time.Millisecond
	// refreshTimeout bounds one read.
	refreshTimeout = time.Second
	// silenceLeast is the least wait after which Redis may be called silent.
	silenceLeast = 100 * time.Millisecond
)

// State is what is believed of a partition.
type State string

// The states. Only StateOpen admits.
const (
	StateUnknown     State = "unknown"     // not looked at yet
	StateOpen        State = "open"        // open, and this version's script is loaded
	StateClosed      State = "closed"      // meta says so
	StateMissing     State = "missing"     // there is no meta
	StateUnproven    State = "unproven"    // open, but the script is not loaded: Redis restarted
	StateVersion     State = "version"     // open for another version of the script
	StateUnreachable State = "unreachable" // Redis does not answer, or refuses
	StateFault       State = "fault"       // meta is not what it should be
)

// Status is the state of a partition, for health.
type Status struct {
	Partition int
	Epoch     int64 // 0 where none was read yet
	State     State
	Reason    string
}

// view is one reading of a partition.
type view struct {
	began  time.Time // when the reading began
	epoch  int64     // the last one read, 0 for none
	sha    string    // of the admission script for that epoch
	state  State
	reason string
	err    error // why there is no reading
}

// partition is what a gateway keeps of one.
type partition struct {
	admitter *Admitter
	number   int
	view     atomic.Pointer[view]
	replied  atomic.Int64 // when anything last came back from Redis, ns since the clock's start

	mu      sync.Mutex
	reading chan struct{} // closed when the reading under way ends; nil for none
}

func newPartition(a *Admitter, number int) *partition {
	p := &partition{admitter: a, number: number}
	p.view.Store(&view{state: StateUnknown, reason: "not read yet"})
	return p
}

func (a *Admitter) partitionOf(voucherID int64) *partition {
	return a.partitions[ledger.Partition(voucherID, len(a.partitions))]
}

func (p *partition) status() Status {
	v := p.view.Load()
	return Status{Partition: p.number, Epoch: v.epoch, State: v.state, Reason: v.reason}
}

// heard notes that Redis answered.
func (p *partition) heard() { p.replied.Store(int64(time.Since(p.admitter.clock.start))) }

// tooLate is the error of a Grab that waited since a time, until its deadline,
// and was never sent: either nothing came back from Redis meanwhile, or others
// kept it busy.
func (p *partition) tooLate(since time.Time) error {
	if time.Since(since) >= silenceLeast && time.Duration(p.replied.Load()) < since.Sub(p.admitter.clock.start) {
		return errSilence
	}
	return errWaited
}

// refresh answers a reading that began at or after a time, so that it shows
// what was so then. All who ask share one reading. Where ctx ends first, it
// answers the last one.
func (p *partition) refresh(ctx context.Context, notBefore time.Time) *view {
	for {
		p.mu.Lock()
		if v := p.view.Load(); !v.began.Before(notBefore) {
			p.mu.Unlock()
			return v
		}
		reading := p.reading
		if reading == nil {
			reading = make(chan struct{})
			p.reading = reading
			// Of its own, with a context of its own: it serves all who ask.
			p.admitter.running.Go(func() {
				v := p.read()
				p.mu.Lock()
				p.view.Store(v)
				p.reading = nil
				p.mu.Unlock()
				close(reading)
			})
		}
		p.mu.Unlock()
		select {
		case <-reading:
		case <-ctx.Done():
			return p.view.Load()
		}
	}
}

func (p *partition) read() *view {
	a := p.admitter
	ctx, cancel := context.WithTimeout(a.base, refreshTimeout)
	defer cancel()
	last := p.view.Load()
	if wait := time.Until(last.began.Add(refreshSpacing)); wait > 0 {
		timer := time.NewTimer(min(wait, refreshSpacing))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	v := &view{began: time.Now(), epoch: last.epoch, sha: last.sha}
	fail := func(err error) *view {
		v.state, v.reason, v.err = StateUnreachable, err.Error(), err
		if errors.Is(err, ledger.ErrFault) {
			v.state = StateFault
		}
		p.changed(last, v)
		return v
	}
	if err := p.readTime(ctx); err != nil {
		return fail(err)
	}
	meta, err := ledger.ReadMeta(ctx, a.cfg.Client, p.number)
	if err != nil {
		return fail(err)
	}
	p.heard()
	if meta.Exists && (meta.Epoch < 1 || meta.Epoch > orderid.MaxEpoch) {
		return fail(fmt.Errorf("%w: meta: epoch %d is out of range", ledger.ErrFault, meta.Epoch))
	}
	if meta.Exists && meta.Epoch != v.epoch {
		v.epoch, v.sha = meta.Epoch, ledger.AdmitSHA(p.number, meta.Epoch)
	}
	switch {
	case !meta.Exists:
		v.state, v.reason = StateMissing, "there is no ledger"
	case !meta.Open:
		v.state, v.reason = StateClosed, meta.Reason
	default:
		// What is loaded is what counts: during an upgrade the scripts of both
		// versions are.
		loaded, err := ledger.AdmitLoaded(ctx, a.cfg.Client, p.number, v.epoch)
		switch {
		case err != nil:
			return fail(err)
		case loaded:
			v.state = StateOpen
		case meta.AdmitSHA != "" && meta.AdmitSHA != v.sha:
			v.state, v.reason = StateVersion, "it is open for another version of the admission script"
		default:
			v.state, v.reason = StateUnproven, "the admission script is not loaded: its ledger is not proven"
		}
	}
	p.changed(last, v)
	return v
}

func (p *partition) readTime(ctx context.Context) error {
	client := p.admitter.cfg.Client
	sent := time.Now()
	parts, err := client.Do(ctx, client.B().Time().Build()).AsIntSlice()
	if err != nil {
		return fmt.Errorf("reading the time of redis: %w", err)
	}
	if len(parts) != 2 {
		return fmt.Errorf("%w: TIME answered %d elements", ledger.ErrFault, len(parts))
	}
	p.admitter.clock.learn(time.Unix(parts[0], parts[1]*1000).Truncate(time.Millisecond), sent, time.Now())
	return nil
}

// changed logs a change of state, once.
func (p *partition) changed(from, to *view) {
	if from.state == to.state && from.epoch == to.epoch {
		return
	}
	log := p.admitter.log.With(keyPartition, p.number, keyEpoch, to.epoch, keyState, string(to.state))
	if to.state == StateOpen {
		log.Info("partition is open")
		return
	}
	log.Warn("partition is not open", keyReason, to.reason)
}

// refusal is the error of a Grab that met a closed door.
func (v *view) refusal() error {
	switch v.state {
	case StateUnreachable:
		return fmt.Errorf("%w: %w", ErrRedisUnreachable, v.err)
	case StateFault:
		return fmt.Errorf("%w: %w", ErrLedgerFault, v.err)
	case StateVersion:
		return ErrScriptVersion
	}
	return fmt.Errorf("%w: %s: %s", ErrClosed, v.state, v.reason)
}
