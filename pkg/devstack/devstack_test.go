package devstack

import (
	"bufio"
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// roleEnv makes the test binary play a parent that starts servers and then ends
// in the named way.
const roleEnv = "DEVSTACK_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		if err := playParent(role); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
	}
	os.Exit(Main(m))
}

// soon bounds every wait in these tests: far more than a loaded machine needs.
const soon = 30 * time.Second

func eventually(t *testing.T, condition func() bool, msg string) {
	t.Helper()
	require.Eventually(t, condition, soon, 5*time.Millisecond, msg)
}

// playParent starts a Redis and a database, says what it has, and ends.
func playParent(role string) error {
	ctx := context.Background()
	b, err := Find(ctx, nil)
	if err != nil {
		return err
	}
	r, err := StartRedis(ctx, b, RedisOptions{})
	if err != nil {
		return err
	}
	d, err := StartDatabase(ctx, b, DatabaseOptions{})
	if err != nil {
		return err
	}
	folder, err := ownFolder()
	if err != nil {
		return err
	}
	fmt.Printf("%d %d %s\n", r.Pid(), d.Pid(), folder.path)
	switch role {
	case "panic":
		go func() { panic("on purpose") }()
	case "paused":
		if err := errors.Join(r.Pause(), d.Pause()); err != nil {
			return err
		}
		fmt.Println("paused")
	}
	select {}
}

func gone(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	// Where nothing collects orphans, a dead process stays as a zombie.
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && strings.Contains(string(stat), ") Z ")
}

func TestChildren_DieWithTheirParentAndFoldersGo(t *testing.T) {
	TestBinaries(t) // not fetched by the children
	for _, role := range []string{"killed", "interrupted", "panic", "paused"} {
		t.Run(role, func(t *testing.T) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), roleEnv+"="+role)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			var stderr tail
			cmd.Stderr = &stderr
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			defer func() { _ = cmd.Process.Kill() }()
			lines := bufio.NewReader(out)
			line, err := lines.ReadString('\n')
			require.NoError(t, err, stderr.String())
			fields := strings.Fields(line)
			require.Len(t, fields, 3)
			redis, err := strconv.Atoi(fields[0])
			require.NoError(t, err)
			database, err := strconv.Atoi(fields[1])
			require.NoError(t, err)
			folder := fields[2]
			require.False(t, role != "panic" && (gone(redis) || gone(database)), "they run while the parent does")

			switch role {
			case "killed":
				require.NoError(t, cmd.Process.Kill())
			case "interrupted": // as a terminal does it: the whole foreground group
				require.NoError(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGINT))
			case "paused":
				_, err := lines.ReadString('\n')
				require.NoError(t, err)
				require.NoError(t, cmd.Process.Kill())
			}
			require.Error(t, cmd.Wait())
			eventually(t, func() bool { return gone(redis) && gone(database) }, "children are gone")
			eventually(t, func() bool { _, err := os.Stat(folder); return errors.Is(err, os.ErrNotExist) }, "the folder is gone")
		})
	}
}

func TestReaper_KillsGroupsItWasToldOf(t *testing.T) {
	// What stands in for the parent-death signal outside Linux.
	start := func() *exec.Cmd {
		cmd := exec.Command("/bin/sh", "-c", "sleep 600")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd
	}
	told, forgotten := start(), start()
	f := &processFolder{path: filepath.Join(t.TempDir(), "data")}
	require.NoError(t, os.Mkdir(f.path, 0o700))
	require.NoError(t, f.startReaper())
	fmt.Fprintf(f.reaper, "+ %d\n+ %d\n- %d\n", forgotten.Process.Pid, told.Process.Pid, forgotten.Process.Pid)
	require.NoError(t, f.reaper.Close())
	<-f.done
	require.NoDirExists(t, f.path)
	eventually(t, func() bool { return gone(told.Process.Pid) }, "the group it was told of is killed")
	require.False(t, gone(forgotten.Process.Pid))
}

func TestSweep_TakesFoldersOfDeadProcessesOnly(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	make := func(lock string) string {
		dir, err := os.MkdirTemp("", folderPrefix)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, "data"), []byte("x"), 0o600))
		if lock != "" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, lock), nil, 0o600))
		}
		return dir
	}
	dead, live, starting, crashedAtStart := make(ownerLock), make(ownerLock), make("new.lock"), make("")
	f, err := os.Open(filepath.Join(live, ownerLock))
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
	old := time.Now().Add(-2 * time.Hour)
	require.NoError(t, os.Chtimes(crashedAtStart, old, old))
	sweep()
	require.NoDirExists(t, dead)
	require.DirExists(t, live)
	require.DirExists(t, starting)
	require.NoDirExists(t, crashedAtStart)
}

func TestLockFolder_ExcludesUntilUnlockedAndHonoursContext(t *testing.T) {
	t.Setenv("SECKILL_DEV_DIR", t.TempDir())
	unlock, err := lockFolder(t.Context(), io.Discard, "x")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Millisecond)
	defer cancel()
	_, err = lockFolder(ctx, io.Discard, "x")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	unlock()
	unlock, err = lockFolder(t.Context(), io.Discard, "x")
	require.NoError(t, err)
	unlock()
}

func TestBuild_BuildsOnceAndProgramsRun(t *testing.T) {
	const pkg = "github.com/seckill/seckill/pkg/devstack/cmd/devstack"
	dir, err := Build(t.Context(), nil, BuildOptions{}, pkg)
	require.NoError(t, err)
	again, err := Build(t.Context(), nil, BuildOptions{}, pkg)
	require.NoError(t, err)
	require.Equal(t, dir, again)
	out, err := exec.Command(filepath.Join(dir, "devstack"), "--help").CombinedOutput()
	require.NoError(t, err)
	require.Contains(t, string(out), "fetch")
	tagged, err := Build(t.Context(), nil, BuildOptions{Tags: []string{"one", "two"}}, pkg)
	require.NoError(t, err)
	require.NotEqual(t, dir, tagged)
	info, err := buildinfo.ReadFile(filepath.Join(tagged, "devstack"))
	require.NoError(t, err)
	require.Contains(t, info.Settings, debug.BuildSetting{Key: "-tags", Value: "one,two"})
	_, err = Build(t.Context(), nil, BuildOptions{}, "-tags=one", pkg)
	require.Error(t, err, "packages are no flags")
	_, err = Build(t.Context(), nil, BuildOptions{}, pkg+"/missing")
	require.ErrorContains(t, err, "building")
}
