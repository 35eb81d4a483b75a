package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// minRedisMajor is the oldest Redis that knows "#!lua" script headers and
// reports deleted entries from XAUTOCLAIM; the ledger needs both.
const minRedisMajor = 7

// Binaries names the server programs that instances are started from.
type Binaries struct {
	// Redis is the path of redis-server, 7.0 or newer.
	Redis string
	// RedisVersion is what it says of itself, for example "7.0.15".
	RedisVersion string
	// Database is the path of mariadbd or mysqld.
	Database string
	// DatabaseVersion is what it says of itself, for example "10.11.18-MariaDB".
	DatabaseVersion string
	// MariaDB tells the two database servers apart: they are initialised
	// differently.
	MariaDB bool
}

// server is one of the two programs that Find looks for.
type server struct {
	title    string   // for messages
	env      string   // names a path that overrides the search
	programs []string // in order of preference
	not      string   // passed over if its version says this: a mysqld may be MariaDB's
	folder   string   // below Dir(), where a fetched one is unpacked
	packages []string // of the distribution, which hold it
	unstable bool     // they come from Debian's unstable suite, with a C library of their own
}

var (
	redisServer = server{
		title: "Redis", env: "SECKILL_REDIS_SERVER", programs: []string{"redis-server"},
		folder: "redis", packages: []string{"redis-server"},
	}
	anyDatabase = server{
		title: "MariaDB or MySQL", env: "SECKILL_DATABASE_SERVER", programs: []string{"mariadbd", "mysqld"},
		folder: "mariadb", // The client package holds my_print_defaults, which the installer of the
		// system tables needs.
		packages: []string{"mariadb-server-core", "mariadb-client-core"},
	}
	mariaDB = server{
		title: "MariaDB", env: anyDatabase.env, programs: anyDatabase.programs, not: "MySQL",
		folder: anyDatabase.folder, packages: anyDatabase.packages,
	}
	// No stable release of Debian has MySQL.
	mySQL = server{
		title: "MySQL", env: anyDatabase.env, programs: []string{"mysqld"}, not: "MariaDB",
		folder: "mysql", packages: []string{"mysql-server-core"}, unstable: true,
	}
)

// ErrMySQLUnavailable is in the error of Find when SECKILL_DATABASE asks for
// MySQL, it is not on this machine and could not be fetched today: the suite
// that has it is not pinned and may be unresolvable for days. Nothing is wrong
// with what was to be tested then.
var ErrMySQLUnavailable = errors.New("MySQL is not available here today")

// databaseServer is the database that SECKILL_DATABASE asks for.
func databaseServer() (server, error) {
	switch kind := os.Getenv("SECKILL_DATABASE"); kind {
	case "":
		return anyDatabase, nil
	case "mariadb":
		return mariaDB, nil
	case "mysql":
		return mySQL, nil
	default:
		return server{}, fmt.Errorf("SECKILL_DATABASE is %q: it may be mysql, mariadb or empty", kind)
	}
}

// Find returns the server programs: those on PATH (and in the usual folders
// that PATH often lacks), else those in the private folder, else it fetches
// them there from the distribution's packages. Progress goes to log, which may
// be nil. Several processes may call it at once: one fetches, the others wait.
// The error says how to get the servers by hand.
func Find(ctx context.Context, log io.Writer) (*Binaries, error) {
	if log == nil {
		log = io.Discard
	}
	database, err := databaseServer()
	if err != nil {
		return nil, err
	}
	b := &Binaries{}
	if b.use(ctx, log, database) {
		return b, nil
	}
	unlock, err := lockFolder(ctx, log, "fetch")
	if err != nil {
		return nil, err
	}
	defer unlock()
	// Another process may have fetched them while this one waited.
	if b.use(ctx, log, database) {
		return b, nil
	}
	var missing []server
	if b.Redis == "" {
		missing = append(missing, redisServer)
	}
	if b.Database == "" {
		missing = append(missing, database)
	}
	err = fetch(ctx, log, missing)
	if b.use(ctx, log, database) {
		return b, nil
	}
	if err == nil {
		err = errors.New("the fetched program does not run or is too old")
	}
	if b.Redis != "" && database.unstable && ctx.Err() == nil {
		return nil, fmt.Errorf("%w: no mysqld was found (SECKILL_DATABASE_SERVER may name one), and it was not fetched: %w", ErrMySQLUnavailable, err)
	}
	return nil, notFound(missing, err)
}

