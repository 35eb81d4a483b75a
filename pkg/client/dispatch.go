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
	slots      []*slot
	turn       int // of slots, where equally loaded ones take turns
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

// submit gives a call to the slot with the least to do, or lets it wait for one.
// done is true where it is the caller's turn for a unary call: no token comes.
// The slot that had the call before is taken only if no other has room.
func (d *dispatcher) submit(c *call) (done bool, err *Error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c.failed, c.unary = nil, false
	if d.killed {
		return false, errorOfClosed()
	}
	if s := d.pick(c.slot); s != nil {
		d.give(c, s)
		return c.state == stateDone, nil
	}
	if d.waiting.n >= d.maxWaiting {
		return false, errorOfFullQueue()
	}
	c.state = stateWaiting
	d.waiting.push(c)
	return false, nil
}

// pick chooses the slot with the least to do, nil where none has room.
func (d *dispatcher) pick(last *slot) *slot {
	var best, spare *slot
	var now time.Time
	d.turn++
	for i := range d.slots {
		s := d.slots[(d.turn+i)%len(d.slots)]
		if !s.room() {
			continue
		}
		if !s.avoidUntil.IsZero() {
			if now.IsZero() {
				now = time.Now()
			}
			if now.Before(s.avoidUntil) {
				spare = s
				continue
			}
			s.avoidUntil = time.Time{}
		}
		if s == last {
			spare = s
			continue
		}
		if best == nil || s.load() < best.load() {
			best = s
		}
	}
	if best == nil {
		return spare
	}
	return best
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
	c.stream, c.state = st, statePending
	if st.outstanding == 0 {
		st.progress = time.Now()
	}
	st.outstanding++
	st.pending.push(c)
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
	case statePending:
		c.stream.pending.remove(c)
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

// avoid lets a slot have nothing for a while, as far as others have room.
func (d *dispatcher) avoid(s *slot, during time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s.avoidUntil = time.Now().Add(during)
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
