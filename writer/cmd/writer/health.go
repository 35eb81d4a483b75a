package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/writer/internal/guardian"
)

// healthInterval is how often the servers are asked: what a load balancer or an
// operator sees is at most so old, and as much older as a server that hangs.
const healthInterval = time.Second

// Names of the parts that tell whether the two servers answer.
const (
	partDatabase = "database"
	partRedis    = "redis"
)

// working is what runs once both servers were reached.
type working struct {
	guardian interface {
		Status() []guardian.Status
		Health() []telemetry.Part
	}
	pipeline interface{ Health() []telemetry.Part }
}

// monitor knows what the process can do: it asks the servers and gathers what
// the parts say of themselves.
type monitor struct {
	server *rpcserver.Server

	mu      sync.Mutex
	servers []telemetry.Part // the database and redis, in this order
	working atomic.Pointer[working]
}

func newMonitor(server *rpcserver.Server) *monitor {
	m := &monitor{server: server, servers: []telemetry.Part{
		{Name: partDatabase, State: "connecting", Reason: "not reached yet"},
		{Name: partRedis, State: "waiting", Reason: "the database comes first"},
	}}
	m.publish()
	return m
}

// set notes whether a server answers.
func (m *monitor) set(name, state string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.servers {
		if m.servers[i].Name != name {
			continue
		}
		m.servers[i].State, m.servers[i].Serving, m.servers[i].Reason = state, err == nil, ""
		if err != nil {
			m.servers[i].Reason = err.Error()
		}
	}
}

// watch asks both servers until ctx ends, and publishes what follows.
func (m *monitor) watch(ctx context.Context, database, redis func(context.Context) error) error {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for {
		var asked sync.WaitGroup
		for name, ask := range map[string]func(context.Context) error{partDatabase: database, partRedis: redis} {
			asked.Go(func() {
				err := bounded(ctx, pingTimeout, ask)
				state := "answers"
				if err != nil {
					state = "unreachable"
				}
				m.set(name, state, err)
			})
		}
		asked.Wait()
		if ctx.Err() != nil {
			return nil
		}
		m.publish()
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// publish sets what grpc.health.v1 answers: the whole and both services serve
// while both servers answer, a partition while gateways may admit.
func (m *monitor) publish() {
	serving := m.report().Serving
	m.server.SetServing("", serving)
	m.server.SetServing(seckillv1.VoucherService_ServiceDesc.ServiceName, serving)
	m.server.SetServing(seckillv1.WriterService_ServiceDesc.ServiceName, serving)
	if w := m.working.Load(); w != nil {
		for _, p := range w.guardian.Status() {
			m.server.SetServing(rpcserver.PartitionService(p.Partition), p.Open)
		}
	}
}

// report is the answer of /healthz. A closed partition is shown, and is no
// reason to take the writer out: it is the writer that will open it.
func (m *monitor) report() telemetry.Health {
	m.mu.Lock()
	parts := append([]telemetry.Part(nil), m.servers...)
	m.mu.Unlock()
	h := telemetry.Health{Serving: true, Parts: parts}
	for _, p := range parts {
		h.Serving = h.Serving && p.Serving
	}
	w := m.working.Load()
	if w == nil {
		h.Serving = false
		return h
	}
	h.Parts = append(h.Parts, w.guardian.Health()...)
	for _, p := range w.pipeline.Health() {
		if p.Name != partDatabase {
			h.Parts = append(h.Parts, p)
			continue
		}
		// A database that answers and takes no batches is one part to whoever
		// reads this. It serves what else it can, so the whole is not out.
		if database := &h.Parts[0]; database.Serving && !p.Serving {
			*database = p
		}
	}
	return h
}
