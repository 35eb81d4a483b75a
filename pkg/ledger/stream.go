package ledger

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"
)

// ErrNoGroup means that the stream or its group is gone, seen by a blocked or
// a new read. The guardian decides what that means.
var ErrNoGroup = errors.New("stream or consumer group is missing")

// RawEntry is an entry as the stream holds it.
type RawEntry struct {
	ID     string
	Fields map[string]string
}

// EnsureGroup creates the consumer group at 0 where it is missing. The stream
// must exist: a missing one is a lost one.
func EnsureGroup(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) error {
	err := client.Do(ctx, client.B().XgroupCreate().Key(OrdersKey(partition, epoch)).Group(Group).Id("0").Build()).Error()
	if answer, ok := rueidis.IsRedisErr(err); ok && answer.IsBusyGroup() {
		return nil
	}
	return streamError("creating group", err)
}

// ReadNew reads entries that were delivered to nobody. With block it waits up
// to that for one, on a connection of its own; with 0 it does not wait. None is
// no error. The caller's context must outlive block by a good
// measure, else entries are delivered that nobody sees until they are
// reclaimed. Errors: ErrNoGroup, ErrRefused, ErrUnknown.
func ReadNew(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string, count int64, block time.Duration) ([]RawEntry, error) {
	key := OrdersKey(partition, epoch)
	var command rueidis.Completed
	if block > 0 {
		command = client.B().Xreadgroup().Group(Group, consumer).Count(count).Block(block.Milliseconds()).Streams().Key(key).Id(">").Build()
	} else {
		command = client.B().Xreadgroup().Group(Group, consumer).Count(count).Streams().Key(key).Id(">").Build()
	}
	reply, err := client.Do(ctx, command).AsXRead()
	if rueidis.IsRedisNil(err) {
		return nil, nil
	}
	if err != nil {
		return nil, streamError("reading entries", err)
	}
	return rawEntries(reply[key]), nil
}

// Claimed is one page of a takeover.
type Claimed struct {
	Entries []RawEntry
	// Lost are ids that were pending but are no longer in the stream: trimmed or
	// deleted before they were settled. Redis drops them from the pending list.
	Lost []string
	// Next is the cursor of the next page; 0-0 ends the scan. A page may be empty
	// long before that.
	Next string
}

// ClaimEnd is the cursor at which a scan begins and ends.
const ClaimEnd = "0-0"

// Claim takes over entries that have been pending for at least minIdle, from
// cursor on. Errors as ReadNew.
func Claim(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string, minIdle time.Duration, cursor string, count int64) (Claimed, error) {
	reply, err := client.Do(ctx, client.B().Xautoclaim().Key(OrdersKey(partition, epoch)).Group(Group).Consumer(consumer).
		MinIdleTime(strconv.FormatInt(minIdle.Milliseconds(), 10)).Start(cursor).Count(count).Build()).ToArray()
	if err != nil {
		return Claimed{}, streamError("claiming entries", err)
	}
	if len(reply) < 3 {
		return Claimed{}, fmt.Errorf("%w: xautoclaim answered %d elements", ErrFault, len(reply))
	}
	var claimed Claimed
	if claimed.Next, err = reply[0].ToString(); err != nil {
		return Claimed{}, fmt.Errorf("%w: xautoclaim: %w", ErrFault, err)
	}
	entries, err := reply[1].AsXRange()
	if err != nil && !rueidis.IsRedisNil(err) {
		return Claimed{}, fmt.Errorf("%w: xautoclaim: %w", ErrFault, err)
	}
	claimed.Entries = rawEntries(entries)
	if claimed.Lost, err = reply[2].AsStrSlice(); err != nil {
		return Claimed{}, fmt.Errorf("%w: xautoclaim: %w", ErrFault, err)
	}
	return claimed, nil
}

// Scan reads up to count entries of a stream from an id on, whoever holds them;
// "-" begins at the first, "("+id behind id.
func Scan(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, from string, count int64) ([]RawEntry, error) {
	entries, err := client.Do(ctx, client.B().Xrange().Key(OrdersKey(partition, epoch)).Start(from).End("+").Count(count).Build()).AsXRange()
	if err != nil {
		return nil, streamError("scanning entries", err)
	}
	return rawEntries(entries), nil
}

// Pending is what a consumer holds.
type Pending struct {
	Consumer string
	Entries  int64
	// Idle is the time since the consumer last read; what exactly counts as a
	// read differs between versions of Redis.
	Idle time.Duration
}

// PendingByConsumer lists the consumers of a partition's group.
func PendingByConsumer(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) ([]Pending, error) {
	reply, err := client.Do(ctx, client.B().XinfoConsumers().Key(OrdersKey(partition, epoch)).Group(Group).Build()).ToArray()
	if err != nil {
		return nil, streamError("listing consumers", err)
	}
	consumers := make([]Pending, 0, len(reply))
	for i := range reply {
		fields, err := reply[i].AsMap()
		if err != nil {
			return nil, fmt.Errorf("%w: xinfo consumers: %w", ErrFault, err)
		}
		var c Pending
		name, pending, idle := fields["name"], fields["pending"], fields["idle"]
		c.Consumer, _ = name.ToString()
		c.Entries, _ = pending.AsInt64()
		ms, _ := idle.AsInt64()
		c.Idle = time.Duration(ms) * time.Millisecond
		consumers = append(consumers, c)
	}
	return consumers, nil
}

// RemoveConsumer removes a consumer if it holds nothing, and tells whether it
// did: a consumer that is removed takes what it holds with it. Errors as
// ReadNew.
func RemoveConsumer(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string) (bool, error) {
	reply, err := removeConsumer.run(ctx, client, []string{OrdersKey(partition, epoch)}, []string{Group, consumer})
	if err != nil {
		return false, err
	}
	name, _, err := status(reply)
	return name == "REMOVED", err
}

// streamError tells a missing stream or group from other errors: a blocked read
// sees UNBLOCKED or NOGROUP, depending on the version of Redis, XGROUP and XINFO
// an ERR that says so in words.
func streamError(doing string, err error) error {
	if answer, ok := rueidis.IsRedisErr(err); ok {
		text := answer.Error()
		if strings.HasPrefix(text, "UNBLOCKED") || strings.Contains(text, "requires the key to exist") || text == "no such key" {
			return fmt.Errorf("%s: %w: %s", doing, ErrNoGroup, text)
		}
	}
	if err = classify(err); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

func rawEntries(entries []rueidis.XRangeEntry) []RawEntry {
	raw := make([]RawEntry, len(entries))
	for i, entry := range entries {
		raw[i] = RawEntry{ID: entry.ID, Fields: entry.FieldValues}
	}
	return raw
}

// EntryTime is the time in an entry's id: that of the Redis clock when it was
// appended, or a little later where the clock had gone back.
func EntryTime(id string) (time.Time, error) {
	ms, _, _ := strings.Cut(id, "-")
	value, err := strconv.ParseInt(ms, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("%w: entry id %q: %w", ErrMalformed, id, err)
	}
	return time.UnixMilli(value).UTC(), nil
}
