package devstack

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"
)

// DatabaseOptions says how a private database server is run.
type DatabaseOptions struct {
	// Dir holds its data; empty means a throw-away folder. A folder that is not
	// there yet is filled with a fresh installation.
	Dir string
	// Args are added to the command line and win over the defaults, for
	// example "--max-connections=20".
	Args []string
}

// Database is a private MariaDB or MySQL server on 127.0.0.1, with the user
// root and no password. A commit is on disk before it is acknowledged, and a
// lock wait timeout rolls the whole transaction back. All methods are safe for
// concurrent use.
type Database struct {
	binaries Binaries
	dir      string
	ours     bool // the folder is removed by Close
	port     int
	args     []string

	mu   sync.Mutex
	proc *Process
}

// StartDatabase starts a private database server and returns when it answers.
// ctx bounds only the start. The first start with a given server program
// installs a template of the system tables (some seconds), later ones copy it.
func StartDatabase(ctx context.Context, b *Binaries, opt DatabaseOptions) (*Database, error) {
	d := &Database{binaries: *b, dir: opt.Dir, args: opt.Args}
	if d.dir == "" {
		folder, err := tempFolder("db-")
		if err != nil {
			return nil, err
		}
		d.dir, d.ours = filepath.Join(folder, "data"), true
	}
	err := d.install(ctx)
	if err == nil {
		d.proc, d.port, err = onFreePort(ctx, d.start)
	}
	if err != nil {
		d.removeFolder()
		return nil, err
	}
	return d, nil
}

// install fills the data folder from the template if it is not there yet.
func (d *Database) install(ctx context.Context) error {
	if _, err := os.Stat(d.dir); err == nil {
		return nil
	}
	template, err := d.template(ctx)
	if err != nil {
		return fmt.Errorf("installing the system tables: %w", err)
	}
	if err := copyFolder(template, d.dir); err != nil {
		return fmt.Errorf("copying the system tables: %w", err)
	}
	return nil
}

// template returns a folder with freshly installed system tables, made once
// for each server program and kept in the private folder.
func (d *Database) template(ctx context.Context) (string, error) {
	info, err := os.Stat(d.binaries.Database)
	if err != nil {
		return "", err
	}
	key := sha256.Sum256(fmt.Appendf(nil, "1 %s %s %d %d", d.binaries.Database, d.binaries.DatabaseVersion, info.Size(), info.ModTime().UnixNano()))
	target := filepath.Join(Dir(), fmt.Sprintf("template-%x", key[:8]))
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}
	unlock, err := lockFolder(ctx, io.Discard, "template")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}
	// Made in the throw-away folder's place first: the server's own temporary
	// files and a torn installation never get the final name.
	work, err := os.MkdirTemp(Dir(), "install-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	data := filepath.Join(work, "data")
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute) // measured: 2 to 9 s
	defer cancel()
	cmd := d.installCommand(ctx, data)
	cmd.Env = programEnv(d.binaries.Database)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("running %s: %w\n%s", filepath.Base(cmd.Path), err, out)
	}
	return target, os.Rename(data, target)
}

func (d *Database) installCommand(ctx context.Context, data string) *exec.Cmd {
	args := append([]string{"--no-defaults"}, d.placeArgs(data)...)
	if !d.binaries.MariaDB {
		program, args := programCommand(d.binaries.Database, append(args, "--initialize-insecure", "--innodb-redo-log-capacity=48M")...)
		return exec.CommandContext(ctx, program, args...)
	}
	installer := "mariadb-install-db"
	for _, dir := range []string{filepath.Dir(d.binaries.Database), filepath.Join(filepath.Dir(d.binaries.Database), "../bin"), "/usr/bin", "/usr/local/bin"} {
		if path := filepath.Join(dir, installer); isProgram(path) {
			installer = path
			break
		}
	}
	return exec.CommandContext(ctx, installer, append(args, "--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-log-file-size=48M")...)
}

// placeArgs are the arguments that depend on where the program and its data are.
func (d *Database) placeArgs(data string) []string {
	args := []string{"--datadir=" + data}
	if root := unpackedRoot(d.binaries.Database); root != "" {
		args = append(args, "--basedir="+filepath.Join(root, "usr"))
		if !d.binaries.MariaDB {
			args = append(args, "--lc-messages-dir="+filepath.Join(root, "usr/share/mysql"))
		}
	}
	if os.Geteuid() == 0 {
		args = append(args, "--user=root") // it refuses to run as root without saying so
	}
	return args
}

