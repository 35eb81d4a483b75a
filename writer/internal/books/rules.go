package books

import (
	"fmt"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// Moment checks the rules that one reading of the ledger must satisfy by
// itself, whatever is in flight.
func Moment(voucherID int64, b ledger.Books) []Violation {
	missing := func(detail string) []Violation {
		return []Violation{{Rule: RuleLedgerMissing, VoucherID: voucherID, Detail: detail}}
	}
	if !b.Meta.Exists {
		return missing("the partition has no ledger")
	}
	if !b.Exists {
		return missing("the voucher has no ledger")
	}
	var violations []Violation
	rule := func(is, should int64, name string, drift Drift, detail string, figures ...any) {
		if is != should {
			violations = append(violations, Violation{Rule: name, Drift: drift, VoucherID: voucherID, Detail: fmt.Sprintf(detail, figures...)})
		}
	}
	if b.State != ledger.VoucherArchived {
		is, should := b.Stock+b.Seq, b.Opening+b.Returned
		rule(is, should, RuleLedgerStock, drift(is, should),
			"stock %d + seq %d is not opening %d + returned %d", b.Stock, b.Seq, b.Opening, b.Returned)
		should = b.CarriedOver + b.Seq - b.Removed
		// A mark too few lets a user buy again.
		rule(b.Buyers, should, RuleLedgerBuyers, drift(should, b.Buyers),
			"%d marks are not carried over %d + seq %d - removed %d", b.Buyers, b.CarriedOver, b.Seq, b.Removed)
		rule(max(b.Settled, b.Seq), b.Seq, RuleLedgerSettled, Unclear, "settled %d is more than seq %d", b.Settled, b.Seq)
	}
	entries := b.Meta.EntriesIn - b.Meta.EntriesOut
	// An entry too few is orders lost. One too many is a stranger's: it will be
	// held as a dead letter and sells nothing.
	strange := Unclear
	if b.Entries > entries {
		strange = Undersell
	}
	rule(b.Entries, entries, RuleLedgerEntries, strange,
		"the stream has %d entries, not entries in %d - entries out %d", b.Entries, b.Meta.EntriesIn, b.Meta.EntriesOut)
	return violations
}

// DatabaseMoment checks what the row of a voucher must satisfy by itself.
func DatabaseMoment(voucherID int64, db orderstore.Reading) []Violation {
	if db.Stock+db.Sold == db.Total {
		return nil
	}
	return []Violation{{
		Rule: RuleDatabaseStock, Drift: drift(db.Stock+db.Sold, db.Total), VoucherID: voucherID,
		Detail: fmt.Sprintf("stock %d + sold %d is not total %d", db.Stock, db.Sold, db.Total),
	}}
}

// databaseSold checks a recount: what was sold is what has a row.
func databaseSold(voucherID int64, db orderstore.Reading) []Violation {
	if db.Orders == db.Sold {
		return nil
	}
	d := Unclear
	if db.Orders > db.Sold {
		d = Oversell
	}
	return []Violation{{
		Rule: RuleDatabaseSold, Drift: d, VoucherID: voucherID, Detail: fmt.Sprintf("sold %d, but %d order rows", db.Sold, db.Orders),
	}}
}

// DatabaseAhead is for a database that knows of an order which the ledger has
// not admitted: the ledger went back.
func DatabaseAhead(voucherID, ahead, seq int64) Violation {
	return Violation{
		Rule: RuleDatabaseAhead, VoucherID: voucherID, Detail: fmt.Sprintf("the database has seq %d, the ledger only %d", ahead, seq),
	}
}

// bridgeStock checks, with nothing in flight, what both sides have left. The
// ledger lacks the units of orders that took one there and are neither sold in
// the database nor given back.
func bridgeStock(voucherID int64, b ledger.Books, db orderstore.Reading) []Violation {
	should := db.Stock - db.OutcomeByKind[orderstore.OutcomeHeld] - db.OutcomeByKind[orderstore.OutcomeRejected] -
		db.OutcomeByKind[orderstore.OutcomeLost]
	// A decision of an operator that the ledger has not been told yet is a unit in
	// flight.
	if b.Stock == should || db.Untold > 0 {
		return nil
	}
	return []Violation{{
		Rule: RuleBridgeStock, Drift: drift(b.Stock, should), VoucherID: voucherID,
		Detail: fmt.Sprintf("the ledger has %d units left, by the database it should be %d", b.Stock, should),
	}}
}

// OrdersMissing is for orders that are nowhere.
func OrdersMissing(voucherID, epoch int64, seqs []int64) Violation {
	v := Violation{
		Rule: RuleOrdersMissing, VoucherID: voucherID,
		Detail: fmt.Sprintf("seq %s is neither a row, nor an outcome, nor in a stream entry", list(seqs)),
	}
	for _, seq := range seqs {
		v.Orders = append(v.Orders, orderid.Position{VoucherID: voucherID, Epoch: epoch, Seq: seq})
	}
	return v
}
