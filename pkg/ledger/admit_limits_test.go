package ledger

import (
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/orderid"
)

func TestAdmit_NumbersOrdersDenselyOverBatches(t *testing.T) {
	b := newBook(t, 8)
	require.Equal(t, []Decision{1, 1, 1}, decisions(b.admit(1, 2, 3)))
	require.Equal(t, []Decision{8, 1, 8}, decisions(b.admit(1, 4, 2)))
	require.Equal(t, []Decision{8}, decisions(b.admit(4)))
	last := b.admit(5, 6, 7, 8, 9, 10)
	require.Equal(t, []Decision{1, 1, 1, 1, 2, 2}, decisions(last))
	require.Equal(t, int64(8), last.LastSeq)
	var seqs []int64
	for _, entry := range b.entries() {
		for _, order := range entry.Orders {
			require.Equal(t, order.Seq, order.UserID, "users were numbered in the order of admission")
			seqs = append(seqs, order.Seq)
		}
	}
	require.Equal(t, []int64{1, 2, 3, 4, 5, 6, 7, 8}, seqs)
	require.Equal(t, int64(0), b.admit(99).LastSeq, "an answer that names no order")
}

func TestAdmit_NeverWrapsAtTheLimitOfSeq(t *testing.T) {
	b := newBook(t, 10)
	b.must("HSET", b.keys()["voucher"], "seq", strconv.FormatInt(orderid.MaxSeq-2, 10))
	before := b.snapshot()
	_, err := Admit(b.ctx, b.client, b.call(1, 2, 3))
	require.ErrorIs(t, err, ErrFault)
	require.ErrorContains(t, err, "limit")
	require.Equal(t, before, b.snapshot())

	reply := b.admit(1, 2)
	require.Equal(t, int64(orderid.MaxSeq-1), reply.Answers[0].Order.Seq)
	require.Equal(t, int64(orderid.MaxSeq), reply.Answers[1].Order.Seq)
	require.Equal(t, int64(orderid.MaxSeq), b.entries()[0].Orders[1].Seq)
	before = b.snapshot()
	_, err = Admit(b.ctx, b.client, b.call(3))
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
	// A replay is still answered.
	reply = b.admit(2)
	require.Equal(t, int64(orderid.MaxSeq), reply.Answers[0].Order.Seq)
	require.True(t, b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Settled)
	require.Equal(t, fmt.Sprintf("%d.%dp", epoch, int64(orderid.MaxSeq)), b.mark(2))
}

func TestAdmit_NeverWrapsAtTheLimitOfEpoch(t *testing.T) {
	for _, c := range []struct {
		epoch int64
		ok    bool
	}{{orderid.MaxEpoch, true}, {orderid.MaxEpoch + 1, false}, {1<<53 + 1, false}} {
		b := newEmptyBook(t, sharedClient(t))
		b.epoch, b.voucher.Epoch, b.voucher.Opening = c.epoch, c.epoch, 5
		require.NoError(t, CreatePartition(b.ctx, b.client, b.partition, c.epoch, 100))
		require.NoError(t, OpenPartition(b.ctx, b.client, b.partition, c.epoch, 100, DurabilityStrict, testRunID))
		require.NoError(t, LoadAdmit(b.ctx, b.client, b.partition, c.epoch))
		require.NoError(t, CreateVoucher(b.ctx, b.client, b.voucher))
		b.apply(VoucherOpen)
		before := b.snapshot()
		reply, err := Admit(b.ctx, b.client, b.call(1))
		if c.ok {
			require.NoError(t, err)
			require.Equal(t, []Decision{DecisionAdmitted}, decisions(reply))
			require.Equal(t, c.epoch, b.entries()[0].Epoch)
		} else {
			require.ErrorIs(t, err, ErrFault)
			require.Equal(t, before, b.snapshot())
		}
	}
}

