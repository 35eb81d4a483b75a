package guardian

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/seckill/seckill/pkg/faultpoint"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

const (
	// tellTimeout bounds the telling of all decisions in one look, tellOneTimeout
	// that of each: one whose row is locked must not hold up the others.
	tellTimeout    = 3 * time.Second
	tellOneTimeout = time.Second
	// updatesMax is how many decisions of operators are told in one look.
	updatesMax = 500
	// searchPage is how many marks one call looks at for the users of cancelled
	// orders, some hundred microseconds of Redis, and searchPages how many calls
	// one look makes.
	searchPage  = 1000
	searchPages = 200
)

// telling is what the guardian is about to tell the ledger.
type telling struct {
	// updates are decisions to tell, after is where the next ones are listed from:
	// what cannot be told now has its turn again when all others had theirs.
	updates []orderstore.LedgerUpdate
	after   orderstore.UpdateCursor
	// unnamed are cancelled orders whose user nobody could read, updatesMax at
	// most. Their units are back, the marks of their users are still there.
	unnamed map[orderid.Position]orderstore.LedgerUpdate
	// search looks for these users, of one voucher at a time; nil for none.
	search *search
}

// search goes through the marks of a voucher, over several looks.
type search struct {
	voucherID, epoch int64
	seqs             map[int64]bool
	users            map[int64]int64
	cursor           uint64
}

// tell brings decisions of operators to the ledger. The held outcome there is
// the token, so each counts once, however often it is told.
func (k *keeper) tell(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tellTimeout)
	defer cancel()
	t := &k.telling
	if len(t.updates) == 0 {
		var err error
		if t.updates, t.after, err = k.Store.LedgerUpdates(ctx, k.partition, t.after, updatesMax); err != nil {
			return err
		}
	}
	var first error
	for len(t.updates) > 0 && ctx.Err() == nil {
		update := t.updates[0]
		t.updates = t.updates[1:]
		err := k.tellOne(ctx, update)
		if err == nil && update.UserID == 0 && update.Outcome == orderstore.ResultCancelled {
			k.findUserOf(update)
		} else if err == nil {
			err = k.told(ctx, update)
		}
		if err != nil && !errors.Is(err, ledger.ErrInFlight) && first == nil {
			first = err
		}
	}
	return cmp.Or(first, k.tellUnnamed(ctx))
}

func (k *keeper) tellOne(ctx context.Context, update orderstore.LedgerUpdate) error {
	ctx, cancel := context.WithTimeout(ctx, tellOneTimeout)
	defer cancel()
	faultpoint.Reach(faultpoint.GuardianBeforeTell)
	if _, err := ledger.Resolve(ctx, k.Client, ledger.Resolution{
		Partition: k.partition, Position: update.Position, UserID: update.UserID,
		Verdict: resolutions[update.Outcome], Standing: update.Standing,
	}); err != nil {
		return fmt.Errorf("voucher %d seq %d: %w", update.Position.VoucherID, update.Position.Seq, err)
	}
	faultpoint.Reach(faultpoint.GuardianAfterTell)
	return nil
}

func (k *keeper) told(ctx context.Context, update orderstore.LedgerUpdate) error {
	ctx, cancel := context.WithTimeout(ctx, tellOneTimeout)
	defer cancel()
	return k.Store.MarkTold(ctx, update)
}

// findUserOf puts off what is told of an order whose user nobody knows, until
// the mark that holds the order was looked for.
func (k *keeper) findUserOf(update orderstore.LedgerUpdate) {
	t := &k.telling
	if t.unnamed == nil {
		t.unnamed = map[orderid.Position]orderstore.LedgerUpdate{}
	}
	if len(t.unnamed) < updatesMax {
		t.unnamed[update.Position] = update
	}
}

// tellUnnamed looks for the marks of users of cancelled orders: whom they belong
// to may buy again. Where there is none, nobody is kept from buying.
func (k *keeper) tellUnnamed(ctx context.Context) error {
	t := &k.telling
	if t.search == nil {
		t.search = newSearch(t.unnamed)
	}
	s := t.search
	if s == nil {
		return nil
	}
	for page := 0; page == 0 || s.cursor != 0; page++ {
		if page == searchPages {
			return nil
		}
		users, next, err := ledger.Holders(ctx, k.Client, k.partition, s.epoch, s.voucherID, s.seqs, s.cursor, searchPage)
		if err != nil {
			return err
		}
		maps.Copy(s.users, users)
		s.cursor = next
	}
	t.search = nil
	var first error
	for seq := range s.seqs {
		position := orderid.Position{VoucherID: s.voucherID, Epoch: s.epoch, Seq: seq}
		update := t.unnamed[position]
		// What fails is listed again.
		delete(t.unnamed, position)
		var err error
		if update.UserID = s.users[seq]; update.UserID != 0 {
			err = k.tellOne(ctx, update)
		}
		if err == nil {
			err = k.told(ctx, update)
		}
		first = cmp.Or(first, err)
	}
	return first
}

// newSearch looks for the users of all orders of a voucher, whichever comes
// first: of several that cannot be told each has its turn.
func newSearch(unnamed map[orderid.Position]orderstore.LedgerUpdate) *search {
	var s *search
	for p := range unnamed {
		if s == nil {
			s = &search{voucherID: p.VoucherID, epoch: p.Epoch, seqs: map[int64]bool{}, users: map[int64]int64{}}
		}
		if p.VoucherID == s.voucherID && p.Epoch == s.epoch {
			s.seqs[p.Seq] = true
		}
	}
	return s
}

// resolutions are the verdicts that results of resolving stand for.
var resolutions = map[string]ledger.Verdict{
	orderstore.ResultPersisted: ledger.VerdictPersisted,
	orderstore.ResultConflict:  ledger.VerdictConflict,
	orderstore.ResultCancelled: ledger.VerdictCancelled,
}
