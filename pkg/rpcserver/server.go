// Package rpcserver builds the gRPC server that the gateway and the writer
// share, and the statuses that they answer with.
//
// Every call passes, in this order: metrics (which see the final code),
// recovery (a panic is INTERNAL), the deadline, the last gate for errors that
// are no status, and the interceptors of the binary. Answers that grpc-go gives
// itself before any interceptor, such as UNIMPLEMENTED for an unknown method or
// RESOURCE_EXHAUSTED for a message beyond MaxRecvBytes, carry no ErrorInfo.
package rpcserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/seckill/seckill/pkg/telemetry"
)

// What Options holds where a field is zero.
const (
	// DefaultDeadline is the budget of a unary call that brings none.
	DefaultDeadline = 2 * time.Second
	// DefaultMaxDeadline caps what a unary caller may ask for: a call holds
	// memory and a place in a queue for as long as it may wait.
	DefaultMaxDeadline = 30 * time.Second
	// DefaultMaxConcurrentStreams bounds the calls in flight on one connection.
	// 1024 is four full batches of 256 Grabs, all that one voucher has in flight
	// at once; more would only wait inside the server instead of in the client.
	// With a message of DefaultMaxRecvBytes and a window of streamWindow each, one
	// connection can pin at most 128 MiB.
	DefaultMaxConcurrentStreams = 1024
	// DefaultMaxRecvBytes bounds one request. The largest real one is a few
	// hundred bytes (a Grab with a reference of 64 bytes and trace context), so
	// 64 KiB leaves room for new fields, and refuses the 4 MiB that grpc-go
	// would accept by default.
	DefaultMaxRecvBytes = 64 << 10
	// DefaultDrainTimeout bounds how long running calls may take to finish.
	DefaultDrainTimeout = 10 * time.Second
)

const (
	// Clients may ping this often, also while no call runs: that is how they
	// find a dead connection before the next Grab does.
	clientPingMinTime = 10 * time.Second
	// The server pings a connection on which nothing was heard for this long,
	// and closes it without an answer: a client that vanished holds no streams.
	serverPingAfter   = 30 * time.Second
	serverPingTimeout = 10 * time.Second
	// A connection that has not finished its handshake by then is closed.
	// grpc-go waits for such connections when it stops, and its default of two
	// minutes would let one silent connection hold up a shutdown.
	connectionTimeout = 5 * time.Second
	// How long Run waits for grpc-go to close its connections after DrainTimeout.
	stopTimeout = time.Second
	// Metadata of one call: trace context and a token.
	maxHeaderBytes = 16 << 10
	// What a client may send on a stream before it is read: as much as one message.
	// Left to itself grpc-go raises this to 16 MiB for every stream of a connection
	// that is fast and far enough, and a handler that reads no more would hold
	// nothing back.
	streamWindow = 64 << 10
	// The same for a connection. It pins nothing, since it is refilled as data
	// arrives; it only bounds the speed, to 1 MiB a round trip.
	connWindow = 1 << 20
)

// handlingBuckets reach from a refusal answered in memory to MaxDeadline.
var handlingBuckets = []float64{
	.00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30,
}

// Options configures New. A zero field takes the Default constant of its name,
// if there is one.
type Options struct {
	Addr string // host:port; port 0 picks a free one
	Settings

	// DefaultDeadline is applied to a unary call whose caller set none, and
	// MaxDeadline caps every unary call. Streams live as long as their owner
	// wants: only MaxStreamDeadline, if set, ends them, with DEADLINE_EXCEEDED.
	DefaultDeadline   time.Duration
	MaxDeadline       time.Duration
	MaxStreamDeadline time.Duration

	MaxConcurrentStreams uint32 // per connection
	MaxRecvBytes         int    // per message
	// MaxConnectionAge closes connections gracefully at that age so that clients
	// resolve and balance again. Zero is off, since it interrupts streams.
	MaxConnectionAge time.Duration

	// DrainDelay is the time between NOT_SERVING and the refusal of new calls,
	// in which load balancers notice. Zero is none.
	DrainDelay time.Duration
	// DrainTimeout is how long running calls may then take.
	DrainTimeout time.Duration

	Logger     *slog.Logger          // default: discards
	Registerer prometheus.Registerer // nil: no metrics

	// Uncounted are full names of unary methods, as "/seckill.v1.SeckillService/Grab",
	// that count themselves: their grpc_server_ metrics stay 0. Looking up the
	// labels costs a tenth of such a call.
	Uncounted []string

	// Interceptors of the binary, called in order, closest to the handler.
	UnaryInterceptors  []grpc.UnaryServerInterceptor
	StreamInterceptors []grpc.StreamServerInterceptor
}

