package ledger

import (
	"context"
	"go/scanner"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/redis/rueidis"
	"github.com/stretchr/testify/require"
)

var (
	returnLine  = regexp.MustCompile(`^\s*return\b`)
	returnWord  = regexp.MustCompile(`\breturn\b`)
	headerLine  = regexp.MustCompile(`^-- (KEYS|ARGV)\[(\d+)\] (\S+)`)
	reachedLine = regexp.MustCompile(`reached (\S+\.lua:\d+)`)
	keyUse      = regexp.MustCompile(`KEYS\[(\d+)\]`)
	argUse      = regexp.MustCompile(`ARGV\[(\d+)\]`)
)

// originals are the sources as they are built in, kept from before they were
// instrumented.
var originals = map[string]string{}

// instrumentScripts makes every return statement of every script write its
// place to the server's log first. redis.log touches no key and needs no right,
// so a script does the same as before.
func instrumentScripts() {
	originals["admit.lua"] = admitSource
	admitSource = instrument("admit.lua", admitSource)
	for _, s := range writerScripts {
		originals[s.name+".lua"] = s.source
		*s = *newScript(s.name, instrument(s.name+".lua", s.source), s.keys, s.args, s.repeated)
	}
}

func instrument(file, source string) string {
	lines := strings.Split(source, "\n")
	for i, line := range lines {
		if returnLine.MatchString(line) {
			lines[i] = "redis.log(redis.LOG_WARNING, 'reached " + file + ":" + strconv.Itoa(i+1) + "') " + line
		}
	}
	return strings.Join(lines, "\n")
}

// missedReturns lists the return statements that no server has logged.
func missedReturns(logs string) []string {
	log, err := os.ReadFile(filepath.Join(logs, "redis.log"))
	if err != nil {
		return []string{err.Error()}
	}
	reached := map[string]bool{}
	for _, match := range reachedLine.FindAllStringSubmatch(string(log), -1) {
		reached[match[1]] = true
	}
	var missed []string
	for file, source := range originals {
		for i, line := range strings.Split(source, "\n") {
			if place := file + ":" + strconv.Itoa(i+1); returnLine.MatchString(line) && !reached[place] {
				missed = append(missed, place+": "+strings.TrimSpace(line))
			}
		}
	}
	return missed
}

// scriptFiles are the scripts of the folder, by file name.
func scriptFiles(t *testing.T) map[string]*script {
	t.Helper()
	byFile := map[string]*script{"admit.lua": admitScript(0, 1)}
	for _, s := range writerScripts {
		byFile[s.name+".lua"] = s
	}
	files, err := filepath.Glob("*.lua")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		require.Contains(t, byFile, file, "a script that the Go side does not know")
	}
	require.Len(t, files, len(byFile))
	return byFile
}

func readSource(t *testing.T, file string) string {
	t.Helper()
	source, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(source)
}

// code is a script without its comments.
func code(source string) string {
	var lines []string
	for _, line := range strings.Split(source, "\n") {
		before, _, _ := strings.Cut(line, "--")
		lines = append(lines, before)
	}
	return strings.Join(lines, "\n")
}

