package client

import (
	"sync"
	"time"
)

// dispatcher gives calls to slots. Its one lock is held for some ten ns a call:
// what takes time, encoding, decoding and waking callers, happens outside.
//
// While a call is in waiting, no slot has room.
type dispatcher struct {
	mu         sync.Mutex
	slots      []*slot // the first ones lead to every gateway
	fewest     int     // slots in use however few callers there are
	turn       int     // of slots, where equally loaded ones take turns
	waiting    list
	maxWaiting int
	callers    int  // inside Grab and GetOrder
	closing    bool // no new callers
	killed     bool // and those that are in come out
	idle       chan struct{}

	streams map[*stream]struct{} // open ones, retiring ones included
	lastErr error                // why a stream or connection failed last
}

// enter counts a caller in. It is false once the client is closing.
func (d *dispatcher) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closing {
		return false
	}
	d.callers++
	return true
}

// exit counts a caller out.
func (d *dispatcher) exit() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.callers--; d.callers == 0 && d.closing {
		close(d.idle)
	}
}

// submit gives a call to the slot that suits best, or lets it wait for one. done
// is true where it is the caller's turn for a unary call: no token comes. A call
// whose stream broke waits beyond the bound: it had its place before.
func (d *dispatcher) submit(c *call) (done bool, err *Error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lost := c.failed != nil && c.failed.lost
	c.failed, c.unary = nil, false
	if d.killed {
		return false, errorOfClosed()
	}
	if s := d.pick(c.slot); s != nil {
		d.give(c, s)
		return c.state == stateDone, nil
	}
	if d.waiting.n >= d.maxWaiting && !lost {
		return false, errorOfFullQueue()
	}
	c.state = stateWaiting
	d.waiting.push(c)
	return false, nil
}

// callersPerSlot is how many callers make messages that are worth a stream: 64 of
// them cost a sixth less CPU over one stream than over four. With fewer, the last
// slots are used only where the first have that much more to do.
const callersPerSlot = 64

// pick chooses of the slots that have room: one of another gateway than had the
// call last, then another slot, then the same again; before those that are to be
// avoided. Among equals the one with the least to do. nil is none.
func (d *dispatcher) pick(last *slot) *slot {
	var best *slot
	var bestRank, bestLoad int
	var now time.Time
	inUse := max(d.fewest, d.callers/callersPerSlot)
	d.turn++
	for i := range d.slots {
		at := (d.turn + i) % len(d.slots)
		s := d.slots[at]
		if !s.room() {
			continue
		}
		rank, load := 0, s.load()
		switch {
		case s.gateway.avoided(&now):
			rank = 3
		case s == last:
			rank = 2
		case last != nil && s.gateway == last.gateway:
			rank = 1
		}
		if at >= inUse {
			load += callersPerSlot
		}
		if best == nil || rank < bestRank || rank == bestRank && load < bestLoad {
			best, bestRank, bestLoad = s, rank, load
		}
	}
	return best
}

// avoided tells whether others are to be preferred. now is read once, if at all.
func (g *gateway) avoided(now *time.Time) bool {
	if g.avoidUntil.IsZero() {
		return false
	}
	if now.IsZero() {
		*now = time.Now()
	}
	if now.Before(g.avoidUntil) {
		return true
	}
	g.avoidUntil = time.Time{}
	return false
}

// give hands a call to a slot that has room.
func (d *dispatcher) give(c *call, s *slot) {
	c.slot = s
	if s.unary {
		s.unaryCalls++
		c.unary, c.state = true, stateDone
		return
	}
	st := s.stream
	c.stream, c.state = st, stateQueued
	if st.outstanding == 0 {
		st.progress = time.Now()
	}
	st.outstanding++
	st.queue.push(c)
	st.wakeSender()
}

// feed gives waiting calls to a slot that got room, and returns woken with those
// added that are done by it and must be woken outside the lock.
func (d *dispatcher) feed(s *slot, woken []*call) []*call {
	for d.waiting.n > 0 && s.room() {
		c := d.waiting.pop()
		if d.give(c, s); c.state == stateDone {
			woken = append(woken, c)
		}
	}
	return woken
}

// leave takes a call back from wherever it is. It is false where the call is
// done: its token is in ready, or will be in a moment. sent tells whether the
// server may have the call.
func (d *dispatcher) leave(c *call) (left, sent bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch c.state {
	case stateDone:
		return false, false
	case stateWaiting:
		d.waiting.remove(c)
	case stateQueued:
		c.stream.queue.remove(c)
		c.stream.outstanding--
		if c.slot.stream == c.stream {
			d.feed(c.slot, nil) // wakes nobody: who is given to a stream goes on waiting
		}
	case stateSent:
		c.stream.table[c.index].call = nil // the late answer finds nobody
		sent = true
	}
	c.state, c.stream = stateIdle, nil
	return true, sent
}

// release ends a unary call on a slot.
func (d *dispatcher) release(s *slot) {
	d.mu.Lock()
	s.unaryCalls--
	woken := d.feed(s, nil)
	d.mu.Unlock()
	wake(woken)
}

// move lets the gateway of a slot have nothing for a while, as far as others
// have room, and tells whether one has.
func (d *dispatcher) move(from *slot, during time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	from.gateway.avoid(now.Add(during))
	for _, s := range d.slots {
		if s.room() && !s.gateway.avoided(&now) {
			return true
		}
	}
	return false
}

func (g *gateway) avoid(until time.Time) {
	if until.After(g.avoidUntil) {
		g.avoidUntil = until
	}
}

// failed notes why no stream could be had, for errors of callers that waited.
func (d *dispatcher) failed(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lastErr = err
}

// unreached tells whether no slot can take calls, and why.
func (d *dispatcher) unreached() (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.slots {
		if s.unary || s.stream != nil {
			return false, nil
		}
	}
	return true, d.lastErr
}

// kill ends every wait. Streams are ended by their context.
func (d *dispatcher) kill() {
	d.mu.Lock()
	d.killed = true
	var woken []*call
	for d.waiting.n > 0 {
		c := d.waiting.pop()
		c.failed, c.state = errorOfClosed(), stateDone
		woken = append(woken, c)
	}
	d.mu.Unlock()
	wake(woken)
}

func wake(calls []*call) {
	for _, c := range calls {
		c.ready <- struct{}{}
	}
}
