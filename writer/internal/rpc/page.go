package rpc

import (
	"encoding/base64"
	"encoding/binary"
)

// pageTokenVersion is the first byte of a token: another form of token gets
// another one, and tokens of the old form are refused instead of misread.
const pageTokenVersion = 1

// pageTokenBytes are the version and the id of the last voucher of the page.
const pageTokenBytes = 1 + 8

var pageTokenForm = base64.RawURLEncoding.Strict()

// pageToken is opaque to callers, who would otherwise build their own and be
// broken by another order of pages.
func pageToken(lastID int64) string {
	b := make([]byte, pageTokenBytes)
	b[0] = pageTokenVersion
	binary.BigEndian.PutUint64(b[1:], uint64(lastID))
	return pageTokenForm.EncodeToString(b)
}

func parsePageToken(token string) (lastID int64, ok bool) {
	if len(token) != pageTokenForm.EncodedLen(pageTokenBytes) {
		return 0, false
	}
	b, err := pageTokenForm.DecodeString(token)
	if err != nil || len(b) != pageTokenBytes || b[0] != pageTokenVersion {
		return 0, false
	}
	lastID = int64(binary.BigEndian.Uint64(b[1:]))
	return lastID, lastID > 0
}
