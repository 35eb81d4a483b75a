package main

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jhump/protoreflect/v2/grpcreflect"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/seckill/seckill/pkg/devstack"
)

// call is a printed grpcurl line, taken apart.
type call struct{ line, data, addr, service, method string }

var (
	callLine   = regexp.MustCompile(`(?m)^\s*(grpcurl -plaintext -d '([^']*)' (\S+) (\S+)/(\S+))\s*$`)
	anyAddress = regexp.MustCompile(`127\.0\.0\.1:\d+`)
)

// The printed lines are run as they are, by reflection alone, as grpcurl does,
// and by grpcurl where it is on PATH. Ctrl-C leaves nothing.
func TestRun_PrintedCallsWorkAndCtrlCLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 8*time.Minute) // a cold build
	defer cancel()
	devstack.TestBinaries(t) // fetched by now, within its own bound
	dir, err := devstack.Build(ctx, nil, devstack.BuildOptions{}, "github.com/seckill/seckill/tests/cmd/run")
	require.NoError(t, err)
	temp, err := os.MkdirTemp("", "run-") // short: sockets live below it
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(temp) })
	p, err := devstack.StartProcess(ctx, devstack.ProcessOptions{
		Path: filepath.Join(dir, "run"), Args: []string{"--stock=5", "--writers=1"}, Env: []string{"TMPDIR=" + temp},
	})
	require.NoError(t, err)
	t.Cleanup(p.Kill)
	require.Eventually(t, func() bool {
		select {
		case <-p.Done():
			return true
		default:
			return strings.Contains(p.Output(), "Ctrl-C ends it.")
		}
	}, 8*time.Minute, 20*time.Millisecond, "%s", p.Output())
	output := p.Output()
	require.Equal(t, -1, p.ExitCode(), "%s", output)

	var calls []call
	for _, m := range callLine.FindAllStringSubmatch(output, -1) {
		calls = append(calls, call{m[1], m[2], m[3], m[4], m[5]})
	}
	require.Len(t, calls, 3, "%s", output)

	ask := func(t *testing.T, how func(*testing.T, context.Context, call) []byte) {
		grab, order := map[string]any{}, map[string]any{}
		require.Equal(t, "Grab", calls[0].method)
		require.NoError(t, json.Unmarshal(how(t, ctx, calls[0]), &grab))
		require.Equal(t, "OUTCOME_ADMITTED", grab["outcome"])
		require.Equal(t, "GetOrder", calls[1].method)
		require.NoError(t, json.Unmarshal(how(t, ctx, calls[1]), &order))
		require.NotEmpty(t, grab["order"].(map[string]any)["orderId"])
		require.Equal(t, grab["order"].(map[string]any)["orderId"], order["order"].(map[string]any)["orderId"])
		require.Equal(t, "GetBooks", calls[2].method)
		require.Eventually(t, func() bool { // the order may still be in flight
			var books struct{ Books map[string]any }
			return json.Unmarshal(how(t, ctx, calls[2]), &books) == nil && books.Books["verdict"] == "BOOKS_VERDICT_PROVEN"
		}, 30*time.Second, 50*time.Millisecond)
	}
	t.Run("by reflection", func(t *testing.T) { ask(t, callByReflection) })
	t.Run("by grpcurl", func(t *testing.T) {
		if _, err := exec.LookPath("grpcurl"); err != nil {
			t.Skip("grpcurl is not on PATH")
		}
		ask(t, callByGrpcurl)
	})

	addresses := anyAddress.FindAllString(output, -1)
	require.GreaterOrEqual(t, len(addresses), 6, "gateway and writer with two each, Redis, the database")
	for _, addr := range addresses {
		conn, err := net.DialTimeout("tcp", addr, 5*time.Second)
		require.NoError(t, err, "printed, but closed: %s", addr)
		require.NoError(t, conn.Close())
	}
	require.NoError(t, p.Signal(syscall.SIGINT))
	select {
	case <-p.Done():
	case <-time.After(time.Minute):
		t.Fatalf("it does not end after SIGINT:\n%s", p.Output())
	}
	require.Equal(t, 0, p.ExitCode(), "%s", p.Output())
	for _, addr := range addresses {
		_, err := net.DialTimeout("tcp", addr, 5*time.Second)
		require.Error(t, err, "still open after the end: %s", addr)
	}
	left, err := os.ReadDir(temp)
	require.NoError(t, err)
	require.Empty(t, left)
}

// callByReflection knows nothing of the API but what the server tells.
func callByReflection(t *testing.T, ctx context.Context, c call) []byte {
	conn, err := grpc.NewClient(c.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	reflection := grpcreflect.NewClientAuto(ctx, conn)
	defer reflection.Reset()
	file, err := reflection.FileContainingSymbol(protoreflect.FullName(c.service))
	require.NoError(t, err)
	service := file.Services().ByName(protoreflect.FullName(c.service).Name())
	require.NotNil(t, service, c.service)
	method := service.Methods().ByName(protoreflect.Name(c.method))
	require.NotNil(t, method, c.method)
	request, response := dynamicpb.NewMessage(method.Input()), dynamicpb.NewMessage(method.Output())
	require.NoError(t, protojson.Unmarshal([]byte(c.data), request))
	require.NoError(t, conn.Invoke(ctx, "/"+c.service+"/"+c.method, request, response), c.line)
	answer, err := protojson.Marshal(response)
	require.NoError(t, err)
	return answer
}

func callByGrpcurl(t *testing.T, ctx context.Context, c call) []byte {
	answer, err := exec.CommandContext(ctx, "/bin/sh", "-c", c.line).CombinedOutput()
	require.NoError(t, err, "%s\n%s", c.line, answer)
	return answer
}

func TestRun_RefusesSettingsThatMakeNoSense(t *testing.T) {
	for _, args := range [][]string{{"--stock=0"}, {"--writers=0"}, {"--gateways=-1"}, {"--partitions=0"}, {"--no-such-flag"}} {
		require.Equal(t, 2, execute(args), "%v", args)
	}
}

func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }
