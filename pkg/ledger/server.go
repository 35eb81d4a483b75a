package ledger

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"
)

// Server is the Redis server as it really is, by its own account: what a
// durability mode needs is read here and never assumed.
type Server struct {
	Version string
	// RunID changes with every start of the server.
	RunID string
	// Role is master, or slave for a replica.
	Role   string
	Uptime time.Duration
	// Loading: it still reads its data and refuses all else.
	Loading bool
	// MaxMemory is its limit in bytes, 0 for none; UsedMemory what it has
	// allocated; SystemMemory what the machine has.
	MaxMemory, UsedMemory, SystemMemory int64
	// Policy is maxmemory-policy.
	Policy string
	// Appendonly and AppendFsync (always, everysec, no) say whether and how it
	// keeps its log of writes.
	Appendonly  bool
	AppendFsync string
	// AOFLoadTruncated: at a start it drops the torn end of its log in silence.
	AOFLoadTruncated bool
	// NoFsyncOnRewrite: it does not sync while it rewrites its log.
	NoFsyncOnRewrite bool
	// AOFWriteOK is false after a write to the log that failed.
	AOFWriteOK bool
	// AOFRewriting: it rewrites its log in the background, or is about to.
	AOFRewriting bool
	// AOFRewriteOK is false after a rewrite that failed. The old log goes on.
	AOFRewriteOK bool
	// AOFComplete: a restart reads everything that it has acknowledged from its
	// log. That is not so from when the log is switched on until the first rewrite
	// has ended: what is written meanwhile goes to a file that no restart reads.
	// INFO shows such a rewrite like any other, so one reading proves the log
	// complete only where no rewrite runs, or where nobody has changed a setting
	// or the role since the server started. Since proves more.
	AOFComplete bool

	// changes stands for all that was done to the settings and the role since the
	// server started: while it stays the same, nothing was.
	changes string
}

// Since adds to a reading what an earlier one of the same server proves: the log
// was complete then, and nobody has changed a setting or the role between, so
// the rewrite that runs now is one of a log that is complete. Who must not mind
// rewrites keeps the last reading. It does no harm if earlier is the later one.
func (s Server) Since(earlier Server) Server {
	if s.Appendonly && s.Unchanged(earlier) && earlier.AOFComplete {
		s.AOFComplete = true
	}
	return s
}

// Unchanged tells whether the server is the one of an earlier reading, and nobody
// has changed a setting or the role between.
func (s Server) Unchanged(earlier Server) bool {
	return s.RunID == earlier.RunID && s.changes == earlier.changes && s.Role == earlier.Role
}

// serverSettings are asked for one by one: a CONFIG GET of several is new in
// Redis 7.0.
var serverSettings = []string{"maxmemory", "maxmemory-policy", "appendonly", "appendfsync", "aof-load-truncated", "no-appendfsync-on-rewrite"}

// settingCommands are those that may switch the log off and on, or hide that
// they did. A replica switches its log by itself: a new replication id shows it.
var settingCommands = []string{"config|set", "config|resetstat", "replicaof", "slaveof", "failover"}

// ReadServer reads INFO and the settings that matter. Errors: ErrRefused (also
// where the user may not call INFO or CONFIG GET), ErrUnknown, ErrFault.
func ReadServer(ctx context.Context, client rueidis.CoreClient) (Server, error) {
	// In one call, so that the changes are those of the same moment.
	commands := rueidis.Commands{client.B().Info().Section("default", "commandstats").Build()}
	for _, name := range serverSettings {
		commands = append(commands, client.B().ConfigGet().Parameter(name).Build())
	}
	replies := client.DoMulti(ctx, commands...)
	text, err := replies[0].ToString()
	if err != nil {
		return Server{}, fmt.Errorf("reading the server's state: %w", classify(err))
	}
	settings := make(map[string]string, len(serverSettings))
	for i, name := range serverSettings {
		pair, err := replies[1+i].AsStrMap()
		if err != nil {
			return Server{}, fmt.Errorf("reading the server's setting %s: %w", name, classify(err))
		}
		value, ok := pair[name]
		if !ok {
			return Server{}, fmt.Errorf("%w: the server has no setting %s", ErrFault, name)
		}
		settings[name] = value
	}
	return parseServer(parseInfo(text), settings)
}

func parseInfo(text string) map[string]string {
	info := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && !strings.HasPrefix(line, "#") {
			info[name] = value
		}
	}
	return info
}

