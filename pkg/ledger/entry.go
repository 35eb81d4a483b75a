package ledger

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	ledgerv1 "github.com/seckill/seckill/proto/seckill/ledger/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/seckill/seckill/pkg/orderid"
)

// EntryVersion is the form of entries that this code writes. Readers leave
// entries of a version that they do not know pending, for a newer writer.
const EntryVersion = "1"

// ErrVersion means that an entry is of a version that this code does not know.
var ErrVersion = errors.New("entry is of an unknown version")

// ErrMalformed means that an entry of a known version cannot be decoded.
var ErrMalformed = errors.New("entry is malformed")

// MaxReference is the most bytes of a caller's reference.
const MaxReference = 64

// Field numbers of ledgerv1.OrderBatch and OrderRecord. A test holds them
// against the generated code.
const (
	batchOrders       protowire.Number = 1
	recordUserID      protowire.Number = 1
	recordReference   protowire.Number = 2
	recordTraceparent protowire.Number = 3
)

// EncodeRecord encodes one order as an element of OrderBatch.orders: tag,
// length, bytes. Elements of this form joined together are a valid OrderBatch,
// which is how the admission script makes one without parsing any. Bytes that
// are not UTF-8 are replaced in reference; a traceparent with any is left out:
// a protobuf string may hold none, and one bad element would make the whole
// entry, with the orders of other users, undecodable.
func EncodeRecord(userID int64, reference, traceparent string) []byte {
	return AppendRecord(nil, userID, reference, traceparent)
}

