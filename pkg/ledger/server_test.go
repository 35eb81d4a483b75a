package ledger

import (
	"context"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
)

func TestServer_DurabilityFollowsTheRealConfiguration(t *testing.T) {
	server := devstack.TestRedis(t, devstack.RedisOptions{Args: []string{"--maxmemory 64mb"}})
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{server.Addr()}, DisableCache: true, ForceSingleClient: true})
	require.NoError(t, err)
	defer client.Close()
	ctx := context.Background()

	read, err := ReadServer(ctx, client)
	require.NoError(t, err)
	require.NotEmpty(t, read.Version)
	require.Len(t, read.RunID, 40)
	require.Equal(t, "master", read.Role)
	require.EqualValues(t, 64<<20, read.MaxMemory)
	require.Equal(t, read.MaxMemory-read.UsedMemory, read.LeftMemory())
	require.Positive(t, read.UsedMemory)
	best, problems := read.Durability()
	require.Equal(t, DurabilityStrict, best)
	require.Empty(t, problems)

	// One setting after the other, each set back afterwards.
	for _, step := range []struct {
		name, bad, good string
		want            Durability
	}{
		{"appendfsync", "everysec", "always", DurabilityFast},
		{"appendfsync", "no", "always", ""},
		{"aof-load-truncated", "yes", "no", DurabilityFast},
		{"no-appendfsync-on-rewrite", "yes", "no", DurabilityFast},
		{"maxmemory-policy", "allkeys-lru", "noeviction", ""},
		{"appendonly", "no", "yes", ""},
	} {
		set := func(value string) {
			require.NoError(t, client.Do(ctx, client.B().ConfigSet().ParameterValue().ParameterValue(step.name, value).Build()).Error())
		}
		set(step.bad)
		read, err := ReadServer(ctx, client)
		require.NoError(t, err)
		best, problems := read.Durability()
		require.Equal(t, step.want, best, step.name)
		require.Len(t, problems, 1, step.name)
		require.Contains(t, problems[0], step.name)
		set(step.good)
	}

	require.NoError(t, client.Do(ctx, client.B().ConfigSet().ParameterValue().ParameterValue("maxmemory", "0").Build()).Error())
	read, err = ReadServer(ctx, client)
	require.NoError(t, err)
	require.Equal(t, read.SystemMemory-read.UsedMemory, read.LeftMemory(), "without a limit the machine is the limit")
	require.Positive(t, read.LeftMemory())
}

// slowRewrite makes a rewrite of the log take 3 s for each key. It can be set at
// the start, too, so that no setting was changed since.
const slowRewrite = "rdb-key-save-delay"

// The log was off and is switched on again while the server runs: until the
// first rewrite has ended, nothing that is written survives a kill, although
// the settings say that all is kept.
func TestServer_HasNoDurabilityBeforeTheFirstRewriteHasEnded(t *testing.T) {
	server := ownServer(t)
	client := connect(t, server.Addr(), "")
	do := doer(t, client)
	do("SET", "before", "1")
	beforeOff := readServer(t, client)
	require.True(t, beforeOff.AOFComplete)
	do("CONFIG", "SET", "appendonly", "no")
	off := readServer(t, client)
	require.False(t, off.AOFComplete)
	do("CONFIG", "SET", slowRewrite, "3000000")
	do("CONFIG", "SET", "appendonly", "yes")
	do("CONFIG", "SET", "appendfsync", "always")
	read := readServer(t, client)
	require.True(t, read.Appendonly)
	require.True(t, read.AOFRewriting)
	require.False(t, read.AOFComplete)
	// Nor does it help to remember how it was before, or to look twice.
	for _, s := range []Server{read, read.Since(beforeOff), read.Since(off), read.Since(read), read.Since(Server{})} {
		best, problems := s.Durability()
		require.Equal(t, Durability(""), best)
		require.Len(t, problems, 1)
		require.Contains(t, problems[0], "rewrite of the append-only file")
	}

	// The same while the first rewrite has to wait for something else.
	do("CONFIG", "SET", "appendonly", "no")
	do("BGSAVE")
	do("CONFIG", "SET", "appendonly", "yes")
	read = readServer(t, client)
	require.True(t, read.AOFRewriting)
	require.False(t, read.AOFComplete, "a rewrite that is due")

	do("SET", "acknowledged", "1")
	server.Kill()
	require.NoError(t, server.Restart(t.Context()))
	client = connect(t, server.Addr(), "")
	require.Eventually(t, func() bool {
		read, err := ReadServer(t.Context(), client)
		return err == nil && !read.Loading
	}, patience, 10*time.Millisecond)
	kept, err := client.Do(t.Context(), client.B().Exists().Key("acknowledged").Build()).AsInt64()
	require.NoError(t, err)
	require.Zero(t, kept, "what this is about: it is lost")
}

