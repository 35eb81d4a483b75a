package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/seckill/seckill/tests/internal/stack"
)

const (
	redrawEvery = 100 * time.Millisecond // at a terminal
	repeatEvery = time.Second            // elsewhere: a line each
)

// progress prints lines and, while the sale runs, one live line below them: at
// a terminal it is redrawn in place.
type progress struct {
	out      io.Writer
	terminal bool

	mu   sync.Mutex
	live string // what stands on the live line now
}

func newProgress(out *os.File) *progress {
	p := &progress{out: out}
	if info, err := out.Stat(); err == nil {
		p.terminal = info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

// print prints lines above the live line.
func (p *progress) print(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
	fmt.Fprintln(p.out, text)
	fmt.Fprint(p.out, p.live)
}

// event prints something that just happened.
func (p *progress) event(text string) { p.print("* " + text) }

// Write takes the log of the stack's start, whole lines each.
func (p *progress) Write(b []byte) (int, error) {
	p.print("  " + strings.TrimRight(string(b), "\n"))
	return len(b), nil
}

func (p *progress) erase() {
	if p.live != "" {
		fmt.Fprint(p.out, "\r", strings.Repeat(" ", len([]rune(p.live))), "\r")
	}
}

func (p *progress) draw(line string) {
	if !p.terminal {
		p.print(line)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
	p.live = line
	fmt.Fprint(p.out, line)
}

// follow draws the live line until ctx ends, and takes it away.
func (p *progress) follow(ctx context.Context, s *stack.Stack, crowd *crowd, cfg settings) {
	every := repeatEvery
	if p.terminal {
		every = redrawEvery
	}
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.erase()
		p.live = ""
	}()
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		figures, err := s.Ledger(ctx, voucherID)
		if err != nil {
			continue // the end, or the sale fails by itself
		}
		line := fmt.Sprintf("  admitted %s of %s | written %s | in flight %s | sold out %s",
			grouped(figures.Seq), grouped(cfg.Stock), grouped(figures.Settled), grouped(figures.InFlight()), grouped(crowd.soldOut.Load()))
		if took := crowd.took(); took > 0 {
			line += fmt.Sprintf(" | %s Grabs/s", grouped(int64(float64(crowd.answers.Load())/took.Seconds())))
		}
		p.draw(line)
	}
}

// grouped writes 1234567 as 1,234,567.
func grouped(n int64) string {
	digits := fmt.Sprint(n)
	sign := ""
	if n < 0 {
		sign, digits = "-", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return sign + digits
}

// counted is "1 writer", "3 writers", "2 entries".
func counted(n int64, noun string) string {
	if n != 1 {
		if stem, ok := strings.CutSuffix(noun, "y"); ok {
			noun = stem + "ies"
		} else {
			noun += "s"
		}
	}
	return grouped(n) + " " + noun
}
