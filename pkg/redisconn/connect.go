package redisconn

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/retry"
	"github.com/seckill/seckill/pkg/telemetry"
)

// Connect calls Client until it succeeds, with exponential backoff and jitter,
// so that a binary can start, report what is missing, and begin to serve when
// Redis appears. Also a wrong password and a missing file are tried again: both
// can be repaired from outside. Only contradicting settings end it at once.
//
// One attempt in 1, 2, 4, 8, ... is logged, and each that fails in a new way. It
// returns when ctx ends, or, where an attempt is under way, within the few
// seconds that bound that one; the error then holds the last failure.
func (o Options) Connect(ctx context.Context, kind Kind, log *slog.Logger) (rueidis.Client, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if kind == Blocking && o.BlockingPoolSize <= 0 {
		return nil, errNoPoolSize
	}
	attempt := 0
	client, err := retry.Until(ctx, log.With(telemetry.KeyAddr, o.Addr), "redis cannot be connected to, trying again", func() (rueidis.Client, error) {
		attempt++
		return o.Client(kind)
	})
	if err != nil {
		return nil, fmt.Errorf("connecting to redis: %w", err)
	}
	log.Info("redis connected", telemetry.KeyAddr, o.Addr, "kind", kind.String(), telemetry.KeyAttempt, attempt)
	return client, nil
}

var errNoPoolSize = errors.New("a blocking redis client needs BlockingPoolSize")

// credentials runs for every connection that is made, so that a new password is
// in use from the next one on.
func (o Options) credentials(rueidis.AuthCredentialsContext) (rueidis.AuthCredentials, error) {
	if o.PasswordFile == "" {
		return rueidis.AuthCredentials{}, nil
	}
	f, err := os.Open(o.PasswordFile)
	if err != nil {
		return rueidis.AuthCredentials{}, fmt.Errorf("reading redis password file: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxPasswordBytes+1))
	switch {
	case err != nil:
		return rueidis.AuthCredentials{}, fmt.Errorf("reading redis password file: %w", err)
	case len(text) > maxPasswordBytes:
		return rueidis.AuthCredentials{}, fmt.Errorf("redis password file %s is longer than %d bytes", o.PasswordFile, maxPasswordBytes)
	}
	// Editors and echo end a file with a newline; it is no part of the password.
	password := strings.TrimRight(string(text), "\r\n")
	if password == "" {
		return rueidis.AuthCredentials{}, fmt.Errorf("redis password file %s is empty", o.PasswordFile)
	}
	return rueidis.AuthCredentials{Username: o.Username, Password: password}, nil
}

func (o Options) tlsConfig() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: o.TLSServerName}
	if o.TLSCAFile != "" {
		pem, err := os.ReadFile(o.TLSCAFile)
		if err != nil {
			return nil, fmt.Errorf("reading redis TLS CA file: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("redis TLS CA file %s holds no certificate", o.TLSCAFile)
		}
	}
	if o.TLSCertFile != "" {
		pair, err := tls.LoadX509KeyPair(o.TLSCertFile, o.TLSKeyFile)
		if err != nil {
			return nil, fmt.Errorf("reading redis TLS client certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// describe adds to an error of connecting what an operator should look at.
func (o Options) describe(err error) error {
	user := o.Username
	if user == "" {
		user = "default"
	}
	hint := ""
	var reply *rueidis.RedisError
	var record tls.RecordHeaderError
	var dial *net.OpError
	var untrusted *tls.CertificateVerificationError
	switch {
	case errors.As(err, &reply) && strings.HasPrefix(reply.Error(), "WRONGPASS"):
		hint = fmt.Sprintf("redis refused user %q or its password: check --redis-username and the content of --redis-password-file", user)
	case errors.As(err, &reply) && strings.HasPrefix(reply.Error(), "NOAUTH"):
		hint = "redis wants a password: give --redis-password-file"
	case errors.As(err, &reply) && strings.HasPrefix(reply.Error(), "NOPERM"):
		hint = fmt.Sprintf("the ACL of redis user %q does not allow what a connection needs", user)
	case errors.As(err, &untrusted):
		hint = "the certificate of redis is not trusted: check --redis-tls-ca-file and --redis-tls-server-name"
	case errors.As(err, &record):
		hint = "this port does not speak TLS: check --redis-tls and the port"
	case o.TLS && errors.Is(err, context.DeadlineExceeded) && !(errors.As(err, &dial) && dial.Op == "dial"):
		// A plain port of Redis takes the handshake for the begin of a command and
		// waits for the rest.
		hint = "no answer to the TLS handshake; if this port does not speak TLS, check --redis-tls and the port"
	case !o.TLS && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
		hint = "redis closed the connection at once: does this port want --redis-tls?"
	}
	if hint == "" {
		return fmt.Errorf("connecting to redis at %s: %w", o.Addr, err)
	}
	return fmt.Errorf("connecting to redis at %s: %s: %w", o.Addr, hint, err)
}
