package orderid

import (
	"bytes"
	"crypto/aes"
	"encoding/binary"
	"log/slog"
	"math/big"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var (
	keyA = Key{Number: 0, Secret: [KeySize]byte([]byte("0123456789abcdef"))}
	keyB = Key{Number: 3, Secret: [KeySize]byte([]byte("fedcba9876543210"))}
)

func newCodec(t testing.TB, keys ...Key) *Codec {
	t.Helper()
	c, err := New(keys...)
	require.NoError(t, err)
	return c
}

func positions() *rapid.Generator[Position] {
	return rapid.Custom(func(t *rapid.T) Position {
		return Position{
			VoucherID: rapid.Int64Min(1).Draw(t, "voucher_id"),
			Epoch:     rapid.Int64Range(1, MaxEpoch).Draw(t, "epoch"),
			Seq:       rapid.Int64Range(1, MaxSeq).Draw(t, "seq"),
		}
	})
}

func TestCodec_DecodesWhatItEncoded(t *testing.T) {
	for _, keys := range [][]Key{{keyA}, {keyB}, {keyA, keyB}} {
		c := newCodec(t, keys...)
		rapid.Check(t, func(t *rapid.T) {
			p := positions().Draw(t, "position")
			id := c.Encode(p)
			require.Regexp(t, "^[0-9A-HJKMNP-TV-Z]{26}$", id)
			got, err := c.Decode(id)
			require.NoError(t, err)
			require.Equal(t, p, got)
		})
	}
}

// The layout is a contract between versions: it is built here a second time, by
// way of one big number.
func TestCodec_FollowsTheDocumentedLayout(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := positions().Draw(t, "position")
		var block [16]byte
		binary.BigEndian.PutUint64(block[:8], uint64(p.VoucherID))
		binary.BigEndian.PutUint64(block[8:], uint64(p.Epoch)<<40|uint64(p.Seq))
		cipher, err := aes.NewCipher(keyB.Secret[:])
		require.NoError(t, err)
		cipher.Encrypt(block[:], block[:])
		n := new(big.Int).SetBytes(append([]byte{3}, block[:]...))
		text := make([]byte, Length)
		for i := Length - 1; i >= 0; i-- {
			var digit big.Int
			n.DivMod(n, big.NewInt(32), &digit)
			text[i] = alphabet[digit.Int64()]
		}
		c, err := New(keyB)
		require.NoError(t, err)
		require.Equal(t, string(text), c.Encode(p))
	})
}

// A well-formed string is the identifier of at most one position, and a position
// has one identifier under a key: whatever decodes encodes to the same string.
func TestCodec_IsABijectionOnWhatDecodes(t *testing.T) {
	c := newCodec(t, keyA)
	decoded := 0
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.StringMatching("[0-7][0-9A-HJKMNP-TV-Z]{25}").Draw(t, "id")
		p, err := c.Decode(id)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		decoded++
		require.Equal(t, id, c.Encode(p))
	})
	require.NotZero(t, decoded)
}

func TestCodec_EveryFlippedBitIsAnotherPositionOrRefused(t *testing.T) {
	c := newCodec(t, keyA, keyB)
	rapid.Check(t, func(t *rapid.T) {
		p := positions().Draw(t, "position")
		id := []byte(c.Encode(p))
		for i := range id {
			for bit := range 5 {
				other := append([]byte(nil), id...)
				other[i] = alphabet[symbol[id[i]]^1<<bit]
				if got, err := c.Decode(string(other)); err == nil {
					require.NotEqual(t, p, got, "character %d bit %d", i, bit)
				}
			}
		}
	})
}

// Nearly every second forged id decodes to something, but not to something that
// a sale has: the position is as random as the block.
func TestCodec_ForgedIDsNeverHitASale(t *testing.T) {
	c := newCodec(t, keyA)
	r := rand.New(rand.NewPCG(1, 2))
	inRange := 0
	const tries = 100_000
	for range tries {
		id := make([]byte, Length)
		for i := range id {
			id[i] = alphabet[r.IntN(32)]
		}
		id[0] = alphabet[r.IntN(8)] // the loaded key
		p, err := c.Decode(string(id))
		if err != nil {
			continue
		}
		inRange++
		plausible := p.VoucherID < 1<<32 && p.Epoch < 1000 && p.Seq < 10_000_000
		require.False(t, plausible, "%s is %+v", id, p)
	}
	require.InDelta(t, tries/2, inRange, tries/20, "the documented half")
}

