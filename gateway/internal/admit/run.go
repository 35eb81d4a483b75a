package admit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
)

const (
	// pauseLeast and pauseMost are the bounds of the pause between two runs of a
	// batch: long enough for a broken connection to be made anew, jittered since
	// a broken connection fails every batch on it at once.
	pauseLeast = 10 * time.Millisecond
	pauseMost  = 50 * time.Millisecond
)

// unknown is what is not known of a batch: the latest time of the Redis clock
// at which a run whose answer was lost may still admit. Zero means that no run
// was lost, or that the server's time has passed it without one.
type unknown struct{ until time.Time }

func (u *unknown) open() bool { return !u.until.IsZero() }

func (u *unknown) lost(notAfter time.Time) {
	if notAfter.After(u.until) {
		u.until = notAfter
	}
}

// settles tells whether an answer of the given server time that finds no order
// proves that no lost run has made one or will: those admit nobody past their
// not_after. Times are whole ms, as the script compares them.
func (u *unknown) settles(server time.Time) bool { return server.After(u.until) }

// run takes a batch to the ledger until each of its callers has an answer or
// the last deadline has passed.
//
// Once the answer to a run is lost, a caller is told one of two things only: an
// order that was found or made, or a refusal whose server time lies past the
// not_after of every lost run. Whatever else comes, its outcome is unknown.
func (a *Admitter) run(b *batch) {
	a.metrics.batchSize.Observe(float64(len(b.grabs)))
	p := b.lane.partition
	var u unknown
	reread := false
	for attempt := 1; ; attempt++ {
		if !b.attend() {
			return
		}
		if a.base.Err() != nil { // Close was cut off: no call can be made any more
			b.giveUp(&u, ErrClosing)
			return
		}
		left := time.Until(b.deadline)
		if left <= 0 {
			b.giveUp(&u, p.tooLate(b.since))
			return
		}
		v := p.view.Load()
		if v.epoch == 0 {
			if v = a.look(b); v.epoch == 0 {
				b.giveUp(&u, v.refusal())
				return
			}
		}
		notAfter := a.clock.now().Add(min(left, attemptWindow)).Truncate(time.Millisecond)
		reply, err := a.call(b, v, notAfter)
		if err == nil && reply.Status == ledger.AdmitOK {
			b.answer(&u, &reply)
			b.lane.saw(v.epoch, reply.LastSeq)
			if u.open() && u.settles(reply.Now) {
				u = unknown{} // whoever is left was late in this run and has no order
			}
			if len(b.grabs) == 0 {
				return
			}
			b.release()
			a.pause(b, &u)
			continue
		}
		next := a.judge(b, reply, err)
		switch next.verdict {
		case outcomeLost:
			a.metrics.unknownRuns.Inc()
			u.lost(notAfter)
			b.release()
			a.pause(b, nil)
		case doorShut:
			// Nothing ran. If the door has moved or opened meanwhile, once more;
			// where a run was lost before, until the deadline, since the order may
			// be found behind the door.
			shut := v
			v = a.look(b)
			switch {
			case u.open():
				b.release()
				a.pause(b, nil)
			case !reread && (v.epoch != shut.epoch || v.state == StateOpen):
				reread = true
			case v.state == StateOpen:
				b.giveUp(&u, next.err)
				return
			default:
				b.giveUp(&u, v.refusal())
				return
			}
		case refused:
			if !u.open() {
				b.giveUp(&u, next.err)
				return
			}
			b.release()
			a.pause(b, nil)
		default:
			b.giveUp(&u, next.err)
			return
		}
	}
}

