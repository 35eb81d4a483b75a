package pipeline

import (
	"context"
	"sync"
)

// slots bounds the orders in hand. A reader reserves before it reads and
// corrects the reservation when it knows how many orders came.
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

// reserve waits until n fit, or ctx ends.
func (s *slots) reserve(ctx context.Context, n int) error {
	for {
		s.mu.Lock()
		if s.used+n <= s.max || s.used == 0 {
			s.used += n
			s.mu.Unlock()
			return nil
		}
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// correct replaces a reservation by what came of it, which may be more.
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
