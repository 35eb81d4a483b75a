package rpc

import (
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
)

const (
	// maxMessage is the most Grabs or answers of one message: a batch.
	maxMessage = 256
	// maxOwed is how many answers a stream may be owed before no more is read of
	// it: four full batches, as many as a voucher has in flight. One message goes
	// beyond it at most.
	maxOwed = 1024
	// maxOwedAll is the same over all streams that are open, about 25 MB. Beyond
	// it a stream is read only while it is owed nothing, a message at a time: who
	// does not read its answers slows the others down, but stops nobody.
	maxOwedAll = 64 * maxOwed
)

// streams is what all streams of a Service share.
type streams struct {
	open atomic.Int64
	owed atomic.Int64 // Grabs read from those that are open and not answered
}

// register makes the metrics of invalid Grabs, which never reach the admission, and
// of streams; all else is counted there.
func (s *Service) register(reg prometheus.Registerer) error {
	s.invalid = prometheus.NewCounter(prometheus.CounterOpts{Namespace: "seckill", Subsystem: "gateway",
		Name: "grabs_invalid_total", Help: "Grabs refused with INVALID_ARGUMENT."})
	if reg == nil {
		return nil
	}
	if err := reg.Register(s.invalid); err != nil {
		return err
	}
	for _, gauge := range []struct {
		name, help string
		value      *atomic.Int64
	}{
		{"streams_open", "GrabStreams that are open.", &s.streams.open},
		{"stream_grabs_owed", "Grabs read from streams whose answers are not sent yet.", &s.streams.owed},
	} {
		if err := reg.Register(prometheus.NewGaugeFunc(
			prometheus.GaugeOpts{Namespace: "seckill", Subsystem: "gateway", Name: gauge.name, Help: gauge.help},
			func() float64 { return float64(gauge.value.Load()) })); err != nil {
			return err
		}
	}
	return nil
}

// grabStream is one GrabStream. One goroutine reads and hands in; the handler's
// own sends what comes back, and what comes back meanwhile goes with the next
// message. So an idle stream is two goroutines that sleep.
type grabStream struct {
	service *Service
	stream  grpc.ServerStream
	wake    chan struct{} // holds one: there is something to send, or the end has come
	gone    atomic.Bool   // nobody wants the answers any more

	mu       sync.Mutex
	room     sync.Cond     // the reader waits here for answers to be sent
	answered []*admit.Grab // to be sent
	owed     int           // read and not sent
	ended    bool          // no more is read
	end      error         // the status of the stream once nothing is owed
	panicked string        // the reader's
}

// Grabs of streams are used again.
var grabs = sync.Pool{New: func() any { return new(admit.Grab) }}

// GrabStream implements SeckillService.
func (s *Service) GrabStream(stream grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
	g := &grabStream{service: s, stream: stream, wake: make(chan struct{}, 1)}
	g.room.L = &g.mu
	s.streams.open.Add(1)
	defer s.streams.open.Add(-1)
	defer g.leave()
	go g.read() // ends with the stream, since Recv does
	draining := s.opts.Draining
	for {
		select {
		case <-g.wake:
		case <-draining:
			draining = nil
			g.stop(lookError(admit.ErrClosing))
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
		if finished, err := g.send(); finished {
			return err
		}
	}
}

// read reads messages for as long as there is room for their answers.
func (g *grabStream) read() {
	defer func() {
		if p := recover(); p != nil {
			g.mu.Lock()
			g.panicked = fmt.Sprintf("%v\n%s", p, debug.Stack())
			g.mu.Unlock()
			g.stop(statusInternal)
		}
	}()
	message := &grabMessage{service: g.service}
	for g.waitForRoom() {
		err := g.stream.RecvMsg(message)
		switch {
		case err == io.EOF:
			g.stop(nil)
		case err != nil:
			g.stop(err)
		case message.count > maxMessage:
			message.free()
			g.stop(statusTooManyGrabs)
		default:
			g.submit(message)
		}
		clear(message.grabs) // an idle stream keeps none of them from the garbage collector
	}
}

// waitForRoom waits until one more message may be read and tells whether it may.
func (g *grabStream) waitForRoom() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for !g.ended && (g.owed >= maxOwed || g.owed > 0 && g.service.streams.owed.Load() >= maxOwedAll) {
		g.room.Wait()
	}
	return !g.ended
}

