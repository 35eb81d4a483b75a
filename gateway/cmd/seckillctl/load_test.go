package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/pkg/rpcserver"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// sale is a gateway that has so many units.
type sale struct {
	seckillv1.UnimplementedSeckillServiceServer
	units  atomic.Int64
	grabs  atomic.Int64
	fault  bool // answers faults
	unary  bool // has no GrabStream
	absent bool // does not know the voucher
}

func (s *sale) GetOrder(context.Context, *seckillv1.GetOrderRequest) (*seckillv1.GetOrderResponse, error) {
	if s.absent {
		return nil, rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_VOUCHER_NOT_FOUND, "no such voucher")
	}
	return nil, rpcserver.Error(codes.NotFound, seckillv1.ErrorReason_ERROR_REASON_ORDER_NOT_FOUND, "no such order")
}

func (s *sale) Grab(context.Context, *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	s.grabs.Add(1)
	if s.fault {
		return nil, rpcserver.Error(codes.ResourceExhausted, seckillv1.ErrorReason_ERROR_REASON_OVERLOADED, "busy", rpcserver.WithRetryAfter(time.Second))
	}
	if s.units.Add(-1) < 0 {
		return &seckillv1.GrabResponse{Outcome: seckillv1.Outcome_OUTCOME_SOLD_OUT}, nil
	}
	return &seckillv1.GrabResponse{Outcome: seckillv1.Outcome_OUTCOME_ADMITTED}, nil
}

func (s *sale) GrabStream(stream grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
	if s.unary {
		return s.UnimplementedSeckillServiceServer.GrabStream(stream)
	}
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		resp := &seckillv1.GrabStreamResponse{}
		for _, grab := range req.GetGrabs() {
			answer := &seckillv1.StreamedAnswer{CorrelationId: grab.GetCorrelationId()}
			if decided, err := s.Grab(stream.Context(), nil); err == nil {
				answer.Result = &seckillv1.StreamedAnswer_Response{Response: decided}
			} else {
				answer.Result = &seckillv1.StreamedAnswer_Error{Error: &seckillv1.GrabError{Code: int32(codes.ResourceExhausted), Reason: seckillv1.ErrorReason_ERROR_REASON_OVERLOADED}}
			}
			resp.Answers = append(resp.Answers, answer)
		}
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
}

// gateway serves a sale until the test ends and returns its address.
func gateway(t *testing.T, s *sale) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	seckillv1.RegisterSeckillServiceServer(server, s)
	go server.Serve(l)
	t.Cleanup(server.Stop)
	return l.Addr().String()
}

func TestLoad_TellsWhatCameOfIt(t *testing.T) {
	w := &writer{get: func(r *seckillv1.GetVoucherRequest) (*seckillv1.GetVoucherResponse, error) {
		return &seckillv1.GetVoucherResponse{Voucher: &seckillv1.Voucher{VoucherId: r.GetVoucherId(), Title: "tea", State: seckillv1.VoucherState_VOUCHER_STATE_OPEN, Total: 600, Stock: 500}}, nil
	}}
	addr := serve(t, w)
	for _, transport := range []string{"--stream", "--unary"} {
		t.Run(transport, func(t *testing.T) {
			first, second := &sale{}, &sale{}
			first.units.Store(300)
			second.units.Store(200)
			dir := t.TempDir()
			jsonFile, page := filepath.Join(dir, "result.json"), filepath.Join(dir, "page.html")
			require.NoError(t, os.WriteFile(jsonFile, bytes.Repeat([]byte("old"), 100_000), 0o600))
			code, out, errs := run("--gateway", gateway(t, first)+", "+gateway(t, second), "--writer", addr, "load", "--voucher=7", "--rate=1000", "--duration=1200ms", "--yes",
				transport, "--json", jsonFile, "--report", page)
			require.Zero(t, code, errs)
			require.EqualValues(t, 1200, first.grabs.Load()+second.grabs.Load())
			require.InDelta(t, 600, first.grabs.Load(), 300, "both gateways have their share")
			require.Regexp(t, `(?m)^ +admitted +500 +41.67 % `, out)
			require.Regexp(t, `(?m)^ +sold_out +700 +58.33 % `, out)
			require.Contains(t, out, "p99.9")
			require.Contains(t, errs, "Voucher 7 (tea) is OPEN, with 500 of 600 units left.")
			require.Contains(t, errs, "take real units, and are orders of user 1000000000000000 and those after")
			require.Contains(t, errs, "from --first-user 1000000000001200 on")
			require.Regexp(t, `(?m)^ +1s  offered [\d,]+/s  admitted .* p99 .* outstanding \d+`, errs)
			require.NotContains(t, errs, "\x1b", "no terminal, no tricks")

			text, err := os.ReadFile(jsonFile)
			require.NoError(t, err)
			var result load.Result
			require.NoError(t, json.Unmarshal(text, &result))
			require.EqualValues(t, 500, result.Count(load.Admitted))
			require.EqualValues(t, 1200, result.Latency.Count())
			html, err := os.ReadFile(page)
			require.NoError(t, err)
			require.Contains(t, string(html), "Load on voucher 7")
			require.Contains(t, string(html), "700")
			require.Equal(t, 5, strings.Count(string(html), "<figure>"))
		})
	}
}

