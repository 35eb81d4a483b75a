package admit

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/ledger"
)

// A guardian hears of a ledger that went back in the word that it closes for.
func TestGrab_RewoundLedgerIsToldToTheGuardian(t *testing.T) {
	_, client, v := open(t, 100)
	a := newAdmitter(t, client)
	for user := int64(1); user <= 5; user++ {
		admitted(t, a, user, v.VoucherID)
	}
	heard := make(chan ledger.FaultKind, 10)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = ledger.ListenFaults(ctx, client, 1, func(_ int, kind ledger.FaultKind, _ string) { heard <- kind })
	}()
	require.Eventually(t, func() bool {
		n, err := client.Do(ctx, client.B().PubsubNumsub().Channel(ledger.FaultsChannel(0)).Build()).AsIntMap()
		return err == nil && n[ledger.FaultsChannel(0)] > 0
	}, 10*time.Second, 10*time.Millisecond, "nobody listens")
	require.NoError(t, client.Do(ctx, client.B().Hset().Key(ledger.VoucherKey(0, 1, v.VoucherID)).FieldValue().FieldValue("seq", "2").Build()).Error())
	_, err := grab(a, 99, v.VoucherID, time.Second)
	require.ErrorIs(t, err, ErrLedgerFault)
	require.Equal(t, ledger.FaultRewound, <-heard)
	cancel()
	<-done
}
