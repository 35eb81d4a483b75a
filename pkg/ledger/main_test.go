package ledger

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
)

// patience bounds every wait for a condition: far more than any of them takes
// on a busy machine.
const patience = 30 * time.Second

// epoch is the epoch of test ledgers, not 1, so that a forgotten epoch shows.
const epoch = int64(7)

const testRunID = "0123456789abcdef"

// shared is one server for all tests that do not change its settings; each
// takes a partition of its own, and no two partitions share a key.
var shared struct {
	sync.Mutex
	server *devstack.Redis
	client rueidis.Client
	logs   string
}

var partitions atomic.Int64

// TestMain runs the package's scripts with every return statement noting that
// it was reached, and fails a complete run in which one was not.
func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("rapid.nofailfile", "true") // the seed is printed all the same
	logs, err := os.MkdirTemp("", "ledger-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	shared.logs = logs
	instrumented := flagValue("test.bench") == ""
	if instrumented {
		instrumentScripts()
	}
	code := m.Run()
	if shared.server != nil {
		shared.client.Close()
		shared.server.Close()
	}
	complete := instrumented && flagValue("test.run") == "" && flagValue("test.skip") == "" &&
		flagValue("test.fuzz") == "" && flagValue("test.list") == ""
	if code == 0 && complete {
		if missed := missedReturns(logs); len(missed) > 0 {
			fmt.Fprintf(os.Stderr, "FAIL: return paths that no test has reached:\n  %s\n", strings.Join(missed, "\n  "))
			code = 1
		}
	}
	_ = os.RemoveAll(logs)
	devstack.Cleanup()
	os.Exit(code)
}

func flagValue(name string) string {
	if f := flag.Lookup(name); f != nil {
		return f.Value.String()
	}
	return ""
}

// startServer starts a server whose log is kept for missedReturns.
func startServer(t testing.TB, args ...string) *devstack.Redis {
	t.Helper()
	binaries := devstack.TestBinaries(t)
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	args = append(args, "--logfile", filepath.Join(shared.logs, "redis.log"))
	var server *devstack.Redis
	var err error
	// The log goes to a file, so devstack cannot see there that a port was lost
	// to another process; hence another try.
	for range 3 {
		if server, err = devstack.StartRedis(ctx, binaries, devstack.RedisOptions{Args: args}); err == nil {
			return server
		}
	}
	require.NoError(t, err)
	return nil
}

func ownServer(t testing.TB, args ...string) *devstack.Redis {
	t.Helper()
	server := startServer(t, args...)
	t.Cleanup(server.Close)
	return server
}

func connect(t testing.TB, addr, user string) rueidis.Client {
	t.Helper()
	// One connection, so that a test which spoke to the server once has it.
	option := rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true, ForceSingleClient: true, PipelineMultiplex: -1}
	if user != "" {
		option.Username, option.Password = user, "secret"
	}
	client, err := rueidis.NewClient(option)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client
}

func sharedClient(t testing.TB) rueidis.Client {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		// What the scripts do does not depend on when it reaches the disk, and
		// many tests make many calls.
		server := startServer(t, "--appendonly", "no")
		client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{server.Addr()}, DisableCache: true, ForceSingleClient: true})
		require.NoError(t, err)
		shared.server, shared.client = server, client
	}
	return shared.client
}

// book is the ledger of one partition with one voucher, as a test uses it.
type book struct {
	t         testing.TB
	ctx       context.Context
	client    rueidis.Client
	partition int
	epoch     int64
	voucher   Voucher
}

// newBook makes an open partition with an open voucher on the shared server.
func newBook(t testing.TB, stock int64) *book {
	t.Helper()
	return newBookOn(t, sharedClient(t), stock)
}

func newBookOn(t testing.TB, client rueidis.Client, stock int64) *book {
	t.Helper()
	b := newEmptyBook(t, client)
	require.NoError(t, CreatePartition(b.ctx, client, b.partition, epoch, 1_000_000))
	require.NoError(t, OpenPartition(b.ctx, client, b.partition, epoch, 1_000_000, DurabilityStrict, testRunID))
	require.NoError(t, LoadAdmit(b.ctx, client, b.partition, epoch))
	b.voucher.Opening = stock
	require.NoError(t, CreateVoucher(b.ctx, client, b.voucher))
	b.apply(VoucherOpen)
	return b
}

