package orderid

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
)

// maxFileSize bounds what Load reads: four keys and generous comments. A path
// that names something else by mistake must not fill the memory.
const maxFileSize = 64 << 10

type fileInfo struct {
	loaded bool
	mode   fs.FileMode
}

// Generate returns the text of a key file with one fresh key, number 0.
func Generate() []byte {
	var secret [KeySize]byte
	rand.Read(secret[:]) // never fails: it ends the process where the system has no randomness
	var b bytes.Buffer
	b.WriteString("# seckill order keys: `<number 0..3> <32 hex digits>`. Secret; the same file on every gateway and writer.\n")
	b.WriteString("# The highest number encodes new order ids, all decode. Never remove a key whose order ids are still in use.\n")
	fmt.Fprintf(&b, "0 %s\n", hex.EncodeToString(secret[:]))
	return b.Bytes()
}

// Load reads a key file. A file that group or others may read is accepted,
// because that is how orchestrators mount secrets for a process that is not
// root; the fact is kept in Exposed, for the caller to warn about.
func Load(path string) (*Codec, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("opening order key file: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("reading order key file: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFileSize+1))
	if err != nil {
		return nil, fmt.Errorf("reading order key file: %w", err)
	}
	c, err := Parse(text)
	if err != nil {
		return nil, fmt.Errorf("order key file %s: %w", path, err)
	}
	c.file = fileInfo{loaded: true, mode: info.Mode()}
	return c, nil
}

// LoadAndWarn reads a key file and logs a warning where Exposed is true.
func LoadAndWarn(path string, log *slog.Logger) (*Codec, error) {
	c, err := Load(path)
	if err != nil {
		return nil, err
	}
	if mode, exposed := c.Exposed(); exposed {
		log.Warn("the order key file may be read by others", "file", path, "file_mode", mode.String())
	}
	return c, nil
}

// Parse reads the text of a key file: blank lines, comment lines that begin
// with #, and lines of a key number and 32 hex digits. Errors name the line and
// never quote it, since it may hold a secret.
func Parse(text []byte) (*Codec, error) {
	if len(text) > maxFileSize {
		return nil, fmt.Errorf("longer than %d bytes", maxFileSize)
	}
	var keys []Key
	lineOf := map[int]int{}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		k, err := parseKey(fields)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if first, ok := lineOf[k.Number]; ok {
			return nil, fmt.Errorf("line %d: key %d is there already, on line %d", n, k.Number, first)
		}
		lineOf[k.Number] = n
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return nil, errors.New("holds no key")
	}
	return New(keys...)
}

func parseKey(fields []string) (Key, error) {
	if len(fields) != 2 {
		return Key{}, fmt.Errorf("want a key number and %d hex digits, found %d words", 2*KeySize, len(fields))
	}
	number, err := strconv.Atoi(fields[0])
	if err != nil || number < 0 || number >= MaxKeys {
		return Key{}, fmt.Errorf("the key number is not one of 0..%d", MaxKeys-1)
	}
	secret, err := hex.DecodeString(fields[1])
	if err != nil || len(secret) != KeySize {
		return Key{}, fmt.Errorf("key %d is not %d hex digits", number, 2*KeySize)
	}
	return Key{Number: number, Secret: [KeySize]byte(secret)}, nil
}

// Exposed reports whether the loaded file may be read by its group or by
// others, and its mode. It is false for a Codec that no file was loaded for.
func (c *Codec) Exposed() (fs.FileMode, bool) {
	return c.file.mode, c.file.loaded && c.file.mode.Perm()&0o044 != 0
}

// Current is the number of the key that encodes.
func (c *Codec) Current() int { return c.current }

// Fingerprints returns, for every loaded key number, the first 16 hex digits of
// SHA-256("seckill order key" || key). They are safe to publish.
func (c *Codec) Fingerprints() map[int]string {
	m := make(map[int]string, MaxKeys)
	for n, fp := range c.fingerprints {
		if fp != "" {
			m[n] = fp
		}
	}
	return m
}

// CheckFingerprints compares the loaded keys with the registered ones: every
// registered number must be loaded with that very fingerprint. Loaded keys that
// are not registered yet are no error; registering them, and that nobody
// encodes with one before every process has it, is the caller's concern.
func (c *Codec) CheckFingerprints(registered map[int]string) error {
	numbers := make([]int, 0, len(registered))
	for n := range registered {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	var errs []error
	for _, n := range numbers {
		switch want := registered[n]; {
		case n < 0 || n >= MaxKeys:
			errs = append(errs, fmt.Errorf("order key %d is registered, but only 0..%d exist", n, MaxKeys-1))
		case c.fingerprints[n] == "":
			errs = append(errs, fmt.Errorf("order key %d (fingerprint %s) is registered but not in the key file", n, want))
		case c.fingerprints[n] != want:
			errs = append(errs, fmt.Errorf("order key %d has fingerprint %s, registered is %s", n, c.fingerprints[n], want))
		}
	}
	return errors.Join(errs...)
}

func fingerprint(secret [KeySize]byte) string {
	sum := sha256.Sum256(append([]byte("seckill order key"), secret[:]...))
	return hex.EncodeToString(sum[:8])
}
