package deploy_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/orderid"
	"github.com/seckill/seckill/pkg/redisconn"
)

// deployed is a Redis with the settings and users that are deployed.
type deployed struct {
	t       testing.TB
	addr    string
	secrets string
}

// startRedis has the start script write the list of users, as it does in a
// container, and starts a real server with it and with redis.conf.
func startRedis(t testing.TB, secrets string) deployed {
	t.Helper()
	acl := filepath.Join(t.TempDir(), "users.acl")
	env, args, _ := fake(t, "redis-server")
	out, code := run(t, append(env, "SECRETS_DIR="+secrets, "ACL_FILE="+acl, "DATA_DIR=/somewhere"),
		"sh", path(t, "deploy/redis-start.sh"), "--maxmemory", "2gb")
	require.Zero(t, code, out)
	require.Equal(t, []string{path(t, "deploy/redis.conf"), "--aclfile", acl, "--dir", "/somewhere",
		"--bind", "*", "-::*", "--port", "6379", "--maxmemory", "2gb"}, strings.Fields(content(t, args)))

	server := devstack.TestRedis(t, devstack.RedisOptions{Args: []string{"--include", path(t, "deploy/redis.conf"), "--aclfile", acl}})
	d := deployed{t: t, addr: server.Addr(), secrets: secrets}
	require.Eventually(t, func() bool { return d.ask("operator", "PING") == "+PONG" }, patience, 10*time.Millisecond)
	return d
}

func (d deployed) options(user string) redisconn.Options {
	return redisconn.Options{
		Addr: d.addr, Username: user, PasswordFile: filepath.Join(d.secrets, "redis_"+user+"_password"),
		ClientName: "seckill-" + user, BlockingPoolSize: 1,
	}
}

// client connects as a program does.
func (d deployed) client(user string, kind redisconn.Kind) rueidis.Client {
	d.t.Helper()
	client, err := d.options(user).Client(kind)
	require.NoError(d.t, err)
	d.t.Cleanup(client.Close)
	return client
}

// ask sends one command on a connection of its own and returns the first line of
// the answer; with no user it does not log in.
func (d deployed) ask(user string, command ...string) string {
	d.t.Helper()
	conn, err := net.DialTimeout("tcp", d.addr, patience)
	require.NoError(d.t, err)
	defer conn.Close()
	require.NoError(d.t, conn.SetDeadline(time.Now().Add(patience)))
	in := bufio.NewReader(conn)
	send := func(words ...string) string {
		fmt.Fprintf(conn, "*%d\r\n", len(words))
		for _, word := range words {
			fmt.Fprintf(conn, "$%d\r\n%s\r\n", len(word), word)
		}
		line, err := in.ReadString('\n')
		require.NoError(d.t, err, "%v", words)
		return strings.TrimSpace(line)
	}
	if user != "" {
		password := strings.TrimSpace(content(d.t, filepath.Join(d.secrets, "redis_"+user+"_password")))
		require.Equal(d.t, "+OK", send("AUTH", user, password))
	}
	return send(command...)
}

const (
	partition = 3
	epoch     = int64(7)
	voucherID = int64(8*1000 + partition)
)

// openLedger makes an open partition with an open voucher as the writer.
func (d deployed) openLedger(ctx context.Context, client rueidis.Client, units int64) ledger.Voucher {
	t := d.t
	t.Helper()
	require.NoError(t, ledger.LoadWriterScripts(ctx, client))
	_, err := ledger.WriteLayout(ctx, client, ledger.Layout{Partitions: 8, Keys: map[int]string{0: "0011223344556677"}, EntryVersion: ledger.EntryVersion})
	require.NoError(t, err)
	require.NoError(t, ledger.CreatePartition(ctx, client, partition, epoch, 1000))
	require.NoError(t, ledger.EnsureGroup(ctx, client, partition, epoch))
	require.NoError(t, ledger.OpenPartition(ctx, client, partition, epoch, 1000, ledger.DurabilityStrict, "run"))
	require.NoError(t, ledger.LoadAdmit(ctx, client, partition, epoch))
	v := ledger.Voucher{
		Partition: partition, Epoch: epoch, VoucherID: voucherID, Rev: 1, State: ledger.VoucherOpen, Opening: units,
		Begin: time.Now().Add(-time.Hour), End: time.Now().Add(time.Hour),
	}
	require.NoError(t, ledger.CreateVoucher(ctx, client, v))
	require.NoError(t, ledger.ApplyVoucher(ctx, client, v))
	return v
}

