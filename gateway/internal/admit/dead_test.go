package admit

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
)

// deadClient is a client of a server that is down: every call fails with the
// error that rueidis brings for it.
type deadClient struct{ rueidis.Client }

var dead = sync.OnceValue(func() rueidis.Client {
	client, _ := rueidis.NewClient(rueidis.ClientOption{
		InitAddress: []string{"127.0.0.1:1"}, DisableCache: true, DisableRetry: true, ForceSingleClient: true,
		DialCtxFn: func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error) { return nil, io.EOF },
	})
	return client
})

func (deadClient) B() rueidis.Builder { return dead().B() }

func (deadClient) Do(ctx context.Context, cmd rueidis.Completed) rueidis.RedisResult {
	return dead().Do(ctx, cmd)
}

func TestDeadClient_IsDead(t *testing.T) {
	require.Error(t, deadClient{}.Do(context.Background(), deadClient{}.B().Ping().Build()).Error())
}
