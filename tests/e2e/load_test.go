package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/tests/internal/stack"
)

// A load by hand against two gateways: what it says was admitted is what is in
// the database, over both ways, with repeated clicks.
func TestLoad_CountsWhatTheDatabaseHas(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{Gateways: 2})
	o := newOperator(ctx, t, s)
	o.env = append(o.env, "SECKILL_GATEWAY="+s.Gateway(0).Addr+","+s.Gateway(1).Addr)
	for voucher, transport := range map[int64]string{7: "--stream", 8: "--unary"} {
		s.MustOpenVoucher(t, voucher, 2000)
		file, page := filepath.Join(t.TempDir(), "load.json"), filepath.Join(t.TempDir(), "load.html")
		args := []string{"load", "--voucher", map[int64]string{7: "7", 8: "8"}[voucher], transport, "--first-user=1", "--repeat-share=0.3", "--yes"}
		code, out, errs := o.run(append(args, "--rate=1500", "--from-rate=500", "--ramp=1s", "--duration=3s", "--json", file, "--report", page)...)
		require.Zero(t, code, out+errs)
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var result load.Result
		require.NoError(t, json.Unmarshal(text, &result))
		require.EqualValues(t, 1000+3000, result.Offered)
		require.EqualValues(t, 2000, result.Count(load.Admitted))
		require.Positive(t, result.Count(load.Replayed))
		require.Positive(t, result.Count(load.SoldOut))
		require.EqualValues(t, 4000, result.Count(load.Admitted)+result.Count(load.Replayed)+result.Count(load.SoldOut))
		require.Contains(t, errs, "is OPEN, with 2000 of 2000 units left")
		require.Contains(t, out, "p99.9")
		html, err := os.ReadFile(page)
		require.NoError(t, err)
		require.Contains(t, string(html), "<svg")
		proven(ctx, t, s, voucher, 2000)

		code, out, errs = o.run(append(args, "--concurrency=20", "--count=500", "--duration=0")...)
		require.Zero(t, code, out+errs)
		require.Regexp(t, `(?m)^ +replayed +\d`, out, "the same users are answered the orders that they have")
		require.NotContains(t, out, "admitted")
	}
	code, _, errs := o.run("load", "--voucher=99", "--rate=10", "--yes")
	require.Equal(t, 1, code)
	require.Contains(t, errs, "NOT_FOUND, VOUCHER_NOT_FOUND")
}

// Whoever interrupts a load gets the result of what was done.
func TestLoad_AnInterruptEndsItWithItsResult(t *testing.T) {
	ctx := testContext(t)
	s := stack.Test(t, stack.Options{})
	o := newOperator(ctx, t, s)
	s.MustOpenVoucher(t, 7, 1_000_000)
	file := filepath.Join(t.TempDir(), "load.json")
	cmd := osexec.CommandContext(ctx, o.program, "load", "--voucher=7", "--rate=500", "--duration=1h", "--yes", "--json", file)
	var out bytes.Buffer
	cmd.Env, cmd.Stdout = o.env, &out
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var told strings.Builder
	for line := make([]byte, 4096); !strings.Contains(told.String(), "/s  admitted "); {
		n, err := stderr.Read(line)
		told.Write(line[:n])
		require.NoError(t, err, told.String())
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	require.NoError(t, cmd.Wait(), "an interrupted load without faults is done")
	require.Contains(t, out.String(), "Ended early.")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var result load.Result
	require.NoError(t, json.Unmarshal(text, &result))
	require.True(t, result.Interrupted)
	require.Less(t, result.Measured, time.Hour)
	require.Equal(t, result.Offered, result.Count(load.Admitted))
	proven(ctx, t, s, 7, result.Count(load.Admitted))
}
