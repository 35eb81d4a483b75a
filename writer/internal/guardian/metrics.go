package guardian

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/seckill/seckill/pkg/ledger"
)

// metrics by partition. The sum of guardian over all writers is 1 for every
// partition; the backlog is the same from every writer.
type metrics struct {
	open, guardian, inFlight, oldest *prometheus.GaugeVec
	violations, closed               *prometheus.GaugeVec
	orphans                          prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) *prometheus.GaugeVec {
		return promauto.With(reg).NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "seckill", Subsystem: "partition", Name: name, Help: help,
		}, []string{"partition"})
	}
	return &metrics{
		orphans: promauto.With(reg).NewCounter(prometheus.CounterOpts{
			Namespace: "seckill", Subsystem: "guardian", Name: "orphan_entries_total",
			Help: "Entries that belonged to no consumer and were delivered again. Alert when it rises: somebody removes consumers by hand.",
		}),
		closed: promauto.With(reg).NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "seckill", Subsystem: "partition", Name: "closed_reason",
			Help: "1 for the kind of reason why a partition is closed, absent while it is open. /healthz and the log have the words.",
		}, []string{"partition", "reason"}),
		violations: promauto.With(reg).NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "seckill", Subsystem: "books", Name: "violations",
			Help: "Vouchers for which a rule does not hold, at the guardian's last look. Alert when above 0.",
		}, []string{"partition", "rule"}),
		open:     gauge("open", "1 while gateways may admit. Alert when 0."),
		guardian: gauge("guardian", "1 on the writer that is the partition's guardian."),
		inFlight: gauge("in_flight_orders", "Orders admitted and not settled: the backlog. The same from every writer: take the maximum."),
		oldest:   gauge("oldest_entry_seconds", "Age of the oldest entry that is not settled, 0 for none. The same from every writer: take the maximum."),
	}
}

// setViolations shows the rules that do not hold now, and only those.
func (m *metrics) setViolations(partition string, counts map[string]int) {
	m.violations.DeletePartialMatch(prometheus.Labels{"partition": partition})
	for rule, n := range counts {
		m.violations.WithLabelValues(partition, rule).Set(float64(n))
	}
}

// reasons are the kinds of reason by what the words begin with: a label has few
// values.
var reasons = []struct{ prefix, kind string }{
	{ledger.FaultPrefix, "fault"},
	{"books violated", "books_violated"},
	{"redis is not configured", "configuration"},
	{"redis restarted in fast", "fast_restart"},
	{"redis cannot be reached", "redis_unreachable"},
	{"the database cannot be reached", "database_unreachable"},
	{"the ledger is missing", "ledger_missing"},
	{"ledger is missing", "ledger_missing"},
	{"ledger is not proven", "not_proven"},
	{"created", "created"},
}

// setClosed shows why a partition is closed, "" where it is open.
func (m *metrics) setClosed(partition, reason string, open bool) {
	m.closed.DeletePartialMatch(prometheus.Labels{"partition": partition})
	if open {
		return
	}
	kind := "check_failed"
	for _, r := range reasons {
		if strings.HasPrefix(reason, r.prefix) {
			kind = r.kind
			break
		}
	}
	m.closed.WithLabelValues(partition, kind).Set(1)
}
