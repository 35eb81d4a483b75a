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

// undecided returns the orders that have no verdict yet.
func (b *batch) undecided() []int {
	var list []int
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
	slices.SortFunc(picked, func(i, j int) int {
		x, y := &b.orders[i], &b.orders[j]
		return cmp.Or(cmp.Compare(x.VoucherID, y.VoucherID), cmp.Compare(x.UserID, y.UserID))
	})
	return picked
}

// groups splits orders by voucher and epoch, in that order.
func (b *batch) groups(picked []int) ([]group, map[group][]int) {
	members := make(map[group][]int)
	for _, i := range picked {
		g := groupOf(&b.orders[i])
		members[g] = append(members[g], i)
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
