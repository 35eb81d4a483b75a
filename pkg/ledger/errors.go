package ledger

import (
	"errors"
	"fmt"
	"strings"

	"github.com/redis/rueidis"
)

var (
	// ErrFault is an answer of the ledger that must not be: a key of a wrong
	// type, a field that is not a number, an answer that nobody wrote. The call
	// had no effect.
	ErrFault = errors.New("ledger fault")
	// ErrNoScript means that the server does not hold the script. It had no
	// effect. For the admission script that is a closed door.
	ErrNoScript = errors.New("script is not loaded")
	// ErrRefused means that the server refused the call before running it: it
	// is loading, a replica, out of memory, busy, or denies the user. The call
	// had no effect.
	ErrRefused = errors.New("redis refused the call")
	// ErrUnknown means that the call may have run, or may still run: its answer
	// did not arrive.
	ErrUnknown = errors.New("outcome unknown")
)

// refusals are the error codes with which Redis refuses a call before its
// script runs, or a script of ours before its first write.
var refusals = map[string]bool{
	"LOADING": true, "READONLY": true, "MASTERDOWN": true, "NOAUTH": true, "WRONGPASS": true, "NOPERM": true,
	"OOM": true, "MISCONF": true, "BUSY": true, "NOREPLICAS": true, "CLUSTERDOWN": true, "TRYAGAIN": true,
	"MOVED": true, "ASK": true, "CROSSSLOT": true,
}

// classify turns an error of rueidis into one of the package's errors. What it
// does not know it takes for a fault if the server answered it, and for an
// unknown outcome otherwise.
func classify(err error) error {
	if err == nil {
		return nil
	}
	answer, ok := rueidis.IsRedisErr(err)
	if !ok {
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	text := answer.Error()
	// An answer raised inside a script comes with "script: <sha>" behind it and
	// may be OOM or NOPERM as well: scripts undo what they wrote.
	switch code, _, _ := strings.Cut(text, " "); {
	case code == "NOSCRIPT":
		return fmt.Errorf("%w: %s", ErrNoScript, text)
	case code == "NOGROUP":
		return fmt.Errorf("%w: %s", ErrNoGroup, text)
	case refusals[code]:
		return fmt.Errorf("%w: %s", ErrRefused, text)
	default:
		return fmt.Errorf("%w: %s", ErrFault, text)
	}
}