func TestScripts_HeaderNamesWhatGoPasses(t *testing.T) {
	for file, s := range scriptFiles(t) {
		t.Run(file, func(t *testing.T) {
			source := readSource(t, file)
			named := map[string][]string{}
			for _, line := range strings.Split(source, "\n") {
				if match := headerLine.FindStringSubmatch(line); match != nil {
					kind, name := match[1], match[3]
					named[kind] = append(named[kind], name)
					require.Equal(t, strconv.Itoa(len(named[kind])), match[2], "%s is out of order", line)
				}
			}
			require.Equal(t, s.keys, named["KEYS"])
			require.Equal(t, append(append([]string(nil), s.args...), s.repeated...), named["ARGV"])
			if len(s.repeated) > 0 {
				first := "-- ARGV[" + strconv.Itoa(len(s.args)+1) + "] " + s.repeated[0]
				at := strings.Index(source, first)
				require.Positive(t, at)
				line, _, _ := strings.Cut(source[at:], "\n")
				require.Contains(t, line, "repeat")
			}

			body := code(source)
			used := map[string]bool{}
			for _, match := range keyUse.FindAllStringSubmatch(body, -1) {
				used[match[1]] = true
			}
			require.Len(t, used, len(s.keys), "keys in use: %v", used)
			for i := range s.keys {
				require.Contains(t, used, strconv.Itoa(i+1))
			}
			for _, match := range argUse.FindAllStringSubmatch(body, -1) {
				number, err := strconv.Atoi(match[1])
				require.NoError(t, err)
				require.LessOrEqual(t, number, len(s.args), "ARGV[%d] is not in the header", number)
			}
			for i := range s.args {
				require.Contains(t, body, "ARGV["+strconv.Itoa(i+1)+"]")
			}
		})
	}
}

func TestScripts_HaveShebangAndCompile(t *testing.T) {
	client := sharedClient(t)
	for file := range scriptFiles(t) {
		t.Run(file, func(t *testing.T) {
			source := readSource(t, file)
			first, _, _ := strings.Cut(source, "\n")
			require.Regexp(t, `^#!lua( flags=(allow-oom|no-writes))?$`, first)
			require.True(t, strings.HasSuffix(source, "\n"), "admit's last comment must begin a line")
			if file == "admit.lua" || strings.HasPrefix(file, "create_") {
				require.Equal(t, "#!lua", first, "what takes memory must be refused when it is full")
			}
			if original, ok := originals[file]; ok {
				require.Equal(t, source, original, "the built-in source is the file")
			}
			_, err := client.Do(context.Background(), client.B().ScriptLoad().Script(source).Build()).ToString()
			require.NoError(t, err)
		})
	}
}

// Else instrument would not see a way out of a script.
func TestScripts_ReturnsStandAtTheirLineBeginning(t *testing.T) {
	for file := range scriptFiles(t) {
		for i, line := range strings.Split(code(readSource(t, file)), "\n") {
			if words := len(returnWord.FindAllString(line, -1)); words > 0 {
				require.Equal(t, 1, words, "%s:%d", file, i+1)
				require.Regexp(t, returnLine, line, "%s:%d", file, i+1)
			}
		}
	}
}

func TestScripts_CallTimeAtMostOnce(t *testing.T) {
	for file := range scriptFiles(t) {
		require.LessOrEqual(t, strings.Count(code(readSource(t, file)), "'TIME'"), 1, file)
	}
}

func TestPackage_UsesNeitherEvalNorFunctions(t *testing.T) {
	forbidden := regexp.MustCompile(`(?i)^(newluascript\w*|eval|evalro|eval_ro|fcall|fcallro|fcall_ro|function(load|restore)?)$`)
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	checked := 0
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		checked++
		source := readSource(t, file)
		set := token.NewFileSet()
		var s scanner.Scanner
		s.Init(set.AddFile(file, set.Base(), len(source)), []byte(source), nil, 0)
		for {
			at, kind, literal := s.Scan()
			if kind == token.EOF {
				break
			}
			if kind == token.IDENT || kind == token.STRING {
				require.NotRegexp(t, forbidden, strings.Trim(literal, "\"`"), "%s", set.Position(at))
			}
		}
	}
	require.Greater(t, checked, 5)
	for file := range scriptFiles(t) {
		require.NotRegexp(t, `(?i)'(eval|evalsha|fcall|function)'`, code(readSource(t, file)), file)
	}
}

