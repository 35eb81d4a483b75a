package deploy_test

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
)

var update = flag.Bool("update", false, "write the flag tables of README anew")

// flagRow is a flag as --help tells it.
type flagRow struct{ flag, env, preset, meaning string }

// A line of --help: name, value, meaning, variable. A value in capitals is a
// placeholder, any other the default.
var helpLine = regexp.MustCompile(`^ {6}(--\S+?)(?:=(\S+))?(?: {2,}(.*?))?(?: \(\$(SECKILL_\w+)\)\.)?$`)

func flagsOf(t testing.TB, help string) []flagRow {
	t.Helper()
	var rows []flagRow
	for line := range strings.Lines(help) {
		if found := helpLine.FindStringSubmatch(strings.TrimRight(line, "\n")); found != nil && found[1] != "--version" {
			row := flagRow{flag: found[1], env: found[4], meaning: strings.TrimSuffix(found[3], ".")}
			if strings.HasPrefix(found[2], `"`) || found[2] != strings.ToUpper(found[2]) || regexp.MustCompile(`^\d+$`).MatchString(found[2]) {
				row.preset = strings.Trim(found[2], `"`)
			}
			rows = append(rows, row)
		}
	}
	return rows
}

// presets are the settings in force where nothing is given.
func presets(t testing.TB, program string) map[string]string {
	t.Helper()
	out, _ := run(t, nil, binary(t, program), "check-config")
	values := map[string]string{}
	for line := range strings.Lines(out) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ": "); ok {
			values["--"+name] = value
		}
	}
	delete(values, "--consumer") // another one each time
	return values
}

