package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/rueidis"
	"github.com/seckill/seckill/pkg/orderid"
)

// Verdict is how an order ended, as settle tells the ledger.
type Verdict byte

// The verdicts.
const (
	// VerdictPersisted: the order is a committed row.
	VerdictPersisted Verdict = 'p'
	// VerdictHeld: it waits for an operator; its unit stays taken.
	VerdictHeld Verdict = 'h'
	// VerdictConflict: the user has another order, which stands; the unit comes
	// back.
	VerdictConflict Verdict = 'c'
	// VerdictRejected: the database has no unit for it; the mark goes, and no
	// unit comes back, for there is none.
	VerdictRejected Verdict = 'r'
	// VerdictCancelled: an operator gave unit and right to buy back.
	VerdictCancelled Verdict = 'x'
)

// Settled is an order with its verdict.
type Settled struct {
	// UserID, 0 where no user could be read from the order: no mark is touched
	// then.
	UserID  int64
	Seq     int64
	Verdict Verdict
	// Standing is the order that stands, with VerdictConflict.
	Standing orderid.Position
}

// Settlement is one entry with the verdicts of all its orders, each committed
// in the database.
type Settlement struct {
	Partition int
	EntryID   string
	Epoch     int64
	VoucherID int64
	// Orders of the entry, all of them, in the order of their seq.
	Orders []Settled
}

// SettleResult is what settling an entry came to.
type SettleResult struct {
	// Settled is false where the entry had been settled before.
	Settled bool
	// Stranger is true where the entry was acknowledged and could not be counted
	// in full: it was never admitted, or another one of the partition was not that
	// has been settled before. The counters are right once nothing is in flight.
	Stranger bool
	// Units that came back to stock.
	Units int64
	Err   error
}

// ErrStaleEpoch means that the ledger is of another epoch. No effect.
var ErrStaleEpoch = errors.New("ledger is of another epoch")

// Settle acknowledges entries, all in one pipeline, and answers for each in
// their order. Errors per entry: ErrStaleEpoch, ErrRefused, ErrFault (no
// effect) and ErrUnknown (repeat it: the entry is the token, so it counts
// once).
func Settle(ctx context.Context, client rueidis.CoreClient, settlements []Settlement) []SettleResult {
	results := make([]SettleResult, len(settlements))
	commands := make([]rueidis.Completed, 0, len(settlements))
	sent := make([]int, 0, len(settlements))
	var args []string // built anew for each, in the same memory: the command copies
	for i := range settlements {
		if results[i].Err = settlements[i].check(); results[i].Err != nil {
			continue
		}
		args = settlements[i].appendArgs(args[:0])
		commands, sent = append(commands, settlements[i].command(client, args)), append(sent, i)
	}
	for k, answer := range client.DoMulti(ctx, commands...) {
		i := sent[k]
		reply, err := answer.ToArray()
		if err = classify(err); errors.Is(err, ErrNoScript) {
			reply, err = settlements[i].retry(ctx, client)
		}
		if err != nil {
			results[i].Err = fmt.Errorf("settling entry %s: %w", settlements[i].EntryID, err)
			continue
		}
		results[i] = parseSettleReply(settlements[i], reply)
	}
	return results
}

func (s *Settlement) retry(ctx context.Context, client rueidis.CoreClient) ([]rueidis.RedisMessage, error) {
	if err := load(ctx, client, settle); err != nil {
		return nil, err
	}
	reply, err := client.Do(ctx, s.command(client, s.appendArgs(nil))).ToArray()
	return reply, classify(err)
}

func (s *Settlement) command(client rueidis.CoreClient, args []string) rueidis.Completed {
	keys := []string{
		MetaKey(s.Partition),
		VoucherKey(s.Partition, s.Epoch, s.VoucherID),
		BuyersKey(s.Partition, s.Epoch, s.VoucherID),
		OutcomesKey(s.Partition, s.Epoch, s.VoucherID),
		OrdersKey(s.Partition, s.Epoch),
	}
	return settle.command(client, keys, args)
}

