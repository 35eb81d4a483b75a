package main

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/load"
)

func newBench() *bench {
	b := &bench{results: newResults(), sizes: settings{Scale: 1}.sizes(), started: time.Now()}
	b.results.begin()
	return b
}

func TestInTurns_TakesHalvesToAndFro(t *testing.T) {
	names := func(all []measurement) (names []string) {
		for _, m := range inTurns(all) {
			names = append(names, m.name)
		}
		return names
	}
	all := measurements()
	require.Equal(t, []string{"fsync", "echo", "unary", "stream", "refused", "refused", "stream", "unary", "echo", "tutorial"}, names(all)[:10])
	require.Len(t, names(all), len(all)+4)
	require.Equal(t, []string{"unary", "unary"}, names(all[2:3]))
	require.Equal(t, []string{"fsync"}, names(all[:1]))
	require.Empty(t, names(nil))
}

func TestResults_WhatARoundRecordsTwiceIsTheMean(t *testing.T) {
	r := newResults()
	r.begin()
	r.record("a", 1)
	r.record("a", 3)
	r.begin()
	r.record("a", 7)
	require.Equal(t, []float64{2, 7}, r.samples("a"))
	now, ok := r.now("a")
	require.True(t, ok)
	require.Equal(t, 7.0, now)
	_, ok = r.now("b")
	require.False(t, ok)
}

// One such reading would keep all the others out of results.json, which cannot
// hold it.
func TestResults_WhatIsNoNumberIsNoReading(t *testing.T) {
	r := newResults()
	r.begin()
	r.record("a", math.NaN())
	r.record("a", math.Inf(1))
	require.Empty(t, r.samples("a"))
	r.record("drain_per_second", 5)
	r.record("raw_insert_per_second", 0)
	for _, f := range figures() {
		require.Empty(t, r.figureSamples(f), f.name)
	}
}

func TestTutorial_IsANoteWhereThereIsNoRedisBenchmark(t *testing.T) {
	t.Setenv("PATH", "")
	b := newBench()
	b.rig = &rig{binaries: &devstack.Binaries{Redis: filepath.Join(t.TempDir(), "redis-server")}}
	require.NoError(t, measureTutorial(t.Context(), b))
	require.Len(t, b.unusual, 1)
	require.Contains(t, b.unusual[0], "redis-benchmark is neither beside")
}

func TestUnusually_CutsWhatAProcessPrinted(t *testing.T) {
	b := newBench()
	b.unusually("it ended\n%s", strings.Repeat("\u00e4", 100_000))
	require.Less(t, len(b.unusual[0]), 2*noteMost)
	require.True(t, utf8.ValidString(b.unusual[0]))
}

func TestUnusually_SaysOnceWhatEveryRoundSays(t *testing.T) {
	b := newBench()
	b.unusually("no %s", "redis-benchmark")
	b.unusually("no %s", "redis-benchmark")
	b.unusually("something else")
	require.Equal(t, []string{"no redis-benchmark", "something else"}, b.unusual)
}

// Redis may have given back more than an archived voucher left.
func TestPage_ShowsMemoryThatShrank(t *testing.T) {
	b := newBench()
	b.results.record("bytes_in_flight", 70)
	b.results.record("bytes_archived", -0.2)
	path := filepath.Join(t.TempDir(), "report.html")
	require.NoError(t, b.writePage(resultsJSON{}, path))
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Contains(t, string(page), "Bytes an order")
}

// The four figures, the fsync beside the ratios, and the tutorial's whole path.
func TestPage_ShowsTheFourFiguresApartAndTheDiskBesideTheRatios(t *testing.T) {
	b := newBench()
	for name, value := range map[string]float64{
		"refused_per_second": 600_001, "stream_strict_per_second": 150_002, "path_per_second": 77_003, "path_catchup_s": 0.304,
		"path_admitted_per_second": 82_004, "path_busy_per_second": 57_005, "fsync_p50_ms": 0.17, "fsync_p99_ms": 0.49,
		"stage_stream_per_second": 220, "stage_stream_admitted_per_second": 3_006, "stage_stream_catchup_s": 17,
	} {
		b.results.record(name, value)
	}
	path := filepath.Join(t.TempDir(), "report.html")
	require.NoError(t, b.writePage(resultsJSON{}, path))
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	for _, text := range []string{"600,001", "150,002", "77,003", "0.30 s", "82,004", "57,005", "3,006", "17.00 s", "an fsync took 0.17 ms here (p99 0.49 ms)"} {
		require.Contains(t, string(page), text)
	}
}

func TestReplace_KeepsTheOldFileWhereTheNewOneCannotBeWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "results.json")
	require.NoError(t, replace(path, []byte("old")))
	require.NoError(t, os.MkdirAll(filepath.Join(path+".new", "in the way"), 0o755))
	require.Error(t, replace(path, []byte("new")))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "old", string(text))
}

// A target that did not keep up has latencies of the queue before it, which say
// nothing of what it could do.
func TestCarries_IsFalseOfATargetThatDidNotKeepUp(t *testing.T) {
	result := func(change func(*load.Result)) *load.Result {
		r := &load.Result{Answers: map[string]int64{"admitted": 1000}, PerSecond: map[string]float64{"offered": 1000, "admitted": 990}}
		change(r)
		return r
	}
	require.True(t, carries(result(func(*load.Result) {})))
	require.False(t, carries(result(func(r *load.Result) { r.PerSecond["admitted"] = 940 })), "answers came after the end")
	require.False(t, carries(result(func(r *load.Result) { r.Dropped = 1 })))
	require.False(t, carries(result(func(r *load.Result) { r.WarmUp.Dropped = 1 })))
	require.False(t, carries(result(func(r *load.Result) { r.Answers["failed"] = 1 })))
}

func TestOrdersOfStage_AreFewerOnASlowDisk(t *testing.T) {
	b := newBench()
	require.Equal(t, b.stageFill, b.ordersOfStage(), "where fsync was not measured")
	for fsync, orders := range map[float64]int64{0.1: b.stageFill, 5: 500, 1000: 100} {
		b.results.begin()
		b.results.record("fsync_p50_ms", fsync)
		require.Equal(t, orders, b.ordersOfStage(), "fsync of %g ms", fsync)
	}
}

func TestAccounted_EveryAdmittedGrabIsARowAndABusyOneIsNone(t *testing.T) {
	b := newBench()
	result := &load.Result{Answers: map[string]int64{"admitted": 100, "failed": 12}, Reasons: map[string]int64{"OVERLOADED": 10, "DEADLINE_EXCEEDED": 2}}
	for rows, ok := range map[int64]bool{99: false, 100: true, 102: true, 103: false} {
		err := b.accounted(result, rows)
		require.Equal(t, ok, err == nil, "%d rows: %v", rows, err)
	}
	require.Len(t, b.unusual, 1)
	require.Contains(t, b.unusual[0], "DEADLINE_EXCEEDED")
}