// use fills in what is there already and reports whether nothing is missing.
func (b *Binaries) use(ctx context.Context, log io.Writer, database server) bool {
	if b.Redis == "" {
		for _, path := range redisServer.candidates() {
			out, version, err := programVersion(ctx, path, `v=([0-9][^ ]*)`)
			if err != nil {
				fmt.Fprintf(log, "devstack: %s is passed over: %v\n", path, err)
				continue
			}
			major, _, _ := strings.Cut(version, ".")
			if n, err := strconv.Atoi(major); err != nil || n < minRedisMajor {
				fmt.Fprintf(log, "devstack: %s is passed over: Redis %d or newer is needed, it is %s\n", path, minRedisMajor, firstLine(out))
				continue
			}
			b.Redis, b.RedisVersion = path, version
			break
		}
	}
	if b.Database == "" {
		for _, path := range database.candidates() {
			out, version, err := programVersion(ctx, path, `Ver ([0-9][^ ]*)`)
			if err != nil {
				fmt.Fprintf(log, "devstack: %s is passed over: %v\n", path, err)
				continue
			}
			kind := "MySQL"
			if strings.Contains(out, "MariaDB") {
				kind = "MariaDB"
			}
			if kind == database.not {
				fmt.Fprintf(log, "devstack: %s is passed over: it is %s, and %s is wanted\n", path, kind, database.title)
				continue
			}
			b.Database, b.DatabaseVersion, b.MariaDB = path, version, kind == "MariaDB"
			break
		}
	}
	return b.Redis != "" && b.Database != ""
}

// candidates lists the existing programs of a server, best first.
func (s server) candidates() []string {
	if path := os.Getenv(s.env); path != "" {
		return []string{path}
	}
	var found []string
	for _, program := range s.programs {
		if path, err := exec.LookPath(program); err == nil {
			found = append(found, path)
			continue
		}
		// Servers live in sbin, which a normal user's PATH often lacks.
		for _, dir := range []string{"/usr/sbin", "/usr/local/sbin", "/usr/local/bin", "/opt/homebrew/bin", "/usr/libexec"} {
			if path := filepath.Join(dir, program); isProgram(path) {
				found = append(found, path)
				break
			}
		}
	}
	for _, program := range s.programs {
		for _, dir := range []string{"usr/bin", "usr/sbin"} {
			if path := filepath.Join(Dir(), s.folder, dir, program); isProgram(path) {
				found = append(found, path)
			}
		}
	}
	return found
}

func isProgram(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

func programVersion(ctx context.Context, path, pattern string) (out, version string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second) // generous: a cold disk, a busy machine
	defer cancel()
	program, args := programCommand(path, "--version")
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = programEnv(path)
	raw, err := cmd.CombinedOutput()
	if err != nil {
		return "", "", fmt.Errorf("running it: %w: %s", err, firstLine(string(raw)))
	}
	m := regexp.MustCompile(pattern).FindSubmatch(raw)
	if m == nil {
		return "", "", fmt.Errorf("it does not tell its version: %s", firstLine(string(raw)))
	}
	return string(raw), string(m[1]), nil
}

// programCommand is how a program is started. One that was unpacked with a C
// library of its own is started by the loader that belongs to it: the system's
// may be older. What runs then shows the loader's name in "ps".
func programCommand(path string, args ...string) (program string, withArgs []string) {
	if loader := ownLoader(path); loader != "" {
		return loader, append([]string{"--library-path", filepath.Dir(loader), path}, args...)
	}
	return path, args
}

// ToolOptions is how StartProcess starts a tool that lies beside a server, such
// as redis-benchmark: with the libraries that were fetched with it.
func ToolOptions(path string, args ...string) ProcessOptions {
	program, args := programCommand(path, args...)
	return ProcessOptions{Name: filepath.Base(path), Path: program, Args: args, Env: programEnv(path)}
}

func ownLoader(path string) string {
	root := unpackedRoot(path)
	if root == "" {
		return ""
	}
	if loaders, _ := filepath.Glob(filepath.Join(root, "usr/lib/*-linux-gnu*/ld-linux*.so.*")); len(loaders) > 0 {
		return loaders[0]
	}
	return ""
}

// programEnv is this process's environment, and for a program below the
// private folder also the path of the libraries that were unpacked with it,
// unless its own loader is told of them.
func programEnv(path string) []string {
	env := os.Environ()
	root := unpackedRoot(path)
	if root == "" || ownLoader(path) != "" {
		return env
	}
	var dirs []string
	for _, pattern := range []string{"usr/lib/*-linux-gnu*", "lib/*-linux-gnu*"} {
		matches, _ := filepath.Glob(filepath.Join(root, pattern))
		dirs = append(dirs, matches...)
	}
	if old := os.Getenv("LD_LIBRARY_PATH"); old != "" {
		dirs = append(dirs, old)
	}
	return append(env, "LD_LIBRARY_PATH="+strings.Join(dirs, ":"))
}

// unpackedRoot returns the folder that holds a fetched program's usr/ tree, or
// "" for a program of the system.
func unpackedRoot(path string) string {
	rel, err := filepath.Rel(Dir(), path)
	if err != nil || strings.HasPrefix(rel, "..") {
		return ""
	}
	top, _, _ := strings.Cut(rel, string(filepath.Separator))
	return filepath.Join(Dir(), top)
}

func notFound(missing []server, cause error) error {
	var titles []string
	for _, s := range missing {
		titles = append(titles, s.title)
	}
	return fmt.Errorf(`%s: not found, and not fetched: %w
Get what is missing in one of three ways:
  package manager   apt-get install redis-server mariadb-server-core   (dnf, pacman, apk: redis and mariadb; Redis must be 7.0 or newer)
  Homebrew          brew install redis mariadb
  containers        docker compose up   (runs the whole stack from compose.yaml instead)`,
		strings.Join(titles, " and "), cause)
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}
