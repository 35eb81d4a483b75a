package stack

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/faultpoint"
)

const (
	// servingTimeout bounds how long a process may take until it serves: a
	// guardian opens partitions within its interval, and a machine may be busy.
	servingTimeout = 60 * time.Second
	// portTries bounds how often other ports are tried when one was lost to
	// another process between choosing and binding it.
	portTries = 10
	// adminTimeout bounds a look at an admin port: a paused process accepts and
	// never answers.
	adminTimeout = 5 * time.Second
)

// Process is a gateway or a writer. It has all of devstack.Process: Kill, Pause,
// Resume, Stop, Done, Output.
type Process struct {
	*devstack.Process
	// Name is "gateway-1", "writer-2"; a writer's name is also its consumer.
	Name string
	// Addr is where its API is served, Admin where /metrics and /healthz are.
	Addr, Admin string

	conn *grpc.ClientConn
}

// StartGateway starts one more gateway and returns when it serves. args are
// added to its flags and win.
func (s *Stack) StartGateway(ctx context.Context, args ...string) (*Process, error) {
	p, err := s.LaunchGateway(ctx, nil, args...)
	if err != nil {
		return nil, err
	}
	return p, p.AwaitServing(ctx, "")
}

// StartWriter starts one more writer and returns when it serves, whether or not
// partitions are open. args are added to its flags and win.
func (s *Stack) StartWriter(ctx context.Context, args ...string) (*Process, error) {
	return s.StartWriterEnv(ctx, nil, args...)
}

// StartWriterEnv is StartWriter with KEY=value lines for the environment.
func (s *Stack) StartWriterEnv(ctx context.Context, env []string, args ...string) (*Process, error) {
	p, err := s.LaunchWriter(ctx, env, args...)
	if err != nil {
		return nil, err
	}
	return p, p.AwaitServing(ctx, "")
}

// LaunchGateway starts one more gateway and returns when its admin port
// answers, which is before it serves: for tests in which it cannot. One that is
// armed with a fault point may have died of it by then.
func (s *Stack) LaunchGateway(ctx context.Context, env []string, args ...string) (*Process, error) {
	return s.launch(ctx, &s.gateways, "gateway", env, func(p *Process) []string {
		return append(append([]string{
			"serve", "--listen=" + p.Addr, "--admin=" + p.Admin, "--redis-addr=" + s.Redis.Addr(),
			"--order-key-file=" + s.OrderKeyFile(), "--log-format=text",
		}, s.opt.GatewayArgs...), args...)
	})
}

// LaunchWriter is LaunchGateway for a writer.
func (s *Stack) LaunchWriter(ctx context.Context, env []string, args ...string) (*Process, error) {
	return s.launch(ctx, &s.writers, "writer", env, func(p *Process) []string {
		return append(append([]string{
			"serve", "--listen=" + p.Addr, "--admin=" + p.Admin, "--redis-addr=" + s.Redis.Addr(),
			"--database-dsn-file=" + s.dsnFile(), "--order-key-file=" + s.OrderKeyFile(),
			"--consumer=" + p.Name, "--log-format=text",
		}, s.opt.WriterArgs...), args...)
	})
}

func (s *Stack) launch(ctx context.Context, list *[]*Process, program string, env []string, args func(*Process) []string) (*Process, error) {
	s.mu.Lock()
	s.started[program]++
	p := &Process{Name: fmt.Sprintf("%s-%d", program, s.started[program])}
	s.mu.Unlock()
	for try := 1; ; try++ {
		err := p.run(ctx, devstack.ProcessOptions{
			Name: p.Name, Path: filepath.Join(s.bin, program),
			Env: append(append([]string(nil), s.opt.Env...), env...), Stdout: s.opt.Output,
		}, args)
		if err == nil {
			s.mu.Lock()
			*list = append(*list, p)
			s.mu.Unlock()
			return p, nil
		}
		if try == portTries || !errors.Is(err, errPortTaken) {
			return nil, err
		}
	}
}

var errPortTaken = errors.New("a port is taken by another process")

