package devstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// fetchTimeout bounds one whole fetch: about 9 MB of index and 9 MB of
// packages, 60 MB for MySQL; a slow line takes minutes, anything longer is a
// hang.
const fetchTimeout = 10 * time.Minute

// fetch downloads the packages of the missing servers from the distribution's
// own mirror and unpacks each server into its own folder below Dir(). It needs
// no root and leaves the system's package state alone: apt gets lists, cache,
// sources and a copy of the package status of its own. The caller holds the
// "fetch" lock. A folder appears by rename, so it is whole or not there.
func fetch(ctx context.Context, log io.Writer, missing []server) error {
	for _, tool := range []string{"apt-get", "dpkg-deb"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("this system has no %s to fetch packages with", tool)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	var stable, unstable []server
	for _, s := range missing {
		if s.unstable {
			unstable = append(unstable, s)
		} else {
			stable = append(stable, s)
		}
	}
	// What is surely there first: that the rest is not must not keep it away.
	if err := fetchFrom(ctx, log, false, stable); err != nil {
		return err
	}
	return fetchFrom(ctx, log, true, unstable)
}

// fetchFrom fetches servers from the system's own release or from Debian's
// unstable suite.
func fetchFrom(ctx context.Context, log io.Writer, unstable bool, servers []server) error {
	if len(servers) == 0 {
		return nil
	}
	source, err := packageSource(unstable)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp(Dir(), "fetch-")
	if err != nil {
		return fmt.Errorf("making a folder to fetch into: %w", err)
	}
	defer os.RemoveAll(work)
	apt, err := newPrivateApt(work, source)
	if err != nil {
		return err
	}
	fmt.Fprintf(log, "devstack: reading the package index of %s\n", apt.source)
	if err := apt.run(ctx, "update"); err != nil {
		return fmt.Errorf("reading the package index: %w", err)
	}
	for _, s := range servers {
		fmt.Fprintf(log, "devstack: fetching %s\n", strings.Join(s.packages, " "))
		if err := apt.fetch(ctx, s, filepath.Join(Dir(), s.folder)); err != nil {
			return fmt.Errorf("fetching %s: %w", strings.Join(s.packages, " "), err)
		}
		fmt.Fprintf(log, "devstack: unpacked into %s\n", filepath.Join(Dir(), s.folder))
	}
	return nil
}

// privateApt is apt with all of its state below one folder.
type privateApt struct {
	dir    string
	source string // the line of sources.list
}

func newPrivateApt(dir, source string) (*privateApt, error) {
	for _, sub := range []string{"apt.conf.d", "empty", "lists/partial", "cache/archives/partial", "log"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, fmt.Errorf("preparing a private apt: %w", err)
		}
	}
	a := &privateApt{dir: dir, source: source}
	// The system's apt.conf.d stays in force: it may carry proxies and
	// authentication. What cannot be read by this user is left out.
	parts, _ := filepath.Glob("/etc/apt/apt.conf.d/*")
	for _, part := range parts {
		if f, err := os.Open(part); err == nil {
			f.Close()
			if err := os.Symlink(part, filepath.Join(dir, "apt.conf.d", filepath.Base(part))); err != nil {
				return nil, fmt.Errorf("preparing a private apt: %w", err)
			}
		}
	}
	// The hooks of the system are cleared: they clean the system's own cache
	// and wake its services.
	settings := strings.ReplaceAll(`#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg;
Dir::State "@";
Dir::State::lists "@/lists";
Dir::Cache "@/cache";
Dir::Cache::archives "@/cache/archives";
Dir::Log "@/log";
Dir::Etc::SourceList "@/sources.list";
Dir::Etc::SourceParts "@/empty";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "@/empty";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Sandbox::User "";
APT::Keep-Downloaded-Packages "true";
// A mirror that is not reached is an error, not a warning.
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons-small::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons-large::DefaultEnabled "false";
Acquire::IndexTargets::deb::DEP-11-icons-hidpi::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
Acquire::IndexTargets::deb::CNF::DefaultEnabled "false";
`, "@", dir)
	files := map[string]string{
		"apt.conf.d/zz-devstack": settings,
		"apt.conf":               fmt.Sprintf("Dir::Etc::parts %q;\n", filepath.Join(dir, "apt.conf.d")),
		"sources.list":           a.source + "\n",
		"status.empty":           "",
	}
	// With a copy of the system's package status only what the system lacks
	// is fetched: 9 MB instead of 31.
	status, err := os.ReadFile("/var/lib/dpkg/status")
	if err != nil {
		return nil, fmt.Errorf("reading the system's package status: %w", err)
	}
	files["status.system"] = string(status)
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return nil, fmt.Errorf("preparing a private apt: %w", err)
		}
	}
	return a, nil
}

func (a *privateApt) run(ctx context.Context, args ...string) error {
	if args[0] == "update" {
		args = append([]string{"-o", "Dir::State::status=" + filepath.Join(a.dir, "status.empty")}, args...)
	}
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q"}, args...)...)
	cmd.Env = append(os.Environ(), "APT_CONFIG="+filepath.Join(a.dir, "apt.conf"), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("apt-get: %w: %s", err, errorLines(out))
	}
	return nil
}