func admit(ctx context.Context, client rueidis.Client, users ...int64) (ledger.AdmitReply, error) {
	call := ledger.AdmitCall{
		Partition: partition, Epoch: epoch, SHA: ledger.AdmitSHA(partition, epoch), VoucherID: voucherID,
		NotAfter: time.Now().Add(time.Hour),
	}
	for _, user := range users {
		call.Grabs = append(call.Grabs, ledger.Grab{UserID: user, Record: ledger.EncodeRecord(user, "", "")})
	}
	return ledger.Admit(ctx, client, call)
}

func TestRedisConf_GivesStrictDurability(t *testing.T) {
	d := startRedis(t, makeSecrets(t))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	server, err := ledger.ReadServer(ctx, d.client("writer", redisconn.Calls))
	require.NoError(t, err)
	durability, problems := server.Durability()
	require.Equal(t, ledger.DurabilityStrict, durability)
	require.Empty(t, problems)
	require.Equal(t, int64(1<<30), server.MaxMemory)

	for name, want := range settingsOf(t, "deploy/redis.conf", " ") {
		if want == "1gb" {
			want = "1073741824"
		} else if want == "256mb" {
			want = "268435456"
		}
		require.Equal(t, strings.Trim(want, `"`), d.setting(name), name)
	}
}

// setting reads a running setting as the operator.
func (d deployed) setting(name string) string {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client := d.client("operator", redisconn.Calls)
	defer client.Close()
	values, err := client.Do(ctx, client.B().ConfigGet().Parameter(name).Build()).AsStrMap()
	require.NoError(d.t, err)
	require.Contains(d.t, values, name)
	return values[name]
}

