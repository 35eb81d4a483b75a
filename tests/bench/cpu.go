package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// cpuTime is what the threads of a process have used since they started, to the
// nanosecond: process times are kept in hundredths of a second only. A thread
// that ended takes its share with it; those of servers stay.
func cpuTime(pid int) (time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		return 0, fmt.Errorf("reading the CPU time of process %d: /proc has no schedstat of it: %w", pid, err)
	}
	var sum time.Duration
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		if os.IsNotExist(err) {
			continue // it ended just now
		}
		if err != nil {
			return 0, fmt.Errorf("reading the CPU time of process %d: %w", pid, err)
		}
		ran, _, _ := bytes.Cut(text, []byte(" "))
		ns, err := strconv.ParseInt(string(ran), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("reading the CPU time of process %d: %w", pid, err)
		}
		sum += time.Duration(ns)
	}
	return sum, nil
}

// cpuClock measures what processes use while something runs.
type cpuClock struct {
	pids  map[string]int
	start map[string]time.Duration
}

// startCPU begins; load is this process itself.
func startCPU(pids map[string]int) (*cpuClock, error) {
	c := &cpuClock{pids: map[string]int{"load": os.Getpid()}, start: make(map[string]time.Duration)}
	for name, pid := range pids {
		c.pids[name] = pid
	}
	for name, pid := range c.pids {
		used, err := cpuTime(pid)
		if err != nil {
			return nil, err
		}
		c.start[name] = used
	}
	return c, nil
}

// used returns what each process used since, in microseconds for each of n.
func (c *cpuClock) used(n int64) (map[string]float64, error) {
	each := make(map[string]float64)
	for name, pid := range c.pids {
		now, err := cpuTime(pid)
		if err != nil {
			return nil, err
		}
		each[name] = max(float64(now-c.start[name])/float64(time.Microsecond)/float64(max(n, 1)), 0)
	}
	return each, nil
}
