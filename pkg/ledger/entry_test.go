package ledger

import (
	"bytes"
	"encoding/hex"
	"errors"
	"maps"
	"os"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/seckill/seckill/pkg/orderid"
	ledgerv1 "github.com/seckill/seckill/proto/seckill/ledger/v1"
)

func TestEncodeRecord_UsesTheFieldNumbersOfTheGeneratedCode(t *testing.T) {
	batch := (&ledgerv1.OrderBatch{}).ProtoReflect().Descriptor().Fields()
	record := (&ledgerv1.OrderRecord{}).ProtoReflect().Descriptor().Fields()
	require.Equal(t, batchOrders, batch.ByName("orders").Number())
	require.Equal(t, recordUserID, record.ByName("user_id").Number())
	require.Equal(t, recordReference, record.ByName("reference").Number())
	require.Equal(t, recordTraceparent, record.ByName("traceparent").Number())
	require.Equal(t, 1, batch.Len())
	require.Equal(t, 3, record.Len(), "a new field belongs into EncodeRecord, DecodeEntry and this test")
}

// Elements joined together are what the generated code would have marshalled,
// byte for byte.
func TestEncodeRecord_JoinedElementsAreAnOrderBatch(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, MaxBatch).Draw(rt, "n")
		var joined []byte
		want := &ledgerv1.OrderBatch{}
		for range n {
			user := rapid.Int64Range(1, 1<<63-1).Draw(rt, "user")
			reference := rapid.StringN(-1, -1, 64).Draw(rt, "reference")
			trace := rapid.StringN(-1, -1, 55).Draw(rt, "trace")
			joined = append(joined, EncodeRecord(user, reference, trace)...)
			want.Orders = append(want.Orders, &ledgerv1.OrderRecord{UserId: user, Reference: reference, Traceparent: trace})
		}
		marshalled, err := proto.MarshalOptions{Deterministic: true}.Marshal(want)
		require.NoError(rt, err)
		require.Equal(rt, marshalled, joined)

		first := rapid.Int64Range(1, orderid.MaxSeq-int64(n)+1).Draw(rt, "first")
		entry, err := DecodeEntry(3, "5-1", map[string]string{
			"v": EntryVersion, "voucher": "9223372036854775807", "epoch": "16777215", "first": formatInt(first), "n": formatInt(int64(n)),
			"at": "1700000000123", "orders": string(joined),
		})
		require.NoError(rt, err)
		require.Len(rt, entry.Orders, n)
		for i, order := range entry.Orders {
			require.Equal(rt, Order{
				Position: orderid.Position{VoucherID: 1<<63 - 1, Epoch: orderid.MaxEpoch, Seq: first + int64(i)},
				UserID:   want.Orders[i].UserId, Reference: want.Orders[i].Reference, Traceparent: want.Orders[i].Traceparent,
			}, order)
		}
	})
}

// One element that cannot be decoded would take all others of its entry along.
func TestEncodeRecord_WhateverACallerSendsCanBeDecoded(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		reference := string(rapid.SliceOfN(rapid.Byte(), 0, 64).Draw(rt, "reference"))
		trace := string(rapid.SliceOfN(rapid.Byte(), 0, 55).Draw(rt, "trace"))
		var batch ledgerv1.OrderBatch
		require.NoError(rt, proto.Unmarshal(EncodeRecord(1, reference, trace), &batch))
		require.Len(rt, batch.Orders, 1)
		if utf8.ValidString(reference) {
			require.Equal(rt, reference, batch.Orders[0].Reference)
		}
		if utf8.ValidString(trace) {
			require.Equal(rt, trace, batch.Orders[0].Traceparent)
		} else {
			require.Empty(rt, batch.Orders[0].Traceparent)
		}
	})
}

func goodFields() map[string]string {
	return map[string]string{
		"v": EntryVersion, "voucher": "11", "epoch": "7", "first": "41", "n": "2", "at": "1700000000123",
		"orders": string(EncodeRecord(5, "a", "b")) + string(EncodeRecord(6, "", "")),
	}
}