// call runs the script once, with a bound on the wait for its answer.
func (a *Admitter) call(b *batch, v *view, notAfter time.Time) (ledger.AdmitReply, error) {
	call := ledger.AdmitCall{
		Partition: b.lane.partition.number, Epoch: v.epoch, SHA: v.sha, VoucherID: b.lane.voucherID,
		Seen: b.lane.seenSeq(v.epoch), NotAfter: notAfter, Grabs: b.grabs,
	}
	sent := time.Now()
	wait := sent.Add(attemptWindow + attemptGrace)
	if b.deadline.Before(wait) {
		wait = b.deadline
	}
	ctx, cancel := context.WithDeadline(a.base, wait)
	defer cancel()
	faultpoint.Reach(faultpoint.GatewayBeforeScript)
	reply, err := a.admit(ctx, call)
	faultpoint.Reach(faultpoint.GatewayAfterScript)
	answered := time.Now()
	a.metrics.scriptTime.Observe(answered.Sub(sent).Seconds())
	if err == nil {
		a.clock.learn(reply.Now, sent, answered)
	}
	if !errors.Is(err, ledger.ErrUnknown) {
		b.lane.partition.heard()
	}
	return reply, err
}

type verdict int

const (
	final       verdict = iota // nothing will change it soon
	outcomeLost                // it may have run
	doorShut                   // the partition did not let it in
	refused                    // Redis did not run it
)

type judgement struct {
	verdict verdict
	err     error // what callers are told if no run was lost
}

// judge says what an answer means that decided nothing.
func (a *Admitter) judge(b *batch, reply ledger.AdmitReply, err error) judgement {
	l := b.lane
	switch {
	case errors.Is(err, ledger.ErrUnknown) && !neverSent(err):
		return judgement{verdict: outcomeLost}
	case errors.Is(err, ledger.ErrUnknown):
		a.fault("unreachable", l, err)
		return judgement{verdict: refused, err: fmt.Errorf("%w: %w", ErrRedisUnreachable, err)}
	case errors.Is(err, ledger.ErrRefused):
		a.fault("refused", l, err)
		return judgement{verdict: refused, err: fmt.Errorf("%w: %w", ErrRedisUnreachable, err)}
	case errors.Is(err, ledger.ErrNoScript):
		return judgement{verdict: doorShut, err: fmt.Errorf("%w: %w", ErrClosed, err)}
	case err != nil:
		a.fault("fault", l, err)
		return judgement{err: fmt.Errorf("%w: %w", ErrLedgerFault, err)}
	}
	switch reply.Status {
	case ledger.AdmitClosed, ledger.AdmitStaleEpoch:
		return judgement{verdict: doorShut, err: fmt.Errorf("%w: %s %s", ErrClosed, reply.Status, reply.Detail)}
	case ledger.AdmitNotFound:
		return judgement{err: ErrVoucherNotFound}
	case ledger.AdmitArchived:
		return judgement{err: ErrVoucherArchived}
	default: // AdmitRewound
		err := fmt.Errorf("%w: %s: the ledger is at seq %s, behind one that was seen", ErrLedgerFault, reply.Status, reply.Detail)
		a.fault("rewound", l, err)
		return judgement{err: err}
	}
}

// neverSent tells whether a call failed because no connection could be made.
func neverSent(err error) bool {
	var dial *net.OpError
	return errors.As(err, &dial) && dial.Op == "dial"
}

// look reads the partition anew for a batch, within its deadline.
func (a *Admitter) look(b *batch) *view {
	ctx, cancel := context.WithDeadline(a.base, b.deadline)
	defer cancel()
	return b.lane.partition.refresh(ctx, time.Now())
}

// pause waits before the next run; with u also until the Redis clock has
// passed what is unknown, since no earlier run could settle it. Never beyond
// the deadline.
func (a *Admitter) pause(b *batch, u *unknown) {
	wait := pauseLeast + rand.N(pauseMost-pauseLeast)
	if u != nil && u.open() {
		wait = max(wait, u.until.Sub(a.clock.now())+2*time.Millisecond)
	}
	timer := time.NewTimer(min(wait, time.Until(b.deadline)))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.base.Done():
	}
}
