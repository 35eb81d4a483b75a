package rpc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"pgregory.net/rapid"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"

	"github.com/seckill/seckill/gateway/internal/admit"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
)

// message is a message of answers by the generated types.
func (s *Service) message(answers []*admit.Grab) *seckillv1.GrabStreamResponse {
	m := &seckillv1.GrabStreamResponse{}
	for _, g := range answers {
		answer := &seckillv1.StreamedAnswer{CorrelationId: g.CorrelationID}
		if g.Err != nil {
			answer.Result = &seckillv1.StreamedAnswer_Error{Error: streamedError(grabError(g.Err))}
		} else {
			answer.Result = &seckillv1.StreamedAnswer_Response{Response: s.answerGrab(g.UserID, g.Reference, &g.Result)}
		}
		m.Answers = append(m.Answers, answer)
	}
	return m
}

func wireService(t testing.TB) *Service {
	ids, err := orderid.New(orderid.Key{Number: 3, Secret: [orderid.KeySize]byte{7}})
	require.NoError(t, err)
	return newService(t, Options{OrderIDs: ids})
}

func drawGrab(t *rapid.T) *admit.Grab {
	id := rapid.OneOf(rapid.Int64Range(1, 300), rapid.Int64Min(1), rapid.Just(int64(1<<63-1)))
	g := &admit.Grab{
		CorrelationID: rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Uint64(), rapid.Just(^uint64(0))).Draw(t, "correlation"),
		UserID:        id.Draw(t, "user"), VoucherID: id.Draw(t, "voucher"),
		Reference: strings.Repeat("é", rapid.IntRange(0, 32).Draw(t, "reference")),
	}
	errs := []error{context.Canceled, context.DeadlineExceeded, errors.New("a driver's"), checkGrab(0, -1, strings.Repeat("x", 99))}
	for _, f := range faults {
		errs = append(errs, fmt.Errorf("x: %w", f.err))
	}
	if rapid.IntRange(0, 3).Draw(t, "kind") == 0 {
		g.Err = rapid.SampledFrom(errs).Draw(t, "err")
		return g
	}
	g.Result = admit.Result{
		Decision: rapid.SampledFrom([]ledger.Decision{ledger.DecisionAdmitted, ledger.DecisionAdmitted, ledger.DecisionSoldOut,
			ledger.DecisionNotStarted, ledger.DecisionEnded, ledger.DecisionPaused}).Draw(t, "decision"),
		DecidedAt: time.UnixMilli(rapid.SampledFrom([]int64{0, 1, 999, 1000, 1_800_000_000_000, 1_800_000_000_123, 1<<47 - 1}).Draw(t, "at")).UTC(),
	}
	if g.Result.Decision == ledger.DecisionAdmitted {
		g.Result.Replayed = rapid.Bool().Draw(t, "replayed")
		g.Result.Order = orderid.Position{VoucherID: g.VoucherID, Epoch: rapid.Int64Range(1, orderid.MaxEpoch).Draw(t, "epoch"), Seq: rapid.Int64Range(1, orderid.MaxSeq).Draw(t, "seq")}
		g.Result.State = rapid.SampledFrom([]ledger.MarkState{ledger.MarkAdmitted, ledger.MarkPersisted, ledger.MarkHeld, 'z'}).Draw(t, "state")
		g.Result.Durability = rapid.SampledFrom([]ledger.Durability{ledger.DurabilityStrict, ledger.DurabilityFast, ""}).Draw(t, "durability")
	}
	return g
}

func TestAnswerMessage_IsTheMessageOfTheGeneratedCode(t *testing.T) {
	s := wireService(t)
	rapid.Check(t, func(t *rapid.T) {
		answers := rapid.SliceOfN(rapid.Custom(drawGrab), 0, maxMessage).Draw(t, "answers")
		encoded := (&answerMessage{s, answers}).AppendMessage(nil)
		var got seckillv1.GrabStreamResponse
		require.NoError(t, proto.Unmarshal(encoded, &got))
		want := s.message(answers)
		require.True(t, proto.Equal(want, &got), "want %v\ngot %v", want, &got)
		plain, err := proto.Marshal(want)
		require.NoError(t, err)
		require.Len(t, encoded, len(plain), "no byte more")
	})
}

