package baseline

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"
)

//go:embed admit.lua
var admitScript string

//go:embed unlock.lua
var unlockScript string

var unlock = rueidis.NewLuaScript(unlockScript)

// AdmitScript is the tutorial's script, for whoever measures it alone.
func AdmitScript() string { return admitScript }

// Stream is the key of the tutorial's one stream.
const Stream = "stream.orders"

const (
	group    = "g1"
	consumer = "c1"

	// The id generator's epoch, 2022-01-01, and the bits of its counter.
	idEpoch = 1640995200
	idBits  = 32

	lockExpiry = 10 * time.Second
)

// Stock puts a voucher's stock into Redis.
func Stock(ctx context.Context, client rueidis.Client, voucherID, stock int64) error {
	return client.Do(ctx, client.B().Set().Key("seckill:stock:"+strconv.FormatInt(voucherID, 10)).Value(strconv.FormatInt(stock, 10)).Build()).Error()
}

// nextID is the tutorial's id generator: seconds and a counter a day.
func nextID(ctx context.Context, client rueidis.Client) (int64, error) {
	now := time.Now().UTC()
	n, err := client.Do(ctx, client.B().Incr().Key("icr:order:"+now.Format("2006:01:02")).Build()).AsInt64()
	if err != nil {
		return 0, fmt.Errorf("making an order id: %w", err)
	}
	return (now.Unix()-idEpoch)<<idBits | n, nil
}

// locked runs do under the lock of a user. It is false where somebody has it.
func locked(ctx context.Context, client rueidis.Client, userID int64, token string, do func() error) (bool, error) {
	key := "lock:order:" + strconv.FormatInt(userID, 10)
	err := client.Do(ctx, client.B().Set().Key(key).Value(token).Nx().ExSeconds(int64(lockExpiry.Seconds())).Build()).Error()
	if rueidis.IsRedisNil(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("locking user %d: %w", userID, err)
	}
	defer unlock.Exec(ctx, client, []string{key}, []string{token})
	return true, do()
}
