package main

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"time"

	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/tests/bench/baseline"
)

const (
	// pathBound is the bound on orders in flight on the whole path: what a writer
	// brings home in less than the 2 s that catching up may take.
	pathBound = 40_000
	// stageCallers is what the tutorial's stages are loaded with.
	stageCallers = 64
)

// measurePath measures the whole path: admitted and persisted, from the first
// Grab to the last row, with writer and gateway on the same cores.
func measurePath(ctx context.Context, b *bench) error {
	s := b.rig.whole
	if err := s.stopWriter(); err != nil {
		return err
	}
	if err := s.startWriter(ctx, pathBound); err != nil {
		return err
	}
	voucher, err := s.open(ctx, plenty)
	if err != nil {
		return err
	}
	target, err := load.NewStreams(s.conns, load.StreamOptions{Streams: streams, Window: window})
	if err != nil {
		return err
	}
	watched, stop := context.WithCancel(ctx)
	defer stop()
	var watching sync.WaitGroup
	began := time.Now()
	b.page.backlog = nil
	watching.Go(func() { b.page.backlog = watchBacklog(watched, s, voucher, began) })

	result, each, err := b.with(s.pids(), func() (*load.Result, error) {
		return load.Run(ctx, target, load.Plan{VoucherID: voucher, Concurrency: streams * window, Duration: b.path})
	})
	if err != nil {
		return err
	}
	loaded := time.Now()
	if err := s.AwaitSettled(ctx, voucher); err != nil {
		return err
	}
	settled := time.Now()
	stop()
	watching.Wait()
	rows, err := s.Rows(ctx, voucher)
	if err != nil {
		return err
	}
	if admitted := result.Count(load.Admitted); rows != admitted {
		return fmt.Errorf("%d were admitted, %d are rows", admitted, rows)
	}
	if err := b.proven(ctx, s, voucher); err != nil {
		return err
	}
	b.results.record("path_per_second", float64(rows)/settled.Sub(began).Seconds())
	b.results.record("path_admitted_per_second", result.Rate(load.Admitted))
	b.results.record("path_busy_per_second", result.Rate(load.Failed))
	b.results.record("path_catchup_s", settled.Sub(loaded).Seconds())
	scale := float64(result.Count(load.Admitted)+result.Count(load.Failed)) / float64(max(rows, 1))
	for process, us := range each {
		each[process] = us * scale // of an order that was admitted
	}
	b.recordCPU("path", each)
	return s.stopWriter()
}

// backlogPoint is what was in flight at a time.
type backlogPoint struct{ seconds, orders float64 }

// watchBacklog looks ten times a second until ctx ends.
func watchBacklog(ctx context.Context, s *side, voucher int64, began time.Time) (points []backlogPoint) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		if books, err := s.Ledger(ctx, voucher); err == nil {
			points = append(points, backlogPoint{time.Since(began).Seconds(), float64(books.InFlight())})
		}
		select {
		case <-ctx.Done():
			return points
		case <-tick.C:
		}
	}
}

func openTutorial(s *side) (*sql.DB, error) {
	return sql.Open("mysql", s.Database.DSN(tutorialDatabase))
}

func startStage(ctx context.Context, s *side, stage baseline.Stage) (*child, error) {
	return startChild(ctx, "stage "+string(stage), "stage", "--stage="+string(stage),
		"--redis="+s.Redis.Addr(), "--dsn="+s.Database.DSN(tutorialDatabase))
}

// measureStages brings the same number of Grabs through each of the tutorial's
// stages, from the first Grab to the last row.
func measureStages(ctx context.Context, b *bench) error {
	s := b.rig.whole
	for _, stage := range []baseline.Stage{baseline.StageSync, baseline.StageQueue, baseline.StageStream} {
		if err := b.measureStage(ctx, s, stage); err != nil {
			return fmt.Errorf("stage %s: %w", stage, err)
		}
	}
	return nil
}

func (b *bench) measureStage(ctx context.Context, s *side, stage baseline.Stage) error {
	grabs := b.stageFill
	voucher, err := b.tutorialVoucherFor(ctx, s, grabs)
	if err != nil {
		return err
	}
	server, err := startStage(ctx, s, stage)
	if err != nil {
		return err
	}
	defer server.Kill()
	to, err := dial(server.addr)
	if err != nil {
		return err
	}
	defer hangUp(to)
	target, err := load.NewUnary(to, 10*time.Second)
	if err != nil {
		return err
	}
	db, err := openTutorial(s)
	if err != nil {
		return err
	}
	defer db.Close()
	began := time.Now()
	result, err := load.Run(ctx, target, load.Plan{VoucherID: voucher, Concurrency: stageCallers, Count: grabs})
	if err != nil {
		return err
	}
	admitted := result.Count(load.Admitted)
	loaded := time.Now()
	var rows int64
	if err := await(ctx, "its orders to be rows", func() (bool, error) {
		err := db.QueryRowContext(ctx, "SELECT COUNT(*) FROM tb_voucher_order WHERE voucher_id = ?", voucher).Scan(&rows)
		return rows >= admitted, err
	}); err != nil {
		return fmt.Errorf("%d of %d: %w\n%s", rows, admitted, err, server.Output())
	}
	name := "stage_" + string(stage)
	b.results.record(name+"_per_second", float64(rows)/time.Since(began).Seconds())
	b.results.record(name+"_admitted_per_second", result.Rate(load.Admitted))
	b.results.record(name+"_catchup_s", time.Since(loaded).Seconds())
	return s.Client().Do(ctx, s.Client().B().Unlink().Key("stream.orders").Build()).Error()
}
