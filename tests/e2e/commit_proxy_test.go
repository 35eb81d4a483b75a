//go:build fleet

package e2e

import (
	"bytes"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// commitProxy stands between a writer and the database and catches the answer
// to a COMMIT: the transaction is committed, its owner does not know yet. No
// general proxy knows which answer that is.
type commitProxy struct {
	t        *testing.T
	upstream string
	listener net.Listener
	armed    atomic.Bool
	caught   chan *caughtCommit
	conns    sync.Map // net.Conn -> struct{}
}

// caughtCommit is a committed transaction whose answer is kept back.
type caughtCommit struct{ deliver chan bool }

// answer lets the writer know.
func (c *caughtCommit) answer() { c.deliver <- true }

// cut breaks the connection instead.
func (c *caughtCommit) cut() { c.deliver <- false }

func newCommitProxy(t *testing.T, upstream string) *commitProxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &commitProxy{t: t, upstream: upstream, listener: listener, caught: make(chan *caughtCommit, 1)}
	t.Cleanup(func() {
		listener.Close()
		p.conns.Range(func(conn, _ any) bool { conn.(net.Conn).Close(); return true })
	})
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go p.serve(client)
		}
	}()
	return p
}

func (p *commitProxy) addr() string { return p.listener.Addr().String() }

// arm catches the next commit.
func (p *commitProxy) arm() { p.armed.Store(true) }

// await waits for the commit that was armed for.
func (p *commitProxy) await() *caughtCommit {
	p.t.Helper()
	select {
	case c := <-p.caught:
		return c
	case <-time.After(patience):
		require.Fail(p.t, "no commit came")
		return nil
	}
}

// commitPacket is COM_QUERY with COMMIT, as the driver sends it.
var commitPacket = append([]byte{7, 0, 0, 0, 3}, "COMMIT"...)

func (p *commitProxy) serve(client net.Conn) {
	server, err := net.Dial("tcp", p.upstream)
	if err != nil {
		client.Close()
		return
	}
	p.conns.Store(client, nil)
	p.conns.Store(server, nil)
	closeBoth := func() {
		for _, conn := range []net.Conn{client, server} {
			conn.Close()
			p.conns.Delete(conn)
		}
	}
	var committing atomic.Bool
	go func() {
		defer closeBoth()
		buf := make([]byte, 64<<10)
		for {
			n, err := client.Read(buf)
			// An answer is read before the next statement is sent, so the next one
			// that comes is the commit's.
			if n > 0 && bytes.Contains(buf[:n], commitPacket) && p.armed.CompareAndSwap(true, false) {
				committing.Store(true)
			}
			if n > 0 {
				if _, err := server.Write(buf[:n]); err != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}()
	defer closeBoth()
	buf := make([]byte, 64<<10)
	for {
		n, err := server.Read(buf)
		if n > 0 && committing.CompareAndSwap(true, false) {
			c := &caughtCommit{deliver: make(chan bool, 1)}
			p.caught <- c
			if !<-c.deliver {
				return
			}
		}
		if n > 0 {
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
