package telemetry

import (
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// NewRegistry returns a registry of its own (the global one is not used) with
// the collectors of the Go runtime and the process, and the gauge
// seckill_build_info, which is always 1 and carries service, version and Go
// version as labels.
func NewRegistry(service, version string) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: "seckill",
		Name:      "build_info",
		Help:      "Always 1; the labels say what is running.",
		ConstLabels: prometheus.Labels{
			"service": service, "version": version, "go_version": runtime.Version(),
		},
	})
	info.Set(1)
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		info,
	)
	return reg
}

// BuildVersion is the version of the running binary as the Go toolchain stamped
// it: the module's version, and the commit (with a "+dirty" mark) where it was
// built inside a checkout. It is "devel" where neither is known.
func BuildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	return versionOf(info)
}

func versionOf(info *debug.BuildInfo) string {
	version := strings.Trim(info.Main.Version, "()")
	if version == "" {
		version = "devel"
	}
	var revision, dirty string
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+dirty"
		}
	}
	// The toolchain's own pseudo-version names the commit already.
	if revision == "" || strings.Contains(version, revision) {
		return version
	}
	return version + "-" + revision + dirty
}