// appendArgs appends the arguments of the script to args.
func (s *Settlement) appendArgs(args []string) []string {
	// All texts of an entry lie in one piece of memory, not one an order.
	const usualDigits = 12
	var text strings.Builder
	text.Grow((len(s.Orders) + 2) * (usualDigits + 1))
	number := func(value int64) {
		digits := [maxDecimal]byte{}
		text.Write(strconv.AppendInt(digits[:0], value, 10))
	}
	cut := func(from int) string { return text.String()[from:] }

	args = slices.Grow(args, len(settle.args)+len(settle.repeated)*len(s.Orders))
	number(s.Epoch)
	args = append(args, Group, s.EntryID, cut(0))
	from := text.Len()
	number(s.Orders[0].Seq)
	args = append(args, cut(from))
	from = text.Len()
	for i := range s.Orders {
		text.WriteByte(byte(s.Orders[i].Verdict))
	}
	args = append(args, cut(from))
	for i := range s.Orders {
		from = text.Len()
		number(s.Orders[i].UserID)
		if s.Orders[i].Verdict == VerdictConflict {
			text.WriteByte(':')
			text.WriteString(formatPosition(s.Orders[i].Standing.Epoch, s.Orders[i].Standing.Seq))
		}
		args = append(args, cut(from))
	}
	return args
}

// check refuses orders that are not one run of seqs: the script is told the first.
func (s *Settlement) check() error {
	for i := range s.Orders {
		if s.Orders[i].Seq != s.Orders[0].Seq+int64(i) {
			return fmt.Errorf("%w: settling entry %s: seq %d is %d behind seq %d", ErrFault, s.EntryID, s.Orders[i].Seq, i, s.Orders[0].Seq)
		}
	}
	if len(s.Orders) == 0 {
		return fmt.Errorf("%w: settling entry %s: it has no orders", ErrFault, s.EntryID)
	}
	return nil
}

func parseSettleReply(s Settlement, reply []rueidis.RedisMessage) SettleResult {
	if len(reply) == 0 {
		return SettleResult{Err: fmt.Errorf("%w: settle answered nothing", ErrFault)}
	}
	name, detail, err := status(reply)
	switch {
	case err != nil:
		return SettleResult{Err: err}
	case (name == "SETTLED" || name == "UNCOUNTED") && len(reply) == 3:
		units, err := reply[2].AsInt64()
		if err != nil {
			return SettleResult{Err: fmt.Errorf("%w: settle answered %s: %w", ErrFault, detail, err)}
		}
		return SettleResult{Settled: true, Stranger: name == "UNCOUNTED", Units: units}
	case name == "NO_TOKEN":
		return SettleResult{}
	case name == "STALE_EPOCH":
		return SettleResult{Err: fmt.Errorf("settling entry %s of epoch %d: %w: %s", s.EntryID, s.Epoch, ErrStaleEpoch, detail)}
	}
	return SettleResult{Err: fmt.Errorf("%w: settle answered %s %s", ErrFault, name, detail)}
}

// Discard acknowledges an entry that stands for no order of the partition and
// is a committed dead letter: one that cannot be decoded and has no sound
// positions (MalformedError.Units is 0), or one of a voucher of another
// partition. It tells whether this call did it: false where it was gone
// already. An entry with sound positions is settled instead, each order with
// user 0. Errors: ErrStaleEpoch, ErrRefused, ErrFault (no effect) and
// ErrUnknown (repeat it).
func Discard(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, entryID string) (bool, error) {
	reply, err := discardEntry.run(ctx, client, []string{MetaKey(partition), OrdersKey(partition, epoch)},
		[]string{Group, entryID, strconv.FormatInt(epoch, 10)})
	if err != nil {
		return false, fmt.Errorf("discarding entry %s: %w", entryID, err)
	}
	name, _, err := status(reply)
	switch {
	case err != nil:
		return false, err
	case name == "DISCARDED":
		return true, nil
	case name == "NO_TOKEN":
		return false, nil
	}
	return false, fmt.Errorf("discarding entry %s: %w", entryID, expect(reply, nil))
}
