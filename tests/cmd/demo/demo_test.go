package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
)

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }

// startDemo runs the built program with a folder of its own for all data.
func startDemo(t *testing.T, args ...string) (p *devstack.Process, temp string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute) // a cold build
	defer cancel()
	devstack.TestBinaries(t) // fetched by now, within its own bound
	dir, err := devstack.Build(ctx, nil, devstack.BuildOptions{},
		"github.com/seckill/seckill/tests/cmd/demo", "github.com/seckill/seckill/gateway/cmd/gateway", "github.com/seckill/seckill/writer/cmd/writer")
	require.NoError(t, err)
	temp, err = os.MkdirTemp("", "demo-") // short: sockets live below it
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(temp) })
	p, err = devstack.StartProcess(ctx, devstack.ProcessOptions{
		Path: filepath.Join(dir, "demo"), Args: append([]string{"--programs=" + dir}, args...), Env: []string{"TMPDIR=" + temp},
	})
	require.NoError(t, err)
	t.Cleanup(p.Kill)
	return p, temp
}

// finish waits for the end and returns the last line.
func finish(t *testing.T, p *devstack.Process, temp string) string {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(8 * time.Minute):
		t.Fatalf("the demo does not end:\n%s", p.Output())
	}
	left, err := os.ReadDir(temp)
	require.NoError(t, err)
	require.Empty(t, left, "left behind")
	output := p.Output()
	return output[strings.LastIndexByte(output, '\n')+1:]
}

func TestDemo_Passes(t *testing.T) {
	for name, test := range map[string]struct {
		args []string
		last string
	}{
		"more users than units": {
			[]string{"--stock=300", "--users=900", "--writers=3"},
			"demo: PASS total=300 admitted=300 persisted=300 remaining=0 in_flight=0 duplicates=0 books=PROVEN",
		},
		"one unit, no other writer, one partition": {
			[]string{"--stock=1", "--users=10", "--writers=1", "--partitions=1"},
			"demo: PASS total=1 admitted=1 persisted=1 remaining=0 in_flight=0 duplicates=0 books=PROVEN",
		},
		"fewer users than units, caught in the middle": {
			[]string{"--stock=5000", "--users=3000", "--writers=2", "--gateways=2"},
			"demo: PASS total=5000 admitted=3000 persisted=3000 remaining=2000 in_flight=0 duplicates=0 books=PROVEN",
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, temp := startDemo(t, test.args...)
			last := finish(t, p, temp)
			require.Equal(t, test.last, last, "%s", p.Output())
			require.Equal(t, 0, p.ExitCode())
			require.Regexp(t, `writer-\d+ \(pid \d+\) is stopped \(SIGSTOP\): it holds \d+ orders? in \d+ entr(y|ies)`, p.Output())
			require.Regexp(t, `\n\* writer-\d+ is killed \(SIGKILL\)\n`, p.Output())
			killed, answered := strings.Index(p.Output(), "is killed (SIGKILL)"), strings.Index(p.Output(), "every user has an answer")
			require.Less(t, killed, answered, "the crash is in the middle of the sale:\n%s", p.Output())
			require.Regexp(t, `\n  taken over   \d+ orders?, `, p.Output())
		})
	}
}

// A sale that is cut short is a failure with the figures as they are.
func TestDemo_FailsWithFiguresWhenOutOfTime(t *testing.T) {
	p, temp := startDemo(t, "--stock=100000", "--users=200000", "--timeout=700ms")
	last := finish(t, p, temp)
	require.Equal(t, 1, p.ExitCode(), "%s", p.Output())
	m := regexp.MustCompile(`^demo: FAIL not finished within 700ms: .* total=100000 admitted=(\d+) persisted=\d+ remaining=\d+ in_flight=\d+ duplicates=0 books=(PROVEN|IN_FLIGHT)$`).FindStringSubmatch(last)
	require.NotNil(t, m, "%s", p.Output())
}

func TestDemo_CtrlCInTheSaleLeavesNothing(t *testing.T) {
	p, temp := startDemo(t, "--stock=1000000", "--users=2000000")
	require.Eventually(t, func() bool {
		select {
		case <-p.Done():
			return true
		default:
			return strings.Contains(p.Output(), "  admitted ")
		}
	}, 8*time.Minute, 20*time.Millisecond)
	require.Equal(t, -1, p.ExitCode(), "%s", p.Output())
	require.NoError(t, p.Signal(syscall.SIGINT))
	last := finish(t, p, temp)
	require.Equal(t, 130, p.ExitCode(), "%s", p.Output())
	require.Equal(t, "* interrupted; everything is removed", last)
	// Every process of the stack names the folder, be it for its data or a key.
	require.Empty(t, commandLinesWith(t, temp))
}

// commandLinesWith finds processes by their command line, where /proc shows it.
func commandLinesWith(t *testing.T, text string) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	var found []string
	for _, path := range paths {
		if line, err := os.ReadFile(path); err == nil && strings.Contains(string(line), text) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

func TestDemo_RefusesSettingsThatMakeNoSense(t *testing.T) {
	for _, args := range [][]string{{"--stock=0"}, {"--users=0"}, {"--writers=0"}, {"--gateways=0"}, {"--partitions=0"}, {"--callers=0"}, {"--timeout=0s"}, {"--no-such-flag"}} {
		require.Equal(t, exitUsage, execute(args), "%v", args)
	}
}
