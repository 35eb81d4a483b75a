package load

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gateway answers as a test tells it, over both ways.
type gateway struct {
	seckillv1.UnimplementedSeckillServiceServer
	// grab decides. An error in a stream must be a *seckillv1.GrabError's.
	grab func(ctx context.Context, userID int64) (*seckillv1.GrabResponse, error)
	// streamed decides a message of a stream; default is grab for each, in reverse.
	streamed func(ctx context.Context, message int, grabs []*seckillv1.StreamedGrab) ([]*seckillv1.StreamedAnswer, error)

	silent bool // notes nobody

	mu       sync.Mutex
	users    map[int64]int // clicks of each
	messages atomic.Int64
	streams  atomic.Int64
}

func (g *gateway) note(userID int64) {
	if g.silent {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.users[userID]++
}

func (g *gateway) clicks() map[int64]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	clicks := map[int64]int{}
	for user, n := range g.users {
		clicks[user] = n
	}
	return clicks
}

func (g *gateway) Grab(ctx context.Context, r *seckillv1.GrabRequest) (*seckillv1.GrabResponse, error) {
	g.note(r.GetUserId())
	return g.grab(ctx, r.GetUserId())
}

// refused is a GrabError as an error.
type refused struct{ *seckillv1.GrabError }

func (r refused) Error() string { return r.GetMessage() }

func (g *gateway) GrabStream(s grpc.BidiStreamingServer[seckillv1.GrabStreamRequest, seckillv1.GrabStreamResponse]) error {
	g.streams.Add(1)
	for message := 0; ; message++ {
		req, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		g.messages.Add(1)
		for _, grab := range req.GetGrabs() {
			g.note(grab.GetUserId())
		}
		decide := g.streamed
		if decide == nil {
			decide = g.decide
		}
		answers, err := decide(s.Context(), message, req.GetGrabs())
		if err != nil {
			return err
		}
		if err := s.Send(&seckillv1.GrabStreamResponse{Answers: answers}); err != nil {
			return err
		}
	}
}

func (g *gateway) decide(ctx context.Context, _ int, grabs []*seckillv1.StreamedGrab) (answers []*seckillv1.StreamedAnswer, _ error) {
	for i := len(grabs) - 1; i >= 0; i-- {
		answer := &seckillv1.StreamedAnswer{CorrelationId: grabs[i].GetCorrelationId()}
		resp, err := g.grab(ctx, grabs[i].GetUserId())
		var r refused
		if errors.As(err, &r) {
			answer.Result = &seckillv1.StreamedAnswer_Error{Error: r.GrabError}
		} else {
			answer.Result = &seckillv1.StreamedAnswer_Response{Response: resp}
		}
		answers = append(answers, answer)
	}
	return answers, nil
}

func admitted() *seckillv1.GrabResponse {
	return &seckillv1.GrabResponse{Outcome: seckillv1.Outcome_OUTCOME_ADMITTED}
}

func admit(context.Context, int64) (*seckillv1.GrabResponse, error) { return admitted(), nil }

// serve serves g until the test ends and connects to it.
func serve(t testing.TB, g *gateway) []*grpc.ClientConn {
	t.Helper()
	g.users = map[int64]int{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	seckillv1.RegisterSeckillServiceServer(server, g)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(); server.Stop(); require.NoError(t, <-served) })
	return []*grpc.ClientConn{conn}
}

// patience is longer than anything takes on a machine that is busy.
const patience = 30 * time.Second

func unary(t testing.TB, g *gateway) Caller {
	t.Helper()
	target, err := NewUnary(serve(t, g), patience)
	require.NoError(t, err)
	return target
}

func streams(t testing.TB, g *gateway, opt StreamOptions) Pipes {
	t.Helper()
	target, err := NewStreams(serve(t, g), opt)
	require.NoError(t, err)
	return target
}

// each runs a test over both ways.
func each(t *testing.T, g func() *gateway, do func(t *testing.T, g *gateway, target Target)) {
	t.Helper()
	t.Run("unary", func(t *testing.T) { g := g(); do(t, g, unary(t, g)) })
	t.Run("stream", func(t *testing.T) { g := g(); do(t, g, streams(t, g, StreamOptions{Streams: 3, Window: 100})) })
}
