// Package faultpoint names the places at which tests kill a process: the
// windows between two steps that must not both be assumed. In a build without
// the tag faultpoint, which every release is, a point is nothing.
//
// With the tag, SECKILL_FAULTPOINT=<name> or <name>:<n> makes the process kill
// itself with SIGKILL when it reaches that point for the first or n-th time.
package faultpoint

// Variable is the environment variable that arms a point.
const Variable = "SECKILL_FAULTPOINT"

// Point is a named place.
type Point string

// The points of a gateway, in the order in which a batch of Grabs passes them.
const (
	// GatewayBeforeScript: a batch is about to be sent to the ledger.
	GatewayBeforeScript Point = "gateway.before_script"
	// GatewayAfterScript: the ledger has answered, no caller has been told.
	GatewayAfterScript Point = "gateway.after_script"
)

// The points of a writer, in the order in which an entry passes them.
const (
	// WriterAfterRead: new entries are delivered to this writer, nothing is
	// written.
	WriterAfterRead Point = "writer.after_read"
	// WriterAfterClaim: a dead writer's entries are taken over, nothing is
	// written.
	WriterAfterClaim Point = "writer.after_claim"
	// WriterBeforeCommit: the transaction of a batch is about to run.
	WriterBeforeCommit Point = "writer.before_commit"
	// WriterAfterCommit: every order of the batch has a committed verdict, the
	// ledger has not been told.
	WriterAfterCommit Point = "writer.after_commit"
	// WriterBeforeHold: dead letters are about to be written.
	WriterBeforeHold Point = "writer.before_hold"
	// WriterAfterHold: dead letters are committed, the ledger has not been told.
	WriterAfterHold Point = "writer.after_hold"
	// GuardianBeforeTell: an operator's decision is committed, the ledger is about to
	// be told.
	GuardianBeforeTell Point = "guardian.before_tell"
	// GuardianAfterTell: the ledger has been told, the database does not know.
	GuardianAfterTell Point = "guardian.after_tell"
	// WriterAfterSettle: the ledger has been told.
	WriterAfterSettle Point = "writer.after_settle"
)
