package command

import (
	"errors"
	"fmt"
	"net"
)

// Problems gathers everything that is wrong with settings, so that whoever
// wrote them is told all of it at once.
type Problems []error

// Add notes errors; nil ones are none.
func (p *Problems) Add(errs ...error) {
	for _, err := range errs {
		if err != nil {
			*p = append(*p, err)
		}
	}
}

// If notes a problem where bad is true.
func (p *Problems) If(bad bool, format string, args ...any) {
	if bad {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

// HostPort notes a flag whose value is no address.
func (p *Problems) HostPort(flag, value string) {
	_, _, err := net.SplitHostPort(value)
	p.If(err != nil, "%s %q is not HOST:PORT", flag, value)
}

// Err is nil where there are none.
func (p Problems) Err() error {
	if len(p) == 0 {
		return nil
	}
	return fmt.Errorf("the settings do not fit:\n%w", errors.Join(p...))
}