func TestServer_IsStrictOnceTheFirstRewriteHasEnded(t *testing.T) {
	server := ownServer(t)
	client := connect(t, server.Addr(), "")
	do := doer(t, client)
	do("CONFIG", "SET", "appendonly", "no")
	do("SET", "k", "1")
	do("CONFIG", "SET", "appendonly", "yes")
	require.Eventually(t, func() bool {
		best, _ := readServer(t, client).Durability()
		return best == DurabilityStrict
	}, patience, 10*time.Millisecond)
	server.Kill()
	require.NoError(t, server.Restart(t.Context()))
	client = connect(t, server.Addr(), "")
	kept, err := client.Do(t.Context(), client.B().Exists().Key("k").Build()).AsInt64()
	require.NoError(t, err)
	require.EqualValues(t, 1, kept)
}

// A server rewrites its log whenever it has grown: that must not end a sale.
func TestServer_StaysStrictWhileACompleteLogIsRewritten(t *testing.T) {
	client := connect(t, ownServer(t, "--"+slowRewrite, "3000000").Addr(), "")
	do := doer(t, client)
	strict := func(s Server) bool {
		best, _ := s.Durability()
		return best == DurabilityStrict
	}
	do("SET", "k", "1")
	do("BGREWRITEAOF")
	read := readServer(t, client)
	require.True(t, read.AOFRewriting)
	require.True(t, strict(read), "nobody has changed a setting: one reading tells")
	require.True(t, strict(readServer(t, client)))

	// Somebody changes a setting, before or while it rewrites: one reading tells
	// no more, but who looked after that, and when no rewrite ran, knows.
	do("CONFIG", "SET", "maxmemory", "64mb")
	require.False(t, strict(readServer(t, client)))
	require.False(t, strict(readServer(t, client).Since(read)), "the setting might have been appendonly, twice")
	do("CONFIG", "SET", slowRewrite, "0")
	require.Eventually(t, func() bool { return !readServer(t, client).AOFRewriting }, patience, 10*time.Millisecond)
	do("CONFIG", "SET", slowRewrite, "3000000")
	between := readServer(t, client)
	require.True(t, strict(between))
	do("BGREWRITEAOF")
	read = readServer(t, client)
	require.True(t, read.AOFRewriting)
	require.False(t, strict(read))
	require.True(t, strict(read.Since(between)))
	require.True(t, strict(readServer(t, client).Since(read.Since(between))), "from reading to reading")
	other := between
	other.RunID = "another"
	require.False(t, strict(read.Since(other)))

	// Statistics that are reset hide what was done, and say so.
	do("CONFIG", "RESETSTAT")
	require.False(t, strict(readServer(t, client).Since(read.Since(between))))
}

