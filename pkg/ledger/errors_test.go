package ledger

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
)

func TestClassify_TellsEffectFromNoEffect(t *testing.T) {
	require.NoError(t, classify(nil))
	b := newEmptyBook(t, sharedClient(t))
	for text, want := range map[string]error{
		"NOSCRIPT No matching script. Please use EVAL.":                     ErrNoScript,
		"LOADING Redis is loading the dataset in memory":                    ErrRefused,
		"READONLY You can't write against a read only replica.":             ErrRefused,
		"MASTERDOWN Link with MASTER is down":                               ErrRefused,
		"NOAUTH Authentication required.":                                   ErrRefused,
		"WRONGPASS invalid username-password pair or user is disabled.":     ErrRefused,
		"NOPERM this user has no permissions to run the 'evalsha' command":  ErrRefused,
		"OOM command not allowed when used memory > 'maxmemory'.":           ErrRefused,
		"MISCONF Errors writing to the AOF file: No space left on device":   ErrRefused,
		"BUSY Redis is busy running a script.":                              ErrRefused,
		"NOREPLICAS Not enough good replicas to write.":                     ErrRefused,
		"CLUSTERDOWN Hash slot not served":                                  ErrRefused,
		"TRYAGAIN Multiple keys request during rehashing of slot":           ErrRefused,
		"MOVED 3999 127.0.0.1:6381":                                         ErrRefused,
		"ASK 3999 127.0.0.1:6381":                                           ErrRefused,
		"CROSSSLOT Keys in request don't hash to the same slot":             ErrRefused,
		"NOGROUP No such key 'x' or consumer group 'writers'":               ErrNoGroup,
		"BUSYGROUP Consumer Group name already exists":                      ErrFault,
		"BUSYKEY Target key name already exists.":                           ErrFault,
		"WRONGTYPE Operation against a key holding the wrong kind of value": ErrFault,
		"LEDGER_FAULT meta: a counter is not a whole number":                ErrFault,
		"ERR unknown command":                                               ErrFault,
		"ERR user_script:7: something, LOADING and OOM":                     ErrFault,
		"OOMS is no code": ErrFault,
		"ERR ACL failure in script: this user has no permissions to run the command.": ErrFault,
	} {
		err := b.do("EVAL", "return redis.error_reply(ARGV[1])", "0", text).Error()
		require.Error(t, err)
		got := classify(err)
		for _, sentinel := range []error{ErrNoScript, ErrRefused, ErrFault, ErrUnknown, ErrNoGroup} {
			require.Equal(t, sentinel == want, errors.Is(got, sentinel), "%s: %s", text, sentinel)
		}
	}
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, context.DeadlineExceeded, context.Canceled, rueidis.ErrClosing, errors.New("OOM said no server")} {
		got := classify(err)
		require.ErrorIs(t, got, ErrUnknown)
		require.ErrorIs(t, got, err)
		require.NotErrorIs(t, got, ErrRefused)
	}
}

// Refusals that a real server gives before it runs a script.
func TestRefused_MeansNoEffect(t *testing.T) {
	server := ownServer(t, "--busy-reply-threshold", "10")
	b := newBookOn(t, connect(t, server.Addr(), ""), 10)
	b.admit(1)
	refused := func(err error, code string) {
		t.Helper()
		require.ErrorIs(t, err, ErrRefused)
		require.ErrorContains(t, err, code)
	}
	before := b.snapshot()

	b.must("CONFIG", "SET", "min-replicas-to-write", "1")
	_, err := Admit(b.ctx, b.client, b.call(2))
	refused(err, "NOREPLICAS")
	b.must("CONFIG", "SET", "min-replicas-to-write", "0")

	b.must("REPLICAOF", "127.0.0.1", "1")
	_, err = Admit(b.ctx, b.client, b.call(2))
	refused(err, "READONLY")
	refused(b.settle(b.settlement(b.entries()[0], VerdictPersisted)).Err, "READONLY")
	b.must("REPLICAOF", "NO", "ONE")

	_, err = Admit(b.ctx, b.aclUser(server.Addr(), "-evalsha"), b.call(2))
	refused(err, "NOPERM")

	busy := connect(t, server.Addr(), "")
	ended := make(chan error, 1)
	go func() {
		ended <- busy.Do(b.ctx, busy.B().Arbitrary("EVAL", "while true do end", "0").Build()).Error()
	}()
	require.Eventually(t, func() bool {
		_, err := Admit(b.ctx, b.client, b.call(1)) // a replay until the script runs
		return errors.Is(err, ErrRefused)
	}, patience, 5*time.Millisecond)
	_, err = Admit(b.ctx, b.client, b.call(2))
	refused(err, "BUSY")
	b.must("SCRIPT", "KILL")
	require.Error(t, <-ended)

	require.Equal(t, before, b.snapshot())
	require.Equal(t, int64(2), b.admit(2).LastSeq)
}

func TestUnknown_AServerThatDoesNotAnswer(t *testing.T) {
	server := ownServer(t)
	b := newBookOn(t, connect(t, server.Addr(), ""), 10)
	b.admit(1)
	settlement := b.settlement(b.entries()[0], VerdictPersisted)
	require.NoError(t, load(b.ctx, b.client, settle))
	settler := connect(t, server.Addr(), "")
	require.NoError(t, settler.Do(b.ctx, settler.B().Ping().Build()).Error())
	require.NoError(t, server.Pause())
	_, err := Admit(shortly(t, 100*time.Millisecond), b.client, b.call(2))
	require.ErrorIs(t, err, ErrUnknown)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	results := Settle(shortly(t, 100*time.Millisecond), settler, []Settlement{settlement, settlement})
	require.ErrorIs(t, results[0].Err, ErrUnknown)
	require.ErrorIs(t, results[1].Err, ErrUnknown)
	_, err = ReadMeta(shortly(t, 100*time.Millisecond), b.client, b.partition)
	require.ErrorIs(t, err, ErrUnknown)
	require.NoError(t, server.Resume())
	require.Eventually(t, func() bool { return b.books().Settled == 1 }, patience, 5*time.Millisecond, "it had been delivered")
	reply := b.admit(2)
	require.Equal(t, []Decision{DecisionReplayed}, decisions(reply))

	server.Kill()
	_, err = Admit(b.ctx, b.client, b.call(3))
	require.ErrorIs(t, err, ErrUnknown)
}
