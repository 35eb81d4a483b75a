package ledger

import (
	"context"
	"crypto/sha1"
	_ "embed" // the scripts
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/rueidis"
)

// script is one Lua file with the names of what it takes, in the order of its
// header; a test compares the two.
type script struct {
	name   string
	source string
	sha    string
	keys   []string
	args   []string
	// repeated are arguments that follow args once for each Grab, order or entry.
	repeated []string
}

func newScript(name, source string, keys, args, repeated []string) *script {
	sum := sha1.Sum([]byte(source))
	return &script{name: name, source: source, sha: hex.EncodeToString(sum[:]), keys: keys, args: args, repeated: repeated}
}

var (
	//go:embed admit.lua
	admitSource string
	//go:embed settle.lua
	settleSource string
	//go:embed resolve.lua
	resolveSource string
	//go:embed discard_entry.lua
	discardEntrySource string
	//go:embed create_partition.lua
	createPartitionSource string
	//go:embed open_partition.lua
	openPartitionSource string
	//go:embed tune_partition.lua
	tunePartitionSource string
	//go:embed close_partition.lua
	closePartitionSource string
	//go:embed create_voucher.lua
	createVoucherSource string
	//go:embed apply_voucher.lua
	applyVoucherSource string
	//go:embed archive_voucher.lua
	archiveVoucherSource string
	//go:embed read_books.lua
	readBooksSource string
	//go:embed read_backlog.lua
	readBacklogSource string
	//go:embed find_orphans.lua
	findOrphansSource string
	//go:embed release.lua
	releaseSource string
	//go:embed remove_consumer.lua
	removeConsumerSource string

	admitKeys     = []string{"meta", "voucher", "buyers", "orders"}
	admitArgs     = []string{"epoch", "seen", "not_after", "voucher_id"}
	admitRepeated = []string{"user_id", "record"}

	settle = newScript("settle", settleSource,
		[]string{"meta", "voucher", "buyers", "outcomes", "orders"},
		[]string{"group", "entry_id", "epoch", "first", "verdicts"},
		[]string{"user_id"})
	resolve = newScript("resolve", resolveSource,
		[]string{"meta", "voucher", "buyers", "outcomes"}, []string{"epoch", "user_id", "seq", "verdict", "standing"}, nil)
	discardEntry = newScript("discard_entry", discardEntrySource,
		[]string{"meta", "orders"}, []string{"group", "entry_id", "epoch"}, nil)
	createPartition = newScript("create_partition", createPartitionSource,
		[]string{"meta", "orders"}, []string{"epoch", "bound", "group"}, nil)
	openPartition = newScript("open_partition", openPartitionSource,
		[]string{"meta"}, []string{"epoch", "durability", "bound", "admit_sha", "run_id"}, nil)
	tunePartition = newScript("tune_partition", tunePartitionSource,
		[]string{"meta"}, []string{"epoch", "durability", "bound"}, nil)
	closePartition = newScript("close_partition", closePartitionSource,
		[]string{"meta"}, []string{"epoch", "reason"}, nil)
	createVoucher = newScript("create_voucher", createVoucherSource,
		[]string{"meta", "voucher", "buyers", "outcomes"}, []string{"epoch", "opening", "begin_ms", "end_ms"}, nil)
	applyVoucher = newScript("apply_voucher", applyVoucherSource,
		[]string{"meta", "voucher"}, []string{"epoch", "rev", "state", "begin_ms", "end_ms", "opening"}, nil)
	archiveVoucher = newScript("archive_voucher", archiveVoucherSource,
		[]string{"meta", "voucher", "buyers", "outcomes"}, []string{"epoch", "rev"}, nil)
	readBooks = newScript("read_books", readBooksSource,
		[]string{"meta", "voucher", "buyers", "orders"}, nil, nil)
	readBacklog = newScript("read_backlog", readBacklogSource,
		[]string{"orders"}, []string{"group"}, nil)
	findOrphans = newScript("find_orphans", findOrphansSource,
		[]string{"orders"}, []string{"group", "after", "limit"}, nil)
	release = newScript("release", releaseSource,
		[]string{"orders"}, []string{"group", "consumer", "released", "min_idle_ms"}, []string{"entry_id"})
	removeConsumer = newScript("remove_consumer", removeConsumerSource,
		[]string{"orders"}, []string{"group", "consumer", "min_idle_ms"}, nil)
)

// writerScripts are those that only writers run; they are safe to have loaded
// at any time, since each checks the epoch or writes nothing.
var writerScripts = []*script{
	settle, resolve, discardEntry, createPartition, openPartition, tunePartition, closePartition, createVoucher, applyVoucher, archiveVoucher,
	readBooks, readBacklog, findOrphans, release, removeConsumer,
}

