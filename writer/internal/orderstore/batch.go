package orderstore

import (
	"cmp"
	"slices"

	"github.com/seckill/seckill/pkg/orderid"
)

// group is what one guarded UPDATE covers: orders of one voucher and one epoch.
type group struct{ voucherID, epoch int64 }

// buyer is the pair that only one order may have.
type buyer struct{ userID, voucherID int64 }

func groupOf(o *Order) group { return group{o.VoucherID, o.Epoch} }
func buyerOf(o *Order) buyer { return buyer{o.UserID, o.VoucherID} }

// batch is one run of Persist: the orders it was given, and what is known of
// each. Orders are named by their index.
type batch struct {
	orders   []Order
	verdicts []Verdict
	// short holds the stock of the groups that lately had too little: how many
	// orders of it the next wave may hold, lowest seq first.
	short map[group]int64
}

func newBatch(orders []Order) *batch {
	b := &batch{
		orders:   orders,
		verdicts: make([]Verdict, len(orders)),
		short:    make(map[group]int64),
	}
	for i := range orders {
		if err := checkOrder(&orders[i]); err != nil {
			b.verdicts[i] = Verdict{Kind: Unstorable, Err: err, Reason: err.Error()}
		}
	}
	return b
}

// left is how many orders have no verdict yet.
func (b *batch) left() int {
	n := 0
	for i := range b.verdicts {
		if b.verdicts[i].Kind == Undecided {
			n++
		}
	}
	return n
}

// undecided returns the orders that have no verdict yet.
func (b *batch) undecided() []int {
	list := make([]int, 0, b.left())
	for i := range b.orders {
		if b.verdicts[i].Kind == Undecided {
			list = append(list, i)
		}
	}
	return list
}

// wave picks the undecided orders for the next transaction: of those that share
// a position or a buyer the first only, the others meet its row in a later wave.
// They come sorted by voucher and user, so that all writers take the locks of
// the unique index, and then those of the vouchers, in one order.
func (b *batch) wave() []int {
	picked := b.undecided()
	sorted := slices.Clone(picked)
	b.sortByBuyer(sorted)
	if len(b.short) == 0 && b.distinct(picked, sorted) {
		return sorted
	}
	picked = b.firsts(picked)
	b.sortByBuyer(picked)
	return picked
}

func (b *batch) sortByBuyer(picked []int) {
	slices.SortFunc(picked, func(i, j int) int {
		x, y := &b.orders[i], &b.orders[j]
		return cmp.Or(cmp.Compare(x.VoucherID, y.VoucherID), cmp.Compare(x.UserID, y.UserID))
	})
}

// distinct tells whether no two orders share a position or a buyer, as is nearly
// always so: by looking at neighbours, not by a map of a thousand keys. It is
// given the orders as they came and as sorted by buyer.
func (b *batch) distinct(picked, byBuyer []int) bool {
	for k := 1; k < len(byBuyer); k++ {
		if buyerOf(&b.orders[byBuyer[k-1]]) == buyerOf(&b.orders[byBuyer[k]]) {
			return false
		}
	}
	byPosition := func(i, j int) int { return comparePositions(b.orders[i].Position, b.orders[j].Position) }
	// Of one voucher they mostly come in the order of their seq.
	if !slices.IsSortedFunc(picked, byPosition) {
		picked = slices.Clone(picked)
		slices.SortFunc(picked, byPosition)
	}
	for k := 1; k < len(picked); k++ {
		if b.orders[picked[k-1]].Position == b.orders[picked[k]].Position {
			return false
		}
	}
	return true
}

func comparePositions(x, y orderid.Position) int {
	return cmp.Or(cmp.Compare(x.VoucherID, y.VoucherID), cmp.Compare(x.Epoch, y.Epoch), cmp.Compare(x.Seq, y.Seq))
}

// firsts keeps, of orders that share a position or a buyer, the first, and of
// groups that are short of stock no more than that.
func (b *batch) firsts(picked []int) []int {
	if len(b.short) > 0 {
		// Scarce units go by seq.
		slices.SortStableFunc(picked, func(i, j int) int { return cmp.Compare(b.orders[i].Seq, b.orders[j].Seq) })
	}
	positions := make(map[orderid.Position]bool, len(picked))
	buyers := make(map[buyer]bool, len(picked))
	picked = slices.DeleteFunc(picked, func(i int) bool {
		o := &b.orders[i]
		if positions[o.Position] || buyers[buyerOf(o)] {
			return true
		}
		if left, ok := b.short[groupOf(o)]; ok {
			if left == 0 {
				return true
			}
			b.short[groupOf(o)] = left - 1
		}
		positions[o.Position], buyers[buyerOf(o)] = true, true
		return false
	})
	clear(b.short)
	return picked
}

// groups splits orders by voucher and epoch, in that order.
func (b *batch) groups(picked []int) ([]group, map[group][]int) {
	members := make(map[group][]int)
	for len(picked) > 0 {
		// Neighbours are mostly of one group.
		g, n := groupOf(&b.orders[picked[0]]), 1
		for n < len(picked) && groupOf(&b.orders[picked[n]]) == g {
			n++
		}
		if list, ok := members[g]; ok {
			members[g] = append(list, picked[:n]...)
		} else {
			members[g] = picked[:n:n]
		}
		picked = picked[n:]
	}
	keys := make([]group, 0, len(members))
	for g := range members {
		keys = append(keys, g)
	}
	slices.SortFunc(keys, func(x, y group) int {
		return cmp.Or(cmp.Compare(x.voucherID, y.voucherID), cmp.Compare(x.epoch, y.epoch))
	})
	return keys, members
}

func (b *batch) decide(picked []int, v Verdict) {
	for _, i := range picked {
		b.verdicts[i] = v
	}
}

func (b *batch) seqs(picked []int) []int64 {
	list := make([]int64, len(picked))
	for k, i := range picked {
		list[k] = b.orders[i].Seq
	}
	return list
}

func (b *batch) users(picked []int) []int64 {
	list := make([]int64, len(picked))
	for k, i := range picked {
		list[k] = b.orders[i].UserID
	}
	return list
}