func (d *Database) start(ctx context.Context, port int) (*Process, error) {
	args := append([]string{"--no-defaults"}, d.placeArgs(d.dir)...)
	args = append(args,
		"--port="+strconv.Itoa(port), "--bind-address=127.0.0.1",
		// Relative to the data folder, into which the server goes: a Unix socket's
		// path has at most 107 bytes, and the data folder's may be longer.
		"--socket=s.sock", "--pid-file="+filepath.Join(d.dir, "pid"),
		// What the writer's promises stand on.
		"--innodb-flush-log-at-trx-commit=1", "--skip-log-bin", "--innodb-rollback-on-timeout=ON",
		// UTC everywhere; utf8mb4 everywhere.
		"--default-time-zone=+00:00", "--character-set-server=utf8mb4",
		// Small, so that several run on one machine.
		"--innodb-buffer-pool-size=64M", "--performance-schema=OFF", "--max-connections=200",
	)
	if d.binaries.MariaDB {
		args = append(args, "--innodb-log-file-size=48M", "--skip-name-resolve")
	} else {
		args = append(args, "--innodb-redo-log-capacity=48M", "--mysqlx=OFF", "--secure-file-priv=NULL")
	}
	program, args := programCommand(d.binaries.Database, append(args, d.args...)...)
	proc, err := StartProcess(ctx, ProcessOptions{Name: filepath.Base(d.binaries.Database), Path: program, Args: args, Env: programEnv(d.binaries.Database)})
	if err != nil {
		return nil, err
	}
	return proc, awaitServer(ctx, proc, "ddress already in use", func(ctx context.Context) error {
		return d.answers(ctx, port)
	})
}

// answers returns nil when the server on the port works on this data folder:
// after a lost race for the port it is somebody else's server that answers.
func (d *Database) answers(ctx context.Context, port int) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	cfg, err := mysql.ParseDSN(dsn(port, ""))
	if err != nil {
		return err
	}
	cfg.Logger = &mysql.NopLogger{} // a server that is just starting may hang up, which is no news
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	var data string
	if err := db.QueryRowContext(ctx, "SELECT @@datadir").Scan(&data); err != nil {
		return err
	}
	got, err := os.Stat(data)
	if err != nil {
		return err
	}
	want, err := os.Stat(d.dir)
	if err != nil {
		return err
	}
	if !os.SameFile(got, want) {
		return errors.New("another database server answers on this port")
	}
	return nil
}

func dsn(port int, dbName string) string {
	return fmt.Sprintf("root@tcp(127.0.0.1:%d)/%s", port, dbName)
}

func (d *Database) process() *Process {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.proc
}

// DSN returns the data source name of a database for go-sql-driver, without
// any parameter. It stays the same over restarts.
func (d *Database) DSN(dbName string) string { return dsn(d.port, dbName) }

// Addr returns host:port; it stays the same over restarts.
func (d *Database) Addr() string { return fmt.Sprintf("127.0.0.1:%d", d.port) }

// Pid returns the process id of the current run.
func (d *Database) Pid() int { return d.process().Pid() }

// Output returns the last part of the server's log of the current run.
func (d *Database) Output() string { return d.process().Output() }

var databaseName = regexp.MustCompile(`^[A-Za-z0-9_]{1,64}$`)

// CreateDatabase creates an empty database with utf8mb4; one that is there
// already is an error.
func (d *Database) CreateDatabase(ctx context.Context, name string) error {
	if !databaseName.MatchString(name) {
		return fmt.Errorf("creating a database: %q is not a plain name", name)
	}
	db, err := sql.Open("mysql", d.DSN(""))
	if err != nil {
		return fmt.Errorf("creating database %s: %w", name, err)
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, "CREATE DATABASE "+name+" CHARACTER SET utf8mb4"); err != nil {
		return fmt.Errorf("creating database %s: %w", name, err)
	}
	return nil
}

// Kill sends SIGKILL and waits until the server is gone.
func (d *Database) Kill() { d.process().Kill() }

// Stop shuts the server down in good order.
func (d *Database) Stop() error { return d.process().Stop(stopTimeout) }

// Pause stops the server by SIGSTOP: connections stay, answers do not come.
func (d *Database) Pause() error { return d.process().Pause() }

// Resume continues a paused server.
func (d *Database) Resume() error { return d.process().Resume() }

// Restart starts the server again with the same data, port and arguments, plus
// what is in args for this run only, and returns when it answers. A server
// that still runs is shut down first.
func (d *Database) Restart(ctx context.Context, args ...string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	proc, err := restart(ctx, d.proc, func(ctx context.Context) (*Process, error) {
		run := &Database{binaries: d.binaries, dir: d.dir, args: append(append([]string(nil), d.args...), args...)}
		return run.start(ctx, d.port)
	})
	if err != nil {
		return fmt.Errorf("restarting the database: %w", err)
	}
	d.proc = proc
	return nil
}

// Close kills the server and removes its folder if it is a throw-away one.
func (d *Database) Close() {
	d.Kill()
	d.removeFolder()
}

func (d *Database) removeFolder() {
	if d.ours {
		_ = os.RemoveAll(filepath.Dir(d.dir)) // what is left goes with the process's folder
	}
}

// copyFolder copies regular files and folders. Blocks of zeros become holes: a
// fresh redo log is nothing else.
func copyFolder(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case entry.IsDir():
			return os.MkdirAll(target, 0o700)
		case entry.Type().IsRegular():
			return copyFile(path, target)
		default:
			return nil // a socket
		}
	})
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	var size int64
	block := make([]byte, 256<<10)
	for {
		n, err := io.ReadFull(in, block)
		if n > 0 && !allZero(block[:n]) {
			if _, err := out.WriteAt(block[:n], size); err != nil {
				return err
			}
		}
		size += int64(n)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := out.Truncate(size); err != nil {
		return err
	}
	return out.Close()
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}
