// Package ledgertest sets up ledgers on real Redis servers for tests, by the
// calls that a guardian uses.
package ledgertest

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/redisconn"
)

// Bound is the bound on orders in flight of every partition that Open opens.
const Bound = 1_000_000

// Client connects to a server and closes the client with the test.
func Client(t testing.TB, addr string) rueidis.Client {
	t.Helper()
	client, err := redisconn.Options{Addr: addr}.Client(redisconn.Calls)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client
}

// Open creates and opens the partitions 0 to partitions-1 in epoch 1.
func Open(t testing.TB, client rueidis.Client, partitions int) {
	t.Helper()
	ctx := context.Background()
	server, err := ledger.ReadServer(ctx, client)
	require.NoError(t, err)
	for p := range partitions {
		require.NoError(t, ledger.CreatePartition(ctx, client, p, 1, Bound))
		require.NoError(t, ledger.OpenPartition(ctx, client, p, 1, Bound, ledger.DurabilityStrict, server.RunID))
		require.NoError(t, ledger.LoadAdmit(ctx, client, p, 1))
	}
}

// Raise moves a partition to the next epoch, empty and open, as a rebuild would.
func Raise(t testing.TB, client rueidis.Client, partition int, epoch int64) {
	t.Helper()
	ctx := context.Background()
	server, err := ledger.ReadServer(ctx, client)
	require.NoError(t, err)
	require.NoError(t, client.Do(ctx, client.B().XgroupCreate().Key(ledger.OrdersKey(partition, epoch)).Group(ledger.Group).Id("0").Mkstream().Build()).Error())
	require.NoError(t, client.Do(ctx, client.B().Hset().Key(ledger.MetaKey(partition)).FieldValue().
		FieldValue("epoch", strconv.FormatInt(epoch, 10)).Build()).Error())
	require.NoError(t, ledger.OpenPartition(ctx, client, partition, epoch, Bound, ledger.DurabilityStrict, server.RunID))
	require.NoError(t, ledger.LoadAdmit(ctx, client, partition, epoch))
}

// Voucher is a voucher of epoch 1 with a window around now.
func Voucher(partitions int, id, stock int64) ledger.Voucher {
	return ledger.Voucher{
		Partition: ledger.Partition(id, partitions), Epoch: 1, VoucherID: id, Rev: 1, State: ledger.VoucherOpen,
		Opening: stock, Begin: time.Now().Add(-time.Hour), End: time.Now().Add(time.Hour),
	}
}

// Sell creates a voucher and brings it to its state.
func Sell(t testing.TB, client rueidis.Client, v ledger.Voucher) {
	t.Helper()
	require.NoError(t, ledger.CreateVoucher(context.Background(), client, v))
	Apply(t, client, v)
}

// Apply brings a voucher to its state.
func Apply(t testing.TB, client rueidis.Client, v ledger.Voucher) {
	t.Helper()
	require.NoError(t, ledger.ApplyVoucher(context.Background(), client, v))
}

// Books reads the figures of a voucher of epoch 1.
func Books(t testing.TB, client rueidis.Client, v ledger.Voucher) ledger.Books {
	t.Helper()
	books, err := ledger.ReadBooks(context.Background(), client, v.Partition, v.Epoch, v.VoucherID)
	require.NoError(t, err)
	return books
}
