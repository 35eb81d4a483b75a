package devstack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// maxHeld bounds the bytes that Hold keeps for one connection; beyond it the
// client's writes block, as they would on a network that takes nothing more.
const maxHeld = 16 << 20

// Proxy is a TCP proxy on 127.0.0.1 that a test puts between a client and its
// server, to make the faults that decide whether an order counts twice: the
// request arrives and the reply does not, or the request arrives long after
// its sender has given up. The known fault proxies cut, slow and limit
// connections, but none delivers requests while it throws replies away; this
// is why it is here. All methods are safe for concurrent use.
type Proxy struct {
	upstream string
	listener net.Listener
	running  sync.WaitGroup

	mu        sync.Mutex
	changed   *sync.Cond // of everything below, and of each connection's queue
	closed    bool
	holding   bool
	swallow   bool
	refuse    bool
	swallowed int64
	conns     map[*proxyConn]struct{}
}

type proxyConn struct {
	client, server net.Conn
	queue          []byte // requests read from the client and not yet written to the server
	clientDone     bool   // the client sends no more
	broken         bool   // both sides are closed
	outOfStep      bool   // it has lost replies, so later ones would be taken for them
}

// StartProxy starts a proxy for the server at upstream (host:port). It passes
// everything until it is told otherwise.
func StartProxy(upstream string) (*Proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("starting a proxy for %s: %w", upstream, err)
	}
	p := &Proxy{upstream: upstream, listener: listener, conns: make(map[*proxyConn]struct{})}
	p.changed = sync.NewCond(&p.mu)
	p.running.Go(p.accept)
	return p, nil
}

// Addr returns the host:port that clients connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// SwallowReplies delivers requests and throws the replies away.
func (p *Proxy) SwallowReplies() { p.set(func() { p.swallow = true }) }

// Hold keeps requests instead of delivering them. A request that is held when
// its sender hangs up is still delivered by Release.
func (p *Proxy) Hold() { p.set(func() { p.holding = true }) }

// Release delivers what is held and holds no more. If replies are swallowed,
// they still are.
func (p *Proxy) Release() { p.set(func() { p.holding = false }) }

// Refuse cuts all connections and every new one at once.
func (p *Proxy) Refuse() { p.set(func() { p.refuse = true; p.cutLocked() }) }

// CutAll closes all connections on both sides; what is held is lost. New
// connections are served as before.
func (p *Proxy) CutAll() { p.set(p.cutLocked) }

// Pass ends every fault: what is held is delivered, replies pass. Connections
// that have lost replies are cut, as their later replies would be taken for
// the lost ones.
func (p *Proxy) Pass() {
	p.set(func() {
		p.holding, p.swallow, p.refuse = false, false, false
		for c := range p.conns {
			if c.outOfStep {
				c.breakLocked()
			}
		}
	})
}

// Held returns how many bytes of requests are held now.
func (p *Proxy) Held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.holding {
		return 0
	}
	held := 0
	for c := range p.conns {
		held += len(c.queue)
	}
	return held
}

// Swallowed returns how many bytes of replies were thrown away so far.
func (p *Proxy) Swallowed() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.swallowed
}

// Conns returns how many connections are open.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

// Close cuts everything and stops listening.
func (p *Proxy) Close() {
	p.set(func() { p.closed = true; p.cutLocked() })
	p.listener.Close()
	p.running.Wait()
}

func (p *Proxy) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
	p.changed.Broadcast()
}

func (p *Proxy) cutLocked() {
	for c := range p.conns {
		c.breakLocked()
	}
}

func (c *proxyConn) breakLocked() {
	c.broken = true
	c.client.Close()
	c.server.Close()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			wait(context.Background(), 10*time.Millisecond) // out of descriptors for a moment
			continue
		}
		p.running.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	server, err := net.DialTimeout("tcp", p.upstream, 5*time.Second)
	if err != nil {
		client.Close()
		return
	}
	c := &proxyConn{client: client, server: server}
	p.mu.Lock()
	if p.refuse || p.closed {
		c.breakLocked()
		p.mu.Unlock()
		return
	}
	p.conns[c] = struct{}{}
	p.mu.Unlock()

	var pumps sync.WaitGroup
	pumps.Go(func() { p.readRequests(c) })
	pumps.Go(func() { p.deliverRequests(c) })
	pumps.Go(func() { p.passReplies(c) })
	pumps.Wait()
	p.set(func() {
		c.breakLocked()
		delete(p.conns, c)
	})
}

// readRequests queues what the client sends. It reads on while requests are
// held, so that it sees the client hang up.
func (p *Proxy) readRequests(c *proxyConn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.client.Read(buf)
		p.mu.Lock()
		c.queue = append(c.queue, buf[:n]...)
		if err != nil {
			c.clientDone = true
		}
		p.changed.Broadcast()
		for len(c.queue) > maxHeld && !c.broken {
			p.changed.Wait()
		}
		stop := c.clientDone || c.broken
		p.mu.Unlock()
		if stop {
			return
		}
	}
}

// deliverRequests writes the queue to the server whenever nothing is held.
func (p *Proxy) deliverRequests(c *proxyConn) {
	for {
		p.mu.Lock()
		for !c.broken && (p.holding || len(c.queue) == 0) && (p.holding || !c.clientDone) {
			p.changed.Wait()
		}
		requests, broken := c.queue, c.broken
		c.queue = nil
		p.changed.Broadcast()
		p.mu.Unlock()
		if broken {
			return
		}
		if len(requests) == 0 { // the client is done and everything is delivered
			if half, ok := c.server.(*net.TCPConn); ok {
				_ = half.CloseWrite() // a server that is gone already is no news
			}
			return
		}
		if _, err := c.server.Write(requests); err != nil {
			p.set(c.breakLocked)
			return
		}
	}
}

// passReplies ends with the server's side of the connection.
func (p *Proxy) passReplies(c *proxyConn) {
	buf := make([]byte, 64<<10)
	clientGone := false
	for {
		n, err := c.server.Read(buf)
		p.mu.Lock()
		if n > 0 && (p.swallow || c.outOfStep) {
			c.outOfStep = true
			p.swallowed += int64(n)
			n = 0
		}
		p.mu.Unlock()
		if n > 0 && !clientGone {
			// The server's side is read to its end all the same, so that a
			// request which outlives its sender is worked off in peace.
			_, writeErr := c.client.Write(buf[:n])
			clientGone = writeErr != nil
		}
		if err != nil {
			p.set(c.breakLocked)
			return
		}
	}
}
