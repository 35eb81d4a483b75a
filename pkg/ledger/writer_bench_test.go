package ledger

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a writer spends on an entry besides the database, the first half: what
// it reads. An operation is an entry.
func BenchmarkDecodeEntry(tb *testing.B) {
	for _, size := range []int{1, 32, MaxBatch} {
		tb.Run(fmt.Sprintf("batch=%d", size), func(tb *testing.B) {
			fields := goodFields()
			fields["n"], fields["orders"] = formatInt(int64(size)), ""
			for i := range size {
				fields["orders"] += string(EncodeRecord(1<<40+int64(i), "", ""))
			}
			tb.ReportAllocs()
			for tb.Loop() {
				entry, err := DecodeEntry(3, "5-1", fields)
				require.NoError(tb, err)
				require.Len(tb, entry.Orders, size)
			}
		})
	}
}

// The other half: what Settle tells Redis of an entry, all persisted.
func BenchmarkSettlement_Args(tb *testing.B) {
	for _, size := range []int{1, 32, MaxBatch} {
		tb.Run(fmt.Sprintf("batch=%d", size), func(tb *testing.B) {
			settlement := Settlement{Partition: 3, EntryID: "1700000000123-0", Epoch: 7, VoucherID: 11}
			for i := range int64(size) {
				settlement.Orders = append(settlement.Orders, Settled{UserID: 1<<40 + i, Seq: 1_000_000 + i, Verdict: VerdictPersisted})
			}
			tb.ReportAllocs()
			var args []string
			for tb.Loop() {
				args = settlement.appendArgs(args[:0])
			}
			require.Len(tb, args, len(settle.args)+len(settle.repeated)*size)
		})
	}
}
