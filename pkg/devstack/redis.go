package devstack

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// startTimeout bounds how long a server may take until it answers: a cold
	// disk, a busy machine, and for Redis the reading of its log.
	startTimeout = 60 * time.Second
	// stopTimeout bounds a graceful stop.
	stopTimeout = 30 * time.Second
	// portTries bounds how often another port is tried when one was lost to
	// another process between choosing and binding it.
	portTries = 10
)

// RedisOptions says how a private Redis is run.
type RedisOptions struct {
	// Dir holds its data; empty means a throw-away folder.
	Dir string
	// Args are added to the command line and win over the defaults, for
	// example "--maxmemory", "10mb" or "--appendfsync", "everysec". One string
	// may hold an option with its value: "--maxmemory 10mb".
	Args []string
}

// Redis is a private redis-server on 127.0.0.1. By default it keeps what
// durability mode STRICT asks for: an append-only file that is synced before
// every reply, no snapshots, no eviction, and no start with a log whose end is
// torn. All methods are safe for concurrent use.
type Redis struct {
	binary string
	dir    string
	ours   bool // the folder is removed by Close
	port   int
	args   []string

	mu   sync.Mutex
	proc *Process
}

// StartRedis starts a private Redis and returns when it answers. ctx bounds
// only the start.
func StartRedis(ctx context.Context, b *Binaries, opt RedisOptions) (*Redis, error) {
	r := &Redis{binary: b.Redis, dir: opt.Dir, ours: opt.Dir == ""}
	for _, arg := range opt.Args {
		if name, value, ok := strings.Cut(arg, " "); ok && strings.HasPrefix(arg, "--") {
			r.args = append(r.args, name, strings.TrimSpace(value))
		} else {
			r.args = append(r.args, arg)
		}
	}
	var err error
	if r.ours {
		if r.dir, err = tempFolder("redis-"); err != nil {
			return nil, err
		}
	}
	r.proc, r.port, err = onFreePort(ctx, r.start)
	if err != nil {
		r.removeFolder()
		return nil, err
	}
	return r, nil
}

// onFreePort starts a server on ports until one is not lost to somebody else.
func onFreePort(ctx context.Context, start func(ctx context.Context, port int) (*Process, error)) (*Process, int, error) {
	for try := 1; ; try++ {
		port, err := FreePort()
		if err != nil {
			return nil, 0, err
		}
		proc, err := start(ctx, port)
		if err == nil {
			return proc, port, nil
		}
		if !errors.Is(err, errPortTaken) || try == portTries {
			return nil, 0, err
		}
	}
}

var errPortTaken = errors.New("the port is taken by another process")

func (r *Redis) start(ctx context.Context, port int) (*Process, error) {
	args := []string{
		"--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", r.dir, "--daemonize", "no",
		"--appendonly", "yes", "--appendfsync", "always", "--aof-load-truncated", "no",
		"--save", "", "--maxmemory-policy", "noeviction",
	}
	proc, err := StartProcess(ctx, ProcessOptions{Name: "redis-server", Path: r.binary, Args: append(args, r.args...), Env: programEnv(r.binary)})
	if err != nil {
		return nil, err
	}
	return proc, awaitServer(ctx, proc, "ddress already in use", func(ctx context.Context) error {
		return redisAnswers(ctx, fmt.Sprintf("127.0.0.1:%d", port), proc.Pid())
	})
}

// awaitServer returns when answers does. It kills the process if it fails.
// taken is what the server prints when it cannot bind its port.
func awaitServer(ctx context.Context, proc *Process, taken string, answers func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var last error
	for {
		if last = answers(ctx); last == nil {
			return nil
		}
		select {
		case <-proc.Done():
			if strings.Contains(proc.Output(), taken) {
				return fmt.Errorf("%s: %w", proc.name, errPortTaken)
			}
			return fmt.Errorf("%s ended instead of starting: %w\n%s", proc.name, proc.Wait(), proc.Output())
		default:
		}
		if !wait(ctx, 5*time.Millisecond) {
			proc.Kill()
			return fmt.Errorf("%s did not answer in time: %w (last: %w)\n%s", proc.name, ctx.Err(), last, proc.Output())
		}
	}
}

