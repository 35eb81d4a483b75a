package devstack

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestOnFreePort_TriesAnotherPortWhenOneIsLost(t *testing.T) {
	b := TestBinaries(t)
	squatter := TestRedis(t) // answers PING, so only the check of the pid tells it from ours
	r := &Redis{binary: b.Redis, dir: t.TempDir()}
	_, err := r.start(t.Context(), squatter.Port())
	require.ErrorIs(t, err, errPortTaken)

	tries := 0
	proc, port, err := onFreePort(t.Context(), func(ctx context.Context, port int) (*Process, error) {
		if tries++; tries == 1 {
			port = squatter.Port()
		}
		return r.start(ctx, port)
	})
	require.NoError(t, err)
	defer proc.Kill()
	require.Equal(t, 2, tries)
	require.NotEqual(t, squatter.Port(), port)
}

func TestProcess_TellsExitCodeAndOutput(t *testing.T) {
	var stdout strings.Builder
	p, err := StartProcess(t.Context(), ProcessOptions{Name: "shell", Path: "/bin/sh", Args: []string{"-c", "echo out $WORD; echo err >&2; exit 7"}, Env: []string{"WORD=hello"}, Stdout: &stdout})
	require.NoError(t, err)
	require.ErrorContains(t, p.Wait(), "shell ended")
	require.Equal(t, 7, p.ExitCode())
	require.Equal(t, "out hello\nerr", p.Output())
	require.Equal(t, "out hello\nerr\n", stdout.String())
	require.Error(t, p.Signal(syscall.SIGTERM), "it has ended")
	p.Kill() // harmless
}

func TestProcess_OutputIsBounded(t *testing.T) {
	p, err := StartProcess(t.Context(), ProcessOptions{Path: "/bin/sh", Args: []string{"-c", "i=0; while [ $i -lt 20000 ]; do echo line number $i; i=$((i+1)); done"}})
	require.NoError(t, err)
	require.NoError(t, p.Wait())
	require.LessOrEqual(t, len(p.Output()), outputTail)
	require.True(t, strings.HasSuffix(p.Output(), "line number 19999"))
}

func TestProcess_StopKillsOneThatDoesNotEnd(t *testing.T) {
	p, err := StartProcess(t.Context(), ProcessOptions{Path: "/bin/sh", Args: []string{"-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"}})
	require.NoError(t, err)
	eventually(t, func() bool { return p.Output() == "ready" }, "the trap is set")
	require.Equal(t, -1, p.ExitCode())
	require.ErrorContains(t, p.Stop(50*time.Millisecond), "was killed")
	<-p.Done()
}

func TestProcess_OutlivesTheThreadThatAskedForIt(t *testing.T) {
	type result struct {
		p   *Process
		err error
	}
	// Several at once: one of them may sit on the main thread, which never ends.
	const threads = 4
	var locked sync.WaitGroup
	locked.Add(threads)
	started := make(chan result)
	for range threads {
		go func() {
			runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
			locked.Done()
			locked.Wait()
			p, err := StartProcess(context.Background(), ProcessOptions{Path: "/bin/sleep", Args: []string{"600"}})
			started <- result{p, err}
		}()
	}
	ended := make(chan struct{}, threads)
	for range threads {
		r := <-started
		require.NoError(t, r.err)
		defer r.p.Kill()
		go func() {
			<-r.p.Done()
			ended <- struct{}{}
		}()
	}
	select {
	case <-ended:
		t.Fatal("a child died with the thread, not with the process")
	case <-time.After(300 * time.Millisecond):
	}
}

func TestFreePort_GivesEachPortOnce(t *testing.T) {
	seen := map[int]bool{}
	for range 200 {
		port, err := FreePort()
		require.NoError(t, err)
		require.False(t, seen[port])
		seen[port] = true
	}
}