// A field that is added to a message must be added here as well.
func TestWire_KnowsAllFields(t *testing.T) {
	for want, m := range map[string]protoreflect.ProtoMessage{
		"1 grabs": &seckillv1.GrabStreamRequest{},
		"1 correlation_id, 2 user_id, 3 voucher_id, 4 reference, 5 timeout_ms, 6 traceparent": &seckillv1.StreamedGrab{},
		"1 answers":                             &seckillv1.GrabStreamResponse{},
		"1 correlation_id, 2 response, 3 error": &seckillv1.StreamedAnswer{},
		"1 outcome, 2 order, 3 replayed, 4 durability, 5 decided_at":                               &seckillv1.GrabResponse{},
		"1 order_id, 2 user_id, 3 voucher_id, 4 state, 5 admitted_at, 6 persisted_at, 7 reference": &seckillv1.Order{},
	} {
		var fields []string
		list := m.ProtoReflect().Descriptor().Fields()
		for i := range list.Len() {
			fields = append(fields, fmt.Sprintf("%d %s", list.Get(i).Number(), list.Get(i).Name()))
		}
		require.Equal(t, want, strings.Join(fields, ", "))
	}
}

func decode(s *Service, b []byte) (*grabMessage, error) {
	m := &grabMessage{service: s}
	return m, m.DecodeMessage(b)
}

// requireDecodesAlike holds a message against the generated code.
func requireDecodesAlike(t require.TestingT, s *Service, b []byte) {
	var want seckillv1.GrabStreamRequest
	wantErr := proto.Unmarshal(b, &want)
	before := time.Now()
	m, err := decode(s, slices.Clone(b))
	if wantErr != nil {
		// Text that is no UTF-8 is the fault of one Grab here.
		if err == nil {
			require.Contains(t, wantErr.Error(), "UTF-8")
		}
		return
	}
	require.NoError(t, err)
	require.Equal(t, len(want.GetGrabs()), m.count)
	for i, g := range m.grabs {
		w := want.GetGrabs()[i]
		require.Equal(t, w.GetCorrelationId(), g.CorrelationID)
		require.Equal(t, w.GetUserId(), g.UserID)
		require.Equal(t, w.GetVoucherId(), g.VoucherID)
		require.Equal(t, w.GetReference(), g.Reference)
		if traceparentForm(w.GetTraceparent()) {
			require.Equal(t, w.GetTraceparent(), g.Traceparent)
		} else {
			require.Empty(t, g.Traceparent)
		}
		require.WithinDuration(t, before.Add(s.timeout(w.GetTimeoutMs())), g.Deadline, time.Second)
		require.NoError(t, g.Err)
	}
}

func TestGrabMessage_IsReadAsTheGeneratedCodeReadsIt(t *testing.T) {
	s := wireService(t)
	rapid.Check(t, func(t *rapid.T) {
		request := &seckillv1.GrabStreamRequest{}
		for range rapid.IntRange(0, 20).Draw(t, "n") {
			g := drawGrab(t)
			request.Grabs = append(request.Grabs, &seckillv1.StreamedGrab{
				CorrelationId: g.CorrelationID, UserId: rapid.Int64().Draw(t, "any user"), VoucherId: g.VoucherID, Reference: g.Reference,
				TimeoutMs:   rapid.Uint32().Draw(t, "timeout"),
				Traceparent: rapid.SampledFrom([]string{"", "nonsense", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}).Draw(t, "trace"),
			})
		}
		b, err := proto.Marshal(request)
		require.NoError(t, err)
		requireDecodesAlike(t, s, b)
		// And with bytes of a later form, or broken ones.
		i := rapid.IntRange(0, len(b)).Draw(t, "where")
		requireDecodesAlike(t, s, slices.Concat(b[:i], rapid.SliceOf(rapid.Byte()).Draw(t, "foreign"), b[i:]))
		requireDecodesAlike(t, s, b[:i])
	})
}

func TestGrabMessage_CountsAllAndKeepsNoMoreThanAreAllowed(t *testing.T) {
	b, err := proto.Marshal(&seckillv1.GrabStreamRequest{Grabs: wishes(1, 1, 1000)})
	require.NoError(t, err)
	m, err := decode(wireService(t), b)
	require.NoError(t, err)
	require.Equal(t, 1000, m.count)
	require.Len(t, m.grabs, maxMessage)
}

func FuzzGrabMessage(f *testing.F) {
	s := wireService(f)
	for _, grabs := range [][]*seckillv1.StreamedGrab{nil, wishes(7, 1, 3), {{Reference: "r", Traceparent: "t"}}} {
		b, err := proto.Marshal(&seckillv1.GrabStreamRequest{Grabs: grabs})
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { requireDecodesAlike(t, s, b) })
}
