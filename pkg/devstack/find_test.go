package devstack

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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

// Continuous integration goes on where MySQL cannot be fetched, and says so; what
// is missing besides is an error.
func TestMakeTestMySQL_SaysSkippedWhereMySQLCannotBeFetched(t *testing.T) {
	bin := t.TempDir() // no apt-get is among these
	for _, program := range []string{"make", "bash", "go", "mkdir", "cat"} {
		path, err := exec.LookPath(program)
		if err != nil {
			t.Skipf("this machine has no %s", program)
		}
		require.NoError(t, os.Symlink(path, filepath.Join(bin, program)))
	}
	run := func(redis string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "make", "-C", Root(), "SHELL="+filepath.Join(bin, "bash"), "DEV="+t.TempDir(), "test-mysql")
		cmd.Env = append(os.Environ(), "PATH="+bin, "MAKEFLAGS=", "SECKILL_DEV_DIR="+t.TempDir(),
			"SECKILL_REDIS_SERVER="+redis, "SECKILL_DATABASE_SERVER=/does/not/exist")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	out, err := run(fakeProgram(t, "redis-server", "Redis server v=8.0.2 sha=00000000:0"))
	require.NoError(t, err, out)
	require.Contains(t, out, "SKIPPED: the tests on real MySQL")
	require.Contains(t, out, "no apt-get", "and why")
	require.NotContains(t, out, "go test")

	out, err = run("/does/not/exist")
	require.Error(t, err, "without Redis nothing can be tested at all: %s", out)
	require.NotContains(t, out, "SKIPPED")
}
