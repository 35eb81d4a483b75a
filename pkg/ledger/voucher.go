package ledger

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"
	"github.com/seckill/seckill/pkg/orderid"
)

// VoucherState is the state of a voucher in the ledger. A draft has no ledger
// in the eyes of gateways, an archived one is a tombstone.
type VoucherState string

// The states.
const (
	VoucherDraft    VoucherState = "draft"
	VoucherOpen     VoucherState = "open"
	VoucherPaused   VoucherState = "paused"
	VoucherClosed   VoucherState = "closed"
	VoucherArchived VoucherState = "archived"
)

// Voucher is what the database wants a voucher's ledger to be.
type Voucher struct {
	Partition int
	Epoch     int64
	VoucherID int64
	Rev       int64
	State     VoucherState
	// Opening is the number of units that this epoch began with.
	Opening    int64
	Begin, End time.Time
}

func (v Voucher) keys() (meta, voucher, buyers, outcomes string) {
	return MetaKey(v.Partition), VoucherKey(v.Partition, v.Epoch, v.VoucherID),
		BuyersKey(v.Partition, v.Epoch, v.VoucherID), OutcomesKey(v.Partition, v.Epoch, v.VoucherID)
}

// ErrVoucherBusy means that a voucher has orders in flight or is not closed.
var ErrVoucherBusy = errors.New("voucher is not closed or has orders in flight")

// CreateVoucher makes a voucher's ledger as a draft, which sells nothing. To be
// called once per epoch, before the database notes that it was; a repeat in
// between changes nothing. Errors: ErrMissing and ErrStaleEpoch (partition).
func CreateVoucher(ctx context.Context, client rueidis.CoreClient, v Voucher) error {
	meta, voucher, buyers, outcomes := v.keys()
	reply, err := createVoucher.run(ctx, client, []string{meta, voucher, buyers, outcomes}, []string{
		strconv.FormatInt(v.Epoch, 10), strconv.FormatInt(v.Opening, 10),
		strconv.FormatInt(v.Begin.UnixMilli(), 10), strconv.FormatInt(v.End.UnixMilli(), 10),
	})
	return expect(reply, err, "CREATED", "EXISTS")
}

// ApplyVoucher brings a voucher's ledger to the wanted state if its rev is
// greater than the ledger's; an older or repeated one changes nothing and is no
// error. Errors: ErrMissing (partition or voucher: never made here),
// ErrStaleEpoch; for VoucherArchived ErrVoucherBusy.
func ApplyVoucher(ctx context.Context, client rueidis.CoreClient, v Voucher) error {
	meta, voucher, buyers, outcomes := v.keys()
	if v.State == VoucherArchived {
		reply, err := archiveVoucher.run(ctx, client, []string{meta, voucher, buyers, outcomes},
			[]string{strconv.FormatInt(v.Epoch, 10), strconv.FormatInt(v.Rev, 10)})
		if err == nil {
			if name, detail, _ := status(reply); name == "BUSY" {
				return fmt.Errorf("archiving voucher %d: %w: %s", v.VoucherID, ErrVoucherBusy, detail)
			}
		}
		return expect(reply, err, "ARCHIVED", "CURRENT")
	}
	reply, err := applyVoucher.run(ctx, client, []string{meta, voucher}, []string{
		strconv.FormatInt(v.Epoch, 10), strconv.FormatInt(v.Rev, 10), string(v.State),
		strconv.FormatInt(v.Begin.UnixMilli(), 10), strconv.FormatInt(v.End.UnixMilli(), 10), strconv.FormatInt(v.Opening, 10),
	})
	return expect(reply, err, "APPLIED", "CURRENT")
}

// Books are the figures of a voucher and its partition at one moment.
type Books struct {
	// Now is the moment, by the Redis clock.
	Now time.Time
	// Buyers is the number of marks, Entries the length of the stream.
	Buyers, Entries int64
	// Partition: zero values where there is no meta.
	Meta Meta
	// Exists is false where the voucher has no ledger.
	Exists                                                            bool
	State                                                             VoucherState
	Rev, Stock, Opening, Seq, Returned, Settled, CarriedOver, Removed int64
}

// InFlight is the number of the voucher's orders admitted and not settled.
func (b Books) InFlight() int64 { return b.Seq - b.Settled }

