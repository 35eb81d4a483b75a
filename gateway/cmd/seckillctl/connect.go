package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

// connection says where the services are and how they are called.
type connection struct {
	Gateway string        `env:"SECKILL_GATEWAY" default:"127.0.0.1:7070" help:"Address of a gateway, for grab, get-order and load; load takes several, with commas between."`
	Writer  string        `env:"SECKILL_WRITER" default:"127.0.0.1:7071" help:"Address of a writer, for everything else."`
	Timeout time.Duration `env:"SECKILL_CTL_TIMEOUT" default:"10s" help:"Most time for one call, and for each page of a list however often it is asked for. Resolving dead letters by a filter takes as long as it takes."`
	Output  string        `env:"SECKILL_CTL_OUTPUT" enum:"text,json" default:"text" help:"Form of answers: text or json."`

	TLS           bool   `name:"tls" env:"SECKILL_CTL_TLS" help:"Speak TLS. So does each of the flags below."`
	TLSCAFile     string `name:"tls-ca-file" env:"SECKILL_CTL_TLS_CA_FILE" type:"path" placeholder:"FILE" help:"CA bundle (PEM) that the servers' certificates must come from; default is the system's."`
	TLSCertFile   string `name:"tls-cert-file" env:"SECKILL_CTL_TLS_CERT_FILE" type:"path" placeholder:"FILE" help:"Own certificate (PEM), where the servers want one."`
	TLSKeyFile    string `name:"tls-key-file" env:"SECKILL_CTL_TLS_KEY_FILE" type:"path" placeholder:"FILE" help:"Its key (PEM)."`
	TLSServerName string `name:"tls-server-name" env:"SECKILL_CTL_TLS_SERVER_NAME" placeholder:"NAME" help:"Name that the servers' certificates must hold; default is the host of the address."`
}

// Validate is called by kong.
func (c *connection) Validate() error {
	switch {
	case c.Timeout <= 0:
		return fmt.Errorf("--timeout %s: must be more than 0", c.Timeout)
	case (c.TLSCertFile == "") != (c.TLSKeyFile == ""):
		return errors.New("--tls-cert-file and --tls-key-file go together")
	}
	return nil
}

const (
	// pageTries is how often a page is asked for where a server is away for a
	// moment: a list of a million orders must not be lost to one of them. Whatever
	// is not a page is for its caller to repeat.
	pageTries = 5
	// The waits between two tries: some 3 s over all of them, and never beyond the
	// time of a call.
	firstRetry, longestRetry = 200 * time.Millisecond, 2 * time.Second
)

// server is one server and a connection to it.
type server struct {
	kind, addr string
	timeout    time.Duration
	conn       *grpc.ClientConn
}

func (c *connection) dial(kind, addr string) (*server, error) {
	creds, err := c.credentials()
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(addr,
		grpc.WithTransportCredentials(creds),
		// A server that vanished is noticed within 30 s also in a stream that has no
		// deadline.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 20 * time.Second, Timeout: 10 * time.Second}))
	if err != nil {
		return nil, fmt.Errorf("%s at %s: %w", kind, addr, err)
	}
	return &server{kind: kind, addr: addr, timeout: c.Timeout, conn: conn}, nil
}

func (c *connection) credentials() (credentials.TransportCredentials, error) {
	if !c.TLS && c.TLSCAFile == "" && c.TLSCertFile == "" && c.TLSServerName == "" {
		return insecure.NewCredentials(), nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.TLSServerName}
	if c.TLSCAFile != "" {
		pem, err := os.ReadFile(c.TLSCAFile)
		if err != nil {
			return nil, fmt.Errorf("reading --tls-ca-file: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("reading --tls-ca-file: %s holds no certificate", c.TLSCAFile)
		}
	}
	if c.TLSCertFile != "" {
		pair, err := tls.LoadX509KeyPair(c.TLSCertFile, c.TLSKeyFile)
		if err != nil {
			return nil, fmt.Errorf("reading --tls-cert-file and --tls-key-file: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}

func (s *server) close() { s.conn.Close() }

// call runs one call within its time and makes its error readable.
func call[Req, Resp any](ctx context.Context, s *server, method func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req) (Resp, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	resp, err := method(ctx, req)
	if err != nil {
		return resp, s.fault(err)
	}
	return resp, nil
}

// page is call for one page of a list. All its tries share the time of one call;
// a list of any length goes on as long as its pages come.
func page[Req, Resp any](ctx context.Context, s *server, method func(context.Context, Req, ...grpc.CallOption) (Resp, error), req Req) (Resp, error) {
	waits := backoff.NewExponentialBackOff()
	waits.InitialInterval, waits.MaxInterval, waits.Multiplier = firstRetry, longestRetry, 2
	bounded, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	var away error
	resp, err := backoff.Retry(bounded, func() (Resp, error) {
		resp, err := method(bounded, req)
		if err != nil && status.Code(err) != codes.Unavailable {
			return resp, backoff.Permanent(err)
		}
		away = err
		return resp, err
	}, backoff.WithBackOff(waits), backoff.WithMaxTries(pageTries))
	if errors.Is(err, context.DeadlineExceeded) && away != nil {
		err = away // the time ended between two tries; what the last one said tells more
	}
	if err != nil {
		return resp, s.fault(err)
	}
	return resp, nil
}

// withWriter runs what needs a writer.
func (c *connection) withWriter(do func(s *server, vouchers seckillv1.VoucherServiceClient, operators seckillv1.WriterServiceClient) error) error {
	s, err := c.dial("writer", c.Writer)
	if err != nil {
		return err
	}
	defer s.close()
	return do(s, seckillv1.NewVoucherServiceClient(s.conn), seckillv1.NewWriterServiceClient(s.conn))
}

// withGateway runs what needs a gateway.
func (c *connection) withGateway(do func(s *server, sale seckillv1.SeckillServiceClient) error) error {
	s, err := c.dial("gateway", c.Gateway)
	if err != nil {
		return err
	}
	defer s.close()
	return do(s, seckillv1.NewSeckillServiceClient(s.conn))
}
