package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/telemetry"
)

// checkCommand is check-config.
type checkCommand struct {
	settings `embed:""`
}

// Run prints the effective settings and everything that is wrong with them or
// with the files that they name. It connects to nothing and changes nothing.
func (c *checkCommand) Run(std streams) error {
	c.complete()
	for _, setting := range telemetry.Settings(c.settings) {
		fmt.Fprintf(std.out, "%s: %v\n", setting.Key, setting.Value)
	}
	problems := c.files()
	if err := c.check(); err != nil {
		problems = append([]error{err}, problems...)
	} else if _, err := c.server(slog.New(slog.DiscardHandler), nil); err != nil {
		problems = append(problems, err)
	}
	if len(problems) > 0 {
		return fmt.Errorf("the settings do not fit:\n%w", errors.Join(problems...))
	}
	fmt.Fprintln(std.out, "ok")
	return nil
}

// files reads every file that is named; those of the API port's TLS are read
// with its server.
func (c *checkCommand) files() (problems []error) {
	if c.OrderKeyFile != "" {
		if _, err := orderid.Load(c.OrderKeyFile); err != nil {
			problems = append(problems, err)
		}
	}
	for _, file := range []struct{ flag, path string }{
		{"--redis-password-file", c.Redis.PasswordFile},
		{"--redis-tls-ca-file", c.Redis.TLSCAFile},
		{"--redis-tls-cert-file", c.Redis.TLSCertFile},
		{"--redis-tls-key-file", c.Redis.TLSKeyFile},
	} {
		if file.path == "" {
			continue
		}
		if f, err := os.Open(file.path); err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", file.flag, err))
		} else {
			f.Close()
		}
	}
	return problems
}