func TestAdmit_KeepsEveryDigitOfTheLargestIDs(t *testing.T) {
	b := newBook(t, 10)
	b.voucher.VoucherID = 1<<63 - 1
	require.NoError(t, CreateVoucher(b.ctx, b.client, b.voucher))
	b.voucher.Rev = 0
	b.apply(VoucherOpen)
	users := []int64{1<<63 - 1, 1<<63 - 2, 1<<53 + 1, 1 << 53, 100_000_000_000_000, 1}
	reply := b.admit(users...)
	require.Equal(t, orderid.Position{VoucherID: 1<<63 - 1, Epoch: epoch, Seq: 1}, reply.Answers[0].Order)
	fields, err := b.do("HKEYS", "sk:{"+strconv.Itoa(b.partition)+"}:e7:buyers:9223372036854775807").AsStrSlice()
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"9223372036854775807", "9223372036854775806", "9007199254740993", "9007199254740992", "100000000000000", "1"}, fields)
	entry := b.entries()[0]
	require.Equal(t, int64(1<<63-1), entry.VoucherID)
	for i, user := range users {
		require.Equal(t, user, entry.Orders[i].UserID)
	}
	require.True(t, b.settle(b.settlement(entry, VerdictPersisted)).Settled)
	for i, user := range users {
		require.Equal(t, fmt.Sprintf("7.%dp", i+1), b.mark(user))
	}
}

func TestAdmit_KeepsEveryDigitOfLargeCounters(t *testing.T) {
	b := newBook(t, 10)
	for field, key := range map[string]string{"admitted": "meta", "settled": "meta", "entries_in": "meta", "stock": "voucher"} {
		b.must("HSET", b.keys()[key], field, "999999999999998")
	}
	b.admit(1)
	for field, want := range map[string]string{"admitted": "999999999999999", "entries_in": "999999999999999"} {
		require.Equal(t, want, b.get(b.keys()["meta"], field))
	}
	require.Equal(t, "999999999999997", b.get(b.keys()["voucher"], "stock"))
}

func TestAdmit_TakesAFullBatchAndNoMore(t *testing.T) {
	b := newBook(t, 1000)
	users := make([]int64, MaxBatch)
	for i := range users {
		users[i] = 1<<62 + int64(i)
	}
	reply := b.admit(users...)
	require.Equal(t, int64(MaxBatch), reply.LastSeq)
	entries := b.entries()
	require.Len(t, entries, 1)
	require.Len(t, entries[0].Orders, MaxBatch)
	require.Equal(t, users[MaxBatch-1], entries[0].Orders[MaxBatch-1].UserID)
	// All of them, with outcomes of every kind, also fit into one settlement.
	require.NoError(t, b.settle(b.settlement(entries[0], VerdictCancelled)).Err)
	require.Equal(t, int64(1000), b.books().Stock)

	before := b.snapshot()
	_, err := Admit(b.ctx, b.client, b.call(append(users, 1)...))
	require.ErrorIs(t, err, ErrFault)
	_, err = Admit(b.ctx, b.client, b.call())
	require.ErrorIs(t, err, ErrFault)
	require.Equal(t, before, b.snapshot())
}

func TestAdmit_EntryHoldsExactlyTheAdmittedInTheirOrder(t *testing.T) {
	b := newBook(t, 5)
	b.admit(2, 4)
	call := b.call()
	for _, user := range []int64{9, 4, 1, 9, 2, 7, 8} { // 7 takes the last unit
		call.Grabs = append(call.Grabs, Grab{UserID: user, Record: EncodeRecord(user, fmt.Sprintf("réf\x00%d", user), "00-aa-bb-0"+strconv.FormatInt(user, 10))})
	}
	reply, err := Admit(b.ctx, b.client, call)
	require.NoError(t, err)
	require.Equal(t, []Decision{1, 8, 1, 8, 8, 1, 2}, decisions(reply))
	entries := b.entries()
	require.Len(t, entries, 2)
	got := entries[1]
	require.Equal(t, reply.Now, got.AdmittedAt)
	require.Equal(t, b.partition, got.Partition)
	want := []Order{}
	for i, user := range []int64{9, 1, 7} {
		want = append(want, Order{
			Position: orderid.Position{VoucherID: b.voucher.VoucherID, Epoch: epoch, Seq: int64(3 + i)},
			UserID:   user, Reference: fmt.Sprintf("réf\x00%d", user), Traceparent: "00-aa-bb-0" + strconv.FormatInt(user, 10),
		})
	}
	require.Equal(t, want, withoutRaw(got).Orders)
}