func TestCodec_RefusesMalformed(t *testing.T) {
	c := newCodec(t, keyA)
	good := c.Encode(Position{VoucherID: 7, Epoch: 1, Seq: 1})
	other := newCodec(t, keyB).Encode(Position{VoucherID: 7, Epoch: 1, Seq: 1})
	for name, id := range map[string]string{
		"empty":              "",
		"short":              good[:25],
		"long":               good + "0",
		"lower case":         strings.ToLower(good),
		"letter I":           good[:25] + "I",
		"letter L":           good[:25] + "L",
		"letter O":           good[:25] + "O",
		"letter U":           good[:25] + "U",
		"hyphen":             good[:25] + "-",
		"not ASCII":          good[:24] + "é",
		"NUL":                good[:25] + "\x00",
		"key not loaded":     other,
		"space in the front": " " + good[1:],
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Decode(id)
			require.ErrorIs(t, err, ErrMalformed)
		})
	}
}

// Blocks that no Encode makes: a zero or a sign bit in a field.
func TestCodec_RefusesPositionsOutOfRange(t *testing.T) {
	c := newCodec(t, keyA)
	encode := func(high, low uint64) string {
		var b [16]byte
		binary.BigEndian.PutUint64(b[:8], high)
		binary.BigEndian.PutUint64(b[8:], low)
		c.blocks[0].Encrypt(b[:], b[:])
		n := new(big.Int).SetBytes(b[:])
		text := make([]byte, Length)
		for i := Length - 1; i >= 0; i-- {
			var digit big.Int
			n.DivMod(n, big.NewInt(32), &digit)
			text[i] = alphabet[digit.Int64()]
		}
		return string(text)
	}
	p, err := c.Decode(encode(9, 2<<40|5))
	require.NoError(t, err)
	require.Equal(t, Position{9, 2, 5}, p)
	for name, block := range map[string][2]uint64{
		"voucher 0":        {0, 1<<40 | 1},
		"voucher negative": {1 << 63, 1<<40 | 1},
		"epoch 0":          {1, 1},
		"seq 0":            {1, 1 << 40},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Decode(encode(block[0], block[1]))
			require.ErrorIs(t, err, ErrMalformed)
		})
	}
	for _, p := range []Position{
		{}, {0, 1, 1}, {-1, 1, 1}, {1, 0, 1}, {1, MaxEpoch + 1, 1}, {1, -1, 1}, {1, 1, 0}, {1, 1, MaxSeq + 1}, {1, 1, -1},
	} {
		require.Empty(t, c.Encode(p), "%+v", p)
	}
	require.NotEmpty(t, c.Encode(Position{1<<63 - 1, MaxEpoch, MaxSeq}))
}

func TestCodec_OldKeysDecodeTheNewestEncodes(t *testing.T) {
	p := Position{VoucherID: 7, Epoch: 2, Seq: 3}
	old, both := newCodec(t, keyA), newCodec(t, keyB, keyA)
	got, err := both.Decode(old.Encode(p))
	require.NoError(t, err)
	require.Equal(t, p, got)
	require.Equal(t, newCodec(t, keyB).Encode(p), both.Encode(p))
	require.Equal(t, 3, both.Current())
}

func TestCodec_AllocatesTheStringOnly(t *testing.T) {
	c := newCodec(t, keyA)
	p := Position{VoucherID: 7, Epoch: 1, Seq: 1}
	id := c.Encode(p)
	// The pool may be emptied by the collector in between, hence not exactly.
	require.Less(t, testing.AllocsPerRun(1000, func() { c.Encode(p) }), 2.0)
	if !raceEnabled { // with the race detector a sync.Pool drops what it is given at random
		require.Less(t, testing.AllocsPerRun(1000, func() { c.Decode(id) }), 1.0)
	}
}

func TestCodec_IsSafeForConcurrentUse(t *testing.T) {
	c := newCodec(t, keyA)
	for g := range int64(4) {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for i := range int64(2000) {
				p := Position{VoucherID: g + 1, Epoch: 1, Seq: i + 1}
				got, err := c.Decode(c.Encode(p))
				require.NoError(t, err)
				require.Equal(t, p, got)
			}
		})
	}
}

