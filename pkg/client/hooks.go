package client

import "time"

// Hooks are called as things happen, for metrics and logs. Each may be nil, is
// called by many goroutines at once, and must return soon: Grabs wait for it.
type Hooks struct {
	// GrabDone is called at the end of each Grab, by its caller's goroutine.
	GrabDone func(GrabDone)
	// StreamOpened is called when a stream was opened. That the server knows
	// GrabStream shows only with its first answer.
	StreamOpened func(StreamOpened)
	// StreamEnded is called when a stream has ended.
	StreamEnded func(StreamEnded)
}

// GrabDone tells of a Grab.
type GrabDone struct {
	VoucherID int64
	// Outcome is unspecified where Err is set.
	Outcome  Outcome
	Replayed bool
	// Err is what the caller gets, an *Error or nil.
	Err error
	// Attempts counts how often it was sent, over a stream or as a unary call.
	Attempts int
	// Latency is the time from call to return, retries included.
	Latency time.Duration
}

// StreamOpened tells of a new stream. Target is the address, or the target,
// that its connection was made for.
type StreamOpened struct{ Target string }

// StreamEnded tells of the end of a stream.
type StreamEnded struct {
	Target string
	// Err is why it broke; nil where this client ended it and all was answered.
	Err error
	// Lost counts the Grabs that were without an answer, which are sent again.
	Lost int
	// Lasted is how long it was open.
	Lasted time.Duration
}
