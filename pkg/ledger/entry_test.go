package ledger

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"slices"
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
				UserID:   want.Orders[i].UserId, Reference: want.Orders[i].Reference, Traceparent: want.Orders[i].Traceparent, Raw: order.Raw,
			}, order)
			raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(want.Orders[i])
			require.NoError(rt, err)
			require.Equal(rt, raw, order.Raw)
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

// What is decoded by hand is decoded like the generated code does, whatever the
// bytes are: fields in any order, twice, of a later form, torn.
func TestScanRecord_AgreesWithTheGeneratedCode(t *testing.T) {
	var scanned, left int
	rapid.Check(t, func(rt *rapid.T) {
		var raw []byte
		for range rapid.IntRange(0, 5).Draw(rt, "fields") {
			number := protowire.Number(rapid.SampledFrom([]int{1, 1, 2, 2, 3, 3, 4, 1 << 20}).Draw(rt, "number"))
			kind := rapid.SampledFrom([]protowire.Type{0, 2, 2, 5}).Draw(rt, "kind")
			raw = protowire.AppendTag(raw, number, kind)
			switch kind {
			case protowire.VarintType:
				raw = protowire.AppendVarint(raw, rapid.Uint64().Draw(rt, "value"))
			case protowire.BytesType:
				raw = protowire.AppendString(raw, rapid.SampledFrom([]string{"", "a", "ü", "\xff", "\x00", "long enough"}).Draw(rt, "text"))
			default:
				raw = protowire.AppendFixed32(raw, 7)
			}
		}
		if rapid.IntRange(0, 3).Draw(rt, "tear") == 0 {
			raw = raw[:rapid.IntRange(0, len(raw)).Draw(rt, "at")]
		}
		got, ok := scanRecord(raw)
		if !ok {
			left++
			return
		}
		scanned++
		var want ledgerv1.OrderRecord
		require.NoError(rt, proto.Unmarshal(raw, &want), "%x", raw)
		require.Equal(rt, Order{
			Raw: raw, UserID: want.GetUserId(), Reference: want.GetReference(), Traceparent: want.GetTraceparent(),
		}, got, "%x", raw)
		require.Empty(rt, want.ProtoReflect().GetUnknown(), "%x", raw)
	})
	require.NotZero(t, scanned)
	require.NotZero(t, left)
	// What AppendRecord writes never needs the generated code.
	_, ok := scanRecord(EncodeRecord(1<<63-1, "ü'\\", "00-1-2-01")[2:])
	require.True(t, ok)
}

// withoutRaw is an entry without the bytes of its orders, for comparing.
func withoutRaw(entry Entry) Entry {
	entry.Orders = slices.Clone(entry.Orders)
	for i := range entry.Orders {
		entry.Orders[i].Raw = nil
	}
	return entry
}

// element is one element of OrderBatch.orders with any bytes in it.
func element(record string) string {
	return string(protowire.AppendString(protowire.AppendTag(nil, batchOrders, protowire.BytesType), record))
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
	}, withoutRaw(entry))
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

func TestDecodeEntry_MalformedAsAWhole(t *testing.T) {
	numbers := []string{"", "x", "-1", "0", "1.5", "1e3", " 7", "0x7", "9223372036854775808", "99999999999999999999999", strings.Repeat("9", 1000), "\xff"}
	good := string(EncodeRecord(5, "", ""))
	for _, c := range []struct {
		field  string
		sound  bool // the positions are, so the entry stands for two
		values []string
	}{
		{"voucher", false, numbers},
		{"epoch", false, append([]string{"16777216"}, numbers...)},
		{"first", false, append([]string{"1099511627776", "1099511627775"}, numbers...)}, // the second: n = 2 goes beyond it
		{"n", false, append([]string{"257"}, numbers...)},
		{"at", true, append([]string{"140737488355328"}, numbers...)},
		{"orders", true, []string{
			"", "garbage", good, strings.Repeat(good, 3), good + good[:len(good)-1], good + "\x0a", good + "\x0a\x05\x08",
			good + "\x0a\x02\x08", good + "\x08\x01", good + good + "\x10", good + good + "\x00\x00", good + good + "\xff",
		}},
	} {
		for i, value := range append([]string{"missing"}, c.values...) {
			fields := goodFields()
			if fields[c.field] = value; i == 0 {
				delete(fields, c.field)
			}
			entry, err := DecodeEntry(3, "5-1", fields)
			require.Equal(t, Entry{}, entry)
			require.ErrorIs(t, err, ErrMalformed, "%s is %q", c.field, value)
			var malformed *MalformedError
			require.ErrorAs(t, err, &malformed)
			want := MalformedError{EntryID: "5-1", Reason: malformed.Reason}
			if c.sound {
				want.VoucherID, want.Epoch, want.FirstSeq, want.Units = 11, 7, 41, 2
			}
			require.Equal(t, want, *malformed, "%s is %q", c.field, value)
			require.NotEmpty(t, malformed.Reason)
			require.Less(t, len(malformed.Reason), 400, "whatever the entry holds")
			require.Regexp(t, `^[ -~]+$`, malformed.Reason)
			require.ErrorContains(t, err, "5-1")
		}
	}
	// n alone decides for how much it stands, also against the orders.
	fields := goodFields()
	fields["n"] = "3"
	_, err := DecodeEntry(3, "5-1", fields)
	require.Equal(t, &MalformedError{EntryID: "5-1", Reason: "2 orders where n is 3", VoucherID: 11, Epoch: 7, FirstSeq: 41, Units: 3}, err)
	// Two faults: what is sound with the one is not with the other.
	fields["at"], fields["epoch"] = "x", "x"
	_, err = DecodeEntry(3, "5-1", fields)
	require.Equal(t, &MalformedError{EntryID: "5-1", Reason: `epoch "x" is not a number from 1 to 16777215`}, err)

	full := goodFields()
	full["first"], full["n"], full["orders"] = "1099511627775", "1", good
	_, err = DecodeEntry(3, "5-1", full)
	require.NoError(t, err, "the last seq of all")
}

