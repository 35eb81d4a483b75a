package main

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/guardian"
)

type told []telemetry.Part

func (t told) Health() []telemetry.Part { return t }

type toldByGuardian struct{ told }

func (toldByGuardian) Status() []guardian.Status { return nil }

// There is one database, whoever tells of it.
func TestReport_HasOnePartForTheDatabase(t *testing.T) {
	m := &monitor{servers: []telemetry.Part{{Name: partDatabase}, {Name: partRedis}}}
	m.set(partDatabase, "answers", nil)
	m.set(partRedis, "answers", nil)
	pipeline := told{{Name: "database", Serving: true, State: "available"}, {Name: "reader.0", Serving: true}}
	m.working.Store(&working{guardian: toldByGuardian{told{{Name: "partition.0", Serving: true}}}, pipeline: pipeline})
	names := func(h telemetry.Health) (names []string) {
		for _, p := range h.Parts {
			names = append(names, p.Name)
		}
		return names
	}
	all := []string{"database", "redis", "partition.0", "reader.0"}
	require.Equal(t, all, names(m.report()))
	require.Equal(t, telemetry.Part{Name: "database", Serving: true, State: "answers"}, m.report().Parts[0])

	pipeline[0] = telemetry.Part{Name: "database", State: "unavailable", Reason: "batches cannot be written"}
	h := m.report()
	require.Equal(t, all, names(h))
	require.Equal(t, pipeline[0], h.Parts[0])
	require.True(t, h.Serving, "it answers calls")

	m.set(partDatabase, "unreachable", errors.New("refused"))
	h = m.report()
	require.Equal(t, telemetry.Part{Name: "database", State: "unreachable", Reason: "refused"}, h.Parts[0])
	require.False(t, h.Serving)
}