func parseServer(info, settings map[string]string) (Server, error) {
	s := Server{
		Version:          info["redis_version"],
		RunID:            info["run_id"],
		Role:             info["role"],
		Loading:          info["loading"] == "1",
		Policy:           settings["maxmemory-policy"],
		Appendonly:       settings["appendonly"] == "yes",
		AppendFsync:      settings["appendfsync"],
		AOFLoadTruncated: settings["aof-load-truncated"] == "yes",
		NoFsyncOnRewrite: settings["no-appendfsync-on-rewrite"] == "yes",
		// Older servers leave the field out while the log is off.
		AOFWriteOK:   info["aof_last_write_status"] != "err",
		AOFRewriting: info["aof_rewrite_in_progress"] != "0" || info["aof_rewrite_scheduled"] != "0",
		AOFRewriteOK: info["aof_last_bgrewrite_status"] != "err",
	}
	// A first rewrite that fails is at once followed by another that is scheduled:
	// there is no moment before its end at which none shows.
	var untouched bool
	s.changes, untouched = changesOf(info)
	s.AOFComplete = s.Appendonly && info["aof_enabled"] == "1" && s.Role == "master" && (!s.AOFRewriting || untouched)
	if s.RunID == "" || s.Role == "" {
		return Server{}, fmt.Errorf("%w: the server told neither who it is nor its role", ErrFault)
	}
	var uptime int64
	for _, field := range []struct {
		name, value string
		to          *int64
	}{
		{"maxmemory", settings["maxmemory"], &s.MaxMemory},
		{"used_memory", info["used_memory"], &s.UsedMemory},
		{"total_system_memory", info["total_system_memory"], &s.SystemMemory},
		{"uptime_in_seconds", info["uptime_in_seconds"], &uptime},
	} {
		value, err := strconv.ParseInt(field.value, 10, 64)
		if err != nil || value < 0 {
			return Server{}, fmt.Errorf("%w: the server's %s is %q", ErrFault, field.name, field.value)
		}
		*field.to = value
	}
	s.Uptime = time.Duration(uptime) * time.Second
	return s, nil
}

// changesOf are the statistics of the commands that change settings or the role,
// with the times that they took, so that no two histories look the same; and
// whether they say that nothing was changed.
func changesOf(info map[string]string) (changes string, untouched bool) {
	counted := false
	for name := range info {
		counted = counted || strings.HasPrefix(name, "cmdstat_")
	}
	var text strings.Builder
	for _, name := range settingCommands {
		if stat, ok := info["cmdstat_"+name]; ok {
			text.WriteString(name + ":" + stat + "\n")
		}
	}
	// Our own call is counted at the least.
	untouched = counted && text.Len() == 0 && info["second_repl_offset"] == "-1"
	return text.String() + info["master_replid"], untouched
}

// LeftMemory is how many bytes the server may still allocate: up to its limit,
// or up to the machine's memory where it has none. It may be negative.
func (s Server) LeftMemory() int64 {
	if s.MaxMemory > 0 {
		return s.MaxMemory - s.UsedMemory
	}
	return s.SystemMemory - s.UsedMemory
}

// Durability is the best mode that the server's configuration and the state of
// its log bear out, empty where they bear out none, and what keeps it from being
// strict, each as a sentence that names the setting.
func (s Server) Durability() (best Durability, problems []string) {
	best = DurabilityStrict
	lower := func(to Durability, format string, args ...any) {
		if best != "" {
			best = to
		}
		problems = append(problems, fmt.Sprintf(format, args...))
	}
	if s.Role != "master" {
		lower("", "role is %s: a replica is never written to", s.Role)
	}
	if !s.Appendonly {
		lower("", "appendonly is no, must be yes: nothing would survive a restart")
	} else {
		switch s.AppendFsync {
		case "always":
		case "everysec":
			lower(DurabilityFast, "appendfsync is everysec, strict needs always: up to a second or more of acknowledged orders is lost with the power")
		default:
			lower("", "appendfsync is %s, strict needs always", s.AppendFsync)
		}
		if s.AOFLoadTruncated {
			lower(DurabilityFast, "aof-load-truncated is yes, strict needs no: the torn end of the log would be dropped in silence")
		}
		if s.NoFsyncOnRewrite {
			lower(DurabilityFast, "no-appendfsync-on-rewrite is yes, strict needs no: nothing is synced while the log is rewritten")
		}
		if !s.AOFComplete {
			lower("", "appendonly may have been switched on just now: until the rewrite of the append-only file has ended, nothing would survive a restart")
		}
		if !s.AOFWriteOK {
			lower("", "the last write to the append-only file failed")
		}
	}
	if s.Policy != "noeviction" {
		lower("", "maxmemory-policy is %s, must be noeviction: the ledger would be evicted", s.Policy)
	}
	return best, problems
}
