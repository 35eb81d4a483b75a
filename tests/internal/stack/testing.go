package stack

import (
	"context"
	"testing"
	"time"

	"github.com/seckill/seckill/pkg/devstack"
)

// testStart bounds the start of a stack: a cold build on a busy machine takes
// minutes.
const testStart = 8 * time.Minute

// Test starts a stack for this test and closes it when the test ends. A test
// that failed shows the last output of every process. Where opt.WriterArgs is
// nil the writers take over fast, see FastTakeover.
func Test(t testing.TB, opt Options) *Stack {
	t.Helper()
	opt.Binaries = devstack.TestBinaries(t)
	if opt.WriterArgs == nil {
		opt.WriterArgs = FastTakeover()
	}
	ctx, cancel := context.WithTimeout(context.Background(), testStart)
	defer cancel()
	s, err := Start(ctx, opt)
	if err != nil {
		t.Fatalf("stack: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range append(s.Writers(), s.Gateways()...) {
				t.Logf("%s, last output:\n%s", p.Name, p.Output())
			}
		}
		s.Close()
	})
	return s
}

// MustOpenVoucher is OpenVoucher for tests.
func (s *Stack) MustOpenVoucher(t testing.TB, voucherID, total int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := s.OpenVoucher(ctx, voucherID, total); err != nil {
		t.Fatalf("stack: %v", err)
	}
}