// newEmptyBook takes a partition and makes nothing in it.
func newEmptyBook(t testing.TB, client rueidis.Client) *book {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	partition := int(partitions.Add(1))
	now := time.Now()
	return &book{t: t, ctx: ctx, client: client, partition: partition, epoch: epoch, voucher: Voucher{
		Partition: partition, Epoch: epoch, VoucherID: 1<<63 - 1 - int64(partition), State: VoucherDraft,
		Begin: now.Add(-time.Hour).Truncate(time.Millisecond), End: now.Add(time.Hour).Truncate(time.Millisecond),
	}}
}

func (b *book) keys() map[string]string {
	return map[string]string{
		"meta":     MetaKey(b.partition),
		"voucher":  VoucherKey(b.partition, b.epoch, b.voucher.VoucherID),
		"buyers":   BuyersKey(b.partition, b.epoch, b.voucher.VoucherID),
		"outcomes": OutcomesKey(b.partition, b.epoch, b.voucher.VoucherID),
		"orders":   OrdersKey(b.partition, b.epoch),
	}
}

// apply moves the voucher to a state with the next rev.
func (b *book) apply(state VoucherState) {
	b.t.Helper()
	b.voucher.Rev++
	b.voucher.State = state
	require.NoError(b.t, ApplyVoucher(b.ctx, b.client, b.voucher))
}

func (b *book) call(users ...int64) AdmitCall {
	call := AdmitCall{
		Partition: b.partition, Epoch: b.epoch, SHA: AdmitSHA(b.partition, b.epoch), VoucherID: b.voucher.VoucherID,
		NotAfter: time.Now().Add(time.Hour),
	}
	for _, user := range users {
		call.Grabs = append(call.Grabs, Grab{UserID: user, Record: EncodeRecord(user, "ref-"+strconv.FormatInt(user, 10), "")})
	}
	return call
}

// admit runs a batch that must be decided.
func (b *book) admit(users ...int64) AdmitReply {
	b.t.Helper()
	reply, err := Admit(b.ctx, b.client, b.call(users...))
	require.NoError(b.t, err)
	require.Equal(b.t, AdmitOK, reply.Status, reply.Detail)
	return reply
}

func decisions(reply AdmitReply) []Decision {
	list := make([]Decision, len(reply.Answers))
	for i, answer := range reply.Answers {
		list[i] = answer.Decision
	}
	return list
}

// entries decodes the whole stream.
func (b *book) entries() []Entry {
	b.t.Helper()
	raw, err := Scan(b.ctx, b.client, b.partition, b.epoch, "-", 10_000)
	require.NoError(b.t, err)
	list := make([]Entry, len(raw))
	for i := range raw {
		list[i], err = DecodeEntry(b.partition, raw[i].ID, raw[i].Fields)
		require.NoError(b.t, err)
	}
	return list
}

// deliver hands all undelivered entries to a consumer. Without BLOCK: an idle
// server looks at the clock of blocked clients only ten times a second.
func (b *book) deliver(consumer string) []RawEntry {
	b.t.Helper()
	key := b.keys()["orders"]
	reply, err := b.do("XREADGROUP", "GROUP", Group, consumer, "COUNT", "100000", "STREAMS", key, ">").AsXRead()
	if rueidis.IsRedisNil(err) {
		return nil
	}
	require.NoError(b.t, err)
	return rawEntries(reply[key])
}

// settlement gives every order of an entry one verdict.
func (b *book) settlement(entry Entry, verdict Verdict) Settlement {
	s := Settlement{Partition: b.partition, EntryID: entry.ID, Epoch: entry.Epoch, VoucherID: entry.VoucherID}
	for _, order := range entry.Orders {
		s.Orders = append(s.Orders, Settled{UserID: order.UserID, Seq: order.Seq, Verdict: verdict})
	}
	return s
}

func (b *book) settle(s Settlement) SettleResult {
	b.t.Helper()
	results := Settle(b.ctx, b.client, []Settlement{s})
	require.Len(b.t, results, 1)
	return results[0]
}

func (b *book) books() Books {
	b.t.Helper()
	books, err := ReadBooks(b.ctx, b.client, b.partition, b.epoch, b.voucher.VoucherID)
	require.NoError(b.t, err)
	return books
}