// quickConnect tries again soon: a process comes up within milliseconds.
var quickConnect = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
	MinConnectTimeout: time.Second,
}

// run starts the process on free ports and waits until both accept.
func (p *Process) run(ctx context.Context, opt devstack.ProcessOptions, args func(*Process) []string) error {
	for _, addr := range []*string{&p.Addr, &p.Admin} {
		port, err := devstack.FreePort()
		if err != nil {
			return err
		}
		*addr = fmt.Sprintf("127.0.0.1:%d", port)
	}
	conn, err := grpc.NewClient(p.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(quickConnect))
	if err != nil {
		return err
	}
	opt.Args = args(p)
	process, err := devstack.StartProcess(ctx, opt)
	if err != nil {
		_ = conn.Close()
		return err
	}
	p.Process, p.conn = process, conn
	// The admin port opens first; a process that cannot bind ends at once.
	bounded, cancel := context.WithTimeout(ctx, servingTimeout)
	defer cancel()
	for {
		if _, err := p.get(bounded, "/healthz"); err == nil {
			return nil
		}
		select {
		case <-p.Done():
			if armed(opt.Env) && !strings.Contains(p.Output(), "address already in use") {
				return nil
			}
			_ = conn.Close()
			if strings.Contains(p.Output(), "address already in use") {
				return errPortTaken
			}
			return fmt.Errorf("%s ended instead of starting: %w\n%s", p.Name, p.Wait(), p.Output())
		case <-bounded.Done():
			p.Kill()
			_ = conn.Close()
			return fmt.Errorf("%s did not open its admin port: %w\n%s", p.Name, bounded.Err(), p.Output())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// armed tells whether a process kills itself at a fault point, which it may come
// to before anybody has seen its admin port.
func armed(env []string) bool {
	return slices.ContainsFunc(env, func(line string) bool { return strings.HasPrefix(line, faultpoint.Variable+"=") })
}

// Conn is a connection to the process's API, shared by all callers.
func (p *Process) Conn() *grpc.ClientConn { return p.conn }

// AwaitServing returns when the health of every named service is SERVING: ""
// for the process, "seckill.partition.<p>" for an open partition. It fails when
// the process ends, or after a minute.
func (p *Process) AwaitServing(ctx context.Context, services ...string) error {
	ctx, cancel := context.WithTimeout(ctx, servingTimeout)
	defer cancel()
	client := healthpb.NewHealthClient(p.conn)
	for _, service := range services {
		for {
			answer, err := client.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
			if err == nil && answer.GetStatus() == healthpb.HealthCheckResponse_SERVING {
				break
			}
			select {
			case <-p.Done():
				return fmt.Errorf("%s ended instead of serving: %w\n%s", p.Name, p.Wait(), p.Output())
			case <-ctx.Done():
				return fmt.Errorf("%s: health of service %q is %v (%v) and not SERVING: %w\n%s", p.Name, service, answer.GetStatus(), err, ctx.Err(), p.Output())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// Metric reads a metric without labels, or the sum over all labels, from the
// process's /metrics. One that is not there is an error.
func (p *Process) Metric(ctx context.Context, name string) (float64, error) {
	page, err := p.get(ctx, "/metrics")
	if err != nil {
		return 0, fmt.Errorf("reading metrics of %s: %w", p.Name, err)
	}
	var sum float64
	found := false
	for lines := bufio.NewScanner(bytes.NewReader(page)); lines.Scan(); {
		rest, ok := strings.CutPrefix(lines.Text(), name)
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		value, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			return 0, fmt.Errorf("reading metrics of %s: %s: %w", p.Name, name, err)
		}
		sum += value
		found = true
	}
	if !found {
		return 0, fmt.Errorf("reading metrics of %s: %s is not there", p.Name, name)
	}
	return sum, nil
}

// get reads a page of the admin port.
func (p *Process) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.Admin+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	return io.ReadAll(response.Body)
}

func (p *Process) close() {
	if p.Process != nil {
		p.Kill()
	}
	if p.conn != nil {
		_ = p.conn.Close()
	}
}
