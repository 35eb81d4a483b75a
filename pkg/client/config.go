package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
)

// Config configures New. A zero field takes what is named as its default.
type Config struct {
	// Target is where the gateways are, as a gRPC target such as
	// "dns:///gateways.sale.svc:7070": streams and calls are spread over all
	// addresses that it resolves to.
	Target string
	// Addresses are the gateways, host:port each, instead of a Target.
	Addresses []string
	// DialOptions are for every connection. Transport credentials are required;
	// for plain text grpc.WithTransportCredentials(insecure.NewCredentials()).
	DialOptions []grpc.DialOption

	// Connections to each address, or to the Target; default 2.
	Connections int
	// Streams on each connection; default 2. Each has up to 768 Grabs in flight.
	// Few streams make full messages and, at the gateway, full batches: with few
	// callers only some of them are used.
	Streams int
	// MaxWaiting bounds the Grabs that wait while every stream is full or none is
	// open; beyond it a Grab is refused at once with ErrOverloaded. Default 8192.
	// Those whose stream broke under them wait beyond it.
	MaxWaiting int

	// Timeout bounds a call whose context has no deadline; default 2 s.
	Timeout time.Duration
	// OverloadRetries is how often a Grab that the server refused as overloaded
	// is sent again, each time after the delay that the server asks for. Default
	// 3; negative is never.
	OverloadRetries int

	// StreamAge is when a stream is replaced by a new one, without a gap, so that
	// gateways that came later get their share; default 1 min.
	StreamAge time.Duration
	// StreamRetry is how long a server that does not know GrabStream gets unary
	// calls before it is asked again; default 1 min.
	StreamRetry time.Duration
	// StallTimeout is how long a stream that owes answers may be silent before it
	// is given up, its Grabs are sent elsewhere, and its gateway is avoided for
	// 20 s; default 5 s. Servers answer each Grab by its deadline, so more than
	// Timeout is right.
	StallTimeout time.Duration

	// Traceparent reads the W3C trace context of a caller, which then travels
	// with its Grab; nil is none. Other forms than that of version 00 are left out.
	Traceparent func(context.Context) string
	// Hooks are for metrics.
	Hooks Hooks
}

func (c *Config) complete() error {
	number := func(n *int, otherwise int) {
		if *n == 0 {
			*n = otherwise
		}
	}
	duration := func(d *time.Duration, otherwise time.Duration) {
		if *d == 0 {
			*d = otherwise
		}
	}
	number(&c.Connections, 2)
	number(&c.Streams, 2)
	number(&c.MaxWaiting, 8192)
	number(&c.OverloadRetries, 3)
	duration(&c.Timeout, 2*time.Second)
	duration(&c.StreamAge, time.Minute)
	duration(&c.StreamRetry, time.Minute)
	duration(&c.StallTimeout, 5*time.Second)
	switch {
	case c.Target == "" && len(c.Addresses) == 0:
		return errors.New("neither a target nor addresses are given")
	case c.Target != "" && len(c.Addresses) > 0:
		return errors.New("both a target and addresses are given")
	case c.Connections < 0 || c.Streams < 0 || c.MaxWaiting < 0:
		return errors.New("a number is negative")
	case c.Timeout < 0 || c.StreamAge < 0 || c.StreamRetry < 0 || c.StallTimeout < 0:
		return errors.New("a duration is negative")
	}
	for _, address := range c.Addresses {
		if address == "" {
			return errors.New("an address is empty")
		}
	}
	return nil
}

const (
	// Of a dead address grpc-go tries one connection at a time, with these pauses.
	dialFirst, dialLongest = 50 * time.Millisecond, 3 * time.Second
	// dialTimeout bounds one try.
	dialTimeout = 3 * time.Second
	// A connection on which nothing was heard for pingAfter is asked, and given
	// up after pingTimeout. Servers of ours allow a ping each 10 s.
	pingAfter, pingTimeout = 15 * time.Second, 5 * time.Second
)

// dial makes the connections, which connect when they are used.
func (c *Config) dial() (conns []*grpc.ClientConn, targets []string, err error) {
	options := append([]grpc.DialOption{
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"round_robin":{}}]}`),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: dialFirst, Multiplier: 1.6, Jitter: 0.2, MaxDelay: dialLongest},
			MinConnectTimeout: dialTimeout,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingAfter, Timeout: pingTimeout, PermitWithoutStream: true}),
	}, c.DialOptions...)
	addresses := c.Addresses
	if c.Target != "" {
		addresses = []string{c.Target}
	}
	// Connection by connection over all addresses: neighbours in the list of
	// slots are at different gateways.
	for range c.Connections {
		for _, address := range addresses {
			conn, err := grpc.NewClient(address, options...)
			if err != nil {
				closeAll(conns)
				return nil, nil, fmt.Errorf("connecting to %s: %w", address, err)
			}
			conns, targets = append(conns, conn), append(targets, address)
		}
	}
	return conns, targets, nil
}

func closeAll(conns []*grpc.ClientConn) {
	for _, conn := range conns {
		_ = conn.Close() // fails only where it is closed already
	}
}
