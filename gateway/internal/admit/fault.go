package admit

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
)

const (
	// faultEvery is the least time between two log lines, and two reports to the
	// guardian, of one kind for one voucher.
	faultEvery = 10 * time.Second
	// maxFaultKeys bounds what is remembered for that; beyond it nothing new is
	// said until something is old: a flood of different vouchers says no more.
	maxFaultKeys = 256
	// reportTimeout bounds a report to the guardian.
	reportTimeout = time.Second
)

type faultKey struct {
	kind      string
	voucherID int64
}

type faultLimiter struct {
	mu   sync.Mutex
	last map[faultKey]time.Time
}

func newFaultLimiter() *faultLimiter { return &faultLimiter{last: make(map[faultKey]time.Time)} }

func (f *faultLimiter) allow(key faultKey, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	last, known := f.last[key]
	if known && now.Sub(last) < faultEvery {
		return false
	}
	if !known && len(f.last) >= maxFaultKeys {
		for other, at := range f.last {
			if now.Sub(at) >= faultEvery {
				delete(f.last, other)
			}
		}
		if len(f.last) >= maxFaultKeys {
			return false
		}
	}
	f.last[key] = now
	return true
}

// fault counts a failure, logs it and, if it is one of the ledger, tells the
// guardian, both at a limited rate.
func (a *Admitter) fault(kind string, l *lane, err error) {
	a.faultOf(kind, l.partition, l.voucherID, err)
}

func (a *Admitter) faultOf(kind string, p *partition, voucherID int64, err error) {
	a.metrics.faults.WithLabelValues(kind).Inc()
	key := faultKey{kind: kind, voucherID: voucherID}
	if kind == "unreachable" || kind == "refused" {
		key.voucherID = 0 // a matter of the server, not of the voucher
	}
	if !a.faults.allow(key, time.Now()) {
		return
	}
	a.log.Error("admission call failed", telemetry.KeyReason, kind, keyPartition, p.number,
		telemetry.KeyVoucherID, voucherID, telemetry.KeyErr, err)
	met, known := map[string]ledger.FaultKind{"fault": ledger.FaultBroken, "rewound": ledger.FaultRewound}[kind]
	if !known {
		return
	}
	a.running.Go(func() {
		ctx, cancel := context.WithTimeout(a.base, reportTimeout)
		defer cancel()
		text := "voucher " + strconv.FormatInt(voucherID, 10) + ": " + err.Error()
		if err := ledger.ReportFault(ctx, a.cfg.Client, p.number, met, text); err != nil {
			a.log.Warn("the guardian could not be told of a fault", keyPartition, p.number, telemetry.KeyErr, err)
		}
	})
}
