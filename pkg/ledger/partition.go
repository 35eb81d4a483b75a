package ledger

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/rueidis"
)

var (
	// ErrMissing means that a ledger which should be there is not. Nothing was
	// made in its place.
	ErrMissing = errors.New("ledger is missing")
	// ErrLedgerInUse means that a ledger was to be created where one is that was
	// in use.
	ErrLedgerInUse = errors.New("a ledger is there that was in use")
	// ErrFaulty means that a fault closed the partition: it is opened again only
	// after its ledger was rebuilt.
	ErrFaulty = errors.New("a fault closed the partition")
	// ErrClosed means that the partition is closed: what was asked for is only
	// for an open one.
	ErrClosed = errors.New("the partition is closed")
)

// FaultPrefix begins the reason of a partition that a fault closed. Proving
// the ledger does not open it: what went wrong need not show in any figure. The
// scripts that open and close know it, too.
const FaultPrefix = "fault: "

// Meta is the meta hash of a partition.
type Meta struct {
	// Exists is false where there is no such hash, which means closed.
	Exists bool
	Epoch  int64
	Open   bool
	// Reason tells why it is closed.
	Reason     string
	Durability Durability
	// AdmitSHA is the admission script that the guardian loads.
	AdmitSHA string
	// RunID is that of the server on which the partition was last opened.
	RunID string
	// Bound is the most orders in flight; Admitted and Settled count orders,
	// EntriesIn and EntriesOut entries, since the epoch began.
	Bound, Admitted, Settled, EntriesIn, EntriesOut int64
}

// InFlight is the number of orders admitted and not settled.
func (m Meta) InFlight() int64 { return m.Admitted - m.Settled }

// ReadMeta reads the meta hash of a partition.
func ReadMeta(ctx context.Context, client rueidis.CoreClient, partition int) (Meta, error) {
	reply, err := client.Do(ctx, metaCommand(client, partition)).ToArray()
	if err != nil {
		return Meta{}, fmt.Errorf("reading meta of partition %d: %w", partition, classify(err))
	}
	return parseMeta(reply)
}

func metaCommand(client rueidis.CoreClient, partition int) rueidis.Completed {
	return client.B().Hmget().Key(MetaKey(partition)).Field("epoch", "state", "reason", "durability", "admit_sha", "run_id",
		"bound", "admitted", "settled", "entries_in", "entries_out").Build()
}

func parseMeta(reply []rueidis.RedisMessage) (Meta, error) {
	if len(reply) != 11 {
		return Meta{}, fmt.Errorf("%w: meta has %d fields", ErrFault, len(reply))
	}
	text := make([]string, len(reply))
	for i := range reply {
		text[i], _ = reply[i].ToString()
	}
	if text[0] == "" && text[1] == "" {
		return Meta{}, nil
	}
	meta := Meta{Exists: true, Open: text[1] == "open", Reason: text[2], Durability: Durability(text[3]), AdmitSHA: text[4], RunID: text[5]}
	for _, field := range []struct {
		name, value string
		to          *int64
	}{
		{"epoch", text[0], &meta.Epoch},
		{"bound", text[6], &meta.Bound},
		{"admitted", text[7], &meta.Admitted},
		{"settled", text[8], &meta.Settled},
		{"entries_in", text[9], &meta.EntriesIn},
		{"entries_out", text[10], &meta.EntriesOut},
	} {
		value, err := strconv.ParseInt(field.value, 10, 64)
		if err != nil || value < 0 {
			return Meta{}, fmt.Errorf("%w: meta: %s %q is not a whole number", ErrFault, field.name, field.value)
		}
		*field.to = value
	}
	return meta, nil
}

// CreatePartition makes the ledger of a partition, closed, with its stream and
// group. Only for a partition that the database shows was never open. A repeat
// after a crash succeeds; where a ledger is that was in use, ErrLedgerInUse.
func CreatePartition(ctx context.Context, client rueidis.CoreClient, partition int, epoch, bound int64) error {
	reply, err := createPartition.run(ctx, client,
		[]string{MetaKey(partition), OrdersKey(partition, epoch)},
		[]string{strconv.FormatInt(epoch, 10), strconv.FormatInt(bound, 10), Group})
	if err != nil {
		return err
	}
	name, detail, err := status(reply)
	switch {
	case err != nil:
		return err
	case name == "CREATED" || name == "EXISTS":
		return nil
	case name == "REFUSED":
		return fmt.Errorf("creating partition %d in epoch %d: %w: %s", partition, epoch, ErrLedgerInUse, detail)
	}
	return fmt.Errorf("%w: create_partition answered %s %s", ErrFault, name, detail)
}

// OpenPartition sets a partition open. The door is closed all the same until
// LoadAdmit. Only with a ledger that was just proven: it opens what somebody
// closed meanwhile, too, but for a fault. Errors: ErrMissing, ErrStaleEpoch,
// ErrFaulty.
func OpenPartition(ctx context.Context, client rueidis.CoreClient, partition int, epoch, bound int64, durability Durability, runID string) error {
	reply, err := openPartition.run(ctx, client, []string{MetaKey(partition)},
		[]string{strconv.FormatInt(epoch, 10), string(durability), strconv.FormatInt(bound, 10), AdmitSHA(partition, epoch), runID})
	return expect(reply, err, "OPEN")
}

