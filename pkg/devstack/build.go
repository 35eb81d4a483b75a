package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

var built struct {
	sync.Mutex
	dirs map[string]string
}

// BuildOptions says how Build builds.
type BuildOptions struct {
	// Race builds the race detector in, which needs a C compiler.
	Race bool
	// Tags are build tags.
	Tags []string
}

// Build builds main packages of the workspace, given by import path, and
// returns the folder with their programs, named as the last part of the path.
// The folder belongs to this process and goes with it; a second call with the
// same arguments returns the same one.
func Build(ctx context.Context, log io.Writer, opt BuildOptions, pkgs ...string) (dir string, err error) {
	if log == nil {
		log = io.Discard
	}
	root := Root()
	if root == "" {
		return "", errors.New("building: no go.work upwards of the working directory")
	}
	built.Lock()
	defer built.Unlock()
	key := fmt.Sprint(opt, pkgs)
	if dir := built.dirs[key]; dir != "" {
		if _, err := os.Stat(dir); err == nil {
			return dir, nil
		}
	}
	if dir, err = tempFolder("bin-"); err != nil {
		return "", err
	}
	// No version stamp: these programs are thrown away, and it needs a git that
	// trusts the folder.
	args := []string{"build", "-buildvcs=false", "-o", dir + string(filepath.Separator)}
	if opt.Race {
		args = append(args, "-race")
	}
	if len(opt.Tags) > 0 {
		args = append(args, "-tags="+strings.Join(opt.Tags, ","))
	}
	cmd := exec.CommandContext(ctx, "go", append(append(args, "--"), pkgs...)...)
	cmd.Dir = root
	// The workspace even where the caller was built without it: the packages
	// lie in several modules.
	cmd.Env = append(os.Environ(), "GOWORK="+filepath.Join(root, "go.work"))
	var out tail
	out.next = log
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("building %s: %w\n%s", strings.Join(pkgs, " "), err, out.String())
	}
	if built.dirs == nil {
		built.dirs = make(map[string]string)
	}
	built.dirs[key] = dir
	return dir, nil
}

// RaceAvailable reports whether the race detector can be built here: it needs
// cgo and a C compiler.
func RaceAvailable() bool {
	out, err := exec.Command("go", "env", "CGO_ENABLED", "CC").Output()
	if err != nil {
		return false
	}
	lines := strings.Split(string(out), "\n")
	if len(lines) < 2 || lines[0] != "1" {
		return false
	}
	compiler := strings.Fields(lines[1])
	if len(compiler) == 0 {
		return false
	}
	_, err = exec.LookPath(compiler[0])
	return err == nil
}
