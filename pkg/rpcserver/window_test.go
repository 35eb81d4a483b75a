package rpcserver

import (
	"bytes"
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	testpb "google.golang.org/grpc/interop/grpc_testing"
)

// farConn is a connection on which what is written arrives later, as from afar.
type farConn struct {
	net.Conn
	delay  time.Duration
	way    chan packet
	closed context.Context
	close  context.CancelFunc
}

type packet struct {
	arrives time.Time
	bytes   []byte
}

func dialFar(ctx context.Context, addr string, delay time.Duration) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &farConn{Conn: conn, delay: delay, way: make(chan packet, 1<<16)}
	c.closed, c.close = context.WithCancel(context.Background())
	go func() {
		for {
			select {
			case p := <-c.way:
				<-time.After(time.Until(p.arrives))
				if _, err := conn.Write(p.bytes); err != nil {
					return
				}
			case <-c.closed.Done():
				return
			}
		}
	}()
	return c, nil
}

func (c *farConn) Write(b []byte) (int, error) {
	c.way <- packet{time.Now().Add(c.delay), bytes.Clone(b)}
	return len(b), nil
}

func (c *farConn) Close() error {
	c.close()
	return c.Conn.Close()
}

// Over a connection that is far and fast, a stream whose handler reads no more
// takes a window from its client, not what would be in flight at full speed.
func TestServer_AStreamThatIsNotReadHoldsItsClientBack(t *testing.T) {
	const message, plenty = 16 << 10, 4 << 20
	var read atomic.Int64
	release := make(chan struct{})
	r := start(t, Options{}, &service{stream: func(ss testpb.TestService_FullDuplexCallServer) error {
		for read.Load() < plenty {
			if _, err := ss.Recv(); err != nil {
				return err
			}
			read.Add(message)
		}
		<-release
		return nil
	}})
	defer close(release)
	conn, err := grpc.NewClient(r.Addr(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return dialFar(ctx, addr, 10*time.Millisecond)
		}))
	require.NoError(t, err)
	defer conn.Close()
	stream, err := testpb.NewTestServiceClient(conn).FullDuplexCall(t.Context())
	require.NoError(t, err)
	var sent atomic.Int64
	go func() {
		for stream.Send(&testpb.StreamingOutputCallRequest{Payload: &testpb.Payload{Body: make([]byte, message-16)}}) == nil {
			sent.Add(message)
		}
	}()
	last, still := int64(0), 0
	require.Eventually(t, func() bool {
		now := sent.Load()
		if now != last || read.Load() < plenty {
			last, still = now, 0
			return false
		}
		still++
		return still == 50
	}, 20*time.Second, 10*time.Millisecond, "it can send on and on")
	// A window, what the client keeps before it waits, and a message on each side.
	require.LessOrEqual(t, sent.Load()-read.Load(), int64(streamWindow+64<<10+2*message))
}
