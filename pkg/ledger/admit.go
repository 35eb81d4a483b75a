package ledger

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"
	"github.com/seckill/seckill/pkg/orderid"
)

// Grab is one user's wish for a unit, as a batch carries it.
type Grab struct {
	UserID int64
	// Record is the encoded order, from EncodeRecord.
	Record []byte
}

// AdmitCall is one admission: a batch of Grabs of one voucher.
type AdmitCall struct {
	Partition int
	Epoch     int64
	// SHA is AdmitSHA(Partition, Epoch), kept by the caller.
	SHA       string
	VoucherID int64
	// Seen is the highest seq that the caller has seen of the voucher in this
	// epoch, 0 for none: a ledger that is behind it has lost orders.
	Seen int64
	// NotAfter is a time of the Redis clock: a call that is run later admits
	// nobody.
	NotAfter time.Time
	// Grabs, 1 to MaxBatch.
	Grabs []Grab
}

// AdmitStatus is the answer to a batch as a whole.
type AdmitStatus string

// What an admission may answer; only with AdmitOK was anything decided.
const (
	AdmitOK         AdmitStatus = "OK"
	AdmitStaleEpoch AdmitStatus = "STALE_EPOCH"
	AdmitClosed     AdmitStatus = "CLOSED"
	AdmitNotFound   AdmitStatus = "NOT_FOUND"
	AdmitArchived   AdmitStatus = "ARCHIVED"
	AdmitRewound    AdmitStatus = "REWOUND"
)

// Decision is the answer to one Grab.
type Decision int

// The decisions, with the numbers that the script answers; DecisionReplayed is
// ours, for a mark.
const (
	DecisionAdmitted   Decision = 1
	DecisionSoldOut    Decision = 2
	DecisionNotStarted Decision = 3
	DecisionEnded      Decision = 4
	DecisionPaused     Decision = 5
	// DecisionBusy: too many orders of the partition are in flight.
	DecisionBusy Decision = 6
	// DecisionLate: the call ran past its NotAfter.
	DecisionLate Decision = 7
	// DecisionReplayed: the user has an order already, or got one earlier in
	// this batch.
	DecisionReplayed Decision = 8
	// DecisionFault: what the ledger holds of the user is no mark. Nothing was
	// done for him, and whether he has an order cannot be told; the others of the
	// batch are decided.
	DecisionFault Decision = 9
)

// Durability is what an acknowledged admission survives, as meta has it.
type Durability string

// The durabilities that a guardian may find.
const (
	DurabilityStrict Durability = "strict"
	DurabilityFast   Durability = "fast"
)

// Answer is the answer to one Grab of a batch.
type Answer struct {
	Decision Decision
	// Order and State are set with DecisionAdmitted and DecisionReplayed.
	Order orderid.Position
	State MarkState
}

// AdmitReply is the answer to a batch.
type AdmitReply struct {
	Status AdmitStatus
	// Detail is the epoch with AdmitStaleEpoch, the reason with AdmitClosed, the
	// ledger's seq with AdmitRewound.
	Detail string
	// Now is the time of the Redis clock at which the script ran.
	Now        time.Time
	Durability Durability
	// Answers has one element per Grab, in their order, with AdmitOK.
	Answers []Answer
	// LastSeq is the highest seq that the answers name, 0 for none.
	LastSeq int64
}

// maxDecimal is the most characters of an int64.
const maxDecimal = 20

