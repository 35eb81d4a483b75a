package ledger

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/rueidis"
)

// ReleasedConsumer is the consumer that holds what stopping writers handed
// back. Nobody reads in its name, so whatever it holds is there to be taken
// over.
const ReleasedConsumer = "released"

// Pending is what a consumer holds.
type Pending struct {
	Consumer string
	Entries  int64
	// Idle is the time since the consumer last read. Before Redis 7.2 only a read
	// that got entries counts, so a live consumer of a quiet stream looks idle;
	// from 7.2 on every attempt counts.
	Idle time.Duration
	// CountsAttempts tells that Idle counts from the last attempt, so that a
	// consumer which is idle for longer than it ever blocks is dead. Without it
	// a live one may be; removing that is harmless, its next read makes it again.
	CountsAttempts bool
	// Inactive is the time since a read or takeover last got it an entry. Nil
	// where the server does not tell, or where none ever did.
	Inactive *time.Duration
}

// PendingByConsumer lists the consumers of a partition's group.
func PendingByConsumer(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) ([]Pending, error) {
	reply, err := client.Do(ctx, client.B().XinfoConsumers().Key(OrdersKey(partition, epoch)).Group(Group).Build()).ToArray()
	if err != nil {
		return nil, streamError("listing consumers", err)
	}
	return parseConsumers(reply)
}

func parseConsumers(reply []rueidis.RedisMessage) ([]Pending, error) {
	consumers := make([]Pending, len(reply))
	for i := range reply {
		fields, err := reply[i].AsMap()
		if err != nil {
			return nil, fmt.Errorf("%w: xinfo consumers: %w", ErrFault, err)
		}
		c := &consumers[i]
		name, pending, idle := fields["name"], fields["pending"], fields["idle"]
		if c.Consumer, _ = name.ToString(); c.Consumer == "" {
			return nil, fmt.Errorf("%w: xinfo consumers: a consumer has no name", ErrFault)
		}
		if c.Entries, err = pending.AsInt64(); err != nil {
			return nil, fmt.Errorf("%w: xinfo consumers: pending: %w", ErrFault, err)
		}
		ms, err := idle.AsInt64()
		if err != nil {
			return nil, fmt.Errorf("%w: xinfo consumers: idle: %w", ErrFault, err)
		}
		c.Idle = time.Duration(ms) * time.Millisecond
		// The field came together with the new meaning of idle; -1 for never.
		inactive, told := fields["inactive"]
		c.CountsAttempts = told
		if ms, err := inactive.AsInt64(); told && err == nil && ms >= 0 {
			since := time.Duration(ms) * time.Millisecond
			c.Inactive = &since
		}
	}
	return consumers, nil
}

// IdleConsumers lists the consumers that hold nothing and have been idle for at
// least minIdle, ReleasedConsumer too: those that RemoveIdleConsumer would
// remove now.
func IdleConsumers(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, minIdle time.Duration) ([]Pending, error) {
	all, err := PendingByConsumer(ctx, client, partition, epoch)
	if err != nil {
		return nil, err
	}
	var idle []Pending
	for _, c := range all {
		if c.Entries == 0 && c.Idle >= minIdle {
			idle = append(idle, c)
		}
	}
	return idle, nil
}

// RemoveConsumer removes a consumer if it holds nothing, and tells whether it
// did: a consumer that is removed takes what it holds with it. For a writer's
// own; ReleasedConsumer is nobody's and stays. Errors as ReadNew.
func RemoveConsumer(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string) (bool, error) {
	if consumer == ReleasedConsumer {
		return false, nil
	}
	return remove(ctx, client, partition, epoch, consumer, 0)
}

// RemoveIdleConsumer removes a consumer if it holds nothing and has been idle
// for at least minIdle, and tells whether it did. For those of others. Errors
// as ReadNew.
func RemoveIdleConsumer(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string, minIdle time.Duration) (bool, error) {
	// Less than the 1 ms that can be told would be 0, which is not to look.
	return remove(ctx, client, partition, epoch, consumer, max(minIdle, time.Millisecond))
}

func remove(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string, minIdle time.Duration) (bool, error) {
	reply, err := removeConsumer.run(ctx, client, []string{OrdersKey(partition, epoch)},
		[]string{Group, consumer, strconv.FormatInt(minIdle.Milliseconds(), 10)})
	if err != nil {
		return false, err
	}
	name, detail, err := status(reply)
	switch {
	case err != nil:
		return false, err
	case name == "REMOVED":
		return true, nil
	case name == "PENDING" || name == "ACTIVE" || name == "ABSENT":
		return false, nil
	}
	return false, fmt.Errorf("%w: remove_consumer answered %s %s", ErrFault, name, detail)
}

// releaseChunk is how many entries one call hands back: some hundred
// microseconds of the server.
const releaseChunk = 200

// Release hands entries of a consumer back, so that a peer whose takeover waits
// for minIdle takes them at once, and tells how many those were: what is no
// longer the consumer's is left alone. Delivery counts stay. On an error the
// entries of the calls before are handed back all the same. Errors as ReadNew;
// after ErrUnknown it may be repeated.
func Release(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, consumer string, minIdle time.Duration, ids []string) (int, error) {
	released := 0
	for len(ids) > 0 {
		n := min(len(ids), releaseChunk)
		args := append([]string{Group, consumer, ReleasedConsumer, strconv.FormatInt(minIdle.Milliseconds(), 10)}, ids[:n]...)
		ids = ids[n:]
		reply, err := release.run(ctx, client, []string{OrdersKey(partition, epoch)}, args)
		if err != nil {
			return released, fmt.Errorf("releasing entries of %s: %w", consumer, err)
		}
		if len(reply) != 2 {
			return released, fmt.Errorf("%w: release answered %d elements", ErrFault, len(reply))
		}
		count, err := reply[1].AsInt64()
		if err != nil {
			return released, fmt.Errorf("%w: release: %w", ErrFault, err)
		}
		released += int(count)
	}
	return released, nil
}