// ReadBooks reads the figures of a voucher. ErrFault where one is not a number.
func ReadBooks(ctx context.Context, client rueidis.CoreClient, partition int, epoch, voucherID int64) (Books, error) {
	reply, err := readBooks.run(ctx, client, []string{
		MetaKey(partition), VoucherKey(partition, epoch, voucherID), BuyersKey(partition, epoch, voucherID), OrdersKey(partition, epoch),
	}, nil)
	if err != nil {
		return Books{}, err
	}
	if len(reply) != 18 {
		return Books{}, fmt.Errorf("%w: read_books answered %d elements", ErrFault, len(reply))
	}
	var first [3]int64
	for i := range first {
		if first[i], err = reply[i].AsInt64(); err != nil {
			return Books{}, fmt.Errorf("%w: read_books: %w", ErrFault, err)
		}
	}
	books := Books{Now: time.UnixMilli(first[0]).UTC(), Buyers: first[1], Entries: first[2]}
	text := make([]string, len(reply)-3)
	for i := range text {
		text[i], _ = reply[3+i].ToString()
	}
	numbers := func(from int, to ...*int64) error {
		for i := range to {
			value, err := strconv.ParseInt(text[from+i], 10, 64)
			if err != nil || value < 0 {
				return fmt.Errorf("%w: voucher %d: field %d of read_books is %q", ErrFault, voucherID, from+i, text[from+i])
			}
			*to[i] = value
		}
		return nil
	}
	if text[0] != "" || text[1] != "" {
		books.Meta.Exists, books.Meta.Open = true, text[1] == "open"
		if err := numbers(0, &books.Meta.Epoch); err != nil {
			return Books{}, err
		}
		if err := numbers(2, &books.Meta.Admitted, &books.Meta.Settled, &books.Meta.EntriesIn, &books.Meta.EntriesOut); err != nil {
			return Books{}, err
		}
	}
	books.State = VoucherState(text[6])
	switch {
	case strings.Join(text[6:], "") == "":
		return books, nil
	case books.State == VoucherArchived:
		books.Exists = true
		return books, numbers(7, &books.Rev)
	}
	books.Exists = true
	return books, numbers(7, &books.Rev, &books.Stock, &books.Opening, &books.Seq, &books.Returned, &books.Settled, &books.CarriedOver, &books.Removed)
}

// Lookup is what the ledger says of a user's order of a voucher.
type Lookup struct {
	Meta Meta
	// Voucher is the voucher's state, empty where it has no ledger.
	Voucher VoucherState
	// Mark is the user's mark; nil for none.
	Mark *Mark
	// Outcome is how the asked seq ended if not as a row; zero for none.
	Outcome Outcome
}

// Outcome is how an order ended that is not a row.
type Outcome struct {
	UserID   int64
	Verdict  Verdict
	Standing orderid.Position
}

// FindOrder reads what there is of a user's order of a voucher in the ledger
// of an epoch; seq 0 asks for no outcome.
func FindOrder(ctx context.Context, client rueidis.CoreClient, partition int, epoch, voucherID, userID, seq int64) (Lookup, error) {
	replies := client.DoMulti(ctx,
		metaCommand(client, partition),
		client.B().Hget().Key(VoucherKey(partition, epoch, voucherID)).Field("state").Build(),
		client.B().Hget().Key(BuyersKey(partition, epoch, voucherID)).Field(strconv.FormatInt(userID, 10)).Build(),
		client.B().Hget().Key(OutcomesKey(partition, epoch, voucherID)).Field(strconv.FormatInt(seq, 10)).Build())
	for _, reply := range replies {
		if err := reply.Error(); err != nil && !rueidis.IsRedisNil(err) {
			return Lookup{}, fmt.Errorf("finding an order of voucher %d: %w", voucherID, classify(err))
		}
	}
	fields, _ := replies[0].ToArray()
	meta, err := parseMeta(fields)
	if err != nil {
		return Lookup{}, err
	}
	lookup := Lookup{Meta: meta}
	state, _ := replies[1].ToString()
	lookup.Voucher = VoucherState(state)
	if text, err := replies[2].ToString(); err == nil {
		mark, err := ParseMark(text)
		if err != nil {
			return Lookup{}, err
		}
		lookup.Mark = &mark
	}
	if text, err := replies[3].ToString(); err == nil && seq > 0 {
		if lookup.Outcome, err = parseOutcome(voucherID, text); err != nil {
			return Lookup{}, err
		}
	}
	return lookup, nil
}

func parseOutcome(voucherID int64, s string) (Outcome, error) {
	user, rest, _ := strings.Cut(s, ":")
	verdict, standing, ok := strings.Cut(rest, ":")
	userID, err := strconv.ParseInt(user, 10, 64)
	if !ok || err != nil || len(verdict) != 1 {
		return Outcome{}, fmt.Errorf("%w: outcome %q", ErrFault, s)
	}
	outcome := Outcome{UserID: userID, Verdict: Verdict(verdict[0])}
	if standing != "" {
		epoch, seq, err := parsePosition(standing)
		if err != nil {
			return Outcome{}, fmt.Errorf("%w: outcome %q: %w", ErrFault, s, err)
		}
		outcome.Standing = orderid.Position{VoucherID: voucherID, Epoch: epoch, Seq: seq}
	}
	return outcome, nil
}
