package main

import (
	"fmt"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/telemetry"
)

// checkCommand is check-config.
type checkCommand struct {
	settings `embed:""`
}

// Run prints the effective settings and everything that is wrong with them or
// with the files that they name. It connects to nothing and changes nothing.
func (c *checkCommand) Run(std command.Streams) error {
	c.complete()
	telemetry.WriteSettings(std.Out, c.settings)
	problems := c.check()
	if c.OrderKeyFile != "" {
		_, err := orderid.Load(c.OrderKeyFile)
		problems.Add(err)
	}
	problems.Add(c.Redis.CheckFiles(), c.Server.CheckFiles())
	command.WarnExposed(std.Out,
		command.SecretFile{Flag: "--order-key-file", Path: c.OrderKeyFile},
		command.SecretFile{Flag: "--redis-password-file", Path: c.Redis.PasswordFile},
		command.SecretFile{Flag: "--redis-tls-key-file", Path: c.Redis.TLSKeyFile},
		command.SecretFile{Flag: "--tls-key-file", Path: c.Server.TLSKeyFile})
	if err := problems.Err(); err != nil {
		return err
	}
	fmt.Fprintln(std.Out, "ok")
	return nil
}
