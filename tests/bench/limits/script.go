package limits

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/devstack"
)

// randomUsers is the range of user ids, close to the most that redis-benchmark
// takes: hardly anybody comes twice.
const randomUsers = "2000000000"

// ScriptRun is a run of a script by redis-benchmark.
type ScriptRun struct {
	Calls    int64
	Admitted int64 // by the members of the buyers' set
	Took     time.Duration
}

// FindBenchmark finds redis-benchmark beside the redis-server that is used.
func FindBenchmark(b *devstack.Binaries) (string, error) {
	beside := filepath.Join(filepath.Dir(b.Redis), "redis-benchmark")
	if path, err := exec.LookPath(beside); err == nil {
		return path, nil
	}
	path, err := exec.LookPath("redis-benchmark")
	if err != nil {
		return "", fmt.Errorf("redis-benchmark is neither beside %s nor in PATH", b.Redis)
	}
	return path, nil
}

// TutorialScript runs the tutorial's script with callers clients, each with
// pipeline commands in flight, as a client that pipelines by itself would, for
// a voucher that nobody used and users at random.
func TutorialScript(ctx context.Context, benchmark, addr string, client rueidis.Client, script string, voucherID, calls int64, callers, pipeline int) (ScriptRun, error) {
	voucher := strconv.FormatInt(voucherID, 10)
	if err := client.Do(ctx, client.B().Set().Key("seckill:stock:"+voucher).Value(strconv.FormatInt(2*calls, 10)).Build()).Error(); err != nil {
		return ScriptRun{}, fmt.Errorf("putting the stock: %w", err)
	}
	sha, err := client.Do(ctx, client.B().ScriptLoad().Script(script).Build()).ToString()
	if err != nil {
		return ScriptRun{}, fmt.Errorf("loading the script: %w", err)
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return ScriptRun{}, err
	}
	began := time.Now()
	p, err := devstack.StartProcess(ctx, devstack.ToolOptions(benchmark,
		"-h", host, "-p", port, "-q",
		"-n", strconv.FormatInt(calls, 10), "-c", strconv.Itoa(callers), "-P", strconv.Itoa(pipeline), "-r", randomUsers,
		"EVALSHA", sha, "0", voucher, "__rand_int__", "__rand_int__"))
	if err != nil {
		return ScriptRun{}, fmt.Errorf("starting redis-benchmark: %w", err)
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		p.Kill()
		return ScriptRun{}, ctx.Err()
	}
	took := time.Since(began)
	if err := p.Wait(); err != nil {
		return ScriptRun{}, fmt.Errorf("running redis-benchmark: %w: %s", err, strings.TrimSpace(p.Output()))
	}
	admitted, err := client.Do(ctx, client.B().Scard().Key("seckill:order:"+voucher).Build()).AsInt64()
	if err != nil {
		return ScriptRun{}, fmt.Errorf("counting buyers: %w", err)
	}
	return ScriptRun{Calls: calls, Admitted: admitted, Took: took}, nil
}
