package telemetry

// Keys of log attributes. One name per thing, so that a line of any process can
// be found by the same query.
const (
	KeyService    = "service"
	KeyVersion    = "version"
	KeyComponent  = "component"
	KeyAddr       = "addr"
	KeyMethod     = "method"
	KeyCode       = "code"
	KeyPartition  = "partition"
	KeyEpoch      = "epoch"
	KeyVoucherID  = "voucher_id"
	KeyUserID     = "user_id"
	KeySeq        = "seq"
	KeyOrderID    = "order_id"
	KeyEntryID    = "entry_id"
	KeyConsumer   = "consumer"
	KeyGroup      = "group"
	KeyStream     = "stream"
	KeyOrders     = "orders"  // number of orders
	KeyEntries    = "entries" // number of entries
	KeyState      = "state"
	KeyMode       = "mode"
	KeyVerdict    = "verdict"
	KeyRule       = "rule"
	KeyReason     = "reason"
	KeyErr        = "err"
	KeyAttempt    = "attempt"
	KeyRetryInMS  = "retry_in_ms"
	KeyDurationMS = "duration_ms"
	KeyStack      = "stack"
)