func TestDecodeEntry_GoodAndOfAnUnknownVersion(t *testing.T) {
	entry, err := DecodeEntry(3, "5-1", goodFields())
	require.NoError(t, err)
	require.Equal(t, Entry{
		ID: "5-1", Partition: 3, VoucherID: 11, Epoch: 7, AdmittedAt: time.UnixMilli(1700000000123).UTC(),
		Orders: []Order{
			{Position: orderid.Position{VoucherID: 11, Epoch: 7, Seq: 41}, UserID: 5, Reference: "a", Traceparent: "b"},
			{Position: orderid.Position{VoucherID: 11, Epoch: 7, Seq: 42}, UserID: 6},
		},
	}, entry)
	for _, version := range []string{"2", "0", "", "01", "1 "} {
		fields := goodFields()
		fields["v"], fields["orders"] = version, "a form that nobody knows yet"
		_, err := DecodeEntry(3, "5-1", fields)
		require.ErrorIs(t, err, ErrVersion)
		require.NotErrorIs(t, err, ErrMalformed)
	}
	_, err = DecodeEntry(3, "5-1", nil)
	require.ErrorIs(t, err, ErrVersion)
}

func TestDecodeEntry_Malformed(t *testing.T) {
	numbers := []string{"", "x", "-1", "0", "1.5", "1e3", " 7", "0x7", "9223372036854775808", "99999999999999999999999"}
	bad := map[string][]string{
		"voucher": numbers,
		"epoch":   append([]string{"16777216"}, numbers...),
		"first":   append([]string{"1099511627776", "1099511627775"}, numbers...), // the second: n = 2 goes beyond it
		"n":       append([]string{"1", "3", "257"}, numbers...),
		"at":      append([]string{"140737488355328"}, numbers...),
		"orders": {
			"", "garbage", string(EncodeRecord(5, "", "")), string(EncodeRecord(5, "", "")) + string(EncodeRecord(6, "x", ""))[:4],
			string(EncodeRecord(5, "", "")) + string(EncodeRecord(0, "", "")), string(EncodeRecord(5, "", "")) + string(EncodeRecord(-1, "", "")),
			string(EncodeRecord(5, "", "")) + "\x0a\x00",     // an element with nothing in it
			string(EncodeRecord(5, "", "")) + "\x0a\x02\x08", // cut short
			string(EncodeRecord(5, "", "")) + string(protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "\x08\x06\x12\x01\xff")), // not UTF-8
			strings.Repeat(string(EncodeRecord(5, "", "")), 3),
		},
	}
	for field, values := range bad {
		fields := goodFields()
		delete(fields, field)
		_, err := DecodeEntry(3, "5-1", fields)
		require.ErrorIs(t, err, ErrMalformed, "%s is missing", field)
		for _, value := range values {
			fields = goodFields()
			fields[field] = value
			_, err := DecodeEntry(3, "5-1", fields)
			require.ErrorIs(t, err, ErrMalformed, "%s is %q", field, value)
			require.ErrorContains(t, err, "5-1")
		}
	}
	full := goodFields()
	full["first"], full["n"], full["orders"] = "1099511627775", "1", string(EncodeRecord(5, "", ""))
	_, err := DecodeEntry(3, "5-1", full)
	require.NoError(t, err, "the last seq of all")
}

// What a newer gateway adds to a record is passed over.
func TestDecodeEntry_PassesOverFieldsOfALaterRecord(t *testing.T) {
	record := protowire.AppendVarint(protowire.AppendTag(nil, recordUserID, protowire.VarintType), 6)
	record = protowire.AppendString(protowire.AppendTag(record, 1000, protowire.BytesType), "later")
	fields := goodFields()
	fields["orders"] = string(EncodeRecord(5, "", "")) + string(protowire.AppendBytes(protowire.AppendTag(nil, batchOrders, protowire.BytesType), record))
	fields["later"] = "too"
	entry, err := DecodeEntry(3, "5-1", fields)
	require.NoError(t, err)
	require.Equal(t, int64(6), entry.Orders[1].UserID)
}

// readGolden reads an entry of version 1 as a server held it: a field a line,
// orders in hexadecimal.
func readGolden(t testing.TB) map[string]string {
	t.Helper()
	text, err := os.ReadFile("testdata/entry_v1.golden")
	require.NoError(t, err)
	fields := map[string]string{}
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		name, value, ok := strings.Cut(line, "=")
		require.True(t, ok, line)
		fields[name] = value
	}
	orders, err := hex.DecodeString(fields["orders"])
	require.NoError(t, err)
	fields["orders"] = string(orders)
	return fields
}

