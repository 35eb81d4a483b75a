package client

import "time"

// call is one attempt of a Grab on its way, reused for the next attempt and,
// from a pool, for other callers. A caller that leaves a call which was sent
// takes it out of its stream first: nobody else knows a call in the pool.
type call struct {
	userID, voucherID      int64
	reference, traceparent string
	deadline               time.Time

	// Of the dispatcher, under its lock.
	state      callState
	slot       *slot   // that it was given to last
	stream     *stream // while queued or sent
	index      uint16  // in stream.table, while sent
	prev, next *call   // in the list that it is in

	// Set with stateDone, one of them.
	result Result
	failed *Error // shared by all calls of a broken stream
	unary  bool   // the caller is to make a unary call on slot, and to release it

	// ready gets one token for each time the call is done behind its caller's
	// back. Capacity 1.
	ready chan struct{}
	timer *time.Timer // bounds the call where the caller's context does not
}

type callState uint8

const (
	stateIdle    callState = iota // with its caller
	stateWaiting                  // in dispatcher.waiting: no stream has room
	stateQueued                   // in stream.queue: leaves with the next message
	stateSent                     // in stream.table
	stateDone                     // with its caller as soon as that has its token
)

func newCall() *call {
	c := &call{ready: make(chan struct{}, 1), timer: time.NewTimer(time.Hour)}
	c.timer.Stop()
	return c
}

func (c *call) reset() {
	ready, timer := c.ready, c.timer
	timer.Stop()
	*c = call{ready: ready, timer: timer}
}

// list is a queue of calls in which any can be taken out at once. A call is in
// one list at most.
type list struct {
	head, tail *call
	n          int
}

func (l *list) push(c *call) {
	c.prev, c.next = l.tail, nil
	if l.tail == nil {
		l.head = c
	} else {
		l.tail.next = c
	}
	l.tail = c
	l.n++
}

func (l *list) remove(c *call) {
	if c.prev == nil {
		l.head = c.next
	} else {
		c.prev.next = c.next
	}
	if c.next == nil {
		l.tail = c.prev
	} else {
		c.next.prev = c.prev
	}
	c.prev, c.next = nil, nil
	l.n--
}

// pop returns the oldest call, nil where there is none.
func (l *list) pop() *call {
	c := l.head
	if c != nil {
		l.remove(c)
	}
	return c
}