func TestLoad_JSONOnStandardOutput(t *testing.T) {
	code, out, errs := run("--output=json", "--writer=127.0.0.1:1", "--gateway", gateway(t, &sale{}), "load", "--voucher=7", "--concurrency=10", "--count=100", "--duration=0", "-y")
	require.Zero(t, code, errs)
	require.Equal(t, 1, strings.Count(out, "\n"))
	var result load.Result
	require.NoError(t, json.Unmarshal([]byte(out), &result))
	require.EqualValues(t, 100, result.Count(load.SoldOut))
	require.Equal(t, 10, result.Plan.Concurrency)
	require.Contains(t, errs, "No writer tells how voucher 7 stands", "a load needs none")
}

func TestLoad_FaultsAreCode1(t *testing.T) {
	for _, transport := range []string{"--stream", "--unary"} {
		code, out, errs := run("--writer=127.0.0.1:1", "--gateway", gateway(t, &sale{fault: true}), "load", "--voucher=7", "--concurrency=5", "--count=50", "-y", transport)
		require.Equal(t, 1, code)
		require.Contains(t, out, "faults: 50 OVERLOADED")
		require.Contains(t, errs, "50 answers were faults")
	}
}

func TestLoad_MistakesTakeNothing(t *testing.T) {
	good := &sale{}
	addr := gateway(t, good)
	for name, c := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no voucher":     {[]string{"--rate=1", "-y"}, 2, "--voucher"},
		"neither":        {[]string{"--voucher=7", "-y"}, 2, "give a rate or a concurrency"},
		"both":           {[]string{"--voucher=7", "--rate=1", "--concurrency=1", "-y"}, 2, "one of them"},
		"both ways":      {[]string{"--voucher=7", "--rate=1", "--stream", "--unary", "-y"}, 2, "--stream or --unary"},
		"endless":        {[]string{"--voucher=7", "--rate=1", "--duration=0", "-y"}, 2, "never ends"},
		"share":          {[]string{"--voucher=7", "--rate=1", "--repeat-share=2", "-y"}, 2, "repeat share 2"},
		"no streams":     {[]string{"--voucher=7", "--rate=1", "--streams=0", "-y"}, 2, "--streams"},
		"no deadline":    {[]string{"--voucher=7", "--rate=1", "--grab-timeout=0s", "-y"}, 2, "--grab-timeout"},
		"one file":       {[]string{"--voucher=7", "--rate=1", "--json=x", "--report=x", "-y"}, 2, "--json and --report"},
		"user 0":         {[]string{"--voucher=7", "--rate=1", "--first-user=0", "-y"}, 2, "--first-user 0"},
		"nobody to ask":  {[]string{"--voucher=7", "--rate=1"}, 2, "give --yes"},
		"no such folder": {[]string{"--voucher=7", "--rate=1", "-y", "--json=/nonexistent/x"}, 1, "--json: open /nonexistent/x"},
		"no such page":   {[]string{"--voucher=7", "--rate=1", "-y", "--report=/nonexistent/x"}, 1, "--report: open /nonexistent/x"},
		"nobody there":   {[]string{"--voucher=7", "--rate=1", "-y", "--gateway=" + addr + ",127.0.0.1:1"}, 1, "gateway at 127.0.0.1:1: UNAVAILABLE"},
		"no voucher 7":   {[]string{"--voucher=7", "--rate=1", "-y", "--gateway=" + gateway(t, &sale{absent: true})}, 1, "NOT_FOUND, VOUCHER_NOT_FOUND"},
		"no GrabStream":  {[]string{"--voucher=7", "--rate=1", "-y", "--gateway=" + gateway(t, &sale{unary: true})}, 1, "has no GrabStream: give --unary"},
	} {
		t.Run(name, func(t *testing.T) {
			code, out, errs := run(append([]string{"load", "--gateway=" + addr}, c.args...)...)
			require.Equal(t, c.code, code, out+errs)
			require.Contains(t, errs, c.want)
			require.Empty(t, out)
		})
	}
	require.Zero(t, good.grabs.Load())
	code, out, _ := run("load", "--help")
	require.Zero(t, code)
	for _, want := range []string{"WARNING", "takes a real unit", "Exit code", "--repeat-share"} {
		require.Contains(t, out, want)
	}
}