// MaxOrphanScan is the most entries that one call of Orphans looks at: Redis
// reads each whole, up to some 20 kB, and does nothing else meanwhile.
const MaxOrphanScan = 256

// Orphans lists entries that were delivered and belong to nobody, because the
// consumer that held them was removed: nothing delivers them again but
// RedeliverAll. It looks at limit entries behind an id, at most MaxOrphanScan,
// with "" at the oldest ones. Next is the id to go on behind, "" where there are
// no more. Errors as ReadNew.
func Orphans(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, after string, limit int) (ids []string, next string, err error) {
	reply, err := findOrphans.run(ctx, client, []string{OrdersKey(partition, epoch)},
		[]string{Group, after, strconv.Itoa(max(1, min(limit, MaxOrphanScan)))})
	if err != nil {
		return nil, "", err
	}
	name, err := reply[0].ToString()
	switch {
	case err != nil:
		return nil, "", fmt.Errorf("%w: find_orphans: %w", ErrFault, err)
	case name == "NO_GROUP":
		return nil, "", fmt.Errorf("finding orphans of partition %d: %w", partition, ErrNoGroup)
	case name != "OK" || len(reply) < 2:
		return nil, "", fmt.Errorf("%w: find_orphans answered %s with %d elements", ErrFault, name, len(reply))
	}
	texts := make([]string, len(reply)-1)
	for i := range texts {
		if texts[i], err = reply[1+i].ToString(); err != nil {
			return nil, "", fmt.Errorf("%w: find_orphans: %w", ErrFault, err)
		}
	}
	return texts[1:], texts[0], nil
}

// RedeliverAll makes the group deliver every entry of the stream again, which
// brings orphans back. What is in somebody's hand is delivered to another as
// well, which is harmless: the second commit meets the first one's rows and
// its settling finds no token. Delivery counts begin anew, and nothing is
// decided by them. Errors: ErrNoGroup, ErrRefused, ErrUnknown (may be
// repeated).
func RedeliverAll(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) error {
	err := client.Do(ctx, client.B().XgroupSetid().Key(OrdersKey(partition, epoch)).Group(Group).Id("0").Build()).Error()
	return streamError("redelivering all entries", err)
}

// Backlog is what waits in a partition's stream, at one moment.
type Backlog struct {
	// Entries that are not settled.
	Entries int64
	// Pending are those that were delivered to a consumer.
	Pending int64
	// Undelivered are the others; nil where that is not known, since the group
	// is missing or pending entries were removed from the stream.
	Undelivered *int64
	// OldestID is the oldest entry's id and OldestAt the time when it was
	// admitted; empty and zero where there is none.
	OldestID string
	OldestAt time.Time
	// Consumers, with what each holds.
	Consumers []Pending
}

// ReadBacklog reads what waits in a partition's stream. A missing group is no
// error: the entries are there. ErrNoGroup where the stream is missing; else
// errors as ReadNew.
func ReadBacklog(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) (Backlog, error) {
	reply, err := readBacklog.run(ctx, client, []string{OrdersKey(partition, epoch)}, []string{Group})
	if err != nil {
		return Backlog{}, err
	}
	name, err := reply[0].ToString()
	switch {
	case err != nil:
		return Backlog{}, fmt.Errorf("%w: read_backlog: %w", ErrFault, err)
	case name == "NO_STREAM":
		return Backlog{}, fmt.Errorf("reading the backlog of partition %d: the stream: %w", partition, ErrNoGroup)
	case name == "OK" && len(reply) == 5, name == "NO_GROUP" && len(reply) == 3:
	default:
		return Backlog{}, fmt.Errorf("%w: read_backlog answered %s with %d elements", ErrFault, name, len(reply))
	}
	var b Backlog
	if b.Entries, err = reply[1].AsInt64(); err != nil {
		return Backlog{}, fmt.Errorf("%w: read_backlog: %w", ErrFault, err)
	}
	if b.OldestID, err = reply[2].ToString(); err != nil {
		return Backlog{}, fmt.Errorf("%w: read_backlog: %w", ErrFault, err)
	}
	if b.OldestID != "" {
		if b.OldestAt, err = EntryTime(b.OldestID); err != nil {
			return Backlog{}, err
		}
	}
	if name == "NO_GROUP" {
		return b, nil
	}
	if b.Pending, err = reply[3].AsInt64(); err != nil {
		return Backlog{}, fmt.Errorf("%w: read_backlog: %w", ErrFault, err)
	}
	consumers, err := reply[4].ToArray()
	if err != nil {
		return Backlog{}, fmt.Errorf("%w: read_backlog: %w", ErrFault, err)
	}
	if b.Consumers, err = parseConsumers(consumers); err != nil {
		return Backlog{}, err
	}
	if undelivered := b.Entries - b.Pending; undelivered >= 0 {
		b.Undelivered = &undelivered
	}
	return b, nil
}
