package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/pkg/load"
)

// measureMemory measures what an order in flight takes in Redis, its buyer's
// mark included, and what is left of it once it is settled and its voucher
// archived.
func measureMemory(ctx context.Context, b *bench) error {
	s := b.rig.whole
	voucher, err := b.wholeVoucher(ctx, b.inFlight)
	if err != nil {
		return err
	}
	before, err := usedMemory(ctx, s)
	if err != nil {
		return err
	}
	if err := b.fillStream(ctx, s, voucher, b.inFlight); err != nil {
		return err
	}
	full, err := usedMemory(ctx, s)
	if err != nil {
		return err
	}
	if err := s.startWriter(ctx, wholeBound); err != nil {
		return err
	}
	defer func() { _ = s.stopWriter() }() // only where it failed below
	if err := s.awaitSettled(ctx, voucher, awaitLimit); err != nil {
		return err
	}
	settled, err := usedMemory(ctx, s)
	if err != nil {
		return err
	}
	if err := s.archive(ctx, voucher); err != nil {
		return err
	}
	// The ledger is removed in pieces, and freed behind the scenes.
	if err := await(ctx, "the voucher's ledger to be removed", func() (bool, error) {
		books, err := s.Ledger(ctx, voucher)
		return err == nil && books.Buyers == 0, err
	}); err != nil {
		return err
	}
	after, err := usedMemory(ctx, s)
	if err != nil {
		return err
	}
	n := float64(b.inFlight)
	b.results.record("bytes_in_flight", (full-before)/n)
	b.results.record("bytes_settled", (settled-before)/n)
	b.results.record("bytes_archived", (after-before)/n)
	if err := s.stopWriter(); err != nil {
		return err
	}
	return b.growPlain(ctx, s, voucher)
}

// usedMemory is what the data set takes: without buffers of clients and of the
// append-only file, which come and go.
func usedMemory(ctx context.Context, s *side) (float64, error) {
	var used float64
	err := await(ctx, "Redis' buffers to be written", func() (bool, error) {
		text, err := s.Client().Do(ctx, s.Client().B().Info().Section("memory").Build()).ToString()
		if err != nil {
			return false, err
		}
		var overhead, lazy float64
		for line := range strings.Lines(text) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			switch name {
			case "used_memory":
				used, err = strconv.ParseFloat(value, 64)
			case "lazyfree_pending_objects":
				lazy, err = strconv.ParseFloat(value, 64)
			case "mem_clients_normal", "mem_aof_buffer":
				var n float64
				n, err = strconv.ParseFloat(value, 64)
				overhead += n
			}
			if err != nil {
				return false, err
			}
		}
		used -= overhead
		return overhead < 4<<20 && lazy == 0, nil
	})
	return used, err
}

// archive closes and archives a voucher whose orders are settled.
func (s *side) archive(ctx context.Context, voucherID int64) error {
	vouchers := seckillv1.NewVoucherServiceClient(s.writer.Conn())
	if _, err := vouchers.CloseVoucher(ctx, &seckillv1.CloseVoucherRequest{VoucherId: voucherID}); err != nil {
		return fmt.Errorf("closing voucher %d: %w", voucherID, err)
	}
	return await(ctx, "the voucher to be archived", func() (bool, error) {
		_, err := vouchers.ArchiveVoucher(ctx, &seckillv1.ArchiveVoucherRequest{VoucherId: voucherID})
		if status.Code(err) == codes.FailedPrecondition {
			return false, nil // its books are not proven yet
		}
		return err == nil, err
	})
}

// fillStream admits so many orders of a voucher, by a gateway alone.
func (b *bench) fillStream(ctx context.Context, s *side, voucherID, orders int64) error {
	target, err := load.NewStreams(s.conns, load.StreamOptions{Streams: streams, Window: window})
	if err != nil {
		return err
	}
	result, err := load.Run(ctx, target, load.Plan{VoucherID: voucherID, Concurrency: streams * window, Count: orders, Drain: 10 * time.Second})
	if err != nil {
		return err
	}
	if n := result.Count(load.Admitted); n != orders {
		return fmt.Errorf("%d of %d were admitted: %v %v", n, orders, result.Answers, result.Reasons)
	}
	return nil
}
