package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/seckill/seckill/pkg/command"
	"github.com/seckill/seckill/pkg/orderid"
)

type keygenCommand struct {
	File string `arg:"" type:"path" help:"File to write; it must not exist."`
}

// Run writes a fresh key where no file is: a key that is overwritten makes every
// order id that was ever given unreadable.
func (c *keygenCommand) Run(std command.Streams) error {
	text := orderid.Generate()
	f, err := os.OpenFile(c.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("writing an order key: %s exists and is not overwritten", c.File)
	}
	if err != nil {
		return fmt.Errorf("writing an order key: %w", err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err != nil {
		// Half a key is worse than none.
		return fmt.Errorf("writing an order key: %w", errors.Join(err, os.Remove(c.File)))
	}
	codec, err := orderid.Load(c.File)
	if err != nil {
		return fmt.Errorf("reading the order key back: %w", err)
	}
	fmt.Fprintf(std.Out, "wrote %s (mode 0600)\norder key %d, fingerprint %s\n", c.File, codec.Current(), codec.Fingerprints()[codec.Current()])
	return nil
}