// One order that cannot be used costs its neighbours nothing, and its bytes are
// kept.
func TestDecodeEntry_JudgesEachOrderAlone(t *testing.T) {
	record := func(userID int64, reference string) string {
		whole := EncodeRecord(userID, reference, "")
		_, _, n := protowire.ConsumeTag(whole)
		body, _ := protowire.ConsumeBytes(whole[n:])
		return string(body)
	}
	for name, bad := range map[string]struct{ raw, reason string }{
		"no user":            {record(0, "r"), "user_id 0"},
		"a negative user":    {record(-1, ""), "user_id -1"},
		"nothing":            {"", "user_id 0"},
		"cut short":          {"\x08", "decoded"},
		"garbage":            {"garbage", "decoded"},
		"reference no UTF-8": {"\x08\x06\x12\x01\xff", "UTF-8"},
		"trace no UTF-8":     {"\x08\x06\x1a\x01\xff", "UTF-8"},
		"reference too long": {record(6, strings.Repeat("r", MaxReference+1)), "65 bytes"},
		"user as text":       {"\x0a\x01\x36", "user_id 0"},
	} {
		fields := goodFields()
		fields["n"] = "3"
		fields["orders"] = string(EncodeRecord(5, "a", "b")) + element(bad.raw) + string(EncodeRecord(7, strings.Repeat("r", MaxReference), ""))
		entry, err := DecodeEntry(3, "5-1", fields)
		require.NoError(t, err, name)
		require.Len(t, entry.Orders, 3)
		for i, order := range entry.Orders {
			require.Equal(t, orderid.Position{VoucherID: 11, Epoch: 7, Seq: 41 + int64(i)}, order.Position)
		}
		require.ErrorContains(t, entry.Orders[1].Err, bad.reason, name)
		require.Regexp(t, `^[ -~]+$`, entry.Orders[1].Err.Error())
		require.Equal(t, Order{Position: entry.Orders[1].Position, Raw: []byte(bad.raw), Err: entry.Orders[1].Err}, entry.Orders[1], name)
		require.NoError(t, entry.Orders[0].Err)
		require.NoError(t, entry.Orders[2].Err)
		require.Equal(t, []int64{5, 7}, []int64{entry.Orders[0].UserID, entry.Orders[2].UserID})
		require.Len(t, entry.Orders[2].Reference, MaxReference)

		// Appending to one order's bytes does not reach into the next one's.
		_ = append(entry.Orders[0].Raw, "xxxxxxxx"...)
		require.Equal(t, []byte(bad.raw), entry.Orders[1].Raw)
	}
}

