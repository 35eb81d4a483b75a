package devstack

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// briefly bounds waits for something that must not come.
const briefly = 200 * time.Millisecond

func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, soon)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

func get(t *testing.T, r *Redis, key string) string {
	t.Helper()
	answer, err := redisDo(r.Addr(), soon, "GET "+key)
	require.NoError(t, err)
	return answer
}

func TestProxy_PassesBothWays(t *testing.T) {
	r := TestRedis(t)
	p := TestProxy(t, r.Addr())
	conn := dial(t, p.Addr())
	big := strings.Repeat("x", 1<<20)
	answer, err := redisTalk(conn, soon, "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1048576\r\n"+big)
	require.NoError(t, err)
	require.Equal(t, "+OK", answer)
	answer, err = redisTalk(conn, soon, "GET a")
	require.NoError(t, err)
	require.Equal(t, big, answer)
}

func TestProxy_SwallowDeliversRequestsAndLosesReplies(t *testing.T) {
	r := TestRedis(t)
	p := TestProxy(t, r.Addr())
	conn := dial(t, p.Addr())
	_, err := redisTalk(conn, soon, "PING")
	require.NoError(t, err)
	p.SwallowReplies()
	_, err = redisTalk(conn, briefly, "SET a 1")
	require.Error(t, err)
	eventually(t, func() bool { return get(t, r, "a") == "1" }, "the request was delivered")
	eventually(t, func() bool { return p.Swallowed() > 0 }, "the reply was lost")

	// The old connection would read the reply of GET as that of SET: it is cut.
	p.Pass()
	_, err = redisTalk(conn, soon, "GET a")
	require.Error(t, err)
	require.NotErrorIs(t, err, net.ErrClosed)
	answer, err := redisTalk(dial(t, p.Addr()), soon, "GET a")
	require.NoError(t, err)
	require.Equal(t, "1", answer)
}

func TestProxy_HoldDeliversOnReleaseEvenAfterTheSenderHungUp(t *testing.T) {
	r := TestRedis(t)
	p := TestProxy(t, r.Addr())
	patient, gone := dial(t, p.Addr()), dial(t, p.Addr())
	_, err := redisTalk(patient, soon, "PING")
	require.NoError(t, err)
	_, err = redisTalk(gone, soon, "PING")
	require.NoError(t, err)
	p.Hold()
	_, err = redisTalk(gone, briefly, "SET b 2")
	require.Error(t, err)
	gone.Close()
	_, err = redisTalk(patient, briefly, "SET a 1")
	require.Error(t, err)
	eventually(t, func() bool { return p.Held() == 2*len("SET a 1\r\n") }, "both requests are held")
	require.Equal(t, "$-1", get(t, r, "a"))
	require.Equal(t, "$-1", get(t, r, "b"))

	p.Release()
	eventually(t, func() bool { return get(t, r, "a") == "1" && get(t, r, "b") == "2" }, "both requests are delivered")
	require.Zero(t, p.Held())
	require.NoError(t, patient.SetDeadline(time.Now().Add(soon)))
	reply := make([]byte, 5)
	_, err = patient.Read(reply)
	require.NoError(t, err)
	require.Equal(t, "+OK\r\n", string(reply), "the late reply reaches the sender that waited")
}

func TestProxy_HoldThenSwallowDeliversLateAndLosesTheReply(t *testing.T) {
	r := TestRedis(t)
	p := TestProxy(t, r.Addr())
	conn := dial(t, p.Addr())
	p.Hold()
	p.SwallowReplies()
	_, err := redisTalk(conn, briefly, "SET a 1")
	require.Error(t, err)
	p.Release()
	eventually(t, func() bool { return get(t, r, "a") == "1" && p.Swallowed() == int64(len("+OK\r\n")) }, "delivered, reply lost")
}

func TestProxy_CutAllClosesAndServesNewOnes(t *testing.T) {
	r := TestRedis(t)
	p := TestProxy(t, r.Addr())
	conn := dial(t, p.Addr())
	_, err := redisTalk(conn, soon, "PING")
	require.NoError(t, err)
	p.Hold()
	_, err = redisTalk(conn, briefly, "SET a 1")
	require.Error(t, err)
	p.CutAll()
	eventually(t, func() bool { return p.Conns() == 0 }, "the connection is cut")
	p.Pass()
	answer, err := redisTalk(dial(t, p.Addr()), soon, "GET a")
	require.NoError(t, err)
	require.Equal(t, "$-1", answer, "what was held is lost")
}

func TestProxy_RefuseCutsNewOnesUntilPass(t *testing.T) {
	r := TestRedis(t)
	p := TestProxy(t, r.Addr())
	p.Refuse()
	_, err := redisDo(p.Addr(), soon, "PING")
	require.Error(t, err)
	p.Pass()
	answer, err := redisDo(p.Addr(), soon, "PING")
	require.NoError(t, err)
	require.Equal(t, "+PONG", answer)
}

func TestProxy_CutsClientWhenServerDies(t *testing.T) {
	r := TestRedis(t)
	p := TestProxy(t, r.Addr())
	conn := dial(t, p.Addr())
	_, err := redisTalk(conn, soon, "PING")
	require.NoError(t, err)
	r.Kill()
	_, err = redisTalk(conn, soon, "PING")
	var timeout net.Error
	require.False(t, err == nil || errorAsTimeout(err, &timeout), "cut at once, not silent: %v", err)
	require.NoError(t, r.Restart(t.Context()))
	answer, err := redisDo(p.Addr(), soon, "PING")
	require.NoError(t, err)
	require.Equal(t, "+PONG", answer)
}

func errorAsTimeout(err error, target *net.Error) bool {
	if e, ok := err.(net.Error); ok {
		*target = e
		return e.Timeout()
	}
	return false
}
