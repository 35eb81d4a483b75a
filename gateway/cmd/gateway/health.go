package main

import (
	"strconv"
	"sync"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/pkg/rpcserver"
	"github.com/seckill/seckill/pkg/telemetry"
)

// health says what the gateway can do: over gRPC as a whole (""), for
// SeckillService and for each partition ("seckill.partition.<p>"), and over
// HTTP with state and reason. A gateway serves if Redis answers and at least one
// partition is open.
type health struct {
	server *rpcserver.Server

	mu      sync.Mutex
	serving bool
	parts   []telemetry.Part
}

func newHealth(server *rpcserver.Server) *health {
	h := &health{server: server}
	h.waiting("starting", "")
	return h
}

// waiting says that nothing can be served and why.
func (h *health) waiting(state, reason string) {
	h.set(false, []telemetry.Part{{Name: "redis", State: state, Reason: reason}})
}

// update takes in a look at the partitions.
func (h *health) update(all []admit.Status) {
	open, reachable := 0, 0
	var reason string
	parts := make([]telemetry.Part, 1, 1+len(all))
	for _, s := range all {
		serving := s.State == admit.StateOpen
		if serving {
			open++
		}
		if s.State == admit.StateUnreachable || s.State == admit.StateUnknown {
			reason = s.Reason
		} else {
			reachable++
		}
		parts = append(parts, telemetry.Part{Name: "partition." + strconv.Itoa(s.Partition), Serving: serving, State: string(s.State), Reason: s.Reason})
		h.server.SetServing(rpcserver.PartitionService(s.Partition), serving)
	}
	parts[0] = telemetry.Part{Name: "redis", Serving: reachable > 0, State: "connected"}
	if reachable == 0 {
		parts[0].State, parts[0].Reason = "unreachable", reason
	}
	h.set(open > 0, parts)
}

func (h *health) set(serving bool, parts []telemetry.Part) {
	h.mu.Lock()
	h.serving, h.parts = serving, parts
	h.mu.Unlock()
	h.server.SetServing("", serving)
	h.server.SetServing(seckillv1.SeckillService_ServiceDesc.ServiceName, serving)
}

// report is what /healthz shows.
func (h *health) report() telemetry.Health {
	h.mu.Lock()
	defer h.mu.Unlock()
	return telemetry.Health{Serving: h.serving, Parts: h.parts}
}
