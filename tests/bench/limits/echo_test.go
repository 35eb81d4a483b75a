package limits

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/seckill/seckill/pkg/orderid"
)

// An echo with shorter answers would be a faster one.
func TestEcho_AnswersAreOfTheSizeOfRealOnes(t *testing.T) {
	ids, err := orderid.New(orderid.Key{Secret: [orderid.KeySize]byte{7}})
	require.NoError(t, err)
	echoed := answer(1_000_000, 3)
	real := proto.CloneOf(echoed)
	real.Order.OrderId = ids.Encode(orderid.Position{VoucherID: 3, Epoch: 1, Seq: 7})
	require.Equal(t, proto.Size(real), proto.Size(echoed))
	require.Less(t, proto.Size(answer(1, 1)), proto.Size(answer(math.MaxInt64, 1)), "it is the caller's own")
}
