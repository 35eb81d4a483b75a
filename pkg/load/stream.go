package load

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// StreamOptions say how Streams are used.
type StreamOptions struct {
	// Streams is how many GrabStreams are open. Default DefaultStreams.
	Streams int
	// Window is how many Grabs of a stream may be without their answers. The server
	// reads no more while it owes 1024. Default DefaultWindow.
	Window int
	// Timeout is the time within which the server answers a Grab; 0 is its own
	// default, 2 s.
	Timeout time.Duration
}

// Defaults of StreamOptions, with which two cores were busiest.
const (
	DefaultStreams = 4
	DefaultWindow  = 512
)

// Streams is Pipes over GrabStreams.
type Streams struct {
	clients []seckillv1.SeckillServiceClient
	opt     StreamOptions
}

// NewStreams makes a target of GrabStreams, spread over the connections.
func NewStreams(conns []*grpc.ClientConn, opt StreamOptions) (*Streams, error) {
	if opt.Streams == 0 {
		opt.Streams = DefaultStreams
	}
	if opt.Window == 0 {
		opt.Window = DefaultWindow
	}
	switch {
	case len(conns) == 0:
		return nil, errors.New("no connection")
	case opt.Streams < 1 || opt.Window < 1:
		return nil, fmt.Errorf("%d streams with a window of %d: must be at least 1 each", opt.Streams, opt.Window)
	case opt.Timeout < 0 || opt.Timeout.Milliseconds() > 1<<32-1:
		return nil, fmt.Errorf("timeout %s: must be between 0 and 49 days", opt.Timeout)
	}
	s := &Streams{opt: opt}
	for _, conn := range conns {
		s.clients = append(s.clients, seckillv1.NewSeckillServiceClient(conn))
	}
	return s, nil
}

// Count is how many streams there are.
func (s *Streams) Count() int { return s.opt.Streams }

// Window is that of each.
func (s *Streams) Window() int { return s.opt.Window }

// Open opens a stream.
func (s *Streams) Open(ctx context.Context, pipe int) (Pipe, error) {
	stream, err := s.clients[pipe%len(s.clients)].GrabStream(ctx, grpc.ForceCodecV2(codec{}))
	if err != nil {
		return nil, err
	}
	return &grabStream{stream: stream, sent: requests{timeoutMS: uint64(s.opt.Timeout.Milliseconds())}}, nil
}

type grabStream struct {
	stream grpc.ClientStream
	sent   requests
	came   answers
}

func (s *grabStream) Send(batch []Grab) error {
	s.sent.grabs = batch
	return s.stream.SendMsg(&s.sent)
}

func (s *grabStream) Receive(into []Answer) ([]Answer, error) {
	s.came.list = into
	err := s.stream.RecvMsg(&s.came)
	return s.came.list, err
}

func (s *grabStream) Close() error { return s.stream.CloseSend() }
