// Package books reckons whether the ledger in Redis and the rows in the
// database tell the same story of a voucher. The demo, the tests, operators and
// the guardian that opens a partition all ask the same rules.
package books

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// Verdict is what a reckoning came to.
type Verdict string

// The verdicts.
const (
	// Proven: nothing is in flight, every admitted order is a row or a named
	// outcome, every rule holds.
	Proven Verdict = "PROVEN"
	// InFlight: orders are on their way; every rule that can be asked meanwhile
	// holds.
	InFlight Verdict = "IN_FLIGHT"
	// Violated: a rule does not hold.
	Violated Verdict = "VIOLATED"
)

// The rules, by the names that operators see.
const (
	// RuleLedgerMissing: a voucher whose ledger was made has none.
	RuleLedgerMissing = "ledger_missing"
	// RuleLedgerFault: a figure of the ledger is not a number.
	RuleLedgerFault = "ledger_fault"
	// RuleLedgerBehind: the ledger has the rev that the database noted it had.
	RuleLedgerBehind = "ledger_behind"
	// RuleLedgerRev: the ledger has no rev that the database has not given, and in
	// the same rev the same state.
	RuleLedgerRev = "ledger_rev"
	// RuleLedgerStock: stock + seq == opening + returned.
	RuleLedgerStock = "ledger_stock"
	// RuleLedgerBuyers: marks == carried over + seq - removed.
	RuleLedgerBuyers = "ledger_buyers"
	// RuleLedgerSettled: settled <= seq.
	RuleLedgerSettled = "ledger_settled"
	// RuleLedgerEntries: length of the stream == entries in - entries out.
	RuleLedgerEntries = "ledger_entries"
	// RuleDatabaseStock: stock + sold == total.
	RuleDatabaseStock = "database_stock"
	// RuleDatabaseSold: sold == order rows.
	RuleDatabaseSold = "database_sold"
	// RuleDatabaseAhead: no row or outcome lies beyond the ledger's seq.
	RuleDatabaseAhead = "database_ahead"
	// RuleOrdersMissing: every seq is a row, an outcome or in a stream entry.
	RuleOrdersMissing = "orders_missing"
	// RuleBridgeStock: with nothing in flight, the ledger's stock is the
	// database's less the units of orders that ended without one.
	RuleBridgeStock = "bridge_stock"
)

// MissingMax is how many missing orders a violation names.
const MissingMax = 100

// Drift is where a violation leads if the sale goes on.
type Drift int

// The drifts.
const (
	// Unclear: the figures contradict each other. Two readings must agree before
	// anything is done: Violation.Again.
	Unclear Drift = iota
	// Oversell: more may be sold than there is, or twice to one user. The sale
	// must stop at once.
	Oversell
	// Undersell: less may be sold than there is. Somebody must look, the sale
	// may go on.
	Undersell
)

// Violation is a rule that does not hold.
type Violation struct {
	Rule  string
	Drift Drift
	// VoucherID is the voucher whose rule it is.
	VoucherID int64
	// Detail has the figures that contradict each other.
	Detail string
	// Orders concerned, MissingMax at most, where the rule can name them.
	Orders []orderid.Position
	// Again tells that the reading of the voucher before this one came to the same.
	// Known to a Watcher only.
	Again bool
}

// String is the violation in one line.
func (v Violation) String() string {
	return fmt.Sprintf("%s: voucher %d: %s", v.Rule, v.VoucherID, v.Detail)
}

// drift tells the drift of a figure that is not what it should be, where a
// larger one leads to overselling.
func drift(is, should int64) Drift {
	if is > should {
		return Oversell
	}
	return Undersell
}

// Books are the reckoning of one voucher.
type Books struct {
	VoucherID  int64
	Verdict    Verdict
	InFlight   int64
	Violations []Violation
	// Ledger is nil for a voucher that has none: a draft, or an archived one.
	Ledger   *ledger.Books
	Database orderstore.Reading
	ReadAt   time.Time
}

// Store is the database's side.
type Store interface {
	Voucher(ctx context.Context, id int64) (orderstore.Voucher, error)
	Read(ctx context.Context, voucherID int64, recount bool) (orderstore.Reading, error)
	MaxSeq(ctx context.Context, voucherID, epoch int64) (int64, error)
	Positions
}