// do runs a plain command.
func (b *book) do(args ...string) rueidis.RedisResult {
	return b.client.Do(b.ctx, b.client.B().Arbitrary(args...).Build())
}

func (b *book) must(args ...string) {
	b.t.Helper()
	err := b.do(args...).Error()
	if !rueidis.IsRedisNil(err) {
		require.NoError(b.t, err, strings.Join(args, " "))
	}
}

func (b *book) get(key, field string) string {
	b.t.Helper()
	text, err := b.do("HGET", key, field).ToString()
	if rueidis.IsRedisNil(err) {
		return "(nil)"
	}
	require.NoError(b.t, err)
	return text
}

func (b *book) mark(user int64) string {
	b.t.Helper()
	return b.get(b.keys()["buyers"], strconv.FormatInt(user, 10))
}

func (b *book) outcome(seq int64) string {
	b.t.Helper()
	return b.get(b.keys()["outcomes"], strconv.FormatInt(seq, 10))
}

// snapshot is everything that the ledger of the partition holds: each key with
// its whole content, and who holds which entry. The last id that a stream gave
// away is left out: an entry that was taken back has used one up.
func (b *book) snapshot() map[string]string {
	b.t.Helper()
	names, err := b.do("KEYS", fmt.Sprintf("sk:{%d}:*", b.partition)).AsStrSlice()
	require.NoError(b.t, err)
	all := map[string]string{}
	for _, name := range names {
		kind, err := b.do("TYPE", name).ToString()
		require.NoError(b.t, err)
		switch kind {
		case "hash":
			fields, err := b.do("HGETALL", name).AsStrMap()
			require.NoError(b.t, err)
			lines := make([]string, 0, len(fields))
			for field, value := range fields {
				lines = append(lines, field+"="+value)
			}
			sort.Strings(lines)
			all[name] = "hash " + strings.Join(lines, " ")
		case "stream":
			entries, err := b.do("XRANGE", name, "-", "+").AsXRange()
			require.NoError(b.t, err)
			var text strings.Builder
			for _, entry := range entries {
				fmt.Fprintf(&text, "%s %v\n", entry.ID, entry.FieldValues)
			}
			pending, err := b.do("XPENDING", name, Group, "-", "+", "10000").ToArray()
			if err == nil {
				for _, held := range pending {
					parts, err := held.ToArray()
					require.NoError(b.t, err)
					id, _ := parts[0].ToString()
					consumer, _ := parts[1].ToString()
					deliveries, _ := parts[3].AsInt64()
					fmt.Fprintf(&text, "pending %s %s %d\n", id, consumer, deliveries)
				}
			} else {
				require.ErrorContains(b.t, err, "NOGROUP")
			}
			all[name] = "stream " + text.String()
		default:
			dump, err := b.do("DUMP", name).ToString()
			require.NoError(b.t, err)
			all[name] = fmt.Sprintf("%s %x", kind, dump)
		}
	}
	return all
}

// aclUser makes a user that may do everything to the partition but what the
// rules take away, and connects as it.
func (b *book) aclUser(addr string, rules ...string) rueidis.Client {
	b.t.Helper()
	name := fmt.Sprintf("user-%d-%d", b.partition, partitions.Add(1))
	all := []string{"ACL", "SETUSER", name, "on", ">secret", "+@all"}
	if !slices.ContainsFunc(rules, func(rule string) bool { return strings.HasPrefix(rule, "~") || strings.HasPrefix(rule, "%") }) {
		all = append(all, "~*")
	}
	b.must(append(all, rules...)...)
	b.t.Cleanup(func() { b.do("ACL", "DELUSER", name) })
	return connect(b.t, addr, name)
}

// readOnly are key rules under which one key may only be read.
func (b *book) readOnly(which string) []string {
	var rules []string
	for name, key := range b.keys() {
		if name == which {
			rules = append(rules, "%R~"+key)
		} else {
			rules = append(rules, "~"+key)
		}
	}
	return rules
}

func sharedAddr(t testing.TB) string {
	sharedClient(t)
	return shared.server.Addr()
}

func testProxy(t testing.TB, upstream string) *devstack.Proxy { return devstack.TestProxy(t, upstream) }

func shortly(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func formatInt(n int64) string { return strconv.FormatInt(n, 10) }
