package ledger

import (
	"context"
	"fmt"

	"github.com/redis/rueidis"
)

// PendingIDs lists up to limit entries that a consumer holds, oldest first.
// Errors as ReadNew.
func PendingIDs(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string, limit int64) ([]string, error) {
	reply, err := client.Do(ctx, client.B().Xpending().Key(OrdersKey(partition, epoch)).Group(Group).
		Start("-").End("+").Count(limit).Consumer(consumer).Build()).ToArray()
	if rueidis.IsRedisNil(err) {
		return nil, nil
	}
	if err != nil {
		return nil, streamError("listing pending entries", err)
	}
	ids := make([]string, 0, len(reply))
	for i := range reply {
		fields, err := reply[i].ToArray()
		if err != nil || len(fields) == 0 {
			return nil, fmt.Errorf("%w: xpending: %w", ErrFault, err)
		}
		id, err := fields[0].ToString()
		if err != nil {
			return nil, fmt.Errorf("%w: xpending: %w", ErrFault, err)
		}
		ids = append(ids, id)
	}
	return ids, nil
}
