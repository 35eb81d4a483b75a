package main

// The sides of a bound.
const (
	higher = "higher"
	lower  = "lower"
)

// figure is a ratio of what one round measured, and the bound that it is held
// against.
type figure struct {
	name   string
	what   string
	bound  float64
	better string
	// over is divided by under, or is the value itself where under is empty.
	over, under string
}

func (f figure) limitWord() string {
	if f.better == higher {
		return "at least"
	}
	return "at most"
}

func (f figure) met(value float64) bool {
	if f.better == higher {
		return value >= f.bound
	}
	return value <= f.bound
}

func figures() []figure {
	return []figure{
		{"unary_over_echo", "unary Grab, fast, over bare unary echo", 0.80, higher, "unary_fast_per_second", "echo_unary_per_second"},
		{"unary_strict_over_echo", "unary Grab, strict, over bare unary echo", 0.65, higher, "unary_strict_per_second", "echo_unary_per_second"},
		{"stream_over_echo", "admitted over GrabStream, strict, over bare unary echo", 4.5, higher, "stream_strict_per_second", "echo_unary_per_second"},
		{"refused_over_admitted", "refused over admitted, both over GrabStream, strict", 1.3, higher, "refused_per_second", "stream_strict_per_second"},
		{"strict_over_fast", "strict over fast, admitted over GrabStream", 0.70, higher, "stream_strict_per_second", "stream_fast_per_second"},
		{"redis_cpu_over_tutorial", "CPU of redis-server an admitted order over that of the tutorial's script, both fast", 0.30, lower, "redis_us_per_admitted", "tutorial_redis_us_per_admitted"},
		{"drain_over_raw", "rows a second of a writer that drains over plain INSERTs", 0.75, higher, "drain_per_second", "raw_insert_per_second"},
		{"drain_over_stage3", "rows a second of a writer that drains over the tutorial's consumer", 30, higher, "drain_per_second", "stage3_drain_per_second"},
		{"path_over_stage3", "admitted and persisted a second, whole path, over the tutorial's", 40, higher, "path_per_second", "stage_stream_per_second"},
		{"p99_over_floor", "p99 of unary Grab at half of saturation over p99 of echo and script alone", 2.0, lower, "unary_half_p99_ms", "floor_p99_ms"},
		{"cost_1m_over_10k", "CPU of gateway and Redis, a unary Grab with 1,000,000 buyers over 10,000", 1.15, lower, "many_buyers_unary_us", "few_buyers_unary_us"},
		{"bytes_in_flight", "Redis memory of an order in flight, in bytes", 120, lower, "bytes_in_flight", ""},
	}
}

// value is the figure of one round; false where the round did not measure it.
func (f figure) value(round map[string]reading) (float64, bool) {
	over, ok := round[f.over]
	if !ok || f.under == "" {
		return over.mean(), ok
	}
	under, ok := round[f.under]
	if !ok || under.sum <= 0 {
		return 0, false
	}
	return over.mean() / under.mean(), true
}
