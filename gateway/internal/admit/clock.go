package admit

import (
	"sync"
	"time"
)

// clock estimates the clock of Redis by this process's monotonic one. Every
// answer that carries a server time proves an interval in which the difference
// lies; the estimate is moved into it, so it follows drift and steps alike. A
// wrong estimate costs a run (it is refused as late, and corrects the estimate)
// or lets a stuck call admit for longer, but decides nothing.
type clock struct {
	start time.Time

	mu     sync.Mutex
	known  bool
	offset time.Duration // from the time since start to Unix time of Redis
}

func newClock() *clock { return &clock{start: time.Now()} }

// learn takes in a server time, in whole ms, of a call sent and answered at the
// given local times.
func (c *clock) learn(server, sent, answered time.Time) {
	at := time.Duration(server.UnixNano())
	low := at - answered.Sub(c.start)
	high := at + time.Millisecond - sent.Sub(c.start)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.known:
		c.known, c.offset = true, low+(high-low)/2
	case c.offset < low:
		c.offset = low
	case c.offset > high:
		c.offset = high
	}
}

// now is the estimated time of Redis. Meaningless before the first learn.
func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Unix(0, int64(c.offset+time.Since(c.start))).UTC()
}
