package devstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// testStart bounds finding (and once fetching) the servers and starting one.
const testStart = fetchTimeout + 2*time.Minute

var shared struct {
	sync.Mutex
	binaries *Binaries
	findErr  error // kept: a hundred tests must not try a failed fetch a hundred times
	database *Database
}

var databaseNumber atomic.Int64

// TestBinaries returns the server programs, or fails the test with the message
// that says how to get them. Where MySQL is asked for and not available today
// the test is skipped.
func TestBinaries(t testing.TB) *Binaries {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	return testBinaries(t)
}

func testBinaries(t testing.TB) *Binaries {
	t.Helper()
	if shared.binaries == nil && shared.findErr == nil {
		ctx, cancel := context.WithTimeout(context.Background(), testStart)
		defer cancel()
		var log bytes.Buffer
		if shared.binaries, shared.findErr = Find(ctx, &log); shared.findErr != nil {
			shared.findErr = fmt.Errorf("%w\n%s", shared.findErr, log.String())
		}
	}
	if errors.Is(shared.findErr, ErrMySQLUnavailable) {
		t.Skipf("devstack: %v", shared.findErr)
	}
	if shared.findErr != nil {
		t.Fatalf("devstack: %v", shared.findErr)
	}
	return shared.binaries
}

// TestRedis starts a private Redis for this test and closes it when the test
// ends. At most one RedisOptions may be given.
func TestRedis(t testing.TB, opts ...RedisOptions) *Redis {
	t.Helper()
	var opt RedisOptions
	if len(opts) > 0 {
		opt = opts[0]
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	r, err := StartRedis(ctx, TestBinaries(t), opt)
	if err != nil {
		t.Fatalf("devstack: starting Redis: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("redis-server, last output:\n%s", r.Output())
		}
		r.Close()
	})
	return r
}

// TestDatabase returns the DSN of a new, empty database on a server that all
// tests of this process share. A test that stops, pauses or reconfigures the
// server takes one of its own from TestDatabaseServer.
func TestDatabase(t testing.TB) (dsn string) {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if shared.database == nil {
		d, err := StartDatabase(ctx, testBinaries(t), DatabaseOptions{})
		if err != nil {
			t.Fatalf("devstack: starting the database: %v", err)
		}
		shared.database = d
	}
	name := fmt.Sprintf("test_%d_%s", databaseNumber.Add(1), plainName(t.Name()))
	if err := shared.database.CreateDatabase(ctx, name); err != nil {
		t.Fatalf("devstack: %v\nserver, last output:\n%s", err, shared.database.Output())
	}
	return shared.database.DSN(name)
}

// plainName keeps what a database may be called, short enough for the limit
// of 64.
func plainName(name string) string {
	name = strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' || r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' {
			return r
		}
		return '_'
	}, name)
	return name[:min(len(name), 40)]
}

// TestDatabaseServer starts a database server for this test alone and closes
// it when the test ends. At most one DatabaseOptions may be given.
func TestDatabaseServer(t testing.TB, opts ...DatabaseOptions) *Database {
	t.Helper()
	var opt DatabaseOptions
	if len(opts) > 0 {
		opt = opts[0]
	}
	binaries := TestBinaries(t)
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	d, err := StartDatabase(ctx, binaries, opt)
	if err != nil {
		t.Fatalf("devstack: starting the database: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("database, last output:\n%s", d.Output())
		}
		d.Close()
	})
	return d
}

// TestProxy starts a proxy for this test and closes it when the test ends.
func TestProxy(t testing.TB, upstream string) *Proxy {
	t.Helper()
	p, err := StartProxy(upstream)
	if err != nil {
		t.Fatalf("devstack: %v", err)
	}
	t.Cleanup(p.Close)
	return p
}

// Main runs the tests of a package and closes what they shared. A package that
// uses TestDatabase has
//
//	func TestMain(m *testing.M) { os.Exit(devstack.Main(m)) }
//
// Without it the same is cleaned up a moment after the process has ended.
func Main(m *testing.M) int {
	code := m.Run()
	shared.Lock()
	defer shared.Unlock()
	if shared.database != nil {
		if code != 0 && os.Getenv("SECKILL_DEV_VERBOSE") != "" {
			fmt.Fprintf(os.Stderr, "shared database, last output:\n%s\n", shared.database.Output())
		}
		shared.database.Close()
		shared.database = nil
	}
	Cleanup()
	return code
}
