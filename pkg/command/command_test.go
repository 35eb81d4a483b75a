package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
)

type greet struct {
	Name string `default:"you" env:"SECKILL_TEST_NAME"`
}

func (g *greet) Run(std Streams) error {
	if g.Name == "nobody" {
		return errors.New("nobody is there")
	}
	fmt.Fprintln(std.Out, "hello", g.Name)
	return nil
}

type wait struct{}

func (wait) Run(ctx context.Context) error {
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func run(args ...string) (code int, out, errs string) {
	var commands struct {
		Greet   greet            `cmd:"" default:"withargs" help:"Greet."`
		Wait    wait             `cmd:"" help:"Wait."`
		Version kong.VersionFlag `help:"Version."`
	}
	var stdout, stderr bytes.Buffer
	code = Run("greeter", "Greets.", &commands, args, Streams{&stdout, &stderr})
	return code, stdout.String(), stderr.String()
}

func TestRun_TellsByItsExitCodeHowItEnded(t *testing.T) {
	t.Setenv("SECKILL_TEST_NAME", "world")
	for name, row := range map[string]struct {
		args      []string
		code      int
		out, errs string
	}{
		"done":       {[]string{"greet", "--name=all"}, 0, "hello all\n", ""},
		"default":    {nil, 0, "hello world\n", ""},
		"failed":     {[]string{"--name=nobody"}, 1, "", "greeter: nobody is there\n"},
		"understood": {[]string{"--loud"}, 2, "", "greeter: unknown flag --loud\nSee greeter --help.\n"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(row.args...)
			require.Equal(t, row.code, code)
			require.Equal(t, row.out, out)
			require.Equal(t, row.errs, errs)
		})
	}
	code, out, _ := run("--help")
	require.Zero(t, code)
	require.Contains(t, out, "Greets.")
	require.NotContains(t, out, "hello", "help runs nothing")
	code, out, _ = run("--version")
	require.Zero(t, code)
	require.NotEmpty(t, strings.TrimSpace(out))
	require.NotContains(t, out, "hello")
}

func TestRun_ASignalEndsTheContextOfTheCommand(t *testing.T) {
	code, _, errs := run("wait")
	require.Zero(t, code, errs)
}

func TestProblems_NamesAllAtOnce(t *testing.T) {
	var problems Problems
	problems.Add(nil)
	problems.If(false, "no problem")
	problems.HostPort("--listen", ":7070")
	require.NoError(t, problems.Err())

	problems.Add(errors.New("first"), nil)
	problems.If(true, "--size %d: too large", 7)
	problems.HostPort("--listen", "7070")
	require.EqualError(t, problems.Err(), "the settings do not fit:\nfirst\n--size 7: too large\n--listen \"7070\" is not HOST:PORT")
}
