package pipeline

import (
	"context"
	"sync"
)

// slots bounds the orders in hand. A reader reserves before it reads, for
// entries as large as they may be, and gives back what did not come.
type slots struct {
	mu   sync.Mutex
	max  int
	used int
	// freed is closed and replaced whenever used falls.
	freed chan struct{}
}

func newSlots(limit int) *slots {
	return &slots{max: limit, freed: make(chan struct{})}
}

// reserve waits until least fit, or ctx ends, and reserves as many as fit of
// most. It answers how many.
func (s *slots) reserve(ctx context.Context, least, most int) (int, error) {
	for {
		s.mu.Lock()
		if free := s.max - s.used; free >= least {
			n := min(free, most)
			s.used += n
			s.mu.Unlock()
			return n, nil
		}
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// correct replaces a reservation by what came of it.
func (s *slots) correct(reserved, actual int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used += actual - reserved
	if actual < reserved {
		close(s.freed)
		s.freed = make(chan struct{})
	}
}

func (s *slots) release(n int) { s.correct(n, 0) }

func (s *slots) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}
