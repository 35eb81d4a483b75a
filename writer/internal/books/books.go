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

// Violation is a rule that does not hold.
type Violation struct {
	Rule string
	// Detail has the figures that contradict each other.
	Detail string
	// Orders concerned, MissingMax at most, where the rule can name them.
	Orders []orderid.Position
}

// String is the violation in one line.
func (v Violation) String() string { return v.Rule + ": " + v.Detail }

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
		books.Violations = Moment(reading)
		if reading.Exists {
			books.Ledger = &reading
			books.InFlight = reading.InFlight()
			if ahead > reading.Seq {
				books.violate(RuleDatabaseAhead, fmt.Sprintf("the database has seq %d, the ledger only %d", ahead, reading.Seq))
			}
			missing, err := Missing(ctx, r.Store, r.Client, voucher.PartitionID, voucher.Epoch, map[int64]int64{voucherID: reading.Seq}, MissingMax)
			if err != nil {
				return Books{}, false, err
			}
			if seqs := missing[voucherID]; len(seqs) > 0 {
				books.Violations = append(books.Violations, missingViolation(voucherID, voucher.Epoch, seqs))
			}
		}
	}

	recount := books.InFlight == 0
	if books.Database, err = r.Store.Read(ctx, voucherID, recount); err != nil {
		return Books{}, false, err
	}
	db := books.Database
	if db.Stock+db.Sold != db.Total {
		books.violate(RuleDatabaseStock, fmt.Sprintf("stock %d + sold %d is not total %d", db.Stock, db.Sold, db.Total))
	}
	if recount && db.Orders != db.Sold {
		books.violate(RuleDatabaseSold, fmt.Sprintf("sold %d, but %d order rows", db.Sold, db.Orders))
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
		} else if want := db.Stock - withoutUnit(db.OutcomeByKind); reading.Stock != want {
			books.violate(RuleBridgeStock, fmt.Sprintf("the ledger has %d units left, by the database it should be %d", reading.Stock, want))
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

func (b *Books) violate(rule, detail string) {
	b.Violations = append(b.Violations, Violation{Rule: rule, Detail: detail})
}

// withoutUnit counts orders that took a unit in the ledger which is neither
// sold in the database nor was given back.
func withoutUnit(byKind map[string]int64) int64 {
	return byKind[orderstore.OutcomeHeld] + byKind[orderstore.OutcomeRejected] + byKind[orderstore.OutcomeLost]
}

// Moment checks the rules that one reading of the ledger must satisfy by
// itself, whatever is in flight.
func Moment(b ledger.Books) []Violation {
	if !b.Meta.Exists {
		return []Violation{{Rule: RuleLedgerMissing, Detail: "the partition has no ledger"}}
	}
	if !b.Exists {
		return []Violation{{Rule: RuleLedgerMissing, Detail: "the voucher has no ledger"}}
	}
	var violations []Violation
	rule := func(holds bool, name, detail string, figures ...any) {
		if !holds {
			violations = append(violations, Violation{Rule: name, Detail: fmt.Sprintf(detail, figures...)})
		}
	}
	if b.State != ledger.VoucherArchived {
		rule(b.Stock+b.Seq == b.Opening+b.Returned, RuleLedgerStock,
			"stock %d + seq %d is not opening %d + returned %d", b.Stock, b.Seq, b.Opening, b.Returned)
		rule(b.Buyers == b.CarriedOver+b.Seq-b.Removed, RuleLedgerBuyers,
			"%d marks are not carried over %d + seq %d - removed %d", b.Buyers, b.CarriedOver, b.Seq, b.Removed)
		rule(b.Settled <= b.Seq, RuleLedgerSettled, "settled %d is more than seq %d", b.Settled, b.Seq)
	}
	rule(b.Entries == b.Meta.EntriesIn-b.Meta.EntriesOut, RuleLedgerEntries,
		"the stream has %d entries, not entries in %d - entries out %d", b.Entries, b.Meta.EntriesIn, b.Meta.EntriesOut)
	return violations
}

func missingViolation(voucherID, epoch int64, seqs []int64) Violation {
	v := Violation{Rule: RuleOrdersMissing, Detail: fmt.Sprintf("seq %s is neither a row, nor an outcome, nor in a stream entry", list(seqs))}
	for _, seq := range seqs {
		v.Orders = append(v.Orders, orderid.Position{VoucherID: voucherID, Epoch: epoch, Seq: seq})
	}
	return v
}

// list shows the first few of many.
func list(seqs []int64) string {
	const shown = 5
	if len(seqs) <= shown {
		return fmt.Sprint(seqs)
	}
	return fmt.Sprintf("%v and more, up to %d", seqs[:shown], slices.Max(seqs))
}
