package devstack

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// reaperKills is false: the kernel kills the children.
const reaperKills = false

func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// standsStill reports whether every thread of the process is stopped (or gone).
func standsStill(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // a thread that has ended
		}
		// "pid (name) state ...": the name may hold anything, so look behind it.
		if _, rest, ok := bytes.Cut(stat[max(0, bytes.LastIndexByte(stat, ')')):], []byte(") ")); !ok || len(rest) == 0 || !bytes.ContainsRune([]byte("TtZX"), rune(rest[0])) {
			return false
		}
	}
	return true
}
