package books

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// recountDuty is the share of time that the recount from the first order on
	// may take: 1 %, so some million orders are recounted every few minutes.
	recountDuty = 100
	// recountLeast and recountMost bound the time between two recounts of a
	// voucher.
	recountLeast = time.Second
	recountMost  = 10 * time.Minute
	// A voucher of up to recountSmall orders is recounted every recountSmallMost
	// whatever that takes, some ten milliseconds: an operator is told within
	// seconds.
	recountSmall     = 100_000
	recountSmallMost = 2 * time.Second
	// recountChunk is how many positions of a larger voucher one look counts: some
	// hundred milliseconds, so that a look stays short. Beyond recountWhole the
	// rows are not counted in one moment any more, only found position by position.
	recountChunk = 1_000_000
	recountWhole = 2_000_000
	// scanLeast is the time between two scans of a stream for orders that are
	// not written by the alarm age: during an outage the stream is long.
	scanLeast = 3 * time.Second
)

// Watcher holds the vouchers of a partition against the rules again and again,
// cheaply: one reading of the ledger and two rows of the database a voucher,
// and a count of what is new since the last look. It remembers up to where
// every order was found; the recount at 1 % duty begins at the first one.
//
// It is used by one goroutine.
type Watcher struct {
	Store     Store
	Client    rueidis.CoreClient
	Partition int
	// AlarmAge is how long an admitted order may take to become a row before it
	// is looked for in the stream.
	AlarmAge time.Duration
	Now      func() time.Time

	// InFlight is the sum over all vouchers at the last look.
	InFlight int64

	epoch    int64
	vouchers map[int64]*watched
	// nextScan is when the stream may be scanned again.
	nextScan time.Time
}

// watched is what is remembered of a voucher.
type watched struct {
	// proven: every order up to it was found as a row or an outcome.
	proven int64
	// seen are readings of seq, so that it is known which are older than the
	// alarm age. One a look, dropped when used.
	seen []sighting
	// nextRecount is when it is due.
	nextRecount time.Time
	// recountedTo is how far the recount of a large voucher has come.
	recountedTo int64
	// recounted is what the last recount found, repeated until the next one.
	recounted []Violation
	// missing is what the last scan found.
	missing []Violation
}

type sighting struct {
	at  time.Time
	seq int64
}

// Look checks vouchers that have a ledger and are not archived. An error means
// that one side could not be read, and nothing else.
func (w *Watcher) Look(ctx context.Context, epoch int64, vouchers []orderstore.Voucher) ([]Violation, error) {
	if w.epoch != epoch || w.vouchers == nil {
		w.epoch, w.vouchers = epoch, map[int64]*watched{}
	}
	live := make(map[int64]bool, len(vouchers))
	w.InFlight = 0
	var violations []Violation
	overdue := map[int64]Range{}
	for _, voucher := range vouchers {
		live[voucher.ID] = true
		v := w.vouchers[voucher.ID]
		if v == nil {
			v = &watched{}
			w.vouchers[voucher.ID] = v
		}
		found, err := w.look(ctx, voucher, v, overdue)
		if errors.Is(err, ledger.ErrFault) {
			found, err = []Violation{{Rule: RuleLedgerFault, VoucherID: voucher.ID, Detail: err.Error()}}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("looking at voucher %d: %w", voucher.ID, err)
		}
		violations = append(violations, found...)
	}
	for id := range w.vouchers {
		if !live[id] {
			delete(w.vouchers, id)
		}
	}
	if err := w.scan(ctx, overdue); err != nil {
		return nil, err
	}
	for _, v := range w.vouchers {
		violations = append(violations, v.missing...)
	}
	return violations, nil
}

// scan looks for overdue orders in the stream, all in one pass.
func (w *Watcher) scan(ctx context.Context, overdue map[int64]Range) error {
	now := w.Now()
	if len(overdue) == 0 || now.Before(w.nextScan) {
		return nil
	}
	w.nextScan = now.Add(scanLeast)
	missing, err := Missing(ctx, w.Store, w.Client, w.Partition, w.epoch, overdue, MissingMax)
	if err != nil {
		return err
	}
	for id := range overdue {
		v := w.vouchers[id]
		v.missing = nil
		if seqs := missing[id]; len(seqs) > 0 {
			v.missing = []Violation{OrdersMissing(id, w.epoch, seqs)}
		}
	}
	return nil
}