// The rest of what one reading must show, of states that cannot be made at will.
func TestServer_OneReadingProvesALogCompleteOnlyIfAllOfItSaysSo(t *testing.T) {
	settings := map[string]string{"maxmemory": "0", "appendonly": "yes"}
	complete := func(changes map[string]string) bool {
		info := map[string]string{
			"run_id": "x", "role": "master", "used_memory": "1", "total_system_memory": "2", "uptime_in_seconds": "3",
			"aof_enabled": "1", "aof_rewrite_in_progress": "1", "aof_rewrite_scheduled": "0",
			"master_replid": "a", "second_repl_offset": "-1", "cmdstat_info": "calls=1",
		}
		for name, value := range changes {
			info[name] = value
			if value == "" {
				delete(info, name)
			}
		}
		read, err := parseServer(info, settings)
		require.NoError(t, err)
		return read.AOFComplete
	}
	require.True(t, complete(nil))
	for name, value := range map[string]string{
		"aof_enabled": "0", "role": "slave", "second_repl_offset": "17", "cmdstat_info": "", // no statistics at all
		"cmdstat_config|set": "calls=1", "cmdstat_config|resetstat": "calls=1", "cmdstat_replicaof": "calls=1",
		"cmdstat_slaveof": "calls=1", "cmdstat_failover": "calls=1",
	} {
		require.False(t, complete(map[string]string{name: value}), name)
	}
	idle := map[string]string{"aof_rewrite_in_progress": "0", "cmdstat_config|set": "calls=1"}
	require.True(t, complete(idle))
	for _, name := range []string{"aof_rewrite_in_progress", "aof_rewrite_scheduled"} {
		require.False(t, complete(map[string]string{"cmdstat_config|set": "calls=1", name: ""}), "a server that does not tell: %s", name)
	}
	settings["appendonly"] = "no"
	require.False(t, complete(idle))
}

func readServer(t *testing.T, client rueidis.Client) Server {
	t.Helper()
	read, err := ReadServer(t.Context(), client)
	require.NoError(t, err)
	return read
}

func doer(t *testing.T, client rueidis.Client) func(args ...string) {
	return func(args ...string) {
		t.Helper()
		require.NoError(t, client.Do(t.Context(), client.B().Arbitrary(args...).Build()).Error())
	}
}

func TestServer_OfWhichTheUserMayNotAskIsRefused(t *testing.T) {
	server := devstack.TestRedis(t)
	admin, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{server.Addr()}, DisableCache: true, ForceSingleClient: true})
	require.NoError(t, err)
	defer admin.Close()
	ctx := context.Background()
	require.NoError(t, admin.Do(ctx, admin.B().AclSetuser().Username("blind").Rule("on", ">secret", "+@all", "-config", "~*").Build()).Error())
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{server.Addr()}, Username: "blind", Password: "secret", DisableCache: true, ForceSingleClient: true})
	require.NoError(t, err)
	defer client.Close()
	_, err = ReadServer(ctx, client)
	require.ErrorIs(t, err, ErrRefused)

	server.Kill()
	_, err = ReadServer(ctx, admin)
	require.ErrorIs(t, err, ErrUnknown)
}

func TestServer_FiguresThatAreNoNumbersAreAFault(t *testing.T) {
	info := map[string]string{"run_id": "x", "role": "master", "used_memory": "1", "total_system_memory": "2", "uptime_in_seconds": "3"}
	settings := map[string]string{"maxmemory": "0"}
	_, err := parseServer(info, settings)
	require.NoError(t, err)
	for _, name := range []string{"used_memory", "total_system_memory", "uptime_in_seconds"} {
		old := info[name]
		for _, bad := range []string{"", "-1", "1e3", "x"} {
			info[name] = bad
			_, err := parseServer(info, settings)
			require.ErrorIs(t, err, ErrFault, "%s %q", name, bad)
		}
		info[name] = old
	}
	settings["maxmemory"] = "64mb"
	_, err = parseServer(info, settings)
	require.ErrorIs(t, err, ErrFault)
	_, err = parseServer(map[string]string{"role": "master"}, settings)
	require.ErrorIs(t, err, ErrFault)
}
