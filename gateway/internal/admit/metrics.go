package admit

import (
	"context"
	"errors"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
)

const (
	keyPartition = telemetry.KeyPartition
	keyEpoch     = telemetry.KeyEpoch
	keyState     = telemetry.KeyState
	keyReason    = telemetry.KeyReason
)

// metrics of admission. Counters of single outcomes are looked up once: a sale
// answers nearly everybody with the same one.
type metrics struct {
	outcomes    [ledger.DecisionPaused + 1]prometheus.Counter // by decision
	replayed    prometheus.Counter
	errors      []errorCounter
	other       prometheus.Counter
	batchSize   prometheus.Histogram
	grabTime    prometheus.Histogram
	scriptTime  prometheus.Histogram
	unknownRuns prometheus.Counter
	faults      *prometheus.CounterVec
}

type errorCounter struct {
	err     error
	counter prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, a *Admitter) (*metrics, error) {
	const namespace, subsystem = "seckill", "gateway"
	grabs := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem,
		Name: "grabs_total", Help: "Grabs answered, by outcome."}, []string{"outcome"})
	m := &metrics{
		batchSize: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Subsystem: subsystem,
			Name: "batch_grabs", Help: "Grabs that left for the ledger in one batch.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 9)}),
		grabTime: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Subsystem: subsystem,
			Name: "grab_seconds", Help: "Time from a Grab's coming in, by a call or a stream, to its answer.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5}}),
		scriptTime: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Subsystem: subsystem,
			Name: "script_seconds", Help: "Time from sending an admission call to its answer or its loss.",
			Buckets: []float64{.0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1}}),
		unknownRuns: prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem,
			Name: "unknown_runs_total", Help: "Admission calls whose answer was lost."}),
		faults: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem,
			Name: "faults_total", Help: "Calls that failed by Redis or the ledger, by kind."}, []string{"kind"}),
	}
	waiting := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem,
		Name: "grabs_waiting", Help: "Grabs that have no answer yet."},
		func() float64 { return float64(a.waiting.Load()) })
	inFlight := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem,
		Name: "batches_in_flight", Help: "Batches on their way to the ledger."},
		func() float64 { return float64(len(a.inFlight)) })
	open := &partitionCollector{admitter: a, desc: prometheus.NewDesc(namespace+"_"+subsystem+"_partition_open",
		"1 where the partition admits, as far as this gateway knows.", []string{"partition"}, nil)}

	for decision, name := range map[ledger.Decision]string{
		ledger.DecisionAdmitted: "admitted", ledger.DecisionSoldOut: "sold_out", ledger.DecisionNotStarted: "not_started",
		ledger.DecisionEnded: "ended", ledger.DecisionPaused: "paused",
	} {
		m.outcomes[decision] = grabs.WithLabelValues(name)
	}
	m.replayed = grabs.WithLabelValues("replayed")
	for _, e := range []struct {
		err  error
		name string
	}{
		{ErrOverloaded, "overloaded"}, {ErrBusy, "busy"}, {ErrVoucherNotFound, "voucher_not_found"},
		{ErrVoucherArchived, "voucher_archived"}, {ErrClosed, "closed"}, {ErrScriptVersion, "script_version"},
		{ErrRedisUnreachable, "redis_unreachable"}, {ErrLedgerFault, "ledger_fault"}, {ErrOutcomeUnknown, "outcome_unknown"},
		{ErrClosing, "shutting_down"}, {context.Canceled, "caller_gone"}, {context.DeadlineExceeded, "deadline_past"},
	} {
		m.errors = append(m.errors, errorCounter{e.err, grabs.WithLabelValues(e.name)})
	}
	m.other = grabs.WithLabelValues("other")
	if reg == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{grabs, m.batchSize, m.grabTime, m.scriptTime, m.unknownRuns, m.faults, waiting, inFlight, open} {
		if err := reg.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// answerCounts counts the answers of a batch, so that counters are touched once.
type answerCounts struct {
	decisions [ledger.DecisionPaused + 1]int
	replayed  int
}

func (c *answerCounts) add(m *metrics, result *Result, err error) {
	switch {
	case err != nil:
		m.failed(err, 1)
	case result.Replayed:
		c.replayed++
	default:
		c.decisions[result.Decision]++
	}
}

func (m *metrics) decided(c *answerCounts) {
	for decision, n := range c.decisions {
		if n > 0 {
			m.outcomes[decision].Add(float64(n))
		}
	}
	if c.replayed > 0 {
		m.replayed.Add(float64(c.replayed))
	}
}

// failed counts Grabs that end with an error.
func (m *metrics) failed(err error, n int) {
	for _, e := range m.errors {
		if errors.Is(err, e.err) {
			e.counter.Add(float64(n))
			return
		}
	}
	m.other.Add(float64(n))
}

// partitionCollector shows the states of partitions at the time of a scrape.
type partitionCollector struct {
	admitter *Admitter
	desc     *prometheus.Desc
}

func (c *partitionCollector) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

func (c *partitionCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c.admitter.Status() {
		value := 0.0
		if s.State == StateOpen {
			value = 1
		}
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, value, strconv.Itoa(s.Partition))
	}
}
