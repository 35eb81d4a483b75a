package pipeline

import (
	"context"
	"errors"
	"sync"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
)

// parking keeps the orders of vouchers that stand in the way, because somebody
// holds their row or the database is too slow for a whole batch, from holding
// up all others: one goroutine of its own tries them, few at a time.
//
// It holds up to half of the slots, and leaves each reader those for an entry;
// beyond that such orders are left pending, and come again when they have lain
// for MinIdle.
type parking struct {
	max int

	mu       sync.Mutex
	queue    []work
	orders   int
	vouchers map[int64]int // works in the queue, or being tried
	came     chan struct{} // holds one: something is there
	drop     func(work)
}

func newParking(limit int, drop func(work)) *parking {
	return &parking{max: limit, vouchers: map[int64]int{}, came: make(chan struct{}, 1), drop: drop}
}

// takes tells whether a work belongs behind others of its voucher that are
// parked, and takes it then.
func (k *parking) takes(w work) bool {
	k.mu.Lock()
	parked := k.vouchers[w.voucher()] > 0
	k.mu.Unlock()
	if parked {
		k.park([]work{w})
	}
	return parked
}

func (k *parking) park(batch []work) {
	k.mu.Lock()
	var left []work
	for _, w := range batch {
		if k.orders+w.size() > k.max {
			left = append(left, w)
			continue
		}
		k.queue = append(k.queue, w)
		k.orders += w.size()
		k.vouchers[w.voucher()]++
	}
	k.mu.Unlock()
	for _, w := range left {
		k.drop(w)
	}
	select {
	case k.came <- struct{}{}:
	default:
	}
}

// next takes works of the voucher that has waited longest, up to some orders.
func (k *parking) next(limit int) []work {
	k.mu.Lock()
	defer k.mu.Unlock()
	var batch []work
	var rest []work
	rows := 0
	for _, w := range k.queue {
		if (len(batch) == 0 || w.voucher() == batch[0].voucher()) && rows < limit {
			batch = append(batch, w)
			rows += w.size()
			continue
		}
		rest = append(rest, w)
	}
	k.queue = rest
	return batch
}

// back puts works, and all others of their voucher, behind the rest again: it is
// the next voucher's turn.
func (k *parking) back(batch []work) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var others []work
	for _, w := range k.queue {
		if w.voucher() == batch[0].voucher() {
			batch = append(batch, w)
		} else {
			others = append(others, w)
		}
	}
	k.queue = append(others, batch...)
}

func (k *parking) size() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.queue)
}

// done ends the parking of works.
func (k *parking) done(batch []work) {
	k.mu.Lock()
	for _, w := range batch {
		k.orders -= w.size()
		if k.vouchers[w.voucher()]--; k.vouchers[w.voucher()] == 0 {
			delete(k.vouchers, w.voucher())
		}
	}
	k.mu.Unlock()
	for _, w := range batch {
		k.drop(w)
	}
}

// parkedBatch is how many orders of a parked voucher are tried at once: few
// enough for a slow database, and each try is one wait for the row.
const parkedBatch = 64

// parkedLoop tries what is parked until the process stops. What is left then
// stays pending and is handed back.
func (p *Pipeline) parkedLoop(working, stopping context.Context) {
	retry := newBackOff()
	for stopping.Err() == nil {
		batch := p.parking.next(min(parkedBatch, p.limit.now()))
		if len(batch) == 0 {
			select {
			case <-p.parking.came:
			case <-stopping.Done():
			}
			continue
		}
		p.metrics.parked.Set(float64(len(batch) + p.parking.size()))
		err := p.bringParked(working, stopping, batch)
		if errors.Is(err, errSlow) {
			p.parking.back(batch)
			_ = wait(stopping, retry.NextBackOff())
			continue
		}
		retry.Reset()
		if err != nil {
			p.Logger.Warn("parked entries left pending", telemetry.KeyEntries, len(batch), telemetry.KeyErr, err)
		}
		p.parking.done(batch)
		p.metrics.parked.Set(float64(p.parking.size()))
	}
	p.parking.mu.Lock()
	left := p.parking.queue
	p.parking.queue = nil
	p.parking.mu.Unlock()
	p.parking.done(left)
}

func (p *Pipeline) bringParked(working, stopping context.Context, batch []work) error {
	var entries []ledger.Entry
	for _, w := range batch {
		if w.dead == nil {
			entries = append(entries, w.entry)
		}
	}
	if len(entries) > 0 {
		settlements, err := p.write(working, stopping, entries)
		if err != nil {
			return err
		}
		p.settle(working, settlements)
	}
	for _, w := range batch {
		if w.dead != nil {
			if err := p.bury(working, stopping, w); err != nil {
				return err
			}
		}
	}
	return nil
}

// batchLimit is how many orders a transaction carries now: halved when one was
// not done in time, and grown again by a tenth with each that was.
type batchLimit struct {
	mu      sync.Mutex
	most    int
	current int
}

// batchLeast keeps a database that is slow for another reason from being asked
// for single rows.
const batchLeast = 16

func newBatchLimit(most int) *batchLimit { return &batchLimit{most: most, current: most} }

func (b *batchLimit) now() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.current
}

func (b *batchLimit) shrink() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.current = max(min(batchLeast, b.most), b.current/2)
}

func (b *batchLimit) grow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.current = min(b.most, b.current+b.current/10+1)
}