// The golden file never changes: entries of version 1 may lie in a stream when
// any later writer starts.
func TestDecodeEntry_OldEntriesDecodeForEver(t *testing.T) {
	fields := readGolden(t)
	entry, err := DecodeEntry(7, "1700000000123-0", fields)
	require.NoError(t, err)
	require.Equal(t, Entry{
		ID: "1700000000123-0", Partition: 7, VoucherID: 1<<63 - 1, Epoch: orderid.MaxEpoch, AdmittedAt: time.UnixMilli(1700000000123).UTC(),
		Orders: []Order{
			{Position: orderid.Position{VoucherID: 1<<63 - 1, Epoch: orderid.MaxEpoch, Seq: 1099511627773}, UserID: 1},
			{
				Position: orderid.Position{VoucherID: 1<<63 - 1, Epoch: orderid.MaxEpoch, Seq: 1099511627774}, UserID: 1<<63 - 1,
				Reference: "Bestellung-7é", Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
			},
			{Position: orderid.Position{VoucherID: 1<<63 - 1, Epoch: orderid.MaxEpoch, Seq: 1099511627775}, UserID: 1<<53 + 1, Reference: "r"},
		},
	}, entry)
	var joined bytes.Buffer
	for _, order := range entry.Orders {
		joined.Write(EncodeRecord(order.UserID, order.Reference, order.Traceparent))
	}
	require.Equal(t, fields["orders"], joined.String())
}

// What the script writes today has the fields of the golden entry, no more and
// no less.
func TestAdmit_WritesTheFormOfTheGoldenEntry(t *testing.T) {
	b := newBook(t, 10)
	b.admit(1)
	raw, err := Scan(b.ctx, b.client, b.partition, epoch, "-", 1)
	require.NoError(t, err)
	golden := readGolden(t)
	for name := range maps.Keys(golden) {
		require.Contains(t, raw[0].Fields, name)
	}
	require.Len(t, raw[0].Fields, len(golden))
	require.Equal(t, golden["v"], raw[0].Fields["v"])
}

func TestParseMark(t *testing.T) {
	mark, err := ParseMark("16777215.1099511627775p")
	require.NoError(t, err)
	require.Equal(t, Mark{Epoch: orderid.MaxEpoch, Seq: orderid.MaxSeq, State: MarkPersisted}, mark)
	for _, bad := range []string{"", "p", "1.p", ".1p", "1.1", "1.1x", "1.-1p", "-1.1p", "1.1.1p", "1 .1p", "9223372036854775808.1p"} {
		_, err := ParseMark(bad)
		require.ErrorIs(t, err, ErrFault, "%q", bad)
	}
	rapid.Check(t, func(rt *rapid.T) {
		want := Mark{
			Epoch: rapid.Int64Range(1, orderid.MaxEpoch).Draw(rt, "epoch"), Seq: rapid.Int64Range(1, orderid.MaxSeq).Draw(rt, "seq"),
			State: rapid.SampledFrom([]MarkState{MarkAdmitted, MarkPersisted, MarkHeld}).Draw(rt, "state"),
		}
		got, err := ParseMark(formatPosition(want.Epoch, want.Seq) + string(rune(want.State)))
		require.NoError(rt, err)
		require.Equal(rt, want, got)
	})
}

func FuzzDecodeEntry(f *testing.F) {
	add := func(fields map[string]string) {
		f.Add(fields["v"], fields["voucher"], fields["epoch"], fields["first"], fields["n"], fields["at"], []byte(fields["orders"]))
	}
	add(goodFields())
	add(readGolden(f))
	for _, field := range []string{"v", "voucher", "epoch", "first", "n", "at", "orders"} {
		fields := goodFields()
		fields[field] = "-1"
		add(fields)
	}
	f.Fuzz(func(t *testing.T, v, voucher, epoch, first, n, at string, orders []byte) {
		entry, err := DecodeEntry(3, "5-1", map[string]string{
			"v": v, "voucher": voucher, "epoch": epoch, "first": first, "n": n, "at": at, "orders": string(orders),
		})
		if err != nil {
			require.True(t, errors.Is(err, ErrVersion) != errors.Is(err, ErrMalformed), "one of the two: %v", err)
			require.Equal(t, Entry{}, entry)
			return
		}
		require.NotEmpty(t, entry.Orders)
		require.LessOrEqual(t, len(entry.Orders), MaxBatch)
		for i, order := range entry.Orders {
			require.Positive(t, order.UserID)
			require.Equal(t, entry.Orders[0].Seq+int64(i), order.Seq)
			require.LessOrEqual(t, order.Seq, int64(orderid.MaxSeq))
			require.Equal(t, entry.VoucherID, order.VoucherID)
			require.Equal(t, entry.Epoch, order.Epoch)
		}
	})
}
