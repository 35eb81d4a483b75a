package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	adminReadHeaderTimeout = 5 * time.Second
	// A profile may ask for any number of seconds; pprof refuses those that do
	// not fit in here.
	adminWriteTimeout = 2 * time.Minute
	adminIdleTimeout  = time.Minute
	// A scrape that is under way may finish; a profile is cut off.
	adminShutdownTimeout = 2 * time.Second
	// Scrapes at once. More are a misconfigured scraper, and gathering costs CPU
	// that the sale needs.
	adminMaxScrapes    = 4
	adminScrapeTimeout = 10 * time.Second
)

// Health is what a process can do at this moment.
type Health struct {
	Serving bool   // the answer as a whole: 200 or 503
	Parts   []Part // in the order in which they are shown
}

// Part is one part of a process: a connection, a partition, a loop.
type Part struct {
	Name    string
	Serving bool
	State   string // one word, such as "open", "closed", "connecting"
	Reason  string // why it does not serve; empty where it does
}

// Admin serves metrics, health and profiles over HTTP on a listener of its own,
// so that they answer while the API port is drained or flooded. It knows no
// users: bind it where only operators and the scraper can reach it.
type Admin struct {
	addr     string
	log      *slog.Logger
	server   *http.Server
	listener net.Listener
}

// NewAdmin builds the admin server. It calls health once per request to
// /healthz, from any goroutine; it must answer at once, from memory. A nil
// logger discards.
func NewAdmin(addr string, reg *prometheus.Registry, health func() Health, log *slog.Logger) *Admin {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", index)
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{
		ErrorLog:            scrapeLog{log},
		ErrorHandling:       promhttp.ContinueOnError, // one broken collector must not blind the others
		Registry:            reg,
		MaxRequestsInFlight: adminMaxScrapes,
		Timeout:             adminScrapeTimeout,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeHealth(w, health()) })
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("POST /debug/pprof/symbol", pprof.Symbol) // as the pprof tool asks
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return &Admin{addr: addr, log: log, server: &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: adminReadHeaderTimeout,
		WriteTimeout:      adminWriteTimeout,
		IdleTimeout:       adminIdleTimeout,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}}
}

// Listen binds the address, so that Addr is known and a port in use is an error
// before anything else is started. Run calls it where the owner did not.
func (a *Admin) Listen() error {
	if a.listener != nil {
		return nil
	}
	l, err := net.Listen("tcp", a.addr)
	if err != nil {
		return fmt.Errorf("listening for admin on %s: %w", a.addr, err)
	}
	a.listener = l
	return nil
}

// Addr is the bound address, or the configured one before Listen.
func (a *Admin) Addr() string {
	if a.listener == nil {
		return a.addr
	}
	return a.listener.Addr().String()
}

// Run serves until ctx ends, gives running requests a short time, and returns
// nil. Give it a context that ends after the drain of the API, so that health
// and metrics can be watched during it.
func (a *Admin) Run(ctx context.Context) error {
	if err := a.Listen(); err != nil {
		return err
	}
	a.log.Info("serving admin", KeyAddr, a.Addr())
	served := make(chan error, 1)
	go func() { served <- a.server.Serve(a.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving admin on %s: %w", a.Addr(), err)
	case <-ctx.Done():
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), adminShutdownTimeout)
	defer cancel()
	if err := a.server.Shutdown(bounded); err != nil {
		a.log.Warn("admin requests cut off", KeyErr, err)
		if err := a.server.Close(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			a.log.Warn("closing admin", KeyErr, err)
		}
	}
	return nil
}

func index(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	io.WriteString(w, `<!doctype html><title>seckill admin</title><ul>
<li><a href="/healthz">/healthz</a> what this process can do, part by part; 200 or 503
<li><a href="/metrics">/metrics</a> for Prometheus
<li><a href="/debug/pprof/">/debug/pprof/</a> profiles
</ul>
`)
}

type healthBody struct {
	Status string     `json:"status"` // "serving" or "not_serving"
	Parts  []partBody `json:"parts"`
}

type partBody struct {
	Name    string `json:"name"`
	Serving bool   `json:"serving"`
	State   string `json:"state"`
	Reason  string `json:"reason,omitempty"`
}

func writeHealth(w http.ResponseWriter, h Health) {
	body := healthBody{Status: "not_serving", Parts: make([]partBody, 0, len(h.Parts))}
	code := http.StatusServiceUnavailable
	if h.Serving {
		body.Status, code = "serving", http.StatusOK
	}
	for _, p := range h.Parts {
		body.Parts = append(body.Parts, partBody(p))
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(code)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.Encode(body) // fails only where the caller has gone
}

type scrapeLog struct{ log *slog.Logger }

func (l scrapeLog) Println(v ...any) { l.log.Warn("gathering metrics", KeyErr, fmt.Sprint(v...)) }
