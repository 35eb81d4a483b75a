package ledger

import (
	"context"
	"testing"

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
