package ledger

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/seckill/seckill/pkg/orderid"
)

// MarkState is how far a marked order is.
type MarkState byte

// The states of a mark. A later version may write other letters from a to z: an
// order all the same.
const (
	MarkAdmitted  MarkState = 'a'
	MarkPersisted MarkState = 'p'
	MarkHeld      MarkState = 'h'
)

// Mark is what the buyers hash holds of a user: the order that is his, as
// <epoch>.<seq><state>.
type Mark struct {
	Epoch int64
	Seq   int64
	State MarkState
}

// ParseMark reads a mark as the scripts write it. It can read whatever admit.lua
// takes for one.
func ParseMark(s string) (Mark, error) {
	if len(s) < 4 {
		return Mark{}, fmt.Errorf("%w: mark %q", ErrFault, s)
	}
	state := MarkState(s[len(s)-1])
	if state < 'a' || state > 'z' {
		return Mark{}, fmt.Errorf("%w: mark %q has no state", ErrFault, s)
	}
	epoch, seq, err := parsePosition(s[:len(s)-1])
	if err != nil {
		return Mark{}, fmt.Errorf("%w: mark %q: %w", ErrFault, s, err)
	}
	return Mark{Epoch: epoch, Seq: seq, State: state}, nil
}

// Position is the order that the mark of a voucher names.
func (m Mark) Position(voucherID int64) orderid.Position {
	return orderid.Position{VoucherID: voucherID, Epoch: m.Epoch, Seq: m.Seq}
}

func formatPosition(epoch, seq int64) string {
	return strconv.FormatInt(epoch, 10) + "." + strconv.FormatInt(seq, 10)
}

func parsePosition(s string) (epoch, seq int64, err error) {
	e, q, ok := strings.Cut(s, ".")
	if !ok {
		return 0, 0, fmt.Errorf("%q is not an epoch and a seq", s)
	}
	if epoch, err = strconv.ParseInt(e, 10, 64); err != nil {
		return 0, 0, err
	}
	if seq, err = strconv.ParseInt(q, 10, 64); err != nil {
		return 0, 0, err
	}
	if epoch < 1 || epoch > orderid.MaxEpoch || seq < 1 || seq > orderid.MaxSeq {
		return 0, 0, fmt.Errorf("position %q is out of range", s)
	}
	return epoch, seq, nil
}