func TestParse_NamesTheLineAndNeverTheSecret(t *testing.T) {
	const secret = "00112233445566778899aabbccddeeff"
	for name, c := range map[string]struct{ text, want string }{
		"empty":           {"", "holds no key"},
		"comments only":   {"# nothing\n\n", "holds no key"},
		"number 4":        {"# x\n4 " + secret + "\n", "line 2: the key number"},
		"number negative": {"-1 " + secret, "line 1: the key number"},
		"no number":       {secret + "\n", "line 1: want a key number"},
		"three words":     {"0 " + secret + " x", "line 1: want a key number"},
		"short":           {"0 " + secret[:30], "line 1: key 0 is not 32 hex digits"},
		"long":            {"0 " + secret + "00", "line 1: key 0 is not 32 hex digits"},
		"no hex":          {"1 " + secret[:31] + "g", "line 1: key 1 is not 32 hex digits"},
		"number twice":    {"1 " + secret + "\n1 " + strings.Repeat("ab", 16), "line 2: key 1 is there already, on line 1"},
		"secret twice":    {"1 " + secret + "\n2 " + secret, "same secret"},
		"too long":        {strings.Repeat("#", maxFileSize+1), "longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(c.text))
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), secret[:30])
		})
	}
	c, err := Parse([]byte("# keys\r\n  0\t" + strings.ToUpper(secret) + "\r\n\n2 " + strings.Repeat("ab", 16)))
	require.NoError(t, err)
	require.Equal(t, 2, c.Current())
	require.Len(t, c.Fingerprints(), 2)
}

func TestGenerate_MakesADifferentLoadableFileEachTime(t *testing.T) {
	a, err := Parse(Generate())
	require.NoError(t, err)
	b, err := Parse(Generate())
	require.NoError(t, err)
	require.Equal(t, 0, a.Current())
	require.NotEqual(t, a.Fingerprints(), b.Fingerprints())
}

func TestLoad_ReportsAFileThatOthersMayRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(path, Generate(), 0o600))
	c, err := Load(path)
	require.NoError(t, err)
	_, exposed := c.Exposed()
	require.False(t, exposed)
	var said bytes.Buffer
	log := slog.New(slog.NewTextHandler(&said, nil))
	_, err = LoadAndWarn(path, log)
	require.NoError(t, err)
	require.Empty(t, said.String())

	for _, mode := range []os.FileMode{0o640, 0o604} {
		require.NoError(t, os.Chmod(path, mode))
		c, err = Load(path)
		require.NoError(t, err)
		got, exposed := c.Exposed()
		require.True(t, exposed)
		require.Equal(t, mode, got.Perm())
	}
	_, err = LoadAndWarn(path, log)
	require.NoError(t, err)
	require.Contains(t, said.String(), "may be read by others")
	require.Contains(t, said.String(), path)
	_, err = LoadAndWarn(path+".no", log)
	require.Error(t, err)
	_, exposed = newCodec(t, keyA).Exposed()
	require.False(t, exposed)
}

func TestLoad_NamesTheFile(t *testing.T) {
	dir := t.TempDir()
	_, err := Load(filepath.Join(dir, "absent"))
	require.ErrorIs(t, err, os.ErrNotExist)
	path := filepath.Join(dir, "keys")
	require.NoError(t, os.WriteFile(path, []byte("x"), 0o600))
	_, err = Load(path)
	require.ErrorContains(t, err, path)
	require.ErrorContains(t, err, "line 1")
}

func TestCheckFingerprints(t *testing.T) {
	c := newCodec(t, keyA, keyB)
	require.NoError(t, c.CheckFingerprints(nil))
	require.NoError(t, c.CheckFingerprints(c.Fingerprints()))
	require.NoError(t, c.CheckFingerprints(newCodec(t, keyA).Fingerprints()), "a key not registered yet")
	require.ErrorContains(t, newCodec(t, keyA).CheckFingerprints(c.Fingerprints()), "order key 3")
	require.ErrorContains(t, c.CheckFingerprints(map[int]string{0: "0000000000000000"}), "order key 0")
	require.ErrorContains(t, c.CheckFingerprints(map[int]string{7: "0000000000000000"}), "order key 7")
}

// SHA-256("seckill order key" || key), computed with sha256sum.
func TestFingerprints_AreTheDocumentedHash(t *testing.T) {
	require.Equal(t, map[int]string{0: "a72d5988d02dd78e"}, newCodec(t, keyA).Fingerprints())
}

func TestNew_RefusesNothingAndNumbersOutOfRange(t *testing.T) {
	_, err := New()
	require.Error(t, err)
	_, err = New(Key{Number: 4})
	require.ErrorContains(t, err, "4")
	_, err = New(keyA, keyA)
	require.ErrorContains(t, err, "twice")
}

func BenchmarkEncode(b *testing.B) {
	c := newCodec(b, keyA)
	p := Position{VoucherID: 7, Epoch: 1, Seq: 1}
	b.ReportAllocs()
	for b.Loop() {
		c.Encode(p)
		p.Seq++
	}
}

func BenchmarkDecode(b *testing.B) {
	c := newCodec(b, keyA)
	id := c.Encode(Position{VoucherID: 7, Epoch: 1, Seq: 1})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Decode(id); err != nil {
			b.Fatal(err)
		}
	}
}