// TunePartition changes the bound and durability of an open partition and never
// opens one. Errors, all without effect: ErrClosed, ErrMissing, ErrStaleEpoch.
func TunePartition(ctx context.Context, client rueidis.CoreClient, partition int, epoch, bound int64, durability Durability) error {
	reply, err := tunePartition.run(ctx, client, []string{MetaKey(partition)},
		[]string{strconv.FormatInt(epoch, 10), string(durability), strconv.FormatInt(bound, 10)})
	if err == nil {
		if name, reason, err := status(reply); err == nil && name == "CLOSED" {
			return fmt.Errorf("%w: %s", ErrClosed, reason)
		}
	}
	return expect(reply, err, "TUNED")
}

// ClosePartition stops a partition from admitting. ErrMissing where it has no
// ledger, which is closed as well.
func ClosePartition(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64, reason string) error {
	reply, err := closePartition.run(ctx, client, []string{MetaKey(partition)}, []string{strconv.FormatInt(epoch, 10), reason})
	return expect(reply, err, "CLOSED")
}

// expect reads the answer of a script that has one good answer or more and
// else tells what is missing or stale.
func expect(reply []rueidis.RedisMessage, err error, good ...string) error {
	if err != nil {
		return err
	}
	name, detail, err := status(reply)
	if err != nil {
		return err
	}
	for _, g := range good {
		if name == g {
			return nil
		}
	}
	switch name {
	case "MISSING":
		return fmt.Errorf("%w: %s", ErrMissing, detail)
	case "STALE_EPOCH":
		return fmt.Errorf("%w: it is of epoch %s", ErrStaleEpoch, detail)
	case "FAULTY":
		return fmt.Errorf("%w: %s", ErrFaulty, detail)
	}
	return fmt.Errorf("%w: unexpected answer %s %s", ErrFault, name, detail)
}

// Layout is what every process must agree on before it touches a ledger.
type Layout struct {
	Partitions int
	// Keys are the fingerprints of the order_id keys, by their number.
	Keys map[int]string
	// EntryVersion is the form of entries.
	EntryVersion string
}

const layoutKeyPrefix = "order_key_"

// ReadLayout reads the layout; ErrMissing where no writer has written one.
func ReadLayout(ctx context.Context, client rueidis.CoreClient) (Layout, error) {
	fields, err := readLayoutFields(ctx, client)
	if err != nil {
		return Layout{}, err
	}
	return parseLayout(fields)
}

func readLayoutFields(ctx context.Context, client rueidis.CoreClient) (map[string]string, error) {
	fields, err := client.Do(ctx, client.B().Hgetall().Key(LayoutKey).Build()).AsStrMap()
	if err != nil {
		return nil, fmt.Errorf("reading layout: %w", classify(err))
	}
	return fields, nil
}

func parseLayout(fields map[string]string) (Layout, error) {
	if len(fields) == 0 {
		return Layout{}, fmt.Errorf("layout: %w", ErrMissing)
	}
	layout := Layout{Keys: map[int]string{}, EntryVersion: fields["entry_version"]}
	var err error
	if layout.Partitions, err = strconv.Atoi(fields["partitions"]); err != nil || layout.Partitions < 1 {
		return Layout{}, fmt.Errorf("%w: layout: partitions %q", ErrFault, fields["partitions"])
	}
	for name, value := range fields {
		if len(name) > len(layoutKeyPrefix) && name[:len(layoutKeyPrefix)] == layoutKeyPrefix {
			number, err := strconv.Atoi(name[len(layoutKeyPrefix):])
			if err != nil {
				return Layout{}, fmt.Errorf("%w: layout: field %q", ErrFault, name)
			}
			layout.Keys[number] = value
		}
	}
	return layout, nil
}

// WriteLayout writes the fields of the layout that are not there yet and
// answers what is there now: the caller compares. Only writers do this. Where
// nothing is missing it only reads: a server whose memory is full refuses every
// HSETNX, and a writer must be able to start there, to settle and so free it.
func WriteLayout(ctx context.Context, client rueidis.CoreClient, layout Layout) (Layout, error) {
	fields, err := readLayoutFields(ctx, client)
	if err != nil {
		return Layout{}, err
	}
	var commands rueidis.Commands
	set := func(field, value string) {
		if _, ok := fields[field]; !ok {
			commands = append(commands, client.B().Hsetnx().Key(LayoutKey).Field(field).Value(value).Build())
		}
	}
	set("partitions", strconv.Itoa(layout.Partitions))
	set("entry_version", layout.EntryVersion)
	for number, fingerprint := range layout.Keys {
		set(layoutKeyPrefix+strconv.Itoa(number), fingerprint)
	}
	if len(commands) == 0 {
		return parseLayout(fields)
	}
	for _, answer := range client.DoMulti(ctx, commands...) {
		if err := answer.Error(); err != nil {
			return Layout{}, fmt.Errorf("writing layout: %w", classify(err))
		}
	}
	return ReadLayout(ctx, client)
}
