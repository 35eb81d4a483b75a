package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

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

// rawPrefix marks the names of fields that are in base64.
const rawPrefix = "base64:"

// Encode writes the entry down as it was, whatever is in it, in a form that a
// person can read and that does not change: a JSON object
//
//	{"id":"1700000000123-0","fields":{"n":"1","orders":{"base64":"CgIIAQ=="},"v":"1"}}
//
// with the fields in the order of their names. A value that is not text, which
// is UTF-8 without control characters, is an object with its base64 (RFC 4648,
// padded). A name that is not text, or that begins with base64: itself, is
// base64: and its base64.
func (e RawEntry) Encode() []byte {
	fields := make(map[string]any, len(e.Fields))
	for name, value := range e.Fields {
		if !isText(name) || strings.HasPrefix(name, rawPrefix) {
			name = rawPrefix + base64.StdEncoding.EncodeToString([]byte(name))
		}
		if isText(value) {
			fields[name] = value
		} else {
			fields[name] = map[string]string{"base64": base64.StdEncoding.EncodeToString([]byte(value))}
		}
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	// Strings in maps: there is nothing that can fail.
	_ = encoder.Encode(struct {
		ID     string         `json:"id"`
		Fields map[string]any `json:"fields"`
	}{e.ID, fields})
	return bytes.TrimSuffix(out.Bytes(), []byte("\n"))
}

func isText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// EnsureGroup creates the consumer group at 0 where it is missing. The stream
// must exist: a missing one is a lost one. It asks first, since a server whose
// memory is full refuses to create even a group that is there.
func EnsureGroup(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) error {
	key := OrdersKey(partition, epoch)
	groups, err := client.Do(ctx, client.B().XinfoGroups().Key(key).Build()).ToArray()
	if err != nil {
		return streamError("looking for the group", err)
	}
	for i := range groups {
		group, err := groups[i].AsStrMap()
		if err != nil {
			return fmt.Errorf("%w: xinfo groups: %w", ErrFault, err)
		}
		if group["name"] == Group {
			return nil
		}
	}
	err = client.Do(ctx, client.B().XgroupCreate().Key(key).Group(Group).Id("0").Build()).Error()
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

// ConnectionID is the server's name of a dedicated connection, for Unblock.
func ConnectionID(ctx context.Context, conn rueidis.CoreClient) (int64, error) {
	id, err := conn.Do(ctx, conn.B().ClientId().Build()).AsInt64()
	if err != nil {
		return 0, fmt.Errorf("reading the id of a connection: %w", classify(err))
	}
	return id, nil
}

// Unblock ends the wait of a ReadNew on the connection of that id, as if its time
// were over: what it was given before is answered, and nothing is given to it
// afterwards. Giving the read up instead would leave both open until the server
// has noticed. It does nothing where none waits.
func Unblock(ctx context.Context, client rueidis.CoreClient, id int64) error {
	if err := client.Do(ctx, client.B().ClientUnblock().ClientId(id).Build()).Error(); err != nil {
		return fmt.Errorf("ending the wait of a read: %w", classify(err))
	}
	return nil
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
