// Package deploy_test holds what is deployed against the programs: the settings
// and users of Redis and of the database are tried on real servers, and
// compose.yaml, the Dockerfile and the tables of README are compared with the
// binaries.
//
//	go test ./tests/deploy -update
//
// writes the flag tables of README anew.
package deploy_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
)

// patience bounds every wait: far more than any of them takes on a busy machine.
const patience = time.Minute

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

// path is a file of the repository.
func path(t testing.TB, name string) string {
	t.Helper()
	root := devstack.Root()
	require.NotEmpty(t, root, "the repository's root")
	return filepath.Join(root, filepath.FromSlash(name))
}

func read(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(path(t, name))
	require.NoError(t, err)
	return string(text)
}

// binary is a built gateway, writer or seckillctl.
func binary(t testing.TB, name string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	dir, err := devstack.Build(ctx, nil, devstack.BuildOptions{},
		"github.com/seckill/seckill/gateway/cmd/gateway", "github.com/seckill/seckill/gateway/cmd/seckillctl", "github.com/seckill/seckill/writer/cmd/writer")
	require.NoError(t, err)
	return filepath.Join(dir, name)
}

// run runs a program to its end, with nothing in its environment but PATH and
// what is given, and returns what it printed and its exit code.
func run(t testing.TB, env []string, program string, args ...string) (output string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if _, ended := err.(*exec.ExitError); err != nil && !ended {
		require.NoError(t, err, "running %s", program)
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

// makeSecrets makes a folder of secrets with the script that a person uses.
func makeSecrets(t testing.TB) string {
	t.Helper()
	// As it is in a fresh clone: there, and open to all.
	dir := filepath.Join(t.TempDir(), "secrets")
	require.NoError(t, os.Mkdir(dir, 0o755))
	out, code := run(t, []string{"SECRETS_DIR=" + dir}, "sh", path(t, "deploy/secrets.sh"))
	require.Zero(t, code, out)
	return dir
}

// fake puts a program of this name first on PATH that keeps its arguments and
// its standard input in files.
func fake(t testing.TB, name string) (env []string, args, stdin string) {
	t.Helper()
	dir := t.TempDir()
	args, stdin = filepath.Join(dir, "args"), filepath.Join(dir, "stdin")
	script := "#!/bin/sh\nprintf '%s\\n' \"$@\" >" + args + "\n[ \"" + name + "\" != mysql ] || cat >" + stdin + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700))
	return []string{"PATH=" + dir + string(os.PathListSeparator) + os.Getenv("PATH")}, args, stdin
}

func content(t testing.TB, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(text)
}