func (w *Watcher) look(ctx context.Context, voucher orderstore.Voucher, v *watched, overdue map[int64]Range) ([]Violation, error) {
	// The database first for what lies beyond the ledger, the ledger first for
	// what the database lacks.
	ahead, err := w.Store.MaxSeq(ctx, voucher.ID, w.epoch)
	if err != nil {
		return nil, err
	}
	reading, err := ledger.ReadBooks(ctx, w.Client, w.Partition, w.epoch, voucher.ID)
	if err != nil {
		return nil, err
	}
	violations := Moment(voucher.ID, reading)
	if !reading.Exists || reading.State == ledger.VoucherArchived {
		return violations, nil
	}
	if reading.Rev < voucher.Rev {
		violations = append(violations, Violation{
			Rule: RuleLedgerBehind, VoucherID: voucher.ID,
			Detail: fmt.Sprintf("the ledger has rev %d, the database %d", reading.Rev, voucher.Rev),
		})
	}
	if reading.Rev > voucher.Rev || (reading.Rev == voucher.Rev && string(reading.State) != strings.ToLower(voucher.State)) {
		violations = append(violations, Violation{
			Rule: RuleLedgerRev, VoucherID: voucher.ID,
			Detail: fmt.Sprintf("the ledger is %s by rev %d, the database %s by rev %d", reading.State, reading.Rev, voucher.State, voucher.Rev),
		})
	}
	if ahead > reading.Seq {
		violations = append(violations, DatabaseAhead(voucher.ID, ahead, reading.Seq))
	}
	violations = append(violations, DatabaseMoment(voucher.ID, orderstore.Reading{Total: voucher.Total, Stock: voucher.Stock, Sold: voucher.Sold})...)
	w.InFlight += reading.InFlight()
	if err := w.bridge(ctx, voucher, v, reading, overdue); err != nil {
		return nil, err
	}
	if err := w.recount(ctx, voucher, v, reading); err != nil {
		return nil, err
	}
	return append(violations, v.recounted...), nil
}

// bridge moves the mark up to which every order was found. What is older than
// the alarm age and not written is overdue, to be looked for in the stream: it
// is there while writers or the database are behind.
func (w *Watcher) bridge(ctx context.Context, voucher orderstore.Voucher, v *watched, reading ledger.Books, overdue map[int64]Range) error {
	now := w.Now()
	v.seen = append(v.seen, sighting{now, reading.Seq})
	due := v.proven
	for len(v.seen) > 0 && now.Sub(v.seen[0].at) >= w.AlarmAge {
		due = max(due, v.seen[0].seq)
		v.seen = v.seen[1:]
	}
	if reading.InFlight() == 0 {
		due = reading.Seq
	}
	if due <= v.proven {
		return nil
	}
	n, err := w.Store.CountPositions(ctx, voucher.ID, w.epoch, v.proven+1, due)
	if err != nil {
		return err
	}
	if n == due-v.proven {
		v.proven, v.missing = due, nil
		return nil
	}
	// Until they are written they are due again at the next look.
	v.seen = append([]sighting{{now.Add(-w.AlarmAge), due}}, v.seen...)
	overdue[voucher.ID] = Range{From: v.proven + 1, To: due}
	return nil
}

// recount finds every order from the first one on again, at 1 % duty, and counts
// the rows. With nothing in flight it also holds the two stocks against each
// other.
func (w *Watcher) recount(ctx context.Context, voucher orderstore.Voucher, v *watched, reading ledger.Books) error {
	began := w.Now()
	if began.Before(v.nextRecount) {
		return nil
	}
	// Also where it fails: a recount that is too slow must not end every look.
	most := recountMost
	if v.proven <= recountSmall {
		most = recountSmallMost
	}
	defer func() {
		v.nextRecount = began.Add(min(max(recountDuty*w.Now().Sub(began), recountLeast), most))
	}()
	var found []Violation
	from, to := v.recountedTo+1, min(v.proven, v.recountedTo+recountChunk)
	n, err := w.Store.CountPositions(ctx, voucher.ID, w.epoch, from, to)
	if err != nil {
		return err
	}
	if n < to-from+1 {
		seqs, err := w.Store.MissingSeqs(ctx, voucher.ID, w.epoch, from, to, MissingMax)
		if err != nil {
			return err
		}
		if len(seqs) > 0 {
			found = append(found, OrdersMissing(voucher.ID, w.epoch, seqs))
		}
	}
	if v.recountedTo = to; to >= v.proven {
		v.recountedTo = 0
	}
	if v.proven <= recountWhole {
		counted, err := w.whole(ctx, voucher, reading)
		if err != nil {
			return err
		}
		// Behind what names the orders, which says more.
		found = append(found, counted...)
	}
	if len(found) > 0 || v.recountedTo == 0 {
		v.recounted = found
	}
	return nil
}

// whole counts the rows in the moment in which the row of the voucher says how
// many were sold.
func (w *Watcher) whole(ctx context.Context, voucher orderstore.Voucher, reading ledger.Books) ([]Violation, error) {
	db, err := w.Store.Read(ctx, voucher.ID, true)
	if err != nil {
		return nil, err
	}
	found := databaseSold(voucher.ID, db)
	if reading.InFlight() > 0 {
		return found, nil
	}
	after, err := ledger.ReadBooks(ctx, w.Client, w.Partition, w.epoch, voucher.ID)
	if err != nil {
		return nil, err
	}
	if after.Seq == reading.Seq && after.Returned == reading.Returned && after.Settled == reading.Settled {
		found = append(found, bridgeStock(voucher.ID, reading, db)...)
	}
	return found, nil
}
