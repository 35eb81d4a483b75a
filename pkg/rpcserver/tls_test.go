package rpcserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

// authority is a CA that signs certificates for 127.0.0.1.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "test CA"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return &authority{t, key, cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

func (a *authority) issue(name string) (cert, key []byte) {
	a.t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, &k.PublicKey, a.key)
	require.NoError(a.t, err)
	kder, err := x509.MarshalECPrivateKey(k)
	require.NoError(a.t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: kder})
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	// By rename, as certificate managers do; the new file has a new time.
	require.NoError(t, os.WriteFile(path+".new", data, 0o600))
	require.NoError(t, os.Rename(path+".new", path))
}

// shownName makes one TLS connection and returns the name in the certificate.
func shownName(t *testing.T, r *running, a *authority) string {
	t.Helper()
	conn, err := tls.Dial("tcp", r.Addr(), &tls.Config{RootCAs: a.pool(), NextProtos: []string{"h2"}})
	require.NoError(t, err)
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0].Subject.CommonName
}

func TestTLS_FollowsRenewedFilesAndKeepsTheOldWhereTheNewAreBroken(t *testing.T) {
	ca := newAuthority(t)
	dir := t.TempDir()
	o := Options{Settings: Settings{TLSCertFile: filepath.Join(dir, "tls.crt"), TLSKeyFile: filepath.Join(dir, "tls.key")}, DrainTimeout: time.Second}
	cert1, key1 := ca.issue("first")
	write(t, o.TLSCertFile, cert1)
	write(t, o.TLSKeyFile, key1)
	r := start(t, o, &service{})
	c := testpb.NewTestServiceClient(r.dial(credentials.NewTLS(&tls.Config{RootCAs: ca.pool()})))
	_, err := c.EmptyCall(context.Background(), &testpb.Empty{})
	require.NoError(t, err)
	require.Equal(t, "first", shownName(t, r, ca))

	cert2, key2 := ca.issue("second")
	write(t, o.TLSCertFile, cert2) // half of the renewal: the pair does not match
	require.Equal(t, "first", shownName(t, r, ca))
	require.Equal(t, "first", shownName(t, r, ca))
	require.Equal(t, 1, strings.Count(r.log.String(), "cannot be loaded"), "logged once")
	write(t, o.TLSKeyFile, key2)
	require.Equal(t, "second", shownName(t, r, ca))

	require.NoError(t, os.Remove(o.TLSKeyFile))
	require.Equal(t, "second", shownName(t, r, ca))
	require.Equal(t, "second", shownName(t, r, ca))
	require.Equal(t, 1, strings.Count(r.log.String(), "no such file"), "logged once")
	write(t, o.TLSKeyFile, key2)
	require.Equal(t, "second", shownName(t, r, ca))

	_, err = r.client().EmptyCall(context.Background(), &testpb.Empty{})
	require.Equal(t, codes.Unavailable, status.Code(err), "plain text is refused")
}

func TestTLS_WantsAClientCertificateOfTheCurrentCA(t *testing.T) {
	serverCA, firstCA, secondCA := newAuthority(t), newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	o := Options{Settings: Settings{
		TLSCertFile: filepath.Join(dir, "tls.crt"), TLSKeyFile: filepath.Join(dir, "tls.key"),
		TLSClientCAFile: filepath.Join(dir, "ca.crt"),
	}, DrainTimeout: time.Second}
	cert, key := serverCA.issue("server")
	write(t, o.TLSCertFile, cert)
	write(t, o.TLSKeyFile, key)
	write(t, o.TLSClientCAFile, firstCA.pem)
	r := start(t, o, &service{})

	call := func(clientCA *authority) error {
		config := &tls.Config{RootCAs: serverCA.pool()}
		if clientCA != nil {
			pair, err := tls.X509KeyPair(clientCA.issue("client"))
			require.NoError(t, err)
			config.Certificates = []tls.Certificate{pair}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, err := testpb.NewTestServiceClient(r.dial(credentials.NewTLS(config))).EmptyCall(ctx, &testpb.Empty{})
		return err
	}
	require.NoError(t, call(firstCA))
	require.Error(t, call(nil))
	require.Error(t, call(secondCA))

	write(t, o.TLSClientCAFile, secondCA.pem)
	require.NoError(t, call(secondCA))
	require.Error(t, call(firstCA))
}

func TestSettings_CheckFilesReadsWhatNewWouldRead(t *testing.T) {
	dir := t.TempDir()
	cert, key := newAuthority(t).issue("server")
	s := Settings{TLSCertFile: filepath.Join(dir, "tls.crt"), TLSKeyFile: filepath.Join(dir, "tls.key")}
	require.ErrorContains(t, s.CheckFiles(), "no such file")
	write(t, s.TLSCertFile, cert)
	write(t, s.TLSKeyFile, key)
	require.NoError(t, s.CheckFiles())
	s.TLSClientCAFile = s.TLSKeyFile
	require.ErrorContains(t, s.CheckFiles(), "holds no certificate")

	require.NoError(t, Settings{}.CheckFiles())
	half := Settings{TLSCertFile: "absent", TLSClientCAFile: "absent"}
	require.NoError(t, half.CheckFiles(), "Check names it")
	require.ErrorContains(t, half.Check(), "--tls-key-file")
	require.ErrorContains(t, Settings{TLSClientCAFile: "x"}.Check(), "--tls-client-ca-file needs")
}
