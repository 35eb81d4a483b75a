package guardian

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics by partition. The sum of guardian over all writers is 1 for every
// partition; backlog figures come from the guardian only.
type metrics struct {
	open, guardian, inFlight, oldest *prometheus.GaugeVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	gauge := func(name, help string) *prometheus.GaugeVec {
		return promauto.With(reg).NewGaugeVec(prometheus.GaugeOpts{
			Namespace: "seckill", Subsystem: "partition", Name: name, Help: help,
		}, []string{"partition"})
	}
	return &metrics{
		open:     gauge("open", "1 while gateways may admit. Alert when 0."),
		guardian: gauge("guardian", "1 on the writer that is the partition's guardian."),
		inFlight: gauge("in_flight_orders", "Orders admitted and not settled: the backlog. From the guardian."),
		oldest:   gauge("oldest_entry_seconds", "Age of the oldest entry that is not settled, 0 for none. From the guardian."),
	}
}
