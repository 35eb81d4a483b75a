package admit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
)

// Found is what the ledger says of a user's order of a voucher.
type Found struct {
	ledger.Lookup
	// OutcomeSeq is the seq that Outcome is of: the one that was asked for, or else
	// that of a mark which says admitted; 0 for none.
	OutcomeSeq int64
	// Epoch is the epoch of the ledger that was asked.
	Epoch int64
	// Refusal is nil where the ledger is open and proven, so that what it does
	// not have does not exist; else the reason why that is not known.
	Refusal error
}

// Find reads what there is of a user's order of a voucher; seq 0 asks for the
// order of the user's mark. A read that fails on the way is tried once more. Errors:
// ErrRedisUnreachable, ErrLedgerFault, ErrClosed, or that of ctx.
func (a *Admitter) Find(ctx context.Context, voucherID, userID, seq int64) (Found, error) {
	select {
	case a.reads <- struct{}{}:
	case <-ctx.Done():
		return Found{}, ctx.Err()
	}
	type answer struct {
		found Found
		err   error
	}
	done := make(chan answer, 1)
	// The caller does not wait on the client itself, which may hold it beyond
	// its deadline; the places bound how many do.
	a.running.Go(func() {
		defer func() { <-a.reads }()
		found, err := a.find(ctx, voucherID, userID, seq)
		done <- answer{found, err}
	})
	select {
	case got := <-done:
		return got.found, got.err
	case <-ctx.Done():
		return Found{}, fmt.Errorf("%w: %w", ErrRedisUnreachable, ctx.Err())
	}
}

func (a *Admitter) find(ctx context.Context, voucherID, userID, seq int64) (Found, error) {
	p := a.partitionOf(voucherID)
	v := p.view.Load()
	if v.epoch == 0 {
		if v = p.refresh(ctx, time.Now()); v.epoch == 0 {
			return Found{}, v.refusal()
		}
	}
	for attempt := 1; ; attempt++ {
		asked := time.Now()
		bounded, cancel := context.WithTimeout(ctx, attemptWindow+attemptGrace)
		lookup, err := ledger.FindOrder(bounded, a.cfg.Client, p.number, v.epoch, voucherID, userID, seq)
		cancel()
		switch {
		case err == nil:
		case errors.Is(err, ledger.ErrUnknown) && attempt == 1 && ctx.Err() == nil:
			continue
		case errors.Is(err, ledger.ErrUnknown), errors.Is(err, ledger.ErrRefused):
			return Found{}, fmt.Errorf("%w: %w", ErrRedisUnreachable, err)
		default:
			a.faultOf("fault", p, voucherID, err)
			return Found{}, fmt.Errorf("%w: %w", ErrLedgerFault, err)
		}
		p.heard()
		found := Found{Lookup: lookup, OutcomeSeq: seq, Epoch: v.epoch}
		mark := lookup.Mark
		// An entry that nobody could read ended without its users being known: their
		// marks still say admitted, and only the outcomes tell.
		if mark != nil && mark.State == ledger.MarkAdmitted && seq == 0 && mark.Epoch == v.epoch {
			seq, attempt = mark.Seq, 0
			continue
		}
		if mark != nil && (seq == 0 || mark.Seq == seq) || lookup.Outcome.UserID == userID {
			return found, nil
		}
		// Nothing found proves something only if the ledger is proven after it.
		before := v.epoch
		if v = p.refresh(ctx, asked); v.epoch != before && attempt == 1 {
			continue
		}
		if v.state != StateOpen {
			found.Refusal = v.refusal()
		} else if v.epoch != before {
			found.Refusal = fmt.Errorf("%w: its epoch moved", ErrClosed)
		}
		return found, nil
	}
}