// What a newer gateway adds to a record is passed over.
func TestDecodeEntry_PassesOverFieldsOfALaterRecord(t *testing.T) {
	record := protowire.AppendVarint(protowire.AppendTag(nil, recordUserID, protowire.VarintType), 6)
	record = protowire.AppendString(protowire.AppendTag(record, 1000, protowire.BytesType), "later")
	fields := goodFields()
	fields["orders"] = string(EncodeRecord(5, "", "")) + string(protowire.AppendBytes(protowire.AppendTag(nil, batchOrders, protowire.BytesType), record))
	fields["orders"] += "\x12\x02ab\x18\x07\x08\x00" // and to the batch, also with an old number
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
	}, withoutRaw(entry))
	var joined, raw bytes.Buffer
	for _, order := range entry.Orders {
		joined.Write(EncodeRecord(order.UserID, order.Reference, order.Traceparent))
		raw.WriteString(element(string(order.Raw)))
	}
	require.Equal(t, fields["orders"], joined.String())
	require.Equal(t, fields["orders"], raw.String())
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
	for _, bad := range []string{"", "p", "1.p", ".1p", "1.1", "1.1X", "1.1\x00", "1.-1p", "-1.1p", "1.1.1p", "1 .1p", "9223372036854775808.1p"} {
		_, err := ParseMark(bad)
		require.ErrorIs(t, err, ErrFault, "%q", bad)
	}
	rapid.Check(t, func(rt *rapid.T) {
		want := Mark{
			Epoch: rapid.Int64Range(1, orderid.MaxEpoch).Draw(rt, "epoch"), Seq: rapid.Int64Range(1, orderid.MaxSeq).Draw(rt, "seq"),
			State: MarkState(rapid.IntRange(int('a'), int('z')).Draw(rt, "state")),
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
			if malformed := new(MalformedError); errors.As(err, &malformed) && malformed.Units != 0 {
				require.True(t, malformed.Units > 0 && malformed.Units <= MaxBatch && malformed.VoucherID > 0 && malformed.Epoch > 0 &&
					malformed.FirstSeq > 0 && malformed.FirstSeq+malformed.Units-1 <= orderid.MaxSeq, "%+v", malformed)
			}
			return
		}
		require.NotEmpty(t, entry.Orders)
		require.LessOrEqual(t, len(entry.Orders), MaxBatch)
		for i, order := range entry.Orders {
			if order.Err != nil {
				require.Equal(t, Order{Position: order.Position, Raw: order.Raw, Err: order.Err}, order)
			} else {
				require.Positive(t, order.UserID)
				require.LessOrEqual(t, len(order.Reference), MaxReference)
			}
			require.Equal(t, entry.Orders[0].Seq+int64(i), order.Seq)
			require.LessOrEqual(t, order.Seq, int64(orderid.MaxSeq))
			require.Equal(t, entry.VoucherID, order.VoucherID)
			require.Equal(t, entry.Epoch, order.Epoch)
		}
	})
}

func TestRawEntry_EncodeIsReadableAndStable(t *testing.T) {
	fields := goodFields()
	fields["note"] = `<b> & "é"` + "\u2028"
	fields["base64:x"], fields["\xfe"] = "1", "\x80"
	require.Equal(t, `{"id":"5-1","fields":{"at":"1700000000123","base64:/g==":{"base64":"gA=="},"base64:YmFzZTY0Ong=":"1",`+
		`"epoch":"7","first":"41","n":"2","note":"<b> & \"é\"\u2028","orders":{"base64":"CggIBRIBYRoBYgoCCAY="},"v":"1","voucher":"11"}}`,
		string(RawEntry{ID: "5-1", Fields: fields}.Encode()))
	require.Equal(t, `{"id":"","fields":{}}`, string(RawEntry{}.Encode()))
}

// Whatever an entry holds can be had back from what is written down of it.
func TestRawEntry_EncodeLosesNothing(t *testing.T) {
	text := func(s string) string {
		rest, ok := strings.CutPrefix(s, rawPrefix)
		if !ok {
			return s
		}
		decoded, err := base64.StdEncoding.DecodeString(rest)
		require.NoError(t, err)
		return string(decoded)
	}
	bytesOf := rapid.Custom(func(rt *rapid.T) string {
		if rapid.Bool().Draw(rt, "text") {
			return rapid.String().Draw(rt, "s")
		}
		return rapid.SampledFrom([]string{"", rawPrefix}).Draw(rt, "prefix") + string(rapid.SliceOf(rapid.Byte()).Draw(rt, "b"))
	})
	rapid.Check(t, func(rt *rapid.T) {
		want := RawEntry{ID: "5-1", Fields: rapid.MapOf(bytesOf, bytesOf).Draw(rt, "fields")}
		encoded := want.Encode()
		require.Equal(rt, encoded, want.Encode())
		require.True(rt, utf8.Valid(encoded))
		require.NotContains(rt, string(encoded), "\n")
		var read struct {
			ID     string
			Fields map[string]any
		}
		require.NoError(rt, json.Unmarshal(encoded, &read))
		got := RawEntry{ID: read.ID, Fields: map[string]string{}}
		for name, value := range read.Fields {
			if plain, ok := value.(string); ok {
				got.Fields[text(name)] = plain
			} else {
				got.Fields[text(name)] = text(rawPrefix + value.(map[string]any)["base64"].(string))
			}
		}
		require.Equal(rt, want, got)
	})
}