// Reckoner reckons books.
type Reckoner struct {
	Store  Store
	Client rueidis.CoreClient
	Now    func() time.Time
}

// stableTries bounds how often a reckoning waits for a moment in which nothing
// moves. A sale that goes on is IN_FLIGHT, not unreadable.
const stableTries = 3

// Reckon reckons a voucher's books from its first order on.
func (r *Reckoner) Reckon(ctx context.Context, voucherID int64) (Books, error) {
	for try := 1; ; try++ {
		books, stable, err := r.reckon(ctx, voucherID)
		if err != nil {
			return Books{}, fmt.Errorf("reckoning voucher %d: %w", voucherID, err)
		}
		if stable || try == stableTries {
			return books, nil
		}
	}
}

// reckon is false where the ledger moved between its readings, so that the two
// sides are of different moments.
func (r *Reckoner) reckon(ctx context.Context, voucherID int64) (Books, bool, error) {
	voucher, err := r.Store.Voucher(ctx, voucherID)
	if err != nil {
		return Books{}, false, err
	}
	books := Books{VoucherID: voucherID, ReadAt: r.Now().UTC()}
	hasLedger := voucher.LedgerEpoch != 0 && voucher.State != orderstore.StateArchived
	var reading ledger.Books
	if hasLedger {
		// For what lies beyond the ledger the database is read first, for what it
		// lacks the ledger: between the two readings both only grow.
		ahead, err := r.Store.MaxSeq(ctx, voucherID, voucher.Epoch)
		if err != nil {
			return Books{}, false, err
		}
		reading, err = ledger.ReadBooks(ctx, r.Client, voucher.PartitionID, voucher.Epoch, voucherID)
		if err != nil {
			return Books{}, false, err
		}
		books.Violations = Moment(voucherID, reading)
		if reading.Exists {
			books.Ledger = &reading
			books.InFlight = reading.InFlight()
			if ahead > reading.Seq {
				books.violate(DatabaseAhead(voucherID, ahead, reading.Seq))
			}
			missing, err := Missing(ctx, r.Store, r.Client, voucher.PartitionID, voucher.Epoch,
				map[int64]Range{voucherID: {From: 1, To: reading.Seq}}, MissingMax)
			if err != nil {
				return Books{}, false, err
			}
			if seqs := missing[voucherID]; len(seqs) > 0 {
				books.violate(OrdersMissing(voucherID, voucher.Epoch, seqs))
			}
		}
	}

	recount := books.InFlight == 0
	if books.Database, err = r.Store.Read(ctx, voucherID, recount); err != nil {
		return Books{}, false, err
	}
	db := books.Database
	books.violate(DatabaseMoment(voucherID, db)...)
	if recount {
		books.violate(databaseSold(voucherID, db)...)
	}
	stable := true
	if books.Ledger != nil && recount {
		after, err := ledger.ReadBooks(ctx, r.Client, voucher.PartitionID, voucher.Epoch, voucherID)
		if err != nil {
			return Books{}, false, err
		}
		if after.Seq != reading.Seq || after.Settled != reading.Settled || after.Returned != reading.Returned {
			stable = false
			books.InFlight = max(after.InFlight(), 1)
		} else if db.Untold > 0 {
			// Decisions of operators that the ledger is about to be told.
			books.InFlight = db.Untold
		} else {
			books.violate(bridgeStock(voucherID, reading, db)...)
		}
	}
	switch {
	case len(books.Violations) > 0:
		books.Verdict = Violated
	case books.InFlight > 0:
		books.Verdict = InFlight
	default:
		books.Verdict = Proven
	}
	return books, stable, nil
}

func (b *Books) violate(violations ...Violation) {
	b.Violations = append(b.Violations, violations...)
}

// list shows the first few of many.
func list(seqs []int64) string {
	const shown = 5
	if len(seqs) <= shown {
		return fmt.Sprint(seqs)
	}
	return fmt.Sprintf("%v and more, up to %d", seqs[:shown], slices.Max(seqs))
}
