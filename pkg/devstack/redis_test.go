package devstack

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func redisDo(addr string, timeout time.Duration, command string) (string, error) {
	conn, err := net.DialTimeout("tcp", addr, timeout)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	return redisTalk(conn, timeout, command)
}

func redisTalk(conn net.Conn, timeout time.Duration, command string) (string, error) {
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, command+"\r\n"); err != nil {
		return "", err
	}
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	if err == nil && line[0] == '$' && line != "$-1\r\n" {
		line, err = in.ReadString('\n')
	}
	if err == nil && line[0] == '*' { // CONFIG GET: name, then value
		for range 4 {
			if line, err = in.ReadString('\n'); err != nil {
				break
			}
		}
	}
	return strings.TrimSpace(line), err
}

func TestRedis_RunsWithStrictDurability(t *testing.T) {
	r := TestRedis(t)
	for name, want := range map[string]string{
		"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "aof-load-truncated": "no", "save": "",
	} {
		got, err := redisDo(r.Addr(), soon, "CONFIG GET "+name)
		require.NoError(t, err)
		require.Equal(t, want, got, name)
	}
}

func TestRedis_ArgsWinOverDefaults(t *testing.T) {
	r := TestRedis(t, RedisOptions{Args: []string{"--maxmemory 10mb", "--appendfsync", "everysec"}})
	for name, want := range map[string]string{"maxmemory": "10485760", "appendfsync": "everysec"} {
		got, err := redisDo(r.Addr(), soon, "CONFIG GET "+name)
		require.NoError(t, err)
		require.Equal(t, want, got, name)
	}
}

func TestRedis_KeepsAcknowledgedWritesOverKillAndRestart(t *testing.T) {
	r := TestRedis(t)
	addr := r.Addr()
	for i := range 3 {
		key := fmt.Sprintf("k%d", i)
		answer, err := redisDo(addr, soon, "SET "+key+" "+key)
		require.NoError(t, err)
		require.Equal(t, "+OK", answer)
		r.Kill()
		_, err = redisDo(addr, time.Second, "PING")
		require.Error(t, err, "a killed server must not answer")
		require.NoError(t, r.Restart(t.Context()))
		require.Equal(t, addr, r.Addr())
		answer, err = redisDo(addr, soon, "GET "+key)
		require.NoError(t, err)
		require.Equal(t, key, answer)
	}
}

func TestRedis_PauseHangsAndResumeAnswers(t *testing.T) {
	r := TestRedis(t)
	require.NoError(t, r.Pause())
	_, err := redisDo(r.Addr(), 300*time.Millisecond, "PING")
	var timeout net.Error
	require.ErrorAs(t, err, &timeout)
	require.True(t, timeout.Timeout(), "a paused server accepts and stays silent: %v", err)
	require.NoError(t, r.Resume())
	answer, err := redisDo(r.Addr(), soon, "PING")
	require.NoError(t, err)
	require.Equal(t, "+PONG", answer)
}

func TestRedis_StopIsGracefulAlsoWhenPaused(t *testing.T) {
	r := TestRedis(t)
	require.NoError(t, r.Pause())
	require.NoError(t, r.Stop())
	require.Contains(t, r.Output(), "ready to exit")
}

func TestRedis_RefusesTornLogAndSaysWhy(t *testing.T) {
	r := TestRedis(t)
	_, err := redisDo(r.Addr(), soon, "SET a b")
	require.NoError(t, err)
	r.Kill()
	logs, err := filepath.Glob(filepath.Join(r.Dir(), "appendonlydir", "*.incr.aof"))
	require.NoError(t, err)
	require.Len(t, logs, 1)
	info, err := os.Stat(logs[0])
	require.NoError(t, err)
	require.NoError(t, os.Truncate(logs[0], info.Size()-3))
	err = r.Restart(t.Context())
	require.ErrorContains(t, err, "Unexpected end of file")
	require.NoError(t, r.Restart(t.Context(), "--aof-load-truncated", "yes"), "arguments for one run win")
}

func TestRedis_CloseRemovesThrowAwayFolderAndKeepsGivenOne(t *testing.T) {
	b := TestBinaries(t)
	own, err := StartRedis(t.Context(), b, RedisOptions{})
	require.NoError(t, err)
	require.DirExists(t, own.Dir())
	own.Close()
	require.NoDirExists(t, own.Dir())

	given := t.TempDir()
	r, err := StartRedis(t.Context(), b, RedisOptions{Dir: given})
	require.NoError(t, err)
	r.Close()
	require.DirExists(t, filepath.Join(given, "appendonlydir"))
}
