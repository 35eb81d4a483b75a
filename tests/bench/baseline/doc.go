// Package baseline is what seckill is measured against: the three stages of the
// well-known flash-sale tutorial, in Go, behind the same gRPC front, on the same
// Redis and database. It exists for the benchmark alone and promises nothing.
//
//	sync    a Grab reads the voucher, checks it, takes the lock of its user, and in
//	        one transaction looks for an order, decrements the stock where there is
//	        any, and inserts the row
//	queue   a Lua script decides by two keys (stock and set of buyers); the order
//	        goes into a queue in memory, from which one goroutine writes row by row
//	stream  the script also appends to a stream, from which one consumer reads one
//	        entry at a time, takes the lock of its user and writes row by row
//
// Keys, scripts, the id generator (one INCR a Grab) and the order of the steps
// are the tutorial's. What was repaired, only as far as it takes to run at all:
//
//   - orders have an index on (user_id, voucher_id): without one, looking for a
//     user's order reads the whole table, and a run of a minute does not end;
//   - the consumer group is made at the start, where the tutorial asks for it to
//     be made by hand;
//   - a full queue refuses the Grab with RESOURCE_EXHAUSTED instead of throwing in
//     the caller's thread after the stock was taken;
//   - the lock is SET NX with an expiry and a script that deletes only one's own,
//     instead of a client library with a watchdog.
//
// Losses are left as they are: orders in the queue go with the process, an
// acknowledged order whose row is refused is gone, and nothing gives a unit back.
package baseline