// submit hands in the Grabs of a message. One that came after the end counts as
// not read.
func (g *grabStream) submit(m *grabMessage) {
	if len(m.grabs) == 0 {
		return
	}
	if !g.owe(len(m.grabs)) {
		m.free()
		return
	}
	backend := g.service.backend.Load()
	valid := m.grabs[:0]
	var refused []*admit.Grab
	for _, one := range m.grabs {
		if one.Err = checkGrab(one.UserID, one.VoucherID, one.Reference); one.Err != nil {
			g.service.invalid.Inc()
		} else if backend == nil {
			one.Err = errStarting
		}
		if one.Err != nil {
			refused = append(refused, one)
		} else {
			valid = append(valid, one)
		}
	}
	if len(refused) > 0 {
		g.Answered(refused)
	}
	if len(valid) > 0 {
		(*backend).Submit(g, valid)
	}
}

// timeout is the time for a Grab that asked for some.
func (s *Service) timeout(ms uint32) time.Duration {
	if ms == 0 {
		return s.opts.DefaultDeadline
	}
	return min(time.Duration(ms)*time.Millisecond, s.opts.MaxDeadline)
}

// owe counts Grabs as read, unless the end came before.
func (g *grabStream) owe(n int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return false
	}
	g.owed += n
	g.service.streams.owed.Add(int64(n))
	return true
}

// stop ends the reading; the first reason is the one that counts.
func (g *grabStream) stop(end error) {
	g.mu.Lock()
	if !g.ended {
		g.ended, g.end = true, end
	}
	g.room.Signal()
	g.mu.Unlock()
	g.signal()
}

func (g *grabStream) signal() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// Answered implements admit.Receiver.
func (g *grabStream) Answered(answers []*admit.Grab) {
	g.mu.Lock()
	if g.gone.Load() {
		g.mu.Unlock()
		free(answers)
		return
	}
	g.answered = append(g.answered, answers...)
	g.mu.Unlock()
	g.signal()
}

// Gone implements admit.Receiver.
func (g *grabStream) Gone() bool { return g.gone.Load() }

// send sends what is there, and tells whether the stream is finished. What comes
// meanwhile waits for the next call, so that a drain is noticed also where answers
// never cease.
func (g *grabStream) send() (finished bool, err error) {
	g.mu.Lock()
	answers := g.answered
	g.answered = nil
	g.mu.Unlock()
	for len(answers) > 0 {
		n := min(len(answers), maxMessage)
		if err := g.stream.SendMsg(&answerMessage{g.service, answers[:n]}); err != nil {
			return true, err
		}
		g.sent(answers[:n])
		answers = answers[n:]
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.panicked != "" {
		panic(g.panicked) // to the one who recovers, and logs it
	}
	return g.ended && g.owed == 0, g.end
}

// sent counts Grabs as answered and ends their life.
func (g *grabStream) sent(answers []*admit.Grab) {
	free(answers)
	g.service.streams.owed.Add(-int64(len(answers)))
	g.mu.Lock()
	g.owed -= len(answers)
	g.room.Signal()
	g.mu.Unlock()
}

// free gives Grabs back that nobody needs any more.
func free(done []*admit.Grab) {
	for _, one := range done {
		grabs.Put(one)
	}
}

// leave is when the handler returns: Grabs that have not left for the ledger
// will not, the answers of the others are thrown away as they come. They are the
// admission's to bound from here on, and owed to nobody.
func (g *grabStream) leave() {
	g.stop(nil)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gone.Store(true)
	free(g.answered)
	g.answered = nil
	g.service.streams.owed.Add(-int64(g.owed))
}
