package pipeline

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/seckill/seckill/writer/internal/orderstore"
)

// metrics of one writer. Orders per batch = persisted / transactions; a
// reclaimed order that rises without a writer having died means that batches
// outlast min idle.
type metrics struct {
	read, reclaimed, settled                              prometheus.Counter
	lostEntries, unknownVersions, held, released, noToken prometheus.Counter
	readErrors, transient, settleFaults, strangers        prometheus.Counter
	verdicts                                              [orderstore.Ended + 1]prometheus.Counter // by kind
	available, parked                                     prometheus.Gauge
	batch, transaction, admitToPersist                    prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer) *metrics {
	with := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return with.NewCounter(prometheus.CounterOpts{Namespace: "seckill", Subsystem: "writer", Name: name, Help: help})
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return with.NewHistogram(prometheus.HistogramOpts{Namespace: "seckill", Subsystem: "writer", Name: name, Help: help, Buckets: buckets})
	}
	m := &metrics{
		read:            counter("orders_read_total", "Orders delivered to this writer as new."),
		reclaimed:       counter("orders_reclaimed_total", "Orders taken over from consumers that let them lie."),
		settled:         counter("orders_settled_total", "Orders whose entries this writer acknowledged."),
		lostEntries:     counter("entries_lost_total", "Entries that were pending but no longer in the stream. Must stay 0."),
		unknownVersions: counter("entries_unknown_version_total", "Deliveries of entries of a version that this writer does not know and left pending. Alert when it rises: upgrade writers first."),
		held:            counter("dead_letters_total", "Orders and entries that this writer held as dead letters. Alert when it rises."),
		released:        counter("entries_released_total", "Entries that this writer handed back when it stopped."),
		noToken:         counter("entries_settled_before_total", "Entries that somebody else had settled first."),
		strangers:       counter("stranger_entries_total", "Entries that were acknowledged and not counted in full, since the stream carried one that was never admitted. Must stay 0."),
		readErrors:      counter("read_errors_total", "Failed reads and takeovers."),
		transient:       counter("transient_errors_total", "Transactions that the database could not decide and that ran again."),
		settleFaults:    counter("settle_faults_total", "Settlements that the ledger refused. Must stay 0."),
		available: with.NewGauge(prometheus.GaugeOpts{Namespace: "seckill", Subsystem: "writer", Name: "database_available",
			Help: "1 while this writer can write, 0 during an outage of the database. Alert when 0."}),
		parked: with.NewGauge(prometheus.GaugeOpts{Namespace: "seckill", Subsystem: "writer", Name: "parked_entries",
			Help: "Entries that are being tried apart since their voucher's row is locked or the database is slow. Alert when above 0 for long."}),
		batch: histogram("batch_orders", "Orders of one transaction.", []float64{1, 4, 16, 64, 128, 256, 512, 1024, 2048}),
		transaction: histogram("transaction_seconds", "Time of one transaction with its read-back.",
			[]float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5}),
		admitToPersist: histogram("admit_to_persist_seconds", "Time from an entry's admission, by the Redis clock, to its commit, by this writer's.",
			[]float64{.005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 300}),
	}
	verdicts := with.NewCounterVec(prometheus.CounterOpts{Namespace: "seckill", Subsystem: "writer", Name: "orders_total",
		Help: "Orders by verdict. All but persisted must stay 0 in a healthy sale."}, []string{"verdict"})
	// Every verdict is there from the start, so that the first one of a bad kind
	// is a rise.
	for kind := range orderstore.Ended + 1 {
		m.verdicts[kind] = verdicts.WithLabelValues(kind.String())
	}
	m.available.Set(1)
	return m
}
