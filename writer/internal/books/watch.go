package books

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
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
	// LookFor is how long a look may take before it leaves the rest of the vouchers,
	// and of a voucher's orders, to the next one; 0 is without end, for a proof.
	LookFor time.Duration

	epoch    int64
	vouchers map[int64]*watched
	// after is the last voucher that was read.
	after int64
	// overdue are the orders to look for in the stream.
	overdue map[int64]Range
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
	// found is what the last reading found, and inFlight what it saw.
	found    []Violation
	inFlight int64
}

type sighting struct {
	at  time.Time
	seq int64
}

// Look checks vouchers that have a ledger and are not archived, ascending by id,
// and answers what is known of all of them, also with an error, which means that
// one side could not be read, and nothing else. It begins where the last look
// stopped, so that each has its turn however many there are.
func (w *Watcher) Look(ctx context.Context, epoch int64, vouchers []orderstore.Voucher) ([]Violation, error) {
	if w.epoch != epoch || w.vouchers == nil {
		w.epoch, w.vouchers, w.overdue = epoch, map[int64]*watched{}, map[int64]Range{}
	}
	w.keep(vouchers)
	began := w.Now()
	first, _ := slices.BinarySearchFunc(vouchers, w.after+1, func(v orderstore.Voucher, id int64) int { return cmp.Compare(v.ID, id) })
	var err error
	for i := 0; i < len(vouchers) && err == nil; i++ {
		if i > 0 && w.LookFor > 0 && w.Now().Sub(began) >= w.LookFor {
			break
		}
		voucher := vouchers[(first+i)%len(vouchers)]
		// Also where it fails: one that cannot be read must not keep the others from
		// their turn.
		w.after = voucher.ID
		if err = w.read(ctx, voucher); err != nil {
			err = fmt.Errorf("looking at voucher %d: %w", voucher.ID, err)
		}
	}
	if err == nil {
		err = w.scan(ctx)
	}
	var violations []Violation
	for _, voucher := range vouchers {
		v := w.vouchers[voucher.ID]
		violations = append(append(violations, v.found...), v.missing...)
	}
	return violations, err
}

// InFlight is the sum over all vouchers, each at its last reading.
func (w *Watcher) InFlight() (sum int64) {
	for _, v := range w.vouchers {
		sum += v.inFlight
	}
	return sum
}

// keep remembers these vouchers and no others.
func (w *Watcher) keep(vouchers []orderstore.Voucher) {
	live := make(map[int64]bool, len(vouchers))
	for _, voucher := range vouchers {
		live[voucher.ID] = true
		if w.vouchers[voucher.ID] == nil {
			w.vouchers[voucher.ID] = &watched{}
		}
	}
	for id := range w.vouchers {
		if !live[id] {
			delete(w.vouchers, id)
			delete(w.overdue, id)
		}
	}
}

// read is one voucher's turn.
func (w *Watcher) read(ctx context.Context, voucher orderstore.Voucher) error {
	v := w.vouchers[voucher.ID]
	v.inFlight = 0
	found, err := w.look(ctx, voucher, v)
	if errors.Is(err, ledger.ErrFault) {
		found, err = []Violation{{Rule: RuleLedgerFault, VoucherID: voucher.ID, Detail: err.Error()}}, nil
	}
	of := func(list []Violation, rule string) bool {
		return slices.ContainsFunc(list, func(v Violation) bool { return v.Rule == rule })
	}
	for i := range found {
		found[i].Again = of(v.found, found[i].Rule)
	}
	if err != nil {
		// Half a reading finds what it finds, and takes back nothing.
		for _, old := range v.found {
			if !of(found, old.Rule) {
				found = append(found, old)
			}
		}
		v.found = found
		return err
	}
	for i := range v.missing {
		v.missing[i].Again = true
	}
	v.found = found
	return nil
}

// scan looks for overdue orders in the stream, all in one pass.
func (w *Watcher) scan(ctx context.Context) error {
	now := w.Now()
	if len(w.overdue) == 0 || now.Before(w.nextScan) {
		return nil
	}
	w.nextScan = now.Add(scanLeast)
	missing, err := Missing(ctx, w.Store, w.Client, w.Partition, w.epoch, w.overdue, MissingMax)
	if err != nil {
		return err
	}
	for id := range w.overdue {
		v := w.vouchers[id]
		again := len(v.missing) > 0
		v.missing = nil
		if seqs := missing[id]; len(seqs) > 0 {
			v.missing = []Violation{OrdersMissing(id, w.epoch, seqs)}
			v.missing[0].Again = again
		}
	}
	clear(w.overdue)
	return nil
}

// look reads both sides of a voucher. What it finds beside an error is found all
// the same: it needs nothing of what failed.
func (w *Watcher) look(ctx context.Context, voucher orderstore.Voucher, v *watched) ([]Violation, error) {
	// The database first for what lies beyond the ledger, the ledger first for
	// what the database lacks.
	ahead, aheadErr := w.Store.MaxSeq(ctx, voucher.ID, w.epoch)
	reading, err := ledger.ReadBooks(ctx, w.Client, w.Partition, w.epoch, voucher.ID)
	if err != nil {
		return nil, err
	}
	violations := Moment(voucher.ID, reading)
	if !reading.Exists || reading.State == ledger.VoucherArchived {
		return violations, aheadErr
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
	v.inFlight = reading.InFlight()
	if aheadErr != nil {
		return violations, aheadErr
	}
	if ahead > reading.Seq {
		violations = append(violations, DatabaseAhead(voucher.ID, ahead, reading.Seq))
	}
	violations = append(violations, DatabaseMoment(voucher.ID, orderstore.Reading{Total: voucher.Total, Stock: voucher.Stock, Sold: voucher.Sold})...)
	if err := w.bridge(ctx, voucher, v, reading); err != nil {
		return violations, err
	}
	err = w.recount(ctx, voucher, v, reading)
	return append(violations, v.recounted...), err
}

// bridge moves the mark up to which every order was found. What is older than
// the alarm age and not written is overdue, to be looked for in the stream: it
// is there while writers or the database are behind.
func (w *Watcher) bridge(ctx context.Context, voucher orderstore.Voucher, v *watched, reading ledger.Books) error {
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
	// Until they are found they are due again at the next look.
	v.seen = slices.Insert(v.seen, 0, sighting{now.Add(-w.AlarmAge), due})
	if w.LookFor > 0 {
		// A guardian that has just come has a whole sale before it.
		due = min(due, v.proven+recountChunk)
	}
	n, err := w.Store.CountPositions(ctx, voucher.ID, w.epoch, v.proven+1, due)
	if err != nil {
		return err
	}
	if n == due-v.proven {
		v.proven, v.missing = due, nil
		delete(w.overdue, voucher.ID)
		return nil
	}
	w.overdue[voucher.ID] = Range{From: v.proven + 1, To: due}
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
	if reading.Seq <= recountSmall {
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
	if reading.Seq <= recountWhole {
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