func (o *Options) complete() error {
	if o.DefaultDeadline == 0 {
		o.DefaultDeadline = DefaultDeadline
	}
	if o.MaxDeadline == 0 {
		o.MaxDeadline = max(DefaultMaxDeadline, o.DefaultDeadline)
	}
	if o.MaxConcurrentStreams == 0 {
		o.MaxConcurrentStreams = DefaultMaxConcurrentStreams
	}
	if o.MaxRecvBytes == 0 {
		o.MaxRecvBytes = DefaultMaxRecvBytes
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = DefaultDrainTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case o.DefaultDeadline < 0 || o.MaxDeadline < 0 || o.MaxStreamDeadline < 0 ||
		o.DrainDelay < 0 || o.DrainTimeout < 0 || o.MaxConnectionAge < 0 || o.MaxRecvBytes < 0:
		return errors.New("a duration or size is negative")
	case o.DefaultDeadline > o.MaxDeadline:
		return fmt.Errorf("the default deadline %s is above the longest one, %s", o.DefaultDeadline, o.MaxDeadline)
	}
	return o.Check()
}

// Server is one gRPC server with health, and reflection if wanted. Register
// services on GRPC(), then Listen, then Run once.
type Server struct {
	opts     Options
	log      *slog.Logger
	grpc     *grpc.Server
	health   *health.Server
	metrics  *grpcprom.ServerMetrics // nil without a Registerer
	listener net.Listener

	draining context.Context // ended when the drain begins
	drain    context.CancelFunc
}

// New builds a Server. It fails where options contradict each other, where the
// TLS files cannot be read, and where the Registerer has a gRPC server's metrics
// already.
func New(o Options) (*Server, error) {
	if err := o.complete(); err != nil {
		return nil, fmt.Errorf("configuring the rpc server: %w", err)
	}
	s := &Server{opts: o, log: o.Logger, health: health.NewServer()}
	s.draining, s.drain = context.WithCancel(context.Background())

	var unary []grpc.UnaryServerInterceptor
	var stream []grpc.StreamServerInterceptor
	if o.Registerer != nil {
		s.metrics = grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(
			grpcprom.WithHistogramBuckets(handlingBuckets)))
		if err := o.Registerer.Register(s.metrics); err != nil {
			return nil, fmt.Errorf("registering rpc metrics: %w", err)
		}
		unary = append(unary, except(o.Uncounted, s.metrics.UnaryServerInterceptor()))
		stream = append(stream, s.metrics.StreamServerInterceptor())
	}
	unary = append(append(unary, s.recoverUnary(), s.deadlineUnary, s.lastGateUnary), o.UnaryInterceptors...)
	stream = append(append(stream, s.recoverStream(), s.deadlineStream, s.lastGateStream), o.StreamInterceptors...)

	grpcOptions := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(unary...),
		grpc.ChainStreamInterceptor(stream...),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.MaxConcurrentStreams(o.MaxConcurrentStreams),
		grpc.MaxRecvMsgSize(o.MaxRecvBytes),
		grpc.MaxHeaderListSize(maxHeaderBytes),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(connWindow),
		grpc.ConnectionTimeout(connectionTimeout),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: clientPingMinTime, PermitWithoutStream: true,
		}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: serverPingAfter, Timeout: serverPingTimeout,
			MaxConnectionAge: o.MaxConnectionAge, // 0 is grpc-go's infinity
		}),
	}
	if o.TLSCertFile != "" {
		creds, err := newTLS(o.Settings, s.log)
		if err != nil {
			return nil, err
		}
		grpcOptions = append(grpcOptions, grpc.Creds(creds))
	}

	s.grpc = grpc.NewServer(grpcOptions...)
	healthpb.RegisterHealthServer(s.grpc, s.health)
	// grpc-go starts with SERVING; here the owner says so when it is true.
	s.SetServing("", false)
	if o.Reflection {
		reflection.Register(s.grpc)
	}
	return s, nil
}

