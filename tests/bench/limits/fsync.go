package limits

import (
	"context"
	"fmt"
	"os"
	"time"
)

// fsyncBytes is about what a commit or a batch appends to a log.
const fsyncBytes = 4096

// Fsyncs measures n times how long it takes to append to a file in dir and have
// it on disk: what every order of a consumer that writes row by row waits for,
// once in the database and, in strict durability, once in Redis.
func Fsyncs(ctx context.Context, dir string, n int) ([]time.Duration, error) {
	f, err := os.CreateTemp(dir, "fsync-")
	if err != nil {
		return nil, fmt.Errorf("measuring fsync: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	block := make([]byte, fsyncBytes)
	took := make([]time.Duration, 0, n)
	for range n {
		if ctx.Err() != nil {
			return took, ctx.Err()
		}
		began := time.Now()
		if _, err := f.Write(block); err != nil {
			return took, fmt.Errorf("measuring fsync: %w", err)
		}
		if err := f.Sync(); err != nil {
			return took, fmt.Errorf("measuring fsync: %w", err)
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}
