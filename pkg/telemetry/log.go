// Package telemetry is how a process shows what it does: its log, its metrics
// registry, and the admin HTTP listener.
package telemetry

import (
	"fmt"
	"io"
	"log/slog"
)

// LogSettings are the settings of a process' log, as flags of kong. Binaries
// embed them with `embed:"" prefix:"log-"`. Empty ones are the defaults.
type LogSettings struct {
	Format string `env:"SECKILL_LOG_FORMAT" enum:"json,text" default:"json" help:"Form of the log: json or text."`
	Level  string `env:"SECKILL_LOG_LEVEL" enum:"debug,info,warn,error" default:"info" help:"Least level that is logged: debug, info, warn or error."`
}

// Logger returns the logger of a process, which writes to w. A format or level
// that it does not know is an error.
func (s LogSettings) Logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if s.Level != "" {
		if err := level.UnmarshalText([]byte(s.Level)); err != nil {
			return nil, fmt.Errorf("log level %q is none of debug, info, warn, error: %w", s.Level, err)
		}
	}
	opts := &slog.HandlerOptions{Level: level}
	switch s.Format {
	case "", "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	default:
		return nil, fmt.Errorf("log format %q is neither json nor text", s.Format)
	}
}
