package pipeline

import (
	"context"
	"errors"
	"fmt"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// work is an entry on its way: its orders, or what is held of an entry that
// cannot be read.
type work struct {
	entry ledger.Entry
	dead  *orderstore.DeadEntry
}

// voucher is whose orders it carries, 0 where nobody can tell.
func (w work) voucher() int64 {
	if w.dead != nil {
		return w.dead.VoucherID
	}
	return w.entry.VoucherID
}

// size is how many slots it takes.
func (w work) size() int { return max(1, len(w.entry.Orders)) }

// take decodes entries, brings the reservation to what came and passes them
// on. Entries that are in hand already are left out: a scan finds our own, too.
func (r *reader) take(ctx context.Context, epoch int64, raw []ledger.RawEntry, reserved int) int {
	// One bound for all lookups: a Redis that does not answer is not asked again
	// for each entry.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readMargin)
	defer cancel()
	orders, slots := 0, 0
	taken := make([]work, 0, len(raw))
	for _, e := range raw {
		if !r.hold(e.ID) {
			continue
		}
		w, err := r.decode(ctx, epoch, e)
		if err != nil && !errors.Is(err, ledger.ErrVersion) {
			// Nobody can tell now what it stands for: it comes again.
			r.metrics.readErrors.Inc()
			r.log.Warn("entry left pending", telemetry.KeyEntryID, e.ID, telemetry.KeyErr, err)
			r.letGo(e.ID)
			continue
		}
		if err != nil {
			// A newer writer may know its version: it stays pending for one.
			r.metrics.unknownVersions.Inc()
			r.log.Error("entry left pending", telemetry.KeyEntryID, e.ID, telemetry.KeyErr, err)
			r.letGo(e.ID)
			continue
		}
		taken = append(taken, w)
		orders += len(w.entry.Orders)
		slots += w.size()
	}
	r.slots.correct(reserved, slots)
	for _, w := range taken {
		r.entries <- w
	}
	return orders
}

// decode is an error for an entry that may be another writer's to read, which is
// ledger.ErrVersion, and for one that cannot be read while the ledger does not
// tell whether the positions that it names were admitted. What was not admitted
// stands for nothing. An order that can be read goes on where the ledger does not
// tell: it must not wait for a lookup that nearly always says yes.
func (r *reader) decode(ctx context.Context, epoch int64, raw ledger.RawEntry) (work, error) {
	entry, err := ledger.DecodeEntry(r.partition, raw.ID, raw.Fields)
	dead := &orderstore.DeadEntry{PartitionID: r.partition, Epoch: epoch, EntryID: raw.ID}
	var malformed *ledger.MalformedError
	switch {
	case errors.As(err, &malformed):
		dead.Reason = malformed.Reason
		if malformed.Units > 0 && malformed.Epoch == epoch && ledger.Partition(malformed.VoucherID, r.Partitions) == r.partition {
			last := malformed.FirstSeq + malformed.Units - 1
			stranger, err := r.stranger(ctx, epoch, malformed.VoucherID, last)
			if err != nil {
				return work{}, fmt.Errorf("decoding an entry: %w: %w", malformed, err)
			}
			if stranger == "" {
				dead.VoucherID, dead.FirstSeq, dead.Units = malformed.VoucherID, malformed.FirstSeq, malformed.Units
			} else {
				dead.Reason += "; " + stranger
			}
		}
	case err != nil:
		return work{}, err
	case entry.Epoch != epoch:
		dead.Reason = fmt.Sprintf("an entry of epoch %d in the stream of epoch %d", entry.Epoch, epoch)
	case ledger.Partition(entry.VoucherID, r.Partitions) != r.partition:
		dead.Reason = fmt.Sprintf("voucher %d is not of partition %d", entry.VoucherID, r.partition)
	default:
		stranger, err := r.stranger(ctx, epoch, entry.VoucherID, entry.Orders[len(entry.Orders)-1].Seq)
		if err != nil || stranger == "" {
			return work{entry: entry}, nil
		}
		dead.Reason = stranger
	}
	dead.Raw = raw.Encode()
	return work{entry: ledger.Entry{ID: raw.ID, Partition: r.partition, Epoch: epoch}, dead: dead}, nil
}

// stranger tells why an entry that ends with a voucher's order seq is nobody's
// that was admitted, "" where it is not so. The ledger is asked only beyond what
// it was seen to have admitted, which for new entries is once for each page and
// voucher.
func (r *reader) stranger(ctx context.Context, epoch, voucherID, seq int64) (reason string, err error) {
	admitted := r.admitted[voucherID]
	if seq > admitted {
		admitted, err = ledger.AdmittedSeq(ctx, r.Client, r.partition, epoch, voucherID)
		if errors.Is(err, ledger.ErrMissing) {
			return r.unsold(ctx, epoch, voucherID)
		}
		if err != nil {
			return "", err
		}
		if len(r.admitted) >= admittedMost {
			clear(r.admitted)
		}
		r.admitted[voucherID] = admitted
	}
	if seq > admitted {
		return fmt.Sprintf("seq %d of voucher %d was never admitted", seq, voucherID), nil
	}
	return "", nil
}

// admittedMost bounds the vouchers whose seq is remembered, some 100 bytes each;
// beyond it all are asked for anew.
const admittedMost = 10_000

// unsold tells why a voucher that has no ledger has nothing in flight. The
// database notes a ledger before it may sell, and archives a voucher only when
// all is settled. Else the ledger is lost, which is an error here.
func (r *reader) unsold(ctx context.Context, epoch, voucherID int64) (reason string, err error) {
	voucher, err := r.Holder.Voucher(ctx, voucherID)
	switch {
	case errors.Is(err, orderstore.ErrVoucherNotFound):
		return fmt.Sprintf("there is no voucher %d", voucherID), nil
	case err != nil:
		return "", err
	case voucher.State == orderstore.StateArchived:
		return fmt.Sprintf("voucher %d is archived", voucherID), nil
	case voucher.LedgerEpoch != epoch:
		return fmt.Sprintf("voucher %d was never on sale in epoch %d", voucherID, epoch), nil
	}
	return "", fmt.Errorf("voucher %d: %w", voucherID, ledger.ErrMissing)
}

func (r *reader) hold(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.inHand[id] {
		return false
	}
	r.inHand[id] = true
	return true
}

// drop ends the holding of an entry, settled or left pending.
func (r *reader) drop(w work) {
	r.letGo(w.entry.ID)
	r.slots.release(w.size())
}

func (r *reader) letGo(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.inHand, id)
}
