package client

import (
	"context"
	"errors"
	"io"
	"runtime"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

const (
	// maxMessage is the most Grabs that the server takes in one message. With
	// references and trace contexts of the longest form they are 45 KiB, within
	// the 64 KiB of a message.
	maxMessage = 256
	// window bounds the Grabs of a stream that are given to it and not answered.
	// The server reads no more while it owes 1024 answers: one message below
	// that it always reads on, and no Grab waits in between, unseen.
	window = 1024 - maxMessage
	// longestTimeout is above what any server grants, and fits the field.
	longestTimeout = time.Hour
)

// stream is one life of a GrabStream: one goroutine sends, one receives. When it
// breaks, it hands every call without an answer back to its caller, once, and
// is never used again; so an answer can only meet calls of its own life.
type stream struct {
	slot   *slot
	rpc    grpc.BidiStreamingClient[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]
	life   context.Context // of rpc; its own Context() ends early where grpc-go repeats it on another connection
	cancel context.CancelFunc
	opened time.Time
	wakeup chan struct{} // capacity 1
	ended  chan struct{} // closed when err is set
	err    *Error        // why it broke; nil where it ended as this client wanted

	// Of the dispatcher, under its lock.
	queue       list          // leave with the next message
	outstanding int           // queued, sent, and sent by callers that have left
	table       [window]place // of what was sent
	free        []uint16      // places of table
	sent        int           // places taken
	seq         uint64        // of the last Grab sent
	sleeping    bool          // the sender waits for wakeup
	retiring    bool          // gets no more calls, ends when it has all answers
	gone        bool          // has ended
	answered    bool          // at least once
	broke       *Error        // why this side gave it up; nil where it did not
	progress    time.Time     // of the last answer, or of the first call after a pause
}

// place is a Grab that was sent. Its correlation id is seq<<16 | index of the
// place, so that it is found without a map and never twice the same.
type place struct {
	id   uint64 // 0 is free
	call *call  // nil when its caller has left
}

// wakeSender is called under the lock of the dispatcher.
func (st *stream) wakeSender() {
	if st.sleeping {
		st.sleeping = false
		st.wakeup <- struct{}{} // has room: sleeping is set with an empty channel
	}
}

// send sends what is queued, as much as there is, in one message after another.
// Calls that come while Send is under way gather for the next.
func (st *stream) send(d *dispatcher) {
	for {
		message, more := st.take(d)
		if message == nil {
			if !more {
				_ = st.rpc.CloseSend() // never fails
				return
			}
			select {
			case <-st.wakeup:
				// Callers that got their answers together come back together: let them
				// all run before the first one's call leaves alone.
				runtime.Gosched()
			case <-st.life.Done():
				return
			}
			continue
		}
		if err := st.rpc.Send(message); err != nil {
			if !errors.Is(err, io.EOF) { // that is the server's end, and receive hears why
				d.mu.Lock()
				st.giveUp(errorOfStatus(err))
				d.mu.Unlock()
			}
			return
		}
	}
}

// giveUp is called under the lock of the dispatcher; receive ends the stream.
func (st *stream) giveUp(why *Error) {
	if st.broke == nil {
		st.broke = why
	}
	st.cancel()
}

// take makes a message of what is queued. Where there is nothing, more tells
// whether the sender should sleep or close.
func (st *stream) take(d *dispatcher) (message *seckillv1.GrabStreamRequest, more bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := min(st.queue.n, maxMessage)
	if n == 0 || st.gone {
		st.sleeping = !st.retiring
		return nil, st.sleeping
	}
	now := time.Now()
	st.sent += n
	grabs, pointers := make([]seckillv1.StreamedGrab, n), make([]*seckillv1.StreamedGrab, n)
	for i := range n {
		c := st.queue.pop()
		c.index = st.free[len(st.free)-1]
		st.free = st.free[:len(st.free)-1]
		st.seq++
		id := st.seq<<16 | uint64(c.index)
		st.table[c.index] = place{id, c}
		c.state = stateSent

		g := &grabs[i]
		g.CorrelationId, g.UserId, g.VoucherId, g.Reference, g.Traceparent = id, c.userID, c.voucherID, c.reference, c.traceparent
		// Rounded up: 0 would mean the server's own default.
		g.TimeoutMs = uint32(min(max(c.deadline.Sub(now), 0), longestTimeout).Milliseconds()) + 1
		pointers[i] = g
	}
	return &seckillv1.GrabStreamRequest{Grabs: pointers}, true
}

// receive hands out answers until the stream ends.
func (st *stream) receive(d *dispatcher, hooks *Hooks) {
	var received answers
	var woken []*call
	for {
		if err := st.rpc.RecvMsg(&received); err != nil {
			st.end(d, hooks, err)
			return
		}
		woken = st.deliver(d, received.list, woken[:0])
		wake(woken)
		clear(woken)
	}
}

func (st *stream) deliver(d *dispatcher, list []answer, woken []*call) []*call {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range list {
		a := &list[i]
		index := uint16(a.id)
		if a.id == 0 || int(index) >= window || st.table[index].id != a.id {
			continue // of nothing that is out: answered twice, or made up
		}
		c := st.table[index].call
		st.table[index] = place{}
		st.free = append(st.free, index)
		st.sent--
		st.outstanding--
		if c != nil {
			c.result, c.failed, c.state, c.stream = a.result, a.failed, stateDone, nil
			woken = append(woken, c)
		}
	}
	if len(list) > 0 {
		st.answered, st.progress = true, now
	}
	if st.slot.stream == st {
		woken = d.feed(st.slot, woken)
	}
	return woken
}

// end hands back what has no answer.
func (st *stream) end(d *dispatcher, hooks *Hooks, why error) {
	st.cancel()
	d.mu.Lock()
	st.gone = true
	delete(d.streams, st)
	if st.slot.stream == st {
		st.slot.stream = nil
	}
	switch {
	case st.broke != nil:
		st.err = st.broke
	case !errors.Is(why, io.EOF):
		st.err = errorOfStatus(why)
	case st.outstanding > 0:
		st.err = &Error{Code: codes.Unavailable, Message: "the server ended the stream with answers outstanding"}
	case !st.retiring:
		st.err = &Error{Code: codes.Unavailable, Message: "the server ended the stream"}
	}
	if (st.retiring || d.killed) && st.outstanding == 0 {
		st.err = nil // whatever came, nobody waits for it
	}
	lost := st.outstanding
	var woken []*call
	if lost > 0 {
		woken = st.lose(st.err, woken)
	}
	d.mu.Unlock()
	close(st.ended)
	wake(woken)
	if hooks.StreamEnded != nil {
		ended := StreamEnded{Target: st.slot.target, Lost: lost, Lasted: time.Since(st.opened)}
		if st.err != nil {
			ended.Err = st.err
		}
		hooks.StreamEnded(ended)
	}
}

// lose gives the calls of a broken stream back. What was sent may have been
// decided, unless the server says that it read none of it: it does not know
// streams, or shut down and answered all it had read.
func (st *stream) lose(why *Error, woken []*call) []*call {
	unsent := &Error{
		Code: codes.Unavailable, Reason: why.Reason, Message: "the stream broke: " + why.Message,
		RetryAfter: why.RetryAfter, lost: true,
	}
	notRead := shuttingDown(why)
	switch why.Code {
	case codes.Unimplemented:
		notRead = true
	case codes.Unauthenticated, codes.PermissionDenied:
		// So it would be on every stream: callers should hear of it.
		unsent, notRead = why, !st.answered
	}
	sent := *unsent
	sent.OutcomeUnknown = !notRead
	for i := range st.table {
		if c := st.table[i].call; c != nil {
			c.failed, c.state, c.stream = &sent, stateDone, nil
			woken = append(woken, c)
		}
		st.table[i] = place{}
	}
	for c := st.queue.pop(); c != nil; c = st.queue.pop() {
		c.failed, c.state, c.stream = unsent, stateDone, nil
		woken = append(woken, c)
	}
	st.outstanding, st.sent = 0, 0
	return woken
}

// stalled tells whether the stream owes answers, or its end, and nothing came
// for so long: a process that hangs, or a network that swallows. Servers answer
// every Grab by its deadline.
func (st *stream) stalled(now time.Time, after time.Duration) bool {
	return (st.outstanding > 0 || st.retiring) && now.Sub(st.progress) > after
}
