// Package telemetry is how a process shows what it does: its log, its metrics
// registry, and the admin HTTP listener.
package telemetry

import (
	"fmt"
	"io"
	"log/slog"
	"os"
)

// LogOptions configures NewLogger.
type LogOptions struct {
	Format string    // "json" (default) or "text"
	Level  string    // debug, info (default), warn, error, or such as "info+2"
	Writer io.Writer // default: standard error
}

// NewLogger returns the logger of a process. A format or level that it does not
// know is an error.
func NewLogger(o LogOptions) (*slog.Logger, error) {
	var level slog.Level
	if o.Level != "" {
		if err := level.UnmarshalText([]byte(o.Level)); err != nil {
			return nil, fmt.Errorf("log level %q is none of debug, info, warn, error: %w", o.Level, err)
		}
	}
	w := o.Writer
	if w == nil {
		w = os.Stderr
	}
	opts := &slog.HandlerOptions{Level: level}
	switch o.Format {
	case "", "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	default:
		return nil, fmt.Errorf("log format %q is neither json nor text", o.Format)
	}
}
