// Package ledger is the one home of the contract between gateway and writer in
// Redis: every key, every script and the form of a stream entry. Nothing else
// in the project names a key or a field, or writes to the ledger in any other
// way than by the scripts here.
//
// The ledger of a partition is one meta hash and one orders stream, and per
// voucher a voucher hash, a buyers hash and an outcomes hash. All but meta
// carry the epoch in their names, so what belongs to an older epoch cannot be
// touched by mistake. All keys of a script share the hash tag {partition}.
package ledger

import "strconv"

// Group is the consumer group of every orders stream. It is created at 0:
// at $ the entries that were there before it would never be delivered.
const Group = "writers"

// MaxBatch is the most Grabs of one admission call and so the most orders of
// one entry: beyond it a call costs hardly less per Grab (3.2 us of Redis CPU
// at 256 against 5 at 128), while each holds up the others for longer.
const MaxBatch = 256

// BytesPerOrder is what a voucher may take of Redis' memory per unit: about
// 100 bytes are measured for an order in flight with its buyer mark, the rest
// is reserve for hash tables that grow by doubling.
const BytesPerOrder = 150

// Partition is the partition of a voucher among the given number of them.
func Partition(voucherID int64, partitions int) int {
	return int(voucherID % int64(partitions))
}

// LayoutKey is a hash: number of partitions, fingerprints of the order_id
// keys, version of the entry form.
const LayoutKey = "sk:layout"

// MetaKey is a hash: epoch, state, reason, durability, admit_sha, bound (most
// orders in flight), admitted and settled (orders), entries_in and entries_out.
func MetaKey(partition int) string {
	return "sk:{" + strconv.Itoa(partition) + "}:meta"
}

// VoucherKey is a hash: state, rev, stock, opening, seq, returned, settled,
// carried, removed, begin_ms, end_ms.
func VoucherKey(partition int, epoch, voucherID int64) string {
	return epochPrefix(partition, epoch) + "voucher:" + strconv.FormatInt(voucherID, 10)
}

// BuyersKey is a hash: user_id -> mark.
func BuyersKey(partition int, epoch, voucherID int64) string {
	return epochPrefix(partition, epoch) + "buyers:" + strconv.FormatInt(voucherID, 10)
}

// OutcomesKey is a hash: seq -> user:kind:standing, for the few orders that
// ended otherwise than as a row.
func OutcomesKey(partition int, epoch, voucherID int64) string {
	return epochPrefix(partition, epoch) + "outcomes:" + strconv.FormatInt(voucherID, 10)
}

// OrdersKey is the stream: one entry for each admitted batch.
func OrdersKey(partition int, epoch int64) string {
	return epochPrefix(partition, epoch) + "orders"
}

func epochPrefix(partition int, epoch int64) string {
	return "sk:{" + strconv.Itoa(partition) + "}:e" + strconv.FormatInt(epoch, 10) + ":"
}
