package ledger

import (
	"errors"
	"fmt"
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
	b := make([]byte, 0, protowire.SizeTag(batchOrders)+protowire.SizeBytes(size))
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

// Order is one admitted order as an entry carries it.
type Order struct {
	orderid.Position
	UserID      int64
	Reference   string
	Traceparent string
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

// DecodeEntry decodes what the admission script wrote into the orders stream
// of a partition. Errors: ErrVersion, ErrMalformed.
func DecodeEntry(partition int, id string, fields map[string]string) (Entry, error) {
	if fields["v"] != EntryVersion {
		return Entry{}, fmt.Errorf("%w: entry %s: version %q", ErrVersion, id, fields["v"])
	}
	malformed := func(what string, err error) (Entry, error) {
		if err != nil {
			return Entry{}, fmt.Errorf("%w: entry %s: %s: %w", ErrMalformed, id, what, err)
		}
		return Entry{}, fmt.Errorf("%w: entry %s: %s", ErrMalformed, id, what)
	}
	var number struct{ voucher, epoch, first, n, at int64 }
	for _, field := range []struct {
		name     string
		to       *int64
		from, up int64
	}{
		{"voucher", &number.voucher, 1, 1<<63 - 1},
		{"epoch", &number.epoch, 1, orderid.MaxEpoch},
		{"first", &number.first, 1, orderid.MaxSeq},
		{"n", &number.n, 1, MaxBatch},
		{"at", &number.at, 1, 1<<47 - 1},
	} {
		value, err := strconv.ParseInt(fields[field.name], 10, 64)
		if err != nil {
			return malformed(field.name, err)
		}
		if value < field.from || value > field.up {
			return malformed(fmt.Sprintf("%s %d is out of range", field.name, value), nil)
		}
		*field.to = value
	}
	if number.first+number.n-1 > orderid.MaxSeq {
		return malformed("last seq is out of range", nil)
	}
	var batch ledgerv1.OrderBatch
	if err := proto.Unmarshal([]byte(fields["orders"]), &batch); err != nil {
		return malformed("orders", err)
	}
	if int64(len(batch.GetOrders())) != number.n {
		return malformed(fmt.Sprintf("%d orders where n is %d", len(batch.GetOrders()), number.n), nil)
	}
	entry := Entry{
		ID: id, Partition: partition, VoucherID: number.voucher, Epoch: number.epoch,
		AdmittedAt: time.UnixMilli(number.at).UTC(),
		Orders:     make([]Order, number.n),
	}
	for i, record := range batch.GetOrders() {
		if record.GetUserId() < 1 {
			return malformed(fmt.Sprintf("order %d: user_id %d is out of range", i, record.GetUserId()), nil)
		}
		entry.Orders[i] = Order{
			Position:    orderid.Position{VoucherID: number.voucher, Epoch: number.epoch, Seq: number.first + int64(i)},
			UserID:      record.GetUserId(),
			Reference:   record.GetReference(),
			Traceparent: record.GetTraceparent(),
		}
	}
	return entry, nil
}
