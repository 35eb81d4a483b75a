package devstack

import (
	"bufio"
	"context"
	"database/sql"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
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

func openDatabase(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func TestDatabase_RunsWithDurableCommitsAndWholeRollback(t *testing.T) {
	db := openDatabase(t, TestDatabase(t))
	var flush, logBin, rollback, zone, charset string
	require.NoError(t, db.QueryRow("SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@innodb_rollback_on_timeout, @@time_zone, @@character_set_database").
		Scan(&flush, &logBin, &rollback, &zone, &charset))
	require.Equal(t, []string{"1", "0", "1", "+00:00", "utf8mb4"}, []string{flush, logBin, rollback, zone, charset})
}

func TestDatabase_EachTestGetsItsOwn(t *testing.T) {
	first, second := openDatabase(t, TestDatabase(t)), openDatabase(t, TestDatabase(t))
	_, err := first.Exec("CREATE TABLE x (a INT)")
	require.NoError(t, err)
	_, err = second.Exec("CREATE TABLE x (a INT)")
	require.NoError(t, err)
}

func TestDatabaseServer_KeepsCommitsOverKillAndPauseHangs(t *testing.T) {
	d := TestDatabaseServer(t, DatabaseOptions{Args: []string{"--max-connections=17"}})
	require.NoError(t, d.CreateDatabase(t.Context(), "shop"))
	require.Error(t, d.CreateDatabase(t.Context(), "shop"))
	require.Error(t, d.CreateDatabase(t.Context(), "x; DROP DATABASE shop"))
	db := openDatabase(t, d.DSN("shop"))
	_, err := db.Exec("CREATE TABLE x (a INT)")
	require.NoError(t, err)
	_, err = db.Exec("INSERT INTO x VALUES (7)")
	require.NoError(t, err)
	d.Kill()
	require.Error(t, db.Ping())
	require.NoError(t, d.Restart(t.Context()))
	var a, connections int
	require.NoError(t, db.QueryRow("SELECT a, @@max_connections FROM x").Scan(&a, &connections))
	require.Equal(t, []int{7, 17}, []int{a, connections})

	require.NoError(t, d.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, db.PingContext(ctx), context.DeadlineExceeded)
	require.NoError(t, d.Resume())
	eventually(t, func() bool { return db.Ping() == nil }, "a resumed server answers")

	require.NoError(t, d.Stop())
	require.NoError(t, d.Restart(t.Context(), "--read-only=ON"))
	var readOnly int
	require.NoError(t, db.QueryRow("SELECT @@read_only").Scan(&readOnly))
	require.Equal(t, 1, readOnly)
}

func TestDatabase_StartsInAFolderWithALongPath(t *testing.T) {
	// Longer than the path of a Unix socket may be.
	d := TestDatabaseServer(t, DatabaseOptions{Dir: filepath.Join(t.TempDir(), strings.Repeat("long", 40), "data")})
	require.NoError(t, openDatabase(t, d.DSN("")).Ping())
}

type lines struct {
	sync.Mutex
	all []string
}

func (l *lines) Print(v ...any) {
	l.Lock()
	defer l.Unlock()
	l.all = append(l.all, fmt.Sprint(v...))
}

func TestDatabase_ProbingAServerThatHangsUpPrintsNothing(t *testing.T) {
	var printed lines
	require.NoError(t, mysql.SetLogger(&printed))
	t.Cleanup(func() { require.NoError(t, mysql.SetLogger(log.New(os.Stderr, "[mysql] ", log.Ldate|log.Ltime))) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	require.Error(t, (&Database{dir: t.TempDir()}).answers(t.Context(), port))
	require.Empty(t, printed.all)
	// The same without the silence, so that this test can fail.
	require.Error(t, openDatabase(t, dsn(port, "")).Ping())
	require.NotEmpty(t, printed.all)
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

func TestFind_SaysTheThreeWaysWhenNothingCanBeFetched(t *testing.T) {
	t.Setenv("SECKILL_DEV_DIR", t.TempDir())
	t.Setenv("PATH", t.TempDir())
	t.Setenv("SECKILL_REDIS_SERVER", "/does/not/exist")
	t.Setenv("SECKILL_DATABASE_SERVER", "/does/not/exist")
	t.Setenv("SECKILL_DATABASE", "")
	_, err := Find(t.Context(), nil)
	for _, way := range []string{"apt-get install", "brew install", "docker compose up", "no apt-get"} {
		require.ErrorContains(t, err, way)
	}
}

func TestFind_SaysThatMySQLIsUnavailableAndNotThatSomethingIsWrong(t *testing.T) {
	t.Setenv("SECKILL_DEV_DIR", t.TempDir())
	t.Setenv("SECKILL_REDIS_SERVER", fakeProgram(t, "redis-server", "Redis server v=8.0.2 sha=00000000:0"))
	t.Setenv("SECKILL_DATABASE_SERVER", fakeProgram(t, "mysqld", "mysqld  Ver 10.11.18-MariaDB for debian-linux-gnu on x86_64"))
	t.Setenv("SECKILL_DATABASE", "mysql")
	t.Setenv("PATH", t.TempDir()) // nothing to fetch with
	var log strings.Builder
	_, err := Find(t.Context(), &log)
	require.ErrorIs(t, err, ErrMySQLUnavailable)
	require.ErrorContains(t, err, "no apt-get")
	require.Contains(t, log.String(), "it is MariaDB, and MySQL is wanted")

	t.Setenv("SECKILL_REDIS_SERVER", "/does/not/exist")
	_, err = Find(t.Context(), nil)
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrMySQLUnavailable, "without Redis nothing can be tested at all")

	t.Setenv("SECKILL_DATABASE", "oracle")
	_, err = Find(t.Context(), nil)
	require.ErrorContains(t, err, "SECKILL_DATABASE")
}

func TestFind_TakesTheDatabaseThatIsAskedFor(t *testing.T) {
	maria := fakeProgram(t, "mariadbd", "mariadbd  Ver 10.11.18-MariaDB for debian-linux-gnu on x86_64")
	mysql := fakeProgram(t, "mysqld", "mysqld  Ver 9.7.4-2 for Linux on x86_64 ((Debian))")
	for _, c := range []struct {
		kind, program string
		taken         bool
	}{
		{"", maria, true}, {"mariadb", maria, true}, {"mysql", maria, false},
		{"", mysql, true}, {"mariadb", mysql, false}, {"mysql", mysql, true},
	} {
		t.Setenv("SECKILL_DATABASE", c.kind)
		t.Setenv("SECKILL_DATABASE_SERVER", c.program)
		asked, err := databaseServer()
		require.NoError(t, err)
		b := &Binaries{Redis: "there"}
		require.Equal(t, c.taken, b.use(t.Context(), io.Discard, asked), "%q with %s", c.kind, c.program)
		require.Equal(t, c.taken && c.program == maria, b.MariaDB)
	}
}

func TestProgramCommand_UsesTheLoaderThatWasUnpackedWithTheProgram(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("SECKILL_DEV_DIR", dir)
	t.Setenv("LD_LIBRARY_PATH", "")
	program, lib := filepath.Join(dir, "mysql/usr/sbin/mysqld"), filepath.Join(dir, "mysql/usr/lib/x86_64-linux-gnu")
	require.NoError(t, os.MkdirAll(lib, 0o755))

	path, args := programCommand(program, "--version")
	require.Equal(t, program, path)
	require.Equal(t, []string{"--version"}, args)
	require.Contains(t, programEnv(program), "LD_LIBRARY_PATH="+lib)

	loader := filepath.Join(lib, "ld-linux-x86-64.so.2")
	require.NoError(t, os.WriteFile(loader, nil, 0o755))
	path, args = programCommand(program, "--version")
	require.Equal(t, loader, path)
	require.Equal(t, []string{"--library-path", lib, program, "--version"}, args)
	require.NotContains(t, programEnv(program), "LD_LIBRARY_PATH="+lib, "the libraries of another release are for this program alone")

	path, args = programCommand("/usr/sbin/mysqld", "--version")
	require.Equal(t, "/usr/sbin/mysqld", path)
	require.Equal(t, []string{"--version"}, args)
}

// fakeProgram makes a program that only tells its version.
func fakeProgram(t *testing.T, name, version string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\necho '"+version+"'\n"), 0o755))
	return path
}

func TestFind_PassesOverRedisThatIsTooOld(t *testing.T) {
	t.Setenv("SECKILL_DEV_DIR", t.TempDir())
	t.Setenv("SECKILL_REDIS_SERVER", fakeProgram(t, "redis-old", "Redis server v=6.0.16 sha=00000000:0"))
	t.Setenv("SECKILL_DATABASE_SERVER", fakeProgram(t, "mysqld", "mysqld  Ver 9.7.4-2 for Linux on x86_64"))
	var log strings.Builder
	b := &Binaries{}
	require.False(t, b.use(t.Context(), &log, anyDatabase))
	require.Empty(t, b.Redis)
	require.Contains(t, log.String(), "Redis 7 or newer is needed")
	require.Equal(t, "9.7.4-2", b.DatabaseVersion)
	require.False(t, b.MariaDB)

	t.Setenv("SECKILL_REDIS_SERVER", fakeProgram(t, "redis-new", "Redis server v=8.0.2 sha=00000000:0"))
	require.True(t, b.use(t.Context(), &log, anyDatabase))
	require.Equal(t, "8.0.2", b.RedisVersion)
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
