// Package orderid turns the position of an order in the ledger into the opaque
// identifier that the API shows, and back.
//
// An identifier is 26 characters of Crockford base32, upper case only. Its 130
// bits are the number of a key (2 bits, most significant) and one AES-128 block
// of voucher_id (64 bits, big endian), epoch (24 bits) and seq (40 bits). It
// tells nobody how many orders there are, it is reversible in memory, and it is
// stored nowhere.
//
// The block is a permutation, not a seal: nearly half of all well-formed strings
// decode to some position that is in range, and a forged one decodes to a random
// position. A caller must therefore compare what stands at the position (the
// user's mark, the row's user_id) with the user who asks, and must not take a
// successful Decode for a proof that the order exists.
package orderid

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
)

const (
	// MaxEpoch is the highest epoch that an identifier can carry.
	MaxEpoch = 1<<24 - 1
	// MaxSeq is the highest seq that an identifier can carry.
	MaxSeq = 1<<40 - 1
	// Length is the number of characters of every identifier.
	Length = 26
	// MaxKeys is how many keys the two spare bits can number: 0 to MaxKeys-1.
	MaxKeys = 4
	// KeySize is the size of a key in bytes (AES-128).
	KeySize = 16
)

// alphabet is Crockford's base32: no I, L, O and U. Decoding is strict: lower
// case and the look-alikes that Crockford would read as digits are refused, so
// that an order has exactly one identifier under a key.
const alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// ErrMalformed is what Decode returns (wrapped) for every string that Encode
// could not have made under the loaded keys.
var ErrMalformed = errors.New("malformed order_id")

// Position is the place of an order in the ledger: seq is the dense number of
// the admission within (voucher, epoch). All three are greater than zero.
type Position struct{ VoucherID, Epoch, Seq int64 }

// valid reports whether p is in the ranges that a block can hold.
func (p Position) valid() bool {
	return p.VoucherID > 0 &&
		p.Epoch > 0 && p.Epoch <= MaxEpoch &&
		p.Seq > 0 && p.Seq <= MaxSeq
}

// Key is one numbered AES-128 key.
type Key struct {
	Number int // 0 to MaxKeys-1
	Secret [KeySize]byte
}

// Codec encodes positions with its highest numbered key and decodes with all of
// its keys. It is safe for concurrent use and must not be copied.
type Codec struct {
	blocks       [MaxKeys]cipher.Block // nil where the file has no such key
	current      int                   // the key that encodes
	fingerprints [MaxKeys]string
	file         fileInfo

	// Blocks go through the cipher.Block interface and would escape to the heap
	// on every call.
	scratch sync.Pool
}

type scratch struct{ block [aes.BlockSize]byte }

// New builds a Codec from keys; the highest number encodes. It refuses an empty
// list, a number out of range, and a number or a secret given twice.
func New(keys ...Key) (*Codec, error) {
	if len(keys) == 0 {
		return nil, errors.New("no order key given")
	}
	c := &Codec{current: -1}
	c.scratch.New = func() any { return new(scratch) }
	for _, k := range keys {
		if err := c.add(k); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *Codec) add(k Key) error {
	if k.Number < 0 || k.Number >= MaxKeys {
		return fmt.Errorf("order key number %d is not in 0..%d", k.Number, MaxKeys-1)
	}
	if c.blocks[k.Number] != nil {
		return fmt.Errorf("order key %d is given twice", k.Number)
	}
	fp := fingerprint(k.Secret)
	for n, other := range c.fingerprints {
		if other == fp {
			return fmt.Errorf("order keys %d and %d have the same secret", n, k.Number)
		}
	}
	block, err := aes.NewCipher(k.Secret[:])
	if err != nil {
		return fmt.Errorf("preparing order key %d: %w", k.Number, err)
	}
	c.blocks[k.Number] = block
	c.fingerprints[k.Number] = fp
	c.current = max(c.current, k.Number)
	return nil
}

// Encode returns the identifier of p under the highest numbered key. The caller
// guarantees 0 < VoucherID, 0 < Epoch <= MaxEpoch and 0 < Seq <= MaxSeq (the
// script that admits never goes beyond them); outside of these Encode returns
// the empty string, never the identifier of another position. It allocates
// nothing but the string.
func (c *Codec) Encode(p Position) string {
	var text [Length]byte
	return string(c.AppendEncode(text[:0], p))
}

// AppendEncode appends what Encode returns to b and allocates nothing itself.
func (c *Codec) AppendEncode(b []byte, p Position) []byte {
	if !p.valid() {
		return b
	}
	s := c.scratch.Get().(*scratch)
	binary.BigEndian.PutUint64(s.block[:8], uint64(p.VoucherID))
	binary.BigEndian.PutUint64(s.block[8:], uint64(p.Epoch)<<40|uint64(p.Seq))
	c.blocks[c.current].Encrypt(s.block[:], s.block[:])
	hi := binary.BigEndian.Uint64(s.block[:8])
	lo := binary.BigEndian.Uint64(s.block[8:])
	c.scratch.Put(s)

	// 25 characters of 5 bits from the low end; the first one is the key number
	// and the 3 bits that are left.
	var text [Length]byte
	for i := Length - 1; i > 0; i-- {
		text[i] = alphabet[lo&31]
		lo = lo>>5 | hi<<59
		hi >>= 5
	}
	text[0] = alphabet[uint64(c.current)<<3|lo&7]
	return append(b, text[:]...)
}

// Decode returns the position that id stands for. The error wraps ErrMalformed
// where the length, a character, the number of the key or the range of a field
// (each greater than zero) is wrong. See the package comment for what a
// successful answer does not prove.
func (c *Codec) Decode(id string) (Position, error) {
	if len(id) != Length {
		return Position{}, fmt.Errorf("%w: %d characters instead of %d", ErrMalformed, len(id), Length)
	}
	var hi, lo uint64
	for i := range Length {
		v := symbol[id[i]]
		if v == noSymbol {
			return Position{}, fmt.Errorf("%w: character %d is not in %s", ErrMalformed, i+1, alphabet)
		}
		hi = hi<<5 | lo>>59
		lo = lo<<5 | uint64(v)
	}
	number := symbol[id[0]] >> 3 // its bits have left hi at the top
	block := c.blocks[number]
	if block == nil {
		return Position{}, fmt.Errorf("%w: made with order key %d, which is not loaded", ErrMalformed, number)
	}

	s := c.scratch.Get().(*scratch)
	defer c.scratch.Put(s)
	binary.BigEndian.PutUint64(s.block[:8], hi)
	binary.BigEndian.PutUint64(s.block[8:], lo)
	block.Decrypt(s.block[:], s.block[:])
	low := binary.BigEndian.Uint64(s.block[8:])
	p := Position{
		VoucherID: int64(binary.BigEndian.Uint64(s.block[:8])),
		Epoch:     int64(low >> 40),
		Seq:       int64(low & MaxSeq),
	}
	if !p.valid() {
		return Position{}, fmt.Errorf("%w: it stands for no position", ErrMalformed)
	}
	return p, nil
}

const noSymbol = 0xFF

var symbol = func() (table [256]uint8) {
	for i := range table {
		table[i] = noSymbol
	}
	for v, ch := range []byte(alphabet) {
		table[ch] = uint8(v)
	}
	return table
}()