func table(t testing.TB, program, command string) string {
	t.Helper()
	help, code := run(t, []string{"COLUMNS=1000"}, binary(t, program), command, "--help")
	require.Zero(t, code, help)
	require.NotEmpty(t, flagsOf(t, help), help)
	var inForce map[string]string
	if program != "seckillctl" { // which has no settings of a server
		inForce = presets(t, program)
	}
	var b strings.Builder
	b.WriteString("| flag | environment | default | meaning |\n|---|---|---|---|\n")
	code2 := func(text string) string {
		if text == "" {
			return ""
		}
		return "`" + text + "`"
	}
	for _, row := range flagsOf(t, help) {
		if row.preset == "" {
			row.preset = inForce[strings.Replace(row.flag, "--[no-]", "--", 1)]
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", row.flag, code2(row.env), code2(row.preset), strings.ReplaceAll(row.meaning, "|", `\|`))
	}
	return b.String()
}

// commandTable is what --help lists of a program's commands.
func commandTable(t testing.TB, program string) string {
	t.Helper()
	help, code := run(t, []string{"COLUMNS=1000"}, binary(t, program), "--help")
	require.Zero(t, code, help)
	lines := regexp.MustCompile(`(?m)^  (\w\S*(?: \S+)?) {2,}(.+)$`).FindAllStringSubmatch(help, -1)
	require.NotEmpty(t, lines, help)
	var b strings.Builder
	b.WriteString("| command | does |\n|---|---|\n")
	for _, line := range lines {
		fmt.Fprintf(&b, "| `%s` | %s |\n", line[1], strings.TrimSuffix(line[2], "."))
	}
	return b.String()
}

func TestReadme_FlagTablesAreThoseOfTheBinaries(t *testing.T) {
	text := read(t, "README.md")
	blocks := regexp.MustCompile(`(?s)<!-- flags: (\w+) (\S+) -->\n(.*?)<!-- end -->\n`)
	seen := map[string]bool{}
	updated := blocks.ReplaceAllStringFunc(text, func(block string) string {
		found := blocks.FindStringSubmatch(block)
		seen[found[1]+" "+found[2]] = true
		want := table(t, found[1], found[2])
		if !*update {
			require.Equal(t, want, found[3], "run: go test ./tests/deploy -run Readme -update")
		}
		return "<!-- flags: " + found[1] + " " + found[2] + " -->\n" + want + "<!-- end -->\n"
	})
	require.Equal(t, map[string]bool{"gateway serve": true, "writer serve": true, "writer migrate": true, "seckillctl backlog": true}, seen)
	commands := regexp.MustCompile(`(?s)<!-- commands: seckillctl -->\n(.*?)<!-- end -->\n`)
	found := commands.FindStringSubmatch(updated)
	require.NotNil(t, found)
	want := commandTable(t, "seckillctl")
	if !*update {
		require.Equal(t, want, found[1], "run: go test ./tests/deploy -run Readme -update")
	}
	updated = strings.Replace(updated, found[0], "<!-- commands: seckillctl -->\n"+want+"<!-- end -->\n", 1)
	if *update {
		require.NoError(t, os.WriteFile(path(t, "README.md"), []byte(updated), 0o644))
	}
}

// Every seckillctl line of the documents, in code of either form, is one that it
// understands: where it would not, it says so before it shows its help.
func TestDocuments_NameCommandsThatSeckillctlUnderstands(t *testing.T) {
	program := binary(t, "seckillctl")
	lines := 0
	for _, document := range documents(t) {
		for _, found := range regexp.MustCompile("(?m)(?:^    |`)seckillctl (\\w[^`#>\n]*)").FindAllStringSubmatch(read(t, document), -1) {
			lines++
			var args []string
			for _, word := range regexp.MustCompile(`"[^"]*"|\S+`).FindAllString(found[1], -1) {
				args = append(args, strings.Trim(word, `"`))
			}
			out, code := run(t, nil, program, append(args, "--help")...)
			require.Zero(t, code, "%s: seckillctl %s\n%s", document, found[1], out)
			require.Contains(t, out, "Usage: seckillctl "+args[0], "%s: seckillctl %s", document, found[1])
		}
	}
	require.Greater(t, lines, 10)
}

// documents are all pages, by their names in the repository.
func documents(t testing.TB) []string {
	t.Helper()
	var names []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/adr/*.md", "docs/benchmarks/*.md"} {
		files, err := filepath.Glob(path(t, pattern))
		require.NoError(t, err)
		for _, file := range files {
			name, err := filepath.Rel(devstack.Root(), file)
			require.NoError(t, err)
			names = append(names, filepath.ToSlash(name))
		}
	}
	require.Greater(t, len(names), 10)
	return names
}

func TestDocuments_NameTestsThatExist(t *testing.T) {
	tests := testNames(t)
	for _, document := range documents(t) {
		for _, found := range regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllStringSubmatch(read(t, document), -1) {
			require.True(t, tests[found[1]], "%s names %s", document, found[1])
		}
	}
}

func TestDocuments_NameFilesThatExist(t *testing.T) {
	roots := "proto|gateway|writer|pkg|migrations|tests|deploy|docs"
	named := regexp.MustCompile("`((?:" + roots + `)/[\w./-]*\w)` + "`")
	linked := regexp.MustCompile(`\]\(([^):#]+)\)`)
	for _, document := range documents(t) {
		text := read(t, document)
		for _, found := range named.FindAllStringSubmatch(text, -1) {
			_, err := os.Stat(path(t, found[1]))
			require.NoError(t, err, "%s names %s", document, found[1])
		}
		for _, found := range linked.FindAllStringSubmatch(text, -1) {
			_, err := os.Stat(path(t, filepath.Join(filepath.Dir(document), found[1])))
			require.NoError(t, err, "%s links to %s", document, found[1])
		}
	}
}

// Every reason for which a partition can be closed has its line in the runbook:
// each text of the guardian, but what it logs or wraps, piece by piece between
// the figures.
func TestRunbook_HasEveryReasonOfTheGuardian(t *testing.T) {
	runbook := read(t, "docs/runbook.md")
	reasons := 0
	var missing []string
	for _, file := range []string{
		"writer/internal/guardian/keeper.go", "writer/internal/guardian/open.go", "writer/internal/guardian/watch.go",
		"writer/internal/guardian/check.go", "writer/internal/pipeline/commit.go", "writer/internal/pipeline/settle.go",
		"writer/internal/pipeline/takeover.go",
	} {
		parsed, err := parser.ParseFile(token.NewFileSet(), path(t, file), nil, 0)
		require.NoError(t, err)
		root := []ast.Node{parsed}
		if strings.Contains(file, "/pipeline/") {
			root = alarms(parsed) // all else that it says is no reason to close
		}
		inspect := func(node ast.Node) bool {
			if call, ok := node.(*ast.CallExpr); ok {
				if f, ok := call.Fun.(*ast.SelectorExpr); ok {
					on, _ := f.X.(*ast.SelectorExpr)
					if f.Sel.Name == "Errorf" || on != nil && on.Sel.Name == "log" {
						return false
					}
				}
			}
			literal, ok := node.(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(literal.Value)
			require.NoError(t, err)
			for _, piece := range regexp.MustCompile(`%[a-z]`).Split(text, -1) {
				if piece = strings.Trim(piece, " :;,"); len(strings.Fields(piece)) >= 2 {
					reasons++
					if !strings.Contains(runbook, piece) {
						missing = append(missing, fmt.Sprintf("%s: %q", file, text))
					}
				}
			}
			return true
		}
		for _, node := range root {
			ast.Inspect(node, inspect)
		}
	}
	require.Empty(t, missing)
	require.Greater(t, reasons, 25)
}

// alarms are the calls by which a pipeline asks for a partition or a voucher to
// be closed.
func alarms(file *ast.File) (calls []ast.Node) {
	ast.Inspect(file, func(node ast.Node) bool {
		if call, ok := node.(*ast.CallExpr); ok {
			if f, ok := call.Fun.(*ast.SelectorExpr); ok && (f.Sel.Name == "PartitionFault" || f.Sel.Name == "VoucherFault") {
				calls = append(calls, call)
			}
		}
		return true
	})
	return calls
}

// Every point at which tests kill a process has its row in failure-modes.md.
func TestFailureModes_HaveEveryCrashPoint(t *testing.T) {
	page := read(t, "docs/failure-modes.md")
	points := regexp.MustCompile(`Point = "([\w.]+)"`).FindAllStringSubmatch(read(t, "pkg/faultpoint/faultpoint.go"), -1)
	require.Greater(t, len(points), 5)
	for _, point := range points {
		require.Contains(t, page, "`"+point[1]+"`")
	}
}

// Every rule of the books stands in the table of the architecture, and in the
// runbook with what to look at.
func TestDocuments_HaveEveryRuleOfTheBooks(t *testing.T) {
	rules := regexp.MustCompile(`\tRule\w+ = "(\w+)"`).FindAllStringSubmatch(read(t, "writer/internal/books/books.go"), -1)
	require.Greater(t, len(rules), 10)
	for _, rule := range rules {
		for _, document := range []string{"docs/architecture.md", "docs/runbook.md"} {
			require.Contains(t, read(t, document), "`"+rule[1]+"`", document)
		}
	}
}

func testNames(t testing.TB) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	for _, module := range []string{"gateway", "writer", "pkg", "migrations", "tests"} {
		require.NoError(t, filepath.WalkDir(path(t, module), func(file string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(file, "_test.go") {
				return err
			}
			for _, found := range declared.FindAllStringSubmatch(content(t, file), -1) {
				names[found[1]] = true
			}
			return nil
		}))
	}
	require.NotEmpty(t, names)
	return names
}