func TestAdmitScript_OpensOnePartitionInOneEpochOnly(t *testing.T) {
	b := newBook(t, 10)
	require.NotEqual(t, AdmitSHA(1, 2), AdmitSHA(12, 2))
	require.NotEqual(t, AdmitSHA(b.partition, epoch), AdmitSHA(b.partition, epoch+1))

	other := newEmptyBook(t, b.client)
	require.NoError(t, CreatePartition(b.ctx, b.client, other.partition, epoch, 10))
	require.NoError(t, OpenPartition(b.ctx, b.client, other.partition, epoch, 10, DurabilityStrict, testRunID))
	_, err := Admit(b.ctx, b.client, other.call(1))
	require.ErrorIs(t, err, ErrNoScript)

	later := b.call(1)
	later.Epoch, later.SHA = epoch+1, AdmitSHA(b.partition, epoch+1)
	_, err = Admit(b.ctx, b.client, later)
	require.ErrorIs(t, err, ErrNoScript)

	for _, c := range []struct {
		partition int
		epoch     int64
		loaded    bool
	}{{b.partition, epoch, true}, {b.partition, epoch + 1, false}, {other.partition, epoch, false}} {
		loaded, err := AdmitLoaded(b.ctx, b.client, c.partition, c.epoch)
		require.NoError(t, err)
		require.Equal(t, c.loaded, loaded, "partition %d epoch %d", c.partition, c.epoch)
		loaded, err = ScriptLoaded(b.ctx, b.client, AdmitSHA(c.partition, c.epoch))
		require.NoError(t, err)
		require.Equal(t, c.loaded, loaded)
	}
	b.admit(1)
}

func TestAdmitScript_IsForgottenByARestartButTheLedgerIsNot(t *testing.T) {
	server := ownServer(t)
	b := newBookOn(t, connect(t, server.Addr(), ""), 10)
	require.Equal(t, int64(2), b.admit(1, 2).LastSeq)
	b.deliver("w")
	before := b.snapshot()
	server.Kill()
	require.NoError(t, server.Restart(b.ctx))
	b.client = connect(t, server.Addr(), "") // the old one's connections each have yet to see that they are cut

	_, err := Admit(b.ctx, b.client, b.call(3))
	require.ErrorIs(t, err, ErrNoScript)
	require.Equal(t, before, b.snapshot())

	// Settling loads its script by itself.
	result := b.settle(b.settlement(b.entries()[0], VerdictPersisted))
	require.NoError(t, result.Err)
	require.True(t, result.Settled)
	// And LoadAdmit opens the door again.
	require.NoError(t, LoadAdmit(b.ctx, b.client, b.partition, epoch))
	require.Equal(t, int64(3), b.admit(3).LastSeq)
}

func TestWriterScripts_LoadAll(t *testing.T) {
	server := ownServer(t)
	client := connect(t, server.Addr(), "")
	require.NoError(t, LoadWriterScripts(context.Background(), client))
	for _, s := range writerScripts {
		held, err := client.Do(context.Background(), client.B().ScriptExists().Sha1(s.sha).Build()).AsIntSlice()
		require.NoError(t, err)
		require.Equal(t, []int64{1}, held, s.name)
	}
	broken := newScript("broken", "this is not Lua", nil, nil, nil)
	require.ErrorIs(t, load(context.Background(), client, broken), ErrFault)
	_, err := newScript("silent", "#!lua\nreturn {}\n", nil, nil, nil).run(context.Background(), client, nil, nil)
	require.ErrorIs(t, err, ErrFault)
}

func TestScript_RefusesAWrongNumberOfKeysOrArguments(t *testing.T) {
	client := sharedClient(t)
	five, three := []string{"a", "b", "c", "d", "e"}, []string{"g", "1-1", "1"}
	require.Panics(t, func() { settle.command(client, five[:4], three) })
	require.Panics(t, func() { settle.command(client, five, append(three, "one")) })
	require.Panics(t, func() { openPartition.command(client, five[:1], three) })
	var built rueidis.Completed
	require.NotPanics(t, func() { built = settle.command(client, five, append(three, "2", "p", "1")) })
	require.Equal(t, []string{"EVALSHA", settle.sha, "5", "a", "b", "c", "d", "e", "g", "1-1", "1", "2", "p", "1"}, built.Commands())
}
