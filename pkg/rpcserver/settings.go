package rpcserver

import (
	"errors"
	"log/slog"
)

// Settings are the settings of a server that are the same for every binary, as
// flags of kong; binaries embed them with `embed:""`. Addresses, deadlines and
// the drain are each binary's own.
type Settings struct {
	// Reflection registers gRPC server reflection.
	Reflection bool `env:"SECKILL_REFLECTION" default:"true" negatable:"" help:"Serve gRPC reflection."`

	// TLSCertFile and TLSKeyFile switch TLS on; with TLSClientCAFile clients must
	// show a certificate signed by it. All are read again when they change.
	TLSCertFile     string `name:"tls-cert-file" env:"SECKILL_TLS_CERT_FILE" type:"path" placeholder:"FILE" help:"Certificate (PEM) of the API port; switches TLS on."`
	TLSKeyFile      string `name:"tls-key-file" env:"SECKILL_TLS_KEY_FILE" type:"path" placeholder:"FILE" help:"Its key (PEM)."`
	TLSClientCAFile string `name:"tls-client-ca-file" env:"SECKILL_TLS_CLIENT_CA_FILE" type:"path" placeholder:"FILE" help:"CA (PEM) that callers' certificates must come from; without it callers need none."`
}

// Check reports settings that contradict each other. It reads no file.
func (s Settings) Check() error {
	var problems []error
	if (s.TLSCertFile == "") != (s.TLSKeyFile == "") {
		problems = append(problems, errors.New("--tls-cert-file and --tls-key-file must be given together"))
	}
	if s.TLSClientCAFile != "" && s.TLSCertFile == "" {
		problems = append(problems, errors.New("--tls-client-ca-file needs --tls-cert-file"))
	}
	return errors.Join(problems...)
}

// CheckFiles reads the files as New would, where the settings fit each other.
func (s Settings) CheckFiles() error {
	if s.TLSCertFile == "" || s.Check() != nil {
		return nil
	}
	_, err := newTLS(s, slog.New(slog.DiscardHandler))
	return err
}
