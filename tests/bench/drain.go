package main

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/tests/bench/baseline"
	"github.com/seckill/seckill/tests/bench/limits"
)

const (
	// wholeBound is the bound on orders in flight where a stream is filled first.
	wholeBound = 10_000_000
	// The writer's defaults, which the plain INSERTs use as well.
	writerBatch, writerCommitters = 1000, 3
	// stageTime is what a run of a stage of the tutorial may take, about. An order
	// waits for some six fsyncs one after the other: two of its transaction, and in
	// strict durability one for each command of its lock and its acknowledgement.
	stageTime, stageFsyncs = 15 * time.Second, 6
	// tutorialDatabase holds the tutorial's tables, rawDatabase those of the plain
	// INSERTs.
	tutorialDatabase, rawDatabase = "tutorial", "plain"
	// seckillDatabase is what the stack names seckill's.
	seckillDatabase = "seckill"
	// rawVouchers lies above the id of every voucher of seckill.
	rawVouchers = 1_000_000_000
)

// wholeVoucher opens a voucher on the whole stack and stops the writer.
func (b *bench) wholeVoucher(ctx context.Context, total int64) (int64, error) {
	s := b.rig.whole
	if err := s.stopWriter(); err != nil { // one that was left, and has another bound
		return 0, err
	}
	if err := s.startWriter(ctx, wholeBound); err != nil {
		return 0, err
	}
	voucher, err := s.open(ctx, total)
	if err != nil {
		return 0, err
	}
	return voucher, s.stopWriter()
}

// measureDrain measures how fast a writer brings a full stream into the
// database, beside plain INSERTs into a table of the same form, and beside the
// tutorial's consumer on its own stream and tables, on the same servers.
func measureDrain(ctx context.Context, b *bench) error {
	s := b.rig.whole
	voucher, err := b.wholeVoucher(ctx, b.fill)
	if err != nil {
		return err
	}
	// Half of the plain rows before and half after the draining: who comes second
	// finds the server writing out what the first one left.
	if err := b.insertPlainly(ctx, s, b.fill/2); err != nil {
		return err
	}
	if err := b.fillStream(ctx, s, voucher, b.fill); err != nil {
		return err
	}
	if err := b.drain(ctx, s, voucher); err != nil {
		return err
	}
	if err := s.stopWriter(); err != nil {
		return err
	}
	if err := b.insertPlainly(ctx, s, b.fill/2); err != nil {
		return err
	}
	if err := b.drainStage3(ctx, s, "stage3_drain_per_second"); err != nil {
		return err
	}
	// In everysec, as the tutorial's Redis is, its commands wait for no disk.
	return b.drainStage3(ctx, b.rig.fast, "stage3_everysec_drain_per_second")
}

// growPlain lets the plain table grow with seckill's, where another round follows
// that will compare the two.
func (b *bench) growPlain(ctx context.Context, s *side, voucher int64) error {
	if len(b.results.rounds) == b.rounds {
		return nil
	}
	if err := b.database(ctx, s, rawDatabase); err != nil {
		return err
	}
	db, err := sql.Open("mysql", s.Database.DSN(rawDatabase))
	if err != nil {
		return err
	}
	defer db.Close()
	return limits.Copy(ctx, db, seckillDatabase, voucher)
}

// insertPlainly inserts rows with nothing around the statements.
func (b *bench) insertPlainly(ctx context.Context, s *side, rows int64) error {
	if err := b.database(ctx, s, rawDatabase); err != nil {
		return err
	}
	clock, err := startCPU(map[string]int{"database": s.Database.Pid()})
	if err != nil {
		return err
	}
	b.rawVoucher++ // behind all others, as a drained voucher is
	took, err := limits.Insert{
		DSN: s.Database.DSN(rawDatabase), From: seckillDatabase, VoucherID: rawVouchers + b.rawVoucher, Rows: rows, Batch: writerBatch, Connections: writerCommitters,
	}.Run(ctx)
	if err != nil {
		return err
	}
	each, err := clock.used(rows)
	if err != nil {
		return err
	}
	b.results.record("raw_insert_per_second", float64(rows)/took.Seconds())
	b.recordCPU("raw_insert", each)
	return nil
}

