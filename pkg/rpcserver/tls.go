package rpcserver

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/seckill/seckill/pkg/telemetry"
)

// certificates holds the TLS configuration made of files that a renewal may
// replace at any time. Each handshake compares the files' stamps (a few
// microseconds beside the milliseconds of the handshake), so that there is no
// watcher to run and none to lose an event. While a renewal is half done, or
// broken, the last good configuration stays in use.
type certificates struct {
	certFile, keyFile, clientCAFile string
	log                             *slog.Logger

	mu      sync.Mutex
	stamp   stamp       // of the files that config was made of
	read    time.Time   // when they were last read
	refused stamp       // the last stamp that could not be loaded
	problem string      // why, as last logged
	config  *tls.Config // never changed, only replaced
}

// stampAge is how old files must be when they are read for their stamps to tell
// of any later change: file systems keep times in steps, of milliseconds up to
// two seconds, and what changes twice within a step looks unchanged.
const stampAge = 2 * time.Second

type stamp [3]fileStamp

type fileStamp struct {
	modified time.Time
	size     int64
}

func newTLS(s Settings, log *slog.Logger) (credentials.TransportCredentials, error) {
	c := &certificates{certFile: s.TLSCertFile, keyFile: s.TLSKeyFile, clientCAFile: s.TLSClientCAFile, log: log}
	c.read = time.Now()
	found, err := c.readStamp()
	if err == nil {
		c.config, err = c.load()
	}
	if err != nil {
		return nil, fmt.Errorf("loading rpc TLS files: %w", err)
	}
	c.stamp = found
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return c.current(), nil
		},
	}), nil
}

func (c *certificates) current() *tls.Config {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, err := c.readStamp()
	if err == nil && (s == c.stamp || s == c.refused) && s.newest().Add(stampAge).Before(c.read) {
		return c.config
	}
	c.read = time.Now()
	// The stamp is older than what load reads: if a file changes in between, the
	// next handshake sees another stamp and loads again.
	var config *tls.Config
	if err == nil {
		config, err = c.load()
	}
	if err != nil {
		if text := err.Error(); text != c.problem { // not once per handshake
			c.problem = text
			c.log.Error("rpc TLS files cannot be loaded, the old ones stay in use", telemetry.KeyErr, err)
		}
		c.refused = s
		return c.config
	}
	if s != c.stamp {
		c.log.Info("rpc TLS files loaded again")
	}
	c.stamp, c.refused, c.problem, c.config = s, stamp{}, "", config
	return c.config
}

func (s stamp) newest() (t time.Time) {
	for _, f := range s {
		if f.modified.After(t) {
			t = f.modified
		}
	}
	return t
}

func (c *certificates) readStamp() (s stamp, err error) {
	for i, name := range []string{c.certFile, c.keyFile, c.clientCAFile} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return stamp{}, err
		}
		s[i] = fileStamp{info.ModTime(), info.Size()}
	}
	return s, nil
}

func (c *certificates) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.certFile, c.keyFile)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{pair},
		NextProtos:   []string{"h2"},
	}
	if c.clientCAFile != "" {
		pem, err := os.ReadFile(c.clientCAFile)
		if err != nil {
			return nil, err
		}
		config.ClientCAs = x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s holds no certificate", c.clientCAFile)
		}
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return config, nil
}
