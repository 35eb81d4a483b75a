//go:build faultpoint

package faultpoint

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

var (
	armed, count = parse(os.Getenv(Variable))
	reached      atomic.Int64
)

func parse(value string) (Point, int64) {
	name, number, ok := strings.Cut(value, ":")
	if !ok {
		return Point(name), 1
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 1 {
		panic(Variable + ": " + value + ": want name or name:n")
	}
	return Point(name), n
}

// Reach marks that the process is at a point, and kills it where that point is
// armed. SIGKILL to itself: no deferred call runs, as in a real crash.
func Reach(p Point) {
	if p != armed || reached.Add(1) != count {
		return
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}
