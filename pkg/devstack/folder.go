package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// Root returns the root of the repository, the nearest folder upwards that has
// a go.work, or "" outside of it.
func Root() string {
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return ""
		}
		dir = parent
	}
}

// Dir returns the private folder for fetched servers and for what is made once
// and used again: SECKILL_DEV_DIR, else .dev in the repository, else a folder
// in the user's cache.
func Dir() string {
	dir := os.Getenv("SECKILL_DEV_DIR")
	if dir == "" {
		if root := Root(); root != "" {
			dir = filepath.Join(root, ".dev")
		} else if cache, err := os.UserCacheDir(); err == nil {
			dir = filepath.Join(cache, "seckill-dev")
		} else {
			dir = filepath.Join(os.TempDir(), "seckill-dev")
		}
	}
	if abs, err := filepath.Abs(dir); err == nil {
		return abs
	}
	return dir
}

// lockFolder takes the named lock of the private folder, which excludes other
// processes (test binaries of several packages start at once). The kernel
// gives it back when the process dies. It waits until ctx ends.
func lockFolder(ctx context.Context, log io.Writer, name string) (unlock func(), err error) {
	if err := os.MkdirAll(Dir(), 0o755); err != nil {
		return nil, fmt.Errorf("making the private folder: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(Dir(), name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the lock of the private folder: %w", err)
	}
	for said := false; ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("locking the private folder: %w", err)
		}
		if !said {
			fmt.Fprintf(log, "devstack: waiting for another process that prepares %s\n", Dir())
			said = true
		}
		if !wait(ctx, 50*time.Millisecond) {
			f.Close()
			return nil, fmt.Errorf("waiting for the lock of the private folder: %w", ctx.Err())
		}
	}
}

// wait sleeps for d and reports false when ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// All data of one process lives below one folder, which goes away in four ways:
// instances remove their own part when closed; Cleanup removes all of it; a
// small shell, the reaper, removes it when this process dies in whatever way,
// which it sees by the end of its input; and should the reaper be killed too,
// the next process sweeps it, which it may once the folder's lock is free.
const (
	folderPrefix = "seckill-dev-"
	ownerLock    = "owner.lock"
)

type processFolder struct {
	path   string
	lock   *os.File
	reaper io.WriteCloser // the reaper's standard input; closing it removes the folder
	done   <-chan struct{}
}

var folders struct {
	sync.Mutex
	current *processFolder
}

// tempFolder makes a new throw-away folder below this process's own.
func tempFolder(pattern string) (string, error) {
	folder, err := ownFolder()
	if err != nil {
		return "", err
	}
	return os.MkdirTemp(folder.path, pattern)
}

func ownFolder() (*processFolder, error) {
	folders.Lock()
	defer folders.Unlock()
	if folders.current != nil {
		return folders.current, nil
	}
	sweep()
	path, err := os.MkdirTemp("", folderPrefix)
	if err != nil {
		return nil, fmt.Errorf("making a folder for throw-away data: %w", err)
	}
	// Locked before it gets its name: no sweep can find it there unlocked.
	lock, err := os.OpenFile(filepath.Join(path, "new.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		if err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
			err = os.Rename(lock.Name(), filepath.Join(path, ownerLock))
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("locking the folder for throw-away data: %w", err), os.RemoveAll(path))
	}
	folder := &processFolder{path: path, lock: lock}
	if err := folder.startReaper(); err != nil {
		return nil, errors.Join(fmt.Errorf("starting the reaper: %w", err), os.RemoveAll(path))
	}
	folders.current = folder
	return folder, nil
}

// reaperScript reads "+ PID" and "- PID" until its input ends, kills the
// process groups that are left, and removes the folder: several times, as a
// server that is just dying may still make a file.
const reaperScript = `trap '' INT TERM HUP QUIT
pids=' '
while read -r op pid; do
  case $op in
    +) pids="$pids$pid " ;;
    -) case $pids in *" $pid "*) pids="${pids%%" $pid "*} ${pids#*" $pid "}" ;; esac ;;
  esac
done
# No "--": dash takes it for a process id.
for pid in $pids; do kill -9 "-$pid" 2>/dev/null; done
for try in 1 2 3 4 5 6 7 8 9 10; do
  rm -rf -- "$1" 2>/dev/null && exit 0
  sleep 0.2
done`

func (f *processFolder) startReaper() error {
	cmd := exec.Command("/bin/sh", "-c", reaperScript, "seckill-dev-reaper", f.path)
	cmd.Dir = "/"
	// A group of its own: Ctrl-C must not reach it before it has worked.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(done)
	}()
	f.reaper, f.done = in, done
	return nil
}

// tellReaper notes that a process group was started or has ended.
func tellReaper(op string, pid int) {
	folders.Lock()
	defer folders.Unlock()
	if folders.current != nil {
		fmt.Fprintf(folders.current.reaper, "%s %d\n", op, pid)
	}
}

// Cleanup removes everything that this process has left below its throw-away
// folder and waits for it. Instances must be closed before. It is not needed
// for order on the machine, the same happens when the process ends; it only
// makes it happen now.
func Cleanup() {
	folders.Lock()
	folder := folders.current
	folders.current = nil
	folders.Unlock()
	if folder == nil {
		return
	}
	folder.reaper.Close()
	<-folder.done // bounded: ten tries
	_ = os.RemoveAll(folder.path)
	folder.lock.Close()
}

// sweep removes the folders of processes that are gone. A live owner holds its
// lock, whatever its pid or container, so no live folder is ever taken.
func sweep() {
	paths, _ := filepath.Glob(filepath.Join(os.TempDir(), folderPrefix+"*"))
	for _, path := range paths {
		lock, err := os.OpenFile(filepath.Join(path, ownerLock), os.O_RDWR, 0)
		if err != nil {
			// Between MkdirTemp and the lock there are microseconds; one that is
			// without a lock for an hour was left by a crash just there.
			if info, statErr := os.Stat(path); errors.Is(err, os.ErrNotExist) && statErr == nil && time.Since(info.ModTime()) > time.Hour {
				_ = os.RemoveAll(path)
			}
			continue
		}
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			_ = os.RemoveAll(path)
		}
		lock.Close()
	}
}