// A device has no length to cut, and one that is full keeps nothing from the
// other result.
func TestLoad_WritesWhatItCanWhereOneResultCannotBeWritten(t *testing.T) {
	addr := gateway(t, &sale{})
	load := func(args ...string) (int, string, string) {
		return run(append([]string{"--writer=127.0.0.1:1", "--gateway", addr, "load", "--voucher=7", "--concurrency=5", "--count=50", "-y"}, args...)...)
	}
	code, _, errs := load("--json", os.DevNull)
	require.Zero(t, code, errs)

	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("no /dev/full here")
	}
	page := filepath.Join(t.TempDir(), "page.html")
	code, out, errs := load("--json=/dev/full", "--report", page)
	require.Equal(t, 1, code)
	require.Contains(t, errs, "writing --json: write /dev/full: no space left on device")
	require.Contains(t, out, "sold_out")
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(html), "</html>")
}

func TestLoad_AnInterruptEndsTheQuestion(t *testing.T) {
	s := &sale{}
	to := &connection{Gateway: gateway(t, s), Writer: "127.0.0.1:1", Timeout: 5 * time.Second, Output: "text"}
	c := &loadCommand{Voucher: 7, Concurrency: 1, Count: 10, FirstUser: 1, Unary: true, Connections: 1, MaxOutstanding: 1, GrabTimeout: time.Second}
	ctx, interrupt := context.WithCancel(t.Context())
	in, terminal := io.Pipe() // nobody answers
	defer terminal.Close()
	asked := &notice{of: "Go on?", then: interrupt}
	require.ErrorContains(t, c.run(ctx, to, command.Streams{Out: io.Discard, Err: asked}, in), "nothing was taken")
	require.Zero(t, s.grabs.Load())
}

// notice calls then when it is told of something.
type notice struct {
	of   string
	then func()
}

func (n *notice) Write(text []byte) (int, error) {
	if strings.Contains(string(text), n.of) {
		n.then()
	}
	return len(text), nil
}

func TestLoad_AsksBeforeItTakes(t *testing.T) {
	s := &sale{}
	to := &connection{Gateway: gateway(t, s), Writer: "127.0.0.1:1", Timeout: 5 * time.Second, Output: "text"}
	c := &loadCommand{Voucher: 7, Concurrency: 1, Count: 10, FirstUser: 1, Streams: 1, Window: 10, Connections: 1, MaxOutstanding: 1, GrabTimeout: time.Second}
	for answer, grabs := range map[string]int64{"": 0, "n\n": 0, "yes\n": 10} {
		s.grabs.Store(0)
		var out, errs bytes.Buffer
		err := c.run(t.Context(), to, command.Streams{Out: &out, Err: &errs}, strings.NewReader(answer))
		require.Contains(t, errs.String(), "Go on? [y/N]")
		require.Equal(t, grabs, s.grabs.Load(), "%q", answer)
		if grabs == 0 {
			require.ErrorContains(t, err, "nothing was taken")
			continue
		}
		require.NoError(t, err)
	}
}