// Admit runs the admission script once. An error is ErrUnknown where the call
// may have run, also where its answer cannot be read; ErrNoScript, ErrRefused
// or ErrFault where it had no effect.
func Admit(ctx context.Context, client rueidis.CoreClient, call AdmitCall) (AdmitReply, error) {
	// A batch beyond MaxBatch would become an entry that no writer decodes.
	if len(call.Grabs) < 1 || len(call.Grabs) > MaxBatch {
		return AdmitReply{}, fmt.Errorf("%w: admit was called with %d grabs", ErrFault, len(call.Grabs))
	}
	// All numbers share one piece of memory, which is never used again: where a
	// call is given up, its bytes may still be on their way.
	text := make([]byte, 0, maxDecimal*(len(admitArgs)+len(call.Grabs)))
	number := func(n int64) string {
		from := len(text)
		text = strconv.AppendInt(text, n, 10)
		return rueidis.BinaryString(text[from:])
	}
	build := client.B().Evalsha().Sha1(call.SHA).Numkeys(int64(len(admitKeys))).Key(
		MetaKey(call.Partition),
		VoucherKey(call.Partition, call.Epoch, call.VoucherID),
		BuyersKey(call.Partition, call.Epoch, call.VoucherID),
		OrdersKey(call.Partition, call.Epoch),
	).Arg(number(call.Epoch), number(call.Seen), number(call.NotAfter.UnixMilli()), number(call.VoucherID))
	for i := range call.Grabs {
		build = build.Arg(number(call.Grabs[i].UserID), rueidis.BinaryString(call.Grabs[i].Record))
	}
	cmd := build.Build()
	reply, err := client.Do(ctx, cmd).ToArray()
	if err != nil {
		return AdmitReply{}, fmt.Errorf("running script admit: %w", classify(err))
	}
	return parseAdmitReply(call, reply)
}

// parseAdmitReply reads an answer. The script has run: where the answer cannot
// be read, what it did is unknown.
func parseAdmitReply(call AdmitCall, reply []rueidis.RedisMessage) (AdmitReply, error) {
	if len(reply) < 2 {
		return AdmitReply{}, fmt.Errorf("%w: admit answered %d elements", ErrUnknown, len(reply))
	}
	name, err := reply[0].ToString()
	if err != nil {
		return AdmitReply{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	now, err := reply[1].AsInt64()
	if err != nil {
		return AdmitReply{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	out := AdmitReply{Status: AdmitStatus(name), Now: time.UnixMilli(now).UTC()}
	switch out.Status {
	case AdmitOK:
	case AdmitStaleEpoch, AdmitClosed, AdmitRewound, AdmitNotFound, AdmitArchived:
		_, out.Detail, err = status(append(reply[:1:1], reply[2:]...))
		return out, err
	default:
		return AdmitReply{}, fmt.Errorf("%w: admit answered %q", ErrUnknown, name)
	}
	if len(reply) != 4+len(call.Grabs) {
		return AdmitReply{}, fmt.Errorf("%w: admit answered %d elements to %d grabs", ErrUnknown, len(reply), len(call.Grabs))
	}
	next, err := reply[2].AsInt64()
	if err != nil {
		return AdmitReply{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	durability, err := reply[3].ToString()
	if err != nil {
		return AdmitReply{}, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	out.Durability = Durability(durability)
	out.Answers = make([]Answer, len(call.Grabs))
	for i := range out.Answers {
		answer := &out.Answers[i]
		message := &reply[4+i]
		if message.IsInt64() {
			code, _ := message.AsInt64()
			answer.Decision = Decision(code)
			if answer.Decision == DecisionAdmitted {
				answer.Order = orderid.Position{VoucherID: call.VoucherID, Epoch: call.Epoch, Seq: next}
				answer.State = MarkAdmitted
				out.LastSeq = max(out.LastSeq, next)
				next++
			} else if (answer.Decision < DecisionAdmitted || answer.Decision > DecisionLate) && answer.Decision != DecisionFault {
				return AdmitReply{}, fmt.Errorf("%w: admit answered decision %d", ErrUnknown, code)
			}
			continue
		}
		text, err := message.ToString()
		if err != nil {
			return AdmitReply{}, fmt.Errorf("%w: %w", ErrUnknown, err)
		}
		mark, err := ParseMark(text)
		if err != nil {
			// The words of err only: it is an ErrFault, which would promise that
			// nothing was done.
			return AdmitReply{}, fmt.Errorf("%w: admit answered: %s", ErrUnknown, err)
		}
		*answer = Answer{Decision: DecisionReplayed, Order: mark.Position(call.VoucherID), State: mark.State}
		if mark.Epoch == call.Epoch {
			out.LastSeq = max(out.LastSeq, mark.Seq)
		}
	}
	return out, nil
}
