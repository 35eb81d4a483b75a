package rpc

import (
	"crypto/sha256"
)

const (
	// cursorVersion is the first byte of a token that is bound to its query; those
	// of ListVouchers begin otherwise.
	cursorVersion = 2
	// cursorBinding is how many bytes of the query's digest a token carries: it is
	// there against mistakes, not against attacks, for it gives no rights.
	cursorBinding = 8

	notOfThisQuery = "must be empty or the next_page_token of an earlier answer to the same query"
)

// cursor is an opaque token for the place behind which the next page of a query
// begins. With another query it would skip what that one has before it.
func cursor(query, place string) string {
	digest := sha256.Sum256([]byte(query))
	b := append([]byte{cursorVersion}, digest[:cursorBinding]...)
	return pageTokenForm.EncodeToString(append(b, place...))
}

// readCursor returns the place of a token of this very query.
func readCursor(token, query string) (place string, ok bool) {
	b, err := pageTokenForm.DecodeString(token)
	if err != nil || len(b) < 1+cursorBinding || b[0] != cursorVersion {
		return "", false
	}
	digest := sha256.Sum256([]byte(query))
	return string(b[1+cursorBinding:]), string(b[1:1+cursorBinding]) == string(digest[:cursorBinding])
}