// settingsOf reads lines of a name, a separator and a value, and requires each
// to have its reason in a comment above it or above its neighbours.
func settingsOf(t testing.TB, file, separator string) map[string]string {
	t.Helper()
	settings := map[string]string{}
	reason := false
	for line := range strings.Lines(read(t, file)) {
		line = strings.TrimSpace(line)
		switch {
		case line == "":
			reason = false
		case strings.HasPrefix(line, "#"):
			reason = true
		case strings.HasPrefix(line, "["):
		default:
			name, value, ok := strings.Cut(line, separator)
			require.True(t, ok, "%s: %s", file, line)
			require.True(t, reason, "%s: %s has no reason above it", file, line)
			settings[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
	}
	require.NotEmpty(t, settings)
	return settings
}

func TestRedisUsers_GatewayDoesItsWorkAndNoMore(t *testing.T) {
	d := startRedis(t, makeSecrets(t))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d.openLedger(ctx, d.client("writer", redisconn.Calls), 2)

	gateway := d.client("gateway", redisconn.Calls)
	reply, err := admit(ctx, gateway, 41, 42, 43)
	require.NoError(t, err)
	require.Equal(t, ledger.AdmitOK, reply.Status, reply.Detail)
	require.Equal(t, []ledger.Decision{ledger.DecisionAdmitted, ledger.DecisionAdmitted, ledger.DecisionSoldOut},
		[]ledger.Decision{reply.Answers[0].Decision, reply.Answers[1].Decision, reply.Answers[2].Decision})
	found, err := ledger.FindOrder(ctx, gateway, partition, epoch, voucherID, 41, 1)
	require.NoError(t, err)
	require.NotNil(t, found.Mark)
	layout, err := ledger.ReadLayout(ctx, gateway)
	require.NoError(t, err)
	require.Equal(t, 8, layout.Partitions)
	loaded, err := ledger.AdmitLoaded(ctx, gateway, partition, epoch)
	require.NoError(t, err)
	require.True(t, loaded)
	require.NoError(t, ledger.ReportFault(ctx, gateway, partition, ledger.FaultRewound, "seen"))
	_, err = gateway.Do(ctx, gateway.B().Time().Build()).AsIntSlice()
	require.NoError(t, err)

	meta, orders := ledger.MetaKey(partition), ledger.OrdersKey(partition, epoch)
	buyers, outcomes := ledger.BuyersKey(partition, epoch, voucherID), ledger.OutcomesKey(partition, epoch, voucherID)
	d.refuses("gateway", [][]string{
		{"EVAL", "return 1", "0"}, {"EVAL_RO", "return 1", "0"}, {"FCALL", "f", "0"},
		{"SCRIPT", "LOAD", "return 1"}, {"SCRIPT", "FLUSH"}, {"FUNCTION", "LOAD", "x"}, {"FUNCTION", "FLUSH"},
		{"FLUSHALL"}, {"FLUSHDB"}, {"SWAPDB", "0", "1"}, {"SHUTDOWN", "NOSAVE"},
		{"CONFIG", "GET", "maxmemory"}, {"CONFIG", "SET", "appendfsync", "no"}, {"CONFIG", "REWRITE"},
		{"ACL", "LIST"}, {"ACL", "SETUSER", "gateway", "+@all"}, {"CLIENT", "KILL", "TYPE", "normal"}, {"CLIENT", "PAUSE", "1"},
		{"REPLICAOF", "NO", "ONE"}, {"BGREWRITEAOF"}, {"SAVE"}, {"MONITOR"}, {"INFO"}, {"MODULE", "LIST"},
		{"KEYS", "*"}, {"SCAN", "0"}, {"RANDOMKEY"}, {"DEL", meta}, {"UNLINK", buyers}, {"RENAME", buyers, meta},
		{"EXPIRE", buyers, "1"}, {"COPY", buyers, meta}, {"DUMP", buyers}, {"RESTORE", buyers, "0", "x"},
		{"HDEL", buyers, "41"}, {"HINCRBY", meta, "admitted", "1"}, {"HGETALL", "other"},
		{"XRANGE", orders, "-", "+"}, {"XREADGROUP", "GROUP", ledger.Group, "me", "STREAMS", orders, ">"},
		{"XACK", orders, ledger.Group, "1-1"}, {"XTRIM", orders, "MAXLEN", "0"}, {"XGROUP", "DESTROY", orders, ledger.Group},
		{"XAUTOCLAIM", orders, ledger.Group, "me", "0", "0-0"}, {"XSETID", orders, "1-1"},
		{"HSET", outcomes, "1", "x"}, {"HSET", ledger.LayoutKey, "partitions", "1"}, {"HSET", "other", "a", "b"}, {"HGET", "other", "a"},
		{"PUBLISH", "other", "x"}, {"SUBSCRIBE", ledger.FaultsChannel(partition)},
	})
	after, err := admit(ctx, gateway, 41)
	require.NoError(t, err)
	require.Equal(t, ledger.DecisionReplayed, after.Answers[0].Decision, "nothing of it had an effect")
}

func TestRedisUsers_WriterDoesItsWorkAndNoMore(t *testing.T) {
	d := startRedis(t, makeSecrets(t))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	writer, blocking := d.client("writer", redisconn.Calls), d.client("writer", redisconn.Blocking)
	gateway := d.client("gateway", redisconn.Calls)

	listening, stop := context.WithCancel(ctx)
	heard, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		ended <- ledger.ListenFaults(listening, writer, 8, func(_ int, kind ledger.FaultKind, text string) {
			select {
			case heard <- string(kind) + " " + text:
			default:
			}
		})
	}()
	// A message reaches only those who listen already.
	require.Eventually(t, func() bool {
		if err := ledger.ReportFault(ctx, gateway, partition, ledger.FaultRewound, "seen"); err != nil {
			return false
		}
		select {
		case text := <-heard:
			return text == "rewound seen"
		default:
			return false
		}
	}, patience, 10*time.Millisecond)
	stop()
	require.ErrorIs(t, <-ended, context.Canceled)

	dedicated, release := writer.Dedicate()
	_, err := ledger.ReadServer(ctx, dedicated)
	require.NoError(t, err)
	release()

	// One entry a user, and one for each verdict that settle knows.
	voucher := d.openLedger(ctx, writer, 10)
	verdicts := []ledger.Verdict{ledger.VerdictPersisted, ledger.VerdictHeld, ledger.VerdictConflict, ledger.VerdictRejected, ledger.VerdictCancelled}
	for user := range verdicts {
		_, err := admit(ctx, gateway, int64(user+1))
		require.NoError(t, err)
	}
	raw, err := ledger.ReadNew(ctx, blocking, partition, epoch, "one", 2, time.Second)
	require.NoError(t, err)
	require.Len(t, raw, 2)
	more, err := ledger.ReadNew(ctx, writer, partition, epoch, "one", 10, 0)
	require.NoError(t, err)
	require.Len(t, more, 3)
	claimed, err := ledger.Claim(ctx, writer, partition, epoch, "two", 0, ledger.ClaimEnd, 10)
	require.NoError(t, err)
	require.Len(t, claimed.Entries, 5)
	scanned, err := ledger.Scan(ctx, writer, partition, epoch, "-", 10)
	require.NoError(t, err)
	require.Len(t, scanned, 5)
	for i, entry := range scanned {
		decoded, err := ledger.DecodeEntry(partition, entry.ID, entry.Fields)
		require.NoError(t, err)
		order := decoded.Orders[0]
		settled := ledger.Settled{UserID: order.UserID, Seq: order.Seq, Verdict: verdicts[i], Standing: order.Position}
		result := ledger.Settle(ctx, writer, []ledger.Settlement{{
			Partition: partition, EntryID: entry.ID, Epoch: epoch, VoucherID: voucherID, Orders: []ledger.Settled{settled},
		}})
		require.NoError(t, result[0].Err, string(rune(verdicts[i])))
		require.True(t, result[0].Settled)
	}
	// What an operator decided about the one that is held.
	resolved, err := ledger.Resolve(ctx, writer, ledger.Resolution{
		Partition: partition, UserID: 2, Verdict: ledger.VerdictCancelled,
		Position: orderid.Position{VoucherID: voucherID, Epoch: epoch, Seq: 2},
	})
	require.NoError(t, err)
	require.True(t, resolved)
	holders, _, err := ledger.Holders(ctx, writer, partition, epoch, voucherID, map[int64]bool{2: true}, 0, 1000)
	require.NoError(t, err)
	require.Empty(t, holders)
	books, err := ledger.ReadBooks(ctx, writer, partition, epoch, voucherID)
	require.NoError(t, err)
	require.Zero(t, books.InFlight())

	// A writer that stops hands its entries back, entries of nobody are delivered
	// again, and what stands for no order is discarded.
	_, err = admit(ctx, gateway, 101)
	require.NoError(t, err)
	raw, err = ledger.ReadNew(ctx, writer, partition, epoch, "three", 1, 0)
	require.NoError(t, err)
	require.Len(t, raw, 1)
	pending, err := ledger.PendingIDs(ctx, writer, partition, epoch, "three", 10)
	require.NoError(t, err)
	require.Equal(t, []string{raw[0].ID}, pending)
	handed, err := ledger.Release(ctx, writer, partition, epoch, "three", time.Second, pending)
	require.NoError(t, err)
	require.Equal(t, 1, handed)
	backlog, err := ledger.ReadBacklog(ctx, writer, partition, epoch)
	require.NoError(t, err)
	require.EqualValues(t, 1, backlog.Pending)
	orphans, _, err := ledger.Orphans(ctx, writer, partition, epoch, "", 10)
	require.NoError(t, err)
	require.Empty(t, orphans)
	require.NoError(t, ledger.RedeliverAll(ctx, writer, partition, epoch))
	raw, err = ledger.ReadNew(ctx, writer, partition, epoch, "three", 1, 0)
	require.NoError(t, err)
	require.Len(t, raw, 1)
	again := ledger.Settle(ctx, writer, []ledger.Settlement{{
		Partition: partition, EntryID: raw[0].ID, Epoch: epoch, VoucherID: voucherID,
		Orders: []ledger.Settled{{UserID: 101, Seq: int64(len(verdicts)) + 1, Verdict: ledger.VerdictPersisted}},
	}})
	require.NoError(t, again[0].Err)
	require.True(t, again[0].Settled)
	require.Regexp(t, `^\$`, d.ask("gateway", "XADD", ledger.OrdersKey(partition, epoch), "*", "stands", "for nothing"))
	raw, err = ledger.ReadNew(ctx, writer, partition, epoch, "three", 1, 0)
	require.NoError(t, err)
	require.Len(t, raw, 1)
	discarded, err := ledger.Discard(ctx, writer, partition, epoch, raw[0].ID)
	require.NoError(t, err)
	require.True(t, discarded)
	require.Eventually(t, func() bool {
		gone, err := ledger.RemoveIdleConsumer(ctx, writer, partition, epoch, "three", time.Millisecond)
		require.NoError(t, err)
		return gone
	}, patience, 10*time.Millisecond)
	require.NoError(t, ledger.TunePartition(ctx, writer, partition, epoch, 2000, ledger.DurabilityStrict))
	consumers, err := ledger.PendingByConsumer(ctx, writer, partition, epoch)
	require.NoError(t, err)
	require.Len(t, consumers, 3, "one, two and the one that entries are handed back to")
	removed, err := ledger.RemoveConsumer(ctx, writer, partition, epoch, "one")
	require.NoError(t, err)
	require.True(t, removed)
	for _, state := range []ledger.VoucherState{ledger.VoucherClosed, ledger.VoucherArchived} {
		voucher.Rev, voucher.State = voucher.Rev+1, state
		require.NoError(t, ledger.ApplyVoucher(ctx, writer, voucher))
	}
	require.NoError(t, ledger.ClosePartition(ctx, writer, partition, epoch, "done"))

	meta, orders := ledger.MetaKey(partition), ledger.OrdersKey(partition, epoch)
	d.refuses("writer", [][]string{
		{"EVAL", "return 1", "0"}, {"FCALL", "f", "0"}, {"SCRIPT", "FLUSH"}, {"FUNCTION", "LOAD", "x"},
		{"FLUSHALL"}, {"FLUSHDB"}, {"SWAPDB", "0", "1"}, {"SHUTDOWN", "NOSAVE"},
		{"CONFIG", "SET", "appendfsync", "no"}, {"CONFIG", "REWRITE"}, {"CONFIG", "RESETSTAT"},
		{"ACL", "SETUSER", "writer", "+@all"}, {"CLIENT", "KILL", "TYPE", "normal"}, {"REPLICAOF", "NO", "ONE"}, {"MONITOR"},
		{"KEYS", "*"}, {"DEL", meta}, {"RENAME", meta, orders}, {"EXPIRE", meta, "1"}, {"RESTORE", meta, "0", "x"},
		{"XADD", orders, "*", "a", "b"}, {"XTRIM", orders, "MAXLEN", "0"}, {"XGROUP", "DESTROY", orders, ledger.Group},
		{"XSETID", orders, "1-1"},
		{"HSET", "other", "a", "b"}, {"SUBSCRIBE", "other"}, {"PUBLISH", ledger.FaultsChannel(partition), "x"},
	})
}

func TestRedisUsers_OperatorOnlyLooks(t *testing.T) {
	d := startRedis(t, makeSecrets(t))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	d.openLedger(ctx, d.client("writer", redisconn.Calls), 1)
	meta, orders := ledger.MetaKey(partition), ledger.OrdersKey(partition, epoch)
	for _, command := range [][]string{
		{"HGETALL", meta}, {"XINFO", "STREAM", orders}, {"XINFO", "GROUPS", orders}, {"XINFO", "CONSUMERS", orders, ledger.Group},
		{"XPENDING", orders, ledger.Group}, {"XRANGE", orders, "-", "+"}, {"XLEN", orders}, {"INFO"}, {"CONFIG", "GET", "append*"},
		{"SLOWLOG", "GET"}, {"LATENCY", "LATEST"}, {"CLIENT", "LIST"}, {"ACL", "LOG"}, {"MEMORY", "USAGE", meta},
	} {
		require.NotContains(t, d.ask("operator", command...), "-", "%v", command)
	}
	d.refuses("operator", [][]string{
		{"HSET", meta, "state", "open"}, {"XACK", orders, ledger.Group, "1-1"}, {"XADD", orders, "*", "a", "b"}, {"DEL", meta},
		{"FLUSHALL"}, {"CONFIG", "SET", "appendfsync", "no"}, {"EVAL", "return 1", "0"}, {"SCRIPT", "LOAD", "return 1"}, {"KEYS", "*"},
		{"SHUTDOWN", "NOSAVE"}, {"ACL", "SETUSER", "operator", "+@all"},
	})
}

// refuses requires that the user's rights refuse every one of the commands.
func (d deployed) refuses(user string, commands [][]string) {
	d.t.Helper()
	for _, command := range commands {
		require.Regexp(d.t, `^-NOPERM `, d.ask(user, command...), "%s: %v", user, command)
	}
}

func TestRedisUsers_NobodyWithoutAName(t *testing.T) {
	d := startRedis(t, makeSecrets(t))
	for _, command := range [][]string{{"PING"}, {"INFO"}, {"HGETALL", ledger.LayoutKey}, {"FLUSHALL"}} {
		require.Regexp(t, `^-NOAUTH `, d.ask("", command...), "%v", command)
	}
	for _, login := range [][]string{{"AUTH", ""}, {"AUTH", "default", ""}, {"AUTH", "gateway", ""}, {"AUTH", "writer", "wrong"}} {
		require.Regexp(t, `^-WRONGPASS `, d.ask("", login...), "%v", login)
	}
}

func TestRedisStart_RefusesAnEmptyOrMissingPassword(t *testing.T) {
	for _, name := range []string{"redis_gateway_password", "redis_writer_password", "redis_operator_password"} {
		for _, how := range []string{"missing", "empty"} {
			secrets := makeSecrets(t)
			file := filepath.Join(secrets, name)
			require.NoError(t, os.Remove(file))
			if how == "empty" {
				require.NoError(t, os.WriteFile(file, []byte("\n"), 0o600))
			}
			env, _, _ := fake(t, "redis-server")
			out, code := run(t, append(env, "SECRETS_DIR="+secrets, "ACL_FILE="+filepath.Join(t.TempDir(), "users.acl")),
				"sh", path(t, "deploy/redis-start.sh"))
			require.NotZero(t, code, "started with %s %s", name, how)
			require.Contains(t, out, name)
		}
	}
}