// drain starts a writer on a full stream and measures from its first settled
// orders to the last: its start is no part of it, unless the first look comes
// too late.
func (b *bench) drain(ctx context.Context, s *side, voucher int64) error {
	started := time.Now()
	if err := s.startWriter(ctx, wholeBound, fmt.Sprintf("--batch-size=%d", writerBatch), fmt.Sprintf("--committers=%d", writerCommitters)); err != nil {
		return err
	}
	var began time.Time
	var first int64
	var clock *cpuClock
	if err := await(ctx, "the writer to drain the stream", func() (bool, error) {
		books, err := s.Ledger(ctx, voucher)
		if err != nil {
			return false, err
		}
		settled := books.Seq - books.InFlight()
		if began.IsZero() && settled > 0 {
			if clock, err = startCPU(s.pids()); err != nil {
				return false, err
			}
			began, first = time.Now(), settled
		}
		return books.InFlight() == 0, nil
	}); err != nil {
		return err
	}
	ended := time.Now()
	if first > b.fill/2 {
		b.unusually("a writer drained half of the stream before the first look: its start is counted")
		b.results.record("drain_per_second", float64(b.fill)/ended.Sub(started).Seconds())
	} else {
		each, err := clock.used(b.fill - first)
		if err != nil {
			return err
		}
		b.results.record("drain_per_second", float64(b.fill-first)/ended.Sub(began).Seconds())
		b.recordCPU("drain", each)
	}
	if err := b.proven(ctx, s, voucher); err != nil {
		return err
	}
	return s.archive(ctx, voucher)
}

// proven fails where the books of a voucher are not proven.
func (b *bench) proven(ctx context.Context, s *side, voucher int64) error {
	return await(ctx, fmt.Sprintf("the books of voucher %d to be proven", voucher), func() (bool, error) {
		books, err := s.Books(ctx, voucher)
		if err != nil {
			return false, err
		}
		if books.GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_VIOLATED {
			return false, fmt.Errorf("books violated: %v", books.GetViolations())
		}
		return books.GetVerdict() == seckillv1.BooksVerdict_BOOKS_VERDICT_PROVEN, nil
	})
}

// database makes a database of a stack once.
func (b *bench) database(ctx context.Context, s *side, name string) error {
	key := s.name + "/" + name
	if b.databases[key] {
		return nil
	}
	b.databases[key] = true
	return s.Database.CreateDatabase(ctx, name)
}

// ordersOfStage is how many orders a run of one of the tutorial's stages has:
// fewer on a slow disk.
func (b *bench) ordersOfStage() int64 {
	fsync, ok := b.results.now("fsync_p50_ms")
	if !ok || fsync <= 0 {
		return b.stageFill
	}
	most := stageTime.Seconds() / (stageFsyncs * fsync / 1000)
	return min(b.stageFill, max(int64(most), 100))
}

// tutorialVoucherFor makes a voucher of the tutorial on a stack, in Redis and in
// the database, and leaves its stream empty.
func (b *bench) tutorialVoucherFor(ctx context.Context, s *side, stock int64) (int64, error) {
	if err := b.database(ctx, s, tutorialDatabase); err != nil {
		return 0, err
	}
	db, err := openTutorial(s)
	if err != nil {
		return 0, err
	}
	defer db.Close()
	if err := s.Client().Do(ctx, s.Client().B().Unlink().Key(baseline.Stream).Build()).Error(); err != nil {
		return 0, err
	}
	b.tutorialVoucher++
	if err := baseline.Prepare(ctx, db, b.tutorialVoucher, stock); err != nil {
		return 0, err
	}
	return b.tutorialVoucher, baseline.Stock(ctx, s.Client(), b.tutorialVoucher, stock)
}

// drainStage3 fills the tutorial's stream with its own script and lets its
// consumer empty it.
func (b *bench) drainStage3(ctx context.Context, s *side, name string) error {
	orders := b.ordersOfStage()
	voucher, err := b.tutorialVoucherFor(ctx, s, orders)
	if err != nil {
		return err
	}
	client := s.Client()
	sha, err := client.Do(ctx, client.B().ScriptLoad().Script(baseline.AdmitScript()).Build()).ToString()
	if err != nil {
		return err
	}
	commands := make([]rueidis.Completed, 0, orders)
	for user := range orders {
		id := strconv.FormatInt(voucher<<32|(user+1), 10)
		commands = append(commands, client.B().Evalsha().Sha1(sha).Numkeys(0).Arg(strconv.FormatInt(voucher, 10), strconv.FormatInt(user+1, 10), id).Build())
	}
	for _, answer := range client.DoMulti(ctx, commands...) {
		if n, err := answer.AsInt64(); err != nil || n != 0 {
			return fmt.Errorf("filling the tutorial's stream: answer %d: %w", n, err)
		}
	}
	db, err := openTutorial(s)
	if err != nil {
		return err
	}
	defer db.Close()
	stage, err := startStage(ctx, s, baseline.StageStream)
	if err != nil {
		return err
	}
	defer stage.Kill()
	var began time.Time
	var first, rows int64
	if err := await(ctx, "the tutorial's consumer to drain its stream", func() (bool, error) {
		if err := db.QueryRowContext(ctx, "SELECT COUNT(*) FROM tb_voucher_order WHERE voucher_id = ?", voucher).Scan(&rows); err != nil {
			return false, err
		}
		if began.IsZero() && rows > 0 {
			began, first = time.Now(), rows
		}
		return rows == orders, nil
	}); err != nil {
		return fmt.Errorf("%w\n%s", err, stage.Output())
	}
	b.results.record(name, float64(orders-first)/time.Since(began).Seconds())
	return nil
}
