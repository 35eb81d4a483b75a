// Package limits measures what no system on these servers can be faster than:
// bare gRPC with messages of the same size, the tutorial's script alone on a
// redis-server, plain multi-row INSERTs into a table of the same form, and the
// disk's fsync. The benchmark shows seckill beside them.
package limits
