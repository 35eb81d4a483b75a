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
	// WriterInTransaction: rows are inserted and their units taken, the
	// transaction is not committed.
	WriterInTransaction Point = "writer.in_transaction"
	// WriterAfterRollback: the transaction of a batch was refused and rolled back,
	// what that means for its orders is not decided.
	WriterAfterRollback Point = "writer.after_rollback"
	// WriterAfterOutcome: conflicts or rejections are committed, other orders of
	// the batch may have no verdict.
	WriterAfterOutcome Point = "writer.after_outcome"
	// WriterBeforeHold: dead letters are about to be written.
	WriterBeforeHold Point = "writer.before_hold"
	// WriterAfterHold: dead letters are committed, the ledger has not been told.
	WriterAfterHold Point = "writer.after_hold"
	// WriterAfterCommit: every order of the batch has a committed verdict, the
	// ledger has not been told.
	WriterAfterCommit Point = "writer.after_commit"
	// WriterAfterSettle: the ledger has been told.
	WriterAfterSettle Point = "writer.after_settle"
	// WriterAfterDiscard: an entry that stands for no order is taken away.
	WriterAfterDiscard Point = "writer.after_discard"
)

// The points of a writer that stops.
const (
	// WriterBeforeRelease: what could not be finished is about to be handed back.
	WriterBeforeRelease Point = "writer.before_release"
	// WriterAfterRelease: it is handed back.
	WriterAfterRelease Point = "writer.after_release"
	// WriterBeforeRemoval: the own consumer is about to be removed.
	WriterBeforeRemoval Point = "writer.before_removal"
	// WriterAfterRemoval: the own consumer is removed.
	WriterAfterRemoval Point = "writer.after_removal"
)

// The points of an operator's decision about a dead letter.
const (
	// OperatorBeforeCommit: all that belongs to a decision is written, the
	// transaction is not committed.
	OperatorBeforeCommit Point = "operator.before_commit"
	// OperatorAfterCommit: a decision is committed, neither the operator nor the
	// ledger has been told.
	OperatorAfterCommit Point = "operator.after_commit"
	// GuardianBeforeTell: an operator's decision is committed, the ledger is about to
	// be told.
	GuardianBeforeTell Point = "guardian.before_tell"
	// GuardianAfterTell: the ledger has been told, the database does not know.
	GuardianAfterTell Point = "guardian.after_tell"
)