// fetch downloads one server with what it depends on and unpacks it as target.
func (a *privateApt) fetch(ctx context.Context, s server, target string) error {
	install := func(status string) error {
		args := []string{"-o", "Dir::State::status=" + filepath.Join(a.dir, status), "-y", "--download-only", "install"}
		return a.run(ctx, append(args, s.packages...)...)
	}
	archives := filepath.Join(a.dir, "cache", "archives")
	leftOut := belongsToSystem
	if s.unstable {
		// Nothing of this system fits: everything is fetched, the C library too.
		leftOut = notForServer
		if err := install("status.empty"); err != nil {
			return err
		}
	} else if err := install("status.system"); err != nil {
		// A system whose own packages are broken or half upgraded cannot be added
		// to; then everything is fetched, as for an empty system.
		if retryErr := install("status.empty"); retryErr != nil {
			return errors.Join(err, retryErr)
		}
	}
	debs, _ := filepath.Glob(filepath.Join(archives, "*.deb"))
	if len(debs) == 0 {
		return errors.New("apt-get downloaded nothing")
	}
	root := filepath.Join(a.dir, "root-"+s.folder)
	if err := os.MkdirAll(root, 0o755); err != nil {
		return err
	}
	for _, deb := range debs {
		if !leftOut.MatchString(filepath.Base(deb)) {
			if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", deb, root).CombinedOutput(); err != nil {
				return fmt.Errorf("unpacking %s: %w: %s", filepath.Base(deb), err, firstLine(string(out)))
			}
		}
		if err := os.Remove(deb); err != nil { // so that the next server does not unpack it too
			return err
		}
	}
	for _, dir := range []string{"doc", "man", "locale", "lintian"} {
		_ = os.RemoveAll(filepath.Join(root, "usr/share", dir)) // only to save space
	}
	if err := os.RemoveAll(target); err != nil { // one that did not run
		return err
	}
	return os.Rename(root, target)
}

// withoutUse are packages that a server depends on and does not run with.
const withoutUse = `perl|perl-base|perl-modules-[0-9.]+|libperl[0-9.]+|dpkg|tar|passwd|adduser|debconf|usrmerge|gcc-[0-9]+-base|libc-gconv-[a-z-]+`

// Packages that are not unpacked. What comes from the system's own release uses
// the system's C library: one on a library path of its own would not belong to
// the loader. What comes from another release brings both.
var (
	notForServer    = regexp.MustCompile(`^(` + withoutUse + `)_`)
	belongsToSystem = regexp.MustCompile(`^(libc6|libc-bin|` + withoutUse + `)_`)
)

// packageSource returns the sources.list line for this release, or for Debian's
// unstable suite, on the mirror that the machine itself is set up with.
func packageSource(unstable bool) (string, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", fmt.Errorf("reading the name of this system's release: %w", err)
	}
	value := func(key string) string {
		m := regexp.MustCompile(`(?m)^` + key + `="?([^"\n]*)"?$`).FindSubmatch(release)
		if m == nil {
			return ""
		}
		return string(m[1])
	}
	codename := value("VERSION_CODENAME")
	if codename == "" {
		return "", errors.New("this system's release has no codename, so its packages cannot be named")
	}
	archive, components, mirror := "debian", "main", "http://deb.debian.org/debian"
	if ubuntu := value("UBUNTU_CODENAME"); ubuntu != "" {
		archive, components, mirror, codename = "ubuntu(?:-ports)?", "main universe", "http://archive.ubuntu.com/ubuntu", ubuntu
	}
	if unstable {
		if archive != "debian" {
			return "", errors.New("what is needed is in Debian's unstable suite, and this system is not Debian")
		}
		codename = "sid"
	}
	lists, _ := filepath.Glob("/etc/apt/sources.list.d/*")
	uri := regexp.MustCompile(`(?m)^(?:URIs:|deb\s)[^#\n]*?(https?://\S+/` + archive + `)/?(?:\s|$)`)
	for _, list := range append([]string{"/etc/apt/sources.list"}, lists...) {
		if !strings.HasSuffix(list, ".list") && !strings.HasSuffix(list, ".sources") {
			continue
		}
		content, err := os.ReadFile(list)
		if err != nil {
			continue
		}
		if m := uri.FindSubmatch(content); m != nil {
			mirror = string(m[1])
			break
		}
	}
	option := ""
	for _, keyring := range []string{"/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/ubuntu-archive-keyring.gpg"} {
		if strings.Contains(keyring, "/"+archive[:6]) {
			if _, err := os.Stat(keyring); err == nil {
				option = "[signed-by=" + keyring + "] "
			}
		}
	}
	return fmt.Sprintf("deb %s%s %s %s", option, mirror, codename, components), nil
}

// errorLines keeps what apt-get says of a failure: its E: and W: lines, at
// most five.
func errorLines(out []byte) string {
	var kept []string
	for line := range bytes.Lines(out) {
		if bytes.HasPrefix(line, []byte("E: ")) || bytes.HasPrefix(line, []byte("W: ")) || bytes.HasPrefix(line, []byte("Err:")) {
			if kept = append(kept, string(bytes.TrimSpace(line))); len(kept) == 5 {
				break
			}
		}
	}
	return strings.Join(kept, "; ")
}