// redisAnswers returns nil when the server on addr is the process pid and has
// loaded its data. It checks the pid because after a lost race for the port it
// is somebody else's Redis that answers.
func redisAnswers(ctx context.Context, addr string, pid int) error {
	dialer := net.Dialer{Timeout: 2 * time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, "INFO\r\n"); err != nil {
		return err
	}
	in := bufio.NewReader(conn)
	head, err := in.ReadString('\n')
	if err != nil {
		return err
	}
	if strings.HasPrefix(head, "-NOAUTH") {
		return nil // a password is set by Args; more cannot be asked without it
	}
	length, err := strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(head, "$")))
	if err != nil || length < 0 || length > 1<<20 {
		return fmt.Errorf("unexpected answer %q", strings.TrimSpace(head))
	}
	info := make([]byte, length)
	if _, err := io.ReadFull(in, info); err != nil {
		return err
	}
	if !strings.Contains(string(info), fmt.Sprintf("\nprocess_id:%d\r", pid)) {
		return errors.New("another Redis answers on this port")
	}
	if !strings.Contains(string(info), "\nloading:0\r") || !strings.Contains(string(info), "\nasync_loading:0\r") {
		return errors.New("it is loading its data")
	}
	return nil
}

func (r *Redis) process() *Process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.proc
}

// Addr returns host:port; it stays the same over restarts.
func (r *Redis) Addr() string { return fmt.Sprintf("127.0.0.1:%d", r.port) }

// Port returns the port; it stays the same over restarts.
func (r *Redis) Port() int { return r.port }

// Dir returns the data folder.
func (r *Redis) Dir() string { return r.dir }

// Pid returns the process id of the current run.
func (r *Redis) Pid() int { return r.process().Pid() }

// Kill sends SIGKILL and waits until the server is gone.
func (r *Redis) Kill() { r.process().Kill() }

// Stop shuts the server down in good order.
func (r *Redis) Stop() error { return r.process().Stop(stopTimeout) }

// Pause stops the server by SIGSTOP: connections stay, answers do not come.
func (r *Redis) Pause() error { return r.process().Pause() }

// Resume continues a paused server.
func (r *Redis) Resume() error { return r.process().Resume() }

// Output returns the last part of the server's log of the current run.
func (r *Redis) Output() string { return r.process().Output() }

// Restart starts the server again with the same data, port and arguments, plus
// what is in args for this run only, and returns when it has loaded its data.
// A server that still runs is shut down first.
func (r *Redis) Restart(ctx context.Context, args ...string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	proc, err := restart(ctx, r.proc, func(ctx context.Context) (*Process, error) {
		run := &Redis{binary: r.binary, dir: r.dir, args: append(append([]string(nil), r.args...), args...)}
		return run.start(ctx, r.port)
	})
	if err != nil {
		return fmt.Errorf("restarting Redis: %w", err)
	}
	r.proc = proc
	return nil
}

// restart stops what still runs and starts it again on the same port. It waits
// for the port: clients of the old run must find the new one there.
func restart(ctx context.Context, old *Process, start func(context.Context) (*Process, error)) (*Process, error) {
	select {
	case <-old.Done():
	default:
		if err := old.Stop(stopTimeout); err != nil {
			return nil, err
		}
	}
	for try := 1; ; try++ {
		proc, err := start(ctx)
		if !errors.Is(err, errPortTaken) || try == portTries {
			return proc, err
		}
		if !wait(ctx, 200*time.Millisecond) {
			return nil, ctx.Err()
		}
	}
}

// Close kills the server and removes its folder if it is a throw-away one.
func (r *Redis) Close() {
	r.Kill()
	r.removeFolder()
}

func (r *Redis) removeFolder() {
	if r.ours {
		_ = os.RemoveAll(r.dir) // what is left goes with the process's folder
	}
}
