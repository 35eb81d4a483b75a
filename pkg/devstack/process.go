package devstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// outputTail is how much of a process's output is kept for messages: enough
// for the last stack trace or the reason of a failed start.
const outputTail = 64 << 10

// ProcessOptions says what StartProcess runs.
type ProcessOptions struct {
	// Name is used in messages; empty means the path.
	Name string
	// Path is the program, Args its arguments without the program itself.
	Path string
	Args []string
	// Env holds KEY=value lines added to this process's environment.
	Env []string
	// Dir is the working directory; empty means this process's own.
	Dir string
	// Stdout, when set, gets the output of the process, both streams, as it
	// comes; the last part of it is kept for Output in any case.
	Stdout io.Writer
}

// Process is a running child. It has a process group of its own, so that a
// Ctrl-C at the terminal reaches only the parent, and it dies with the parent.
// All methods are safe for concurrent use.
type Process struct {
	name   string
	cmd    *exec.Cmd
	output *tail
	done   chan struct{}
	err    error // of Wait; set before done is closed
}

// starter runs functions on one OS thread that lives as long as the process.
// Linux sends a parent-death signal when the *thread* that forked ends, and Go
// ends threads when it likes; a locked goroutine that never returns keeps its
// own.
var starter = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

// StartProcess starts a child. ctx bounds only the start; the child lives until
// it ends, is stopped, or this process dies.
func StartProcess(ctx context.Context, opt ProcessOptions) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if opt.Name == "" {
		opt.Name = opt.Path
	}
	p := &Process{name: opt.Name, output: &tail{next: opt.Stdout}, done: make(chan struct{})}
	p.cmd = exec.Command(opt.Path, opt.Args...)
	p.cmd.Dir = opt.Dir
	p.cmd.Env = append(os.Environ(), opt.Env...)
	p.cmd.Stdout, p.cmd.Stderr = p.output, p.output
	p.cmd.WaitDelay = 5 * time.Second // a grandchild that keeps the pipe open must not hold Wait
	p.cmd.SysProcAttr = childAttr()
	if reaperKills {
		if _, err := ownFolder(); err != nil {
			return nil, err
		}
	}
	started := make(chan error, 1)
	starter() <- func() { started <- p.cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", p.name, err)
	}
	if reaperKills {
		tellReaper("+", p.Pid())
	}
	go func() {
		p.err = p.cmd.Wait()
		if reaperKills {
			tellReaper("-", p.Pid())
		}
		close(p.done)
	}()
	return p, nil
}

// Pid returns the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Signal sends sig; to a process that has ended it is an error.
func (p *Process) Signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("signalling %s: %w", p.name, err)
	}
	return nil
}

// Kill sends SIGKILL and waits until the process is gone.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // fails only if it has ended already
	<-p.done
}

// Pause stops the process by SIGSTOP and returns when it stands still: it
// accepts connections (the kernel does) and answers nothing.
func (p *Process) Pause() error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	deadline := time.Now().Add(2 * time.Second) // a thread in uninterruptible I/O stops a little later
	for !standsStill(p.Pid()) && time.Now().Before(deadline) {
		wait(context.Background(), time.Millisecond)
	}
	return nil
}

// Resume continues a paused process.
func (p *Process) Resume() error { return p.Signal(syscall.SIGCONT) }

// Stop sends SIGTERM (and SIGCONT, should it be paused) and waits. When the
// timeout passes it kills the process and returns an error; it also returns one
// if the process ended with another code than 0.
func (p *Process) Stop(timeout time.Duration) error {
	_ = p.Signal(syscall.SIGTERM) // an ended process is what is wanted
	_ = p.Signal(syscall.SIGCONT)
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-p.done:
		return p.Wait()
	case <-timer.C:
		p.Kill()
		return fmt.Errorf("stopping %s: it did not end within %s after SIGTERM and was killed", p.name, timeout)
	}
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the end and returns an error unless the exit code was 0.
func (p *Process) Wait() error {
	<-p.done
	if p.err != nil {
		return fmt.Errorf("%s ended: %w", p.name, p.err)
	}
	return nil
}

// ExitCode returns the exit code, or -1 while the process runs and when a
// signal ended it.
func (p *Process) ExitCode() int {
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	default:
		return -1
	}
}

// Output returns the last part of the output, at most 64 KiB.
func (p *Process) Output() string { return p.output.String() }

// tail keeps the last part of what is written to it and hands all of it on.
type tail struct {
	mu   sync.Mutex
	buf  []byte
	next io.Writer
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if len(t.buf) > 2*outputTail { // trimmed rarely, so that a chatty child costs no copy a line
		t.buf = append([]byte(nil), t.buf[len(t.buf)-outputTail:]...)
	}
	if t.next != nil {
		_, _ = t.next.Write(b) // a broken log must not stop the child
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.buf[max(0, len(t.buf)-outputTail):]))
}

var ports struct {
	sync.Mutex
	given map[int]bool
}

// FreePort returns a TCP port on 127.0.0.1 that nobody listens on. It lies
// below the range from which the kernel takes ports for outgoing connections:
// a server that is killed and restarted finds its port still free. Another
// process may take it first, so a caller retries with another one.
func FreePort() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	if ports.given == nil {
		ports.given = make(map[int]bool)
	}
	for range 1000 {
		port := 10000 + rand.IntN(22000)
		if ports.given[port] {
			continue
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		l.Close()
		ports.given[port] = true
		return port, nil
	}
	return 0, errors.New("finding a free port: 1000 tries failed")
}