// GRPC is where services are registered, before Run.
func (s *Server) GRPC() *grpc.Server { return s.grpc }

// Health is the health service on this server. The whole ("") begins as
// NOT_SERVING: the owner sets it and its services by what it can really do.
// From the beginning of the drain on, changes have no effect.
func (s *Server) Health() *health.Server { return s.health }

// SetServing says whether a service can be served; "" is the whole.
func (s *Server) SetServing(service string, serving bool) {
	status := healthpb.HealthCheckResponse_NOT_SERVING
	if serving {
		status = healthpb.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus(service, status)
}

// PartitionService is the name under which health tells of one partition.
func PartitionService(partition int) string {
	return fmt.Sprintf("seckill.partition.%d", partition)
}

// Draining is closed once no new calls are taken. A handler of a long stream
// should then finish what it has and return, or it is cut off at DrainTimeout.
func (s *Server) Draining() <-chan struct{} { return s.draining.Done() }

// Listen binds the address, so that Addr is known and a port in use is an error
// before anything else is started. Run calls it where the owner did not.
func (s *Server) Listen() error {
	if s.listener != nil {
		return nil
	}
	l, err := net.Listen("tcp", s.opts.Addr)
	if err != nil {
		return fmt.Errorf("listening for rpc on %s: %w", s.opts.Addr, err)
	}
	s.listener = l
	return nil
}

// Addr is the bound address, or the configured one before Listen.
func (s *Server) Addr() string {
	if s.listener == nil {
		return s.opts.Addr
	}
	return s.listener.Addr().String()
}

// Run serves until ctx ends, then drains and returns nil:
//
//  1. health answers NOT_SERVING, calls are still taken, for DrainDelay;
//  2. new calls are refused, Draining is closed, running calls finish, for at
//     most DrainTimeout;
//  3. what still runs is cut off: its context is cancelled and its caller gets
//     UNAVAILABLE. A handler that ignores its context may outlive Run.
//
// It returns an error where it could not listen, or where serving failed.
func (s *Server) Run(ctx context.Context) error {
	defer s.drain()
	if err := s.Listen(); err != nil {
		return err
	}
	if s.metrics != nil {
		s.metrics.InitializeMetrics(s.grpc)
	}
	s.log.Info("serving rpc", telemetry.KeyAddr, s.Addr(), "tls", s.opts.TLSCertFile != "")
	served := make(chan error, 1)
	go func() { served <- s.grpc.Serve(s.listener) }()

	select {
	case err := <-served:
		s.health.Shutdown()
		s.grpc.Stop()
		if err == nil {
			err = errors.New("stopped by another party")
		}
		return fmt.Errorf("serving rpc on %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}

	start := time.Now()
	s.log.Info("rpc draining", "delay_ms", s.opts.DrainDelay.Milliseconds(), "timeout_ms", s.opts.DrainTimeout.Milliseconds())
	s.health.Shutdown()
	if s.opts.DrainDelay > 0 {
		<-time.After(s.opts.DrainDelay) // ctx has ended; the delay is the bound
	}
	s.drain()
	finished := make(chan struct{})
	go func() { s.grpc.GracefulStop(); close(finished) }()
	select {
	case <-finished:
		s.log.Info("rpc drained", telemetry.KeyDurationMS, time.Since(start).Milliseconds())
		return nil
	case <-time.After(s.opts.DrainTimeout):
	}

	s.log.Warn("rpc drain timed out, cutting off what still runs", telemetry.KeyDurationMS, time.Since(start).Milliseconds())
	stopped := make(chan struct{})
	go func() { s.grpc.Stop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(stopTimeout):
		s.log.Warn("rpc connections are still open")
	}
	return nil
}