// AppendRecord is EncodeRecord into the end of b.
func AppendRecord(b []byte, userID int64, reference, traceparent string) []byte {
	reference = strings.ToValidUTF8(reference, "\uFFFD")
	if !utf8.ValidString(traceparent) {
		traceparent = ""
	}
	size := protowire.SizeTag(recordUserID) + protowire.SizeVarint(uint64(userID))
	if reference != "" {
		size += protowire.SizeTag(recordReference) + protowire.SizeBytes(len(reference))
	}
	if traceparent != "" {
		size += protowire.SizeTag(recordTraceparent) + protowire.SizeBytes(len(traceparent))
	}
	b = slices.Grow(b, protowire.SizeTag(batchOrders)+protowire.SizeBytes(size))
	b = protowire.AppendTag(b, batchOrders, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	b = protowire.AppendTag(b, recordUserID, protowire.VarintType)
	b = protowire.AppendVarint(b, uint64(userID))
	if reference != "" {
		b = protowire.AppendTag(b, recordReference, protowire.BytesType)
		b = protowire.AppendString(b, reference)
	}
	if traceparent != "" {
		b = protowire.AppendTag(b, recordTraceparent, protowire.BytesType)
		b = protowire.AppendString(b, traceparent)
	}
	return b
}

// Order is one admitted order as an entry carries it. Each is judged alone:
// one that cannot be used costs the others of its entry nothing.
type Order struct {
	orderid.Position
	UserID      int64
	Reference   string
	Traceparent string
	// Raw are the order's bytes as they were written, an encoded OrderRecord.
	Raw []byte
	// Err tells why the order cannot be used; UserID is 0 then, Reference and
	// Traceparent are empty.
	Err error
}

// Entry is one admitted batch, decoded.
type Entry struct {
	// ID is the entry's id in the stream, the token of its settling.
	ID        string
	Partition int
	VoucherID int64
	Epoch     int64
	// AdmittedAt is the time of the Redis clock at which the batch was admitted.
	AdmittedAt time.Time
	// Orders in the order of their seq, dense; 1 to MaxBatch.
	Orders []Order
}

// MalformedError is an entry of a known version that cannot be decoded as a
// whole. It is ErrMalformed.
type MalformedError struct {
	EntryID string
	Reason  string
	// The entry stands for the Units positions from FirstSeq on, of a voucher in
	// an epoch. All are 0 where one of them cannot be told: it stands for nothing
	// then.
	VoucherID, Epoch, FirstSeq, Units int64
}

func (e *MalformedError) Error() string {
	return ErrMalformed.Error() + ": entry " + e.EntryID + ": " + e.Reason
}

// Unwrap makes the error ErrMalformed.
func (e *MalformedError) Unwrap() error { return ErrMalformed }

// DecodeEntry decodes what the admission script wrote into the orders stream
// of a partition. An order in it that cannot be used carries its own error and
// makes none here. Errors: ErrVersion, *MalformedError.
func DecodeEntry(partition int, id string, fields map[string]string) (Entry, error) {
	if fields["v"] != EntryVersion {
		return Entry{}, fmt.Errorf("%w: entry %s: version %q", ErrVersion, id, clip(fields["v"]))
	}
	malformed := &MalformedError{EntryID: id}
	number := func(name string, from, up int64) int64 {
		value, err := strconv.ParseInt(fields[name], 10, 64)
		if err != nil || value < from || value > up {
			if malformed.Reason == "" {
				malformed.Reason = fmt.Sprintf("%s %q is not a number from %d to %d", name, clip(fields[name]), from, up)
			}
			return 0
		}
		return value
	}
	voucher := number("voucher", 1, 1<<63-1)
	epoch := number("epoch", 1, orderid.MaxEpoch)
	first := number("first", 1, orderid.MaxSeq)
	n := number("n", 1, MaxBatch)
	if malformed.Reason == "" && first+n-1 > orderid.MaxSeq {
		malformed.Reason = "last seq is out of range"
	}
	if malformed.Reason != "" {
		return Entry{}, malformed
	}
	malformed.VoucherID, malformed.Epoch, malformed.FirstSeq, malformed.Units = voucher, epoch, first, n
	at := number("at", 1, 1<<47-1)
	if malformed.Reason != "" {
		return Entry{}, malformed
	}
	records, err := splitBatch([]byte(fields["orders"]), n)
	if err == nil && int64(len(records)) != n {
		err = fmt.Errorf("%d orders where n is %d", len(records), n)
	}
	if err != nil {
		malformed.Reason = err.Error()
		return Entry{}, malformed
	}
	entry := Entry{
		ID: id, Partition: partition, VoucherID: voucher, Epoch: epoch,
		AdmittedAt: time.UnixMilli(at).UTC(), Orders: make([]Order, n),
	}
	for i, record := range records {
		entry.Orders[i] = decodeRecord(record)
		entry.Orders[i].Position = orderid.Position{VoucherID: voucher, Epoch: epoch, Seq: first + int64(i)}
	}
	return entry, nil
}

// splitBatch takes an OrderBatch apart into the bytes of its orders, n as it
// says, without looking into them. Fields of a later form are passed over.
func splitBatch(batch []byte, n int64) ([][]byte, error) {
	records := make([][]byte, 0, n)
	for len(batch) > 0 {
		number, kind, size := protowire.ConsumeTag(batch)
		if size < 0 {
			return nil, fmt.Errorf("orders: %s", parseText(protowire.ParseError(size)))
		}
		batch = batch[size:]
		if number == batchOrders && kind == protowire.BytesType {
			record, size := protowire.ConsumeBytes(batch)
			if size < 0 {
				return nil, fmt.Errorf("orders: order %d: %s", len(records), parseText(protowire.ParseError(size)))
			}
			records = append(records, record[:len(record):len(record)])
			batch = batch[size:]
			continue
		}
		if size = protowire.ConsumeFieldValue(number, kind, batch); size < 0 {
			return nil, fmt.Errorf("orders: field %d: %s", number, parseText(protowire.ParseError(size)))
		}
		batch = batch[size:]
	}
	return records, nil
}

// decodeRecord decodes one order, without its position.
func decodeRecord(raw []byte) Order {
	order, ok := scanRecord(raw)
	if !ok {
		var record ledgerv1.OrderRecord
		if err := proto.Unmarshal(raw, &record); err != nil {
			return Order{Raw: raw, Err: fmt.Errorf("order cannot be decoded: %s", parseText(err))}
		}
		order = Order{Raw: raw, UserID: record.GetUserId(), Reference: record.GetReference(), Traceparent: record.GetTraceparent()}
	}
	if order.UserID < 1 {
		return Order{Raw: raw, Err: fmt.Errorf("user_id %d is out of range", order.UserID)}
	}
	if n := len(order.Reference); n > MaxReference {
		return Order{Raw: raw, Err: fmt.Errorf("reference has %d bytes, at most %d are allowed", n, MaxReference)}
	}
	return order
}

// scanRecord decodes an order as AppendRecord writes it, with no message of its
// own in memory. It is false where anything else is in it, or anything is wrong
// with it, of which the generated code is the judge.
func scanRecord(raw []byte) (Order, bool) {
	order := Order{Raw: raw}
	for rest := raw; len(rest) > 0; {
		number, kind, n := protowire.ConsumeTag(rest)
		if n < 0 {
			return Order{}, false
		}
		rest = rest[n:]
		if number == recordUserID && kind == protowire.VarintType {
			user, n := protowire.ConsumeVarint(rest)
			if n < 0 {
				return Order{}, false
			}
			order.UserID, rest = int64(user), rest[n:]
			continue
		}
		if kind != protowire.BytesType || (number != recordReference && number != recordTraceparent) {
			return Order{}, false
		}
		text, n := protowire.ConsumeBytes(rest)
		if n < 0 || !utf8.Valid(text) {
			return Order{}, false
		}
		if number == recordReference {
			order.Reference = string(text)
		} else {
			order.Traceparent = string(text)
		}
		rest = rest[n:]
	}
	return order, true
}

// parseText is the text of a protobuf error. The module puts one kind of space
// or another into it, a build, so that nobody relies on it; a reason is the same
// in all builds.
func parseText(err error) string {
	return strings.ReplaceAll(err.Error(), "\u00a0", " ")
}

// clip bounds what an error repeats of an entry that anything may be in.
func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return s[:most] + "..."
}
