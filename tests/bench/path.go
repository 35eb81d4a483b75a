package main

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/load"
	"github.com/seckill/seckill/tests/bench/baseline"
)

const (
	// pathBound is the bound on orders in flight on the whole path, and catchUp how
	// long a writer may take to bring them home. On a slow machine the bound is what
	// a writer drains in half of that time.
	pathBound = 40_000
	catchUp   = 2 * time.Second
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
	bound := int64(pathBound)
	if drained, ok := b.results.now("drain_per_second"); ok {
		bound = max(min(bound, int64(drained*catchUp.Seconds()/2)), ledger.MaxBatch)
	}
	if err := s.startWriter(ctx, bound); err != nil {
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
	clock, err := startCPU(s.pids())
	if err != nil {
		return err
	}
	began := time.Now()
	backlog := watchBacklog(ctx, s, voucher, began)
	result, err := load.Run(ctx, target, load.Plan{VoucherID: voucher, Concurrency: streams * window, Duration: b.path})
	loaded := time.Now()
	if err == nil {
		err = s.awaitSettled(ctx, voucher, awaitLimit)
	}
	settled := time.Now()
	points := backlog()
	if err != nil {
		return err
	}
	b.page.backlog, b.page.bound = append(points, backlogPoint{settled.Sub(began).Seconds(), 0}), bound
	rows, err := s.Rows(ctx, voucher)
	if err != nil {
		return err
	}
	each, err := clock.used(rows) // what was refused as busy is a cost of those that were not
	if err != nil {
		return err
	}
	if err := b.accounted(result, rows); err != nil {
		return err
	}
	if err := b.proven(ctx, s, voucher); err != nil {
		return err
	}
	took := settled.Sub(loaded)
	if took > catchUp {
		b.unusually("catching up took %s on the whole path, more than %s: path_per_second is not what its figure asks for", took.Round(time.Millisecond), catchUp)
	}
	b.results.record("path_per_second", float64(rows)/settled.Sub(began).Seconds())
	b.results.record("path_admitted_per_second", result.Rate(load.Admitted))
	b.results.record("path_busy_per_second", float64(result.Reasons[busy])/result.Measured.Seconds())
	b.results.record("path_catchup_s", took.Seconds())
	b.recordCPU("path", each)
	// A writer that starts counts every voucher that is not archived: the next
	// measurement must not pay for this one.
	if err := s.archive(ctx, voucher); err != nil {
		return err
	}
	if err := s.stopWriter(); err != nil {
		return err
	}
	return b.growPlain(ctx, s, voucher)
}

// busy is the reason of a Grab that the bound on orders in flight refused.
const busy = "OVERLOADED"

// accounted fails where rows are missing or too many. A Grab whose answer was
// lost may have a row; one that was refused as busy has none.
func (b *bench) accounted(result *load.Result, rows int64) error {
	admitted := result.Count(load.Admitted)
	unknown := result.Count(load.Failed) - result.Reasons[busy]
	if unknown > 0 {
		b.unusually("%d of %d Grabs on the whole path were faults: %v", unknown, result.Offered, result.Reasons)
	}
	if rows < admitted || rows > admitted+unknown {
		return fmt.Errorf("%d were admitted and %d have no answer, %d are rows", admitted, unknown, rows)
	}
	return nil
}

// backlogPoint is what was in flight at a time.
type backlogPoint struct{ seconds, orders float64 }

// watchBacklog looks ten times a second until its result is asked for.
func watchBacklog(ctx context.Context, s *side, voucher int64, began time.Time) func() []backlogPoint {
	ctx, stop := context.WithCancel(ctx)
	watched := make(chan []backlogPoint)
	go func() {
		var points []backlogPoint
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			if books, err := s.Ledger(ctx, voucher); err == nil {
				points = append(points, backlogPoint{time.Since(began).Seconds(), float64(books.InFlight())})
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
		watched <- points
	}()
	return func() []backlogPoint {
		stop()
		return <-watched
	}
}

// tutorialDSN has the driver put values into statements by itself, as the
// tutorial's does: one round trip each instead of three.
func tutorialDSN(s *side) string {
	return s.Database.DSN(tutorialDatabase) + "?interpolateParams=true"
}

func openTutorial(s *side) (*sql.DB, error) { return sql.Open("mysql", tutorialDSN(s)) }

func startStage(ctx context.Context, s *side, stage baseline.Stage) (*child, error) {
	return startChild(ctx, "stage "+string(stage), "stage", "--stage="+string(stage), "--redis="+s.Redis.Addr(), "--dsn="+tutorialDSN(s))
}

// measureStages brings the same number of Grabs through each of the tutorial's
// stages, from the first Grab to the last row: on the servers of the whole path,
// where Redis is as durable as the database, and the last one also with a Redis
// in everysec, as the tutorial's is.
func measureStages(ctx context.Context, b *bench) error {
	for _, run := range []struct {
		name  string
		stage baseline.Stage
		on    *side
	}{
		{"stage_sync", baseline.StageSync, b.rig.whole}, {"stage_queue", baseline.StageQueue, b.rig.whole},
		{"stage_stream", baseline.StageStream, b.rig.whole}, {"stage_stream_everysec", baseline.StageStream, b.rig.fast},
	} {
		if err := b.measureStage(ctx, run.name, run.stage, run.on); err != nil {
			return fmt.Errorf("%s: %w", run.name, err)
		}
	}
	return nil
}

func (b *bench) measureStage(ctx context.Context, name string, stage baseline.Stage, s *side) error {
	grabs := b.ordersOfStage()
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
	if admitted < grabs {
		b.unusually("%s admitted %d of %d: %v %v", name, admitted, grabs, result.Answers, result.Reasons)
	}
	loaded := time.Now()
	var rows int64
	if err := await(ctx, "its orders to be rows", func() (bool, error) {
		err := db.QueryRowContext(ctx, "SELECT COUNT(*) FROM tb_voucher_order WHERE voucher_id = ?", voucher).Scan(&rows)
		return rows >= admitted, err
	}); err != nil {
		return fmt.Errorf("%d of %d: %w\n%s", rows, admitted, err, server.Output())
	}
	b.results.record(name+"_per_second", float64(rows)/time.Since(began).Seconds())
	b.results.record(name+"_admitted_per_second", result.Rate(load.Admitted))
	b.results.record(name+"_catchup_s", time.Since(loaded).Seconds())
	return nil
}