// admitScript is the admission script of one partition and epoch. Both stand
// in a comment at its end, so its SHA opens this partition in this epoch only.
// Redis forgets scripts when it restarts, and a replica that is promoted never
// had them: so a server whose ledger nobody has proven answers NOSCRIPT.
func admitScript(partition int, epoch int64) *script {
	source := admitSource + "-- partition " + strconv.Itoa(partition) + " epoch " + strconv.FormatInt(epoch, 10) + "\n"
	return newScript("admit", source, admitKeys, admitArgs, admitRepeated)
}

// AdmitSHA is the SHA-1 of the admission script of a partition and epoch.
func AdmitSHA(partition int, epoch int64) string {
	return admitScript(partition, epoch).sha
}

// LoadAdmit loads the admission script of a partition and epoch: it opens the
// door. Only the guardian does this, after everything else, on the connection
// on which it proved the ledger.
func LoadAdmit(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) error {
	return load(ctx, client, admitScript(partition, epoch))
}

// AdmitLoaded tells whether the server holds the admission script of a
// partition and epoch.
func AdmitLoaded(ctx context.Context, client rueidis.CoreClient, partition int, epoch int64) (bool, error) {
	return ScriptLoaded(ctx, client, AdmitSHA(partition, epoch))
}

// ScriptLoaded tells whether the server holds the script with a SHA, which may
// be one of another version: that of a partition's meta, say.
func ScriptLoaded(ctx context.Context, client rueidis.CoreClient, sha string) (bool, error) {
	held, err := client.Do(ctx, client.B().ScriptExists().Sha1(sha).Build()).AsIntSlice()
	if err != nil {
		return false, fmt.Errorf("asking for script %s: %w", sha, classify(err))
	}
	return len(held) == 1 && held[0] == 1, nil
}

// LoadWriterScripts loads every script that writers run.
func LoadWriterScripts(ctx context.Context, client rueidis.CoreClient) error {
	for _, s := range writerScripts {
		if err := load(ctx, client, s); err != nil {
			return err
		}
	}
	return nil
}

func load(ctx context.Context, client rueidis.CoreClient, s *script) error {
	sha, err := client.Do(ctx, client.B().ScriptLoad().Script(s.source).Build()).ToString()
	if err != nil {
		return fmt.Errorf("loading script %s: %w", s.name, classify(err))
	}
	if sha != s.sha {
		return fmt.Errorf("%w: loading script %s: the server computed %s, we %s", ErrFault, s.name, sha, s.sha)
	}
	return nil
}

// command builds the call. EVALSHA only: EVAL would run a script on a server
// whose door is closed.
func (s *script) command(client rueidis.CoreClient, keys []string, args []string) rueidis.Completed {
	if len(keys) != len(s.keys) || len(args) < len(s.args) || (len(s.repeated) == 0 && len(args) != len(s.args)) ||
		(len(s.repeated) > 0 && (len(args)-len(s.args))%len(s.repeated) != 0) {
		panic(fmt.Sprintf("script %s: called with %d keys and %d arguments", s.name, len(keys), len(args)))
	}
	return client.B().Evalsha().Sha1(s.sha).Numkeys(int64(len(keys))).Key(keys...).Arg(args...).Build()
}

// run calls a writer script and loads it where the server does not hold it,
// which is safe: NOSCRIPT means that nothing ran.
func (s *script) run(ctx context.Context, client rueidis.CoreClient, keys []string, args []string) ([]rueidis.RedisMessage, error) {
	reply, err := client.Do(ctx, s.command(client, keys, args)).ToArray()
	if err = classify(err); errors.Is(err, ErrNoScript) {
		if err = load(ctx, client, s); err == nil {
			reply, err = client.Do(ctx, s.command(client, keys, args)).ToArray()
			err = classify(err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("running script %s: %w", s.name, err)
	}
	if len(reply) == 0 {
		return nil, fmt.Errorf("%w: script %s answered nothing", ErrFault, s.name)
	}
	return reply, nil
}

// status reads the first element of an answer and at most one that explains it.
func status(reply []rueidis.RedisMessage) (name, detail string, err error) {
	if name, err = reply[0].ToString(); err != nil {
		return "", "", fmt.Errorf("%w: %w", ErrFault, err)
	}
	for _, more := range reply[1:] {
		if text, err := more.ToString(); err == nil {
			detail += " " + text
		} else if number, err := more.AsInt64(); err == nil {
			detail += " " + strconv.FormatInt(number, 10)
		}
	}
	if detail != "" {
		detail = detail[1:]
	}
	return name, detail, nil
}
