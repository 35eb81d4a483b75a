// Package orderstore is the database side of the writer: all of the project's
// SQL and all of its GORM. Nothing outside knows a table, a column or a driver.
//
// Read in this order: store.go (connections and transactions), packet.go (how
// long a statement may be), schema.go (what is checked before the first order),
// partitions.go and lock.go (who may do what), vouchers.go, then batch.go,
// persist.go and readback.go (how a batch of admitted orders gets its verdicts),
// hold.go, heldrows.go, deadletters.go and resolve.go (what becomes of those that
// cannot be stored), ledgerupdates.go (what the ledger is told of that), find.go
// and books.go (what is read and counted afterwards) and errors.go (what a driver
// error means).
//
// Three rules hold everywhere. Every session is READ COMMITTED, so each
// statement sees what was committed before it began. Any error inside a
// transaction means ROLLBACK, for a server that gave up one statement keeps the
// others. Whoever gives or changes a verdict in order_outcomes, or changes a
// voucher's stock, holds the lock on the voucher row, or on that of the partition
// where there is no such voucher.
//
// Every time stored is the database's own or one that the caller gave; the clock
// of the writer's machine is never stored.
package orderstore
