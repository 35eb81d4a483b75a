// Package redisconn makes the Redis clients of the gateway and the writer from
// their settings.
package redisconn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/redis/rueidis"
)

// Kind is what a client is for. A blocking read holds its connection until the
// server answers, so blocking reads and scripts never share a client.
type Kind int

const (
	// Calls multiplexes concurrent commands over a few connections: scripts and
	// reads of the gateway and of the guardian.
	Calls Kind = iota
	// Blocking gives each blocking read (XREADGROUP BLOCK) a connection of its
	// own, up to BlockingPoolSize of them.
	Blocking
)

// String returns the name of the kind, as it appears in CLIENT LIST.
func (k Kind) String() string {
	if k == Blocking {
		return "blocking"
	}
	return "calls"
}

const (
	dialTimeout = time.Second
	// TCP keep-alive and the interval of rueidis' own PINGs. A peer that is
	// silent is given up after about 2 x keepAlive + writeTimeout.
	keepAlive = time.Second
	// No answer to a write or PING for that long closes the connection. Blocking
	// commands are exempt: those need a context that outlives their BLOCK.
	writeTimeout = 2 * time.Second
	// Connections of a Calls client that carry a command for itself: a DoMulti
	// with WAIT, a dedicated client. More callers than that wait for one.
	callsPoolSize = 64
	// maxPasswordBytes bounds what is read of the password file, which may be
	// some other path by mistake.
	maxPasswordBytes = 4 << 10
)

// Options are the settings of a connection to Redis, as flags of kong. Both
// binaries embed them with `embed:"" prefix:"redis-"`; the names of the
// environment variables are complete, so no envprefix may be added.
type Options struct {
	Addr          string `name:"addr" env:"SECKILL_REDIS_ADDR" default:"127.0.0.1:6379" help:"HOST:PORT of the Redis server (any node of a Redis Cluster)."`
	Username      string `name:"username" env:"SECKILL_REDIS_USERNAME" help:"ACL user; empty is the default user of Redis."`
	PasswordFile  string `name:"password-file" env:"SECKILL_REDIS_PASSWORD_FILE" type:"path" placeholder:"FILE" help:"File with the password; read again at every new connection."`
	TLS           bool   `name:"tls" env:"SECKILL_REDIS_TLS" help:"Speak TLS to Redis."`
	TLSCAFile     string `name:"tls-ca-file" env:"SECKILL_REDIS_TLS_CA_FILE" type:"path" placeholder:"FILE" help:"CA bundle (PEM) that the server's certificate must come from; default is the system's."`
	TLSCertFile   string `name:"tls-cert-file" env:"SECKILL_REDIS_TLS_CERT_FILE" type:"path" placeholder:"FILE" help:"Client certificate (PEM), where Redis wants one."`
	TLSKeyFile    string `name:"tls-key-file" env:"SECKILL_REDIS_TLS_KEY_FILE" type:"path" placeholder:"FILE" help:"Key of the client certificate (PEM)."`
	TLSServerName string `name:"tls-server-name" env:"SECKILL_REDIS_TLS_SERVER_NAME" placeholder:"NAME" help:"Name that the server's certificate must hold; default is the host of the address."`
	ClientName    string `name:"client-name" env:"SECKILL_REDIS_CLIENT_NAME" placeholder:"NAME" help:"Name shown by CLIENT LIST, followed by the kind of client; default is the binary's."`
	Cluster       bool   `name:"cluster" env:"SECKILL_REDIS_CLUSTER" help:"The server is a Redis Cluster."`

	// BlockingPoolSize is how many blocking reads a Blocking client can have in
	// flight. The owner derives it from its partitions; it is no flag.
	BlockingPoolSize int `kong:"-"`
}

// Validate reports settings that contradict each other. It reads no file and
// opens no connection.
func (o Options) Validate() error {
	if _, _, err := net.SplitHostPort(o.Addr); err != nil {
		return fmt.Errorf("redis address %q is not HOST:PORT: %w", o.Addr, err)
	}
	if !o.TLS && (o.TLSCAFile != "" || o.TLSCertFile != "" || o.TLSKeyFile != "" || o.TLSServerName != "") {
		return errors.New("redis TLS settings are given, but TLS is off: add --redis-tls")
	}
	if (o.TLSCertFile == "") != (o.TLSKeyFile == "") {
		return errors.New("--redis-tls-cert-file and --redis-tls-key-file must be given together")
	}
	if o.Username != "" && o.PasswordFile == "" {
		return errors.New("--redis-username needs --redis-password-file")
	}
	for _, r := range o.ClientName {
		if r <= ' ' || r > '~' {
			return fmt.Errorf("redis client name %q holds a space or a character that Redis refuses in it", o.ClientName)
		}
	}
	return nil
}

// CheckFiles reports files that are named and cannot be opened.
func (o Options) CheckFiles() error {
	var problems []error
	for _, file := range []struct{ flag, path string }{
		{"--redis-password-file", o.PasswordFile},
		{"--redis-tls-ca-file", o.TLSCAFile},
		{"--redis-tls-cert-file", o.TLSCertFile},
		{"--redis-tls-key-file", o.TLSKeyFile},
	} {
		if file.path == "" {
			continue
		}
		f, err := os.Open(file.path)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", file.flag, err))
			continue
		}
		f.Close()
	}
	return errors.Join(problems...)
}

// Client connects once and answers within a few seconds; it is an error where
// the server is down, refuses the user, or is not trusted. The client that it
// returns connects again by itself: then a command fails while the server is
// away. A server that is still loading its data can be connected to, its
// commands answer LOADING.
//
// Nothing is retried behind the caller's back: rueidis would repeat reads for
// ever, and whether a script may run again is the caller's decision.
func (o Options) Client(kind Kind) (rueidis.Client, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if kind == Blocking && o.BlockingPoolSize <= 0 {
		return nil, errNoPoolSize
	}
	client, err := rueidis.NewClient(o.clientOption(kind))
	if err != nil {
		// With ForceSingleClient rueidis returns a live client beside the error.
		if client != nil {
			client.Close()
		}
		return nil, o.describe(err)
	}
	return client, nil
}

func (o Options) clientOption(kind Kind) rueidis.ClientOption {
	opt := rueidis.ClientOption{
		InitAddress:       []string{o.Addr},
		AuthCredentialsFn: o.credentials,
		Dialer:            net.Dialer{Timeout: dialTimeout, KeepAlive: keepAlive},
		ConnWriteTimeout:  writeTimeout,
		// Client-side caching is not used, and would reserve 128 MiB a connection.
		DisableCache: true,
		DisableRetry: true,
		// Without it rueidis asks CLUSTER first and decides by the answer.
		ForceSingleClient: !o.Cluster,
		// ConnLifetime stays unset: when a connection's time is over, rueidis sends
		// the writes in flight on it a second time.
		BlockingPoolSize: callsPoolSize,
	}
	if o.ClientName != "" {
		opt.ClientName = o.ClientName + "-" + kind.String()
	}
	if kind == Blocking {
		opt.BlockingPoolSize = o.BlockingPoolSize
		opt.PipelineMultiplex = -1 // one connection for what does not block: its reads are all that matters here
	}
	if o.TLS {
		// Made anew for each connection, so that renewed files are followed.
		opt.DialCtxFn = func(ctx context.Context, addr string, dialer *net.Dialer, _ *tls.Config) (net.Conn, error) {
			config, err := o.tlsConfig()
			if err != nil {
				return nil, err
			}
			return (&tls.Dialer{NetDialer: dialer, Config: config}).DialContext(ctx, "tcp", addr)
		}
	}
	return opt
}
