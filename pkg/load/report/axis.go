package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Unit says how the numbers of an axis read.
type Unit int

// The units.
const (
	Number    Unit = iota // 1,200 or 12k
	PerSecond             // 12k/s
	Seconds               // seconds, shown as us, ms or s
	Bytes                 // shown as B, KiB, MiB or GiB
	Share                 // 0 to 1, shown in percent
	Ratio                 // 1.25
)

// Scale is how an axis divides its length.
type Scale int

// The scales.
const (
	Linear Scale = iota // from 0, unless values are below it
	Log                 // for values above 0; others are not drawn
	Tail                // percentiles (0 to 1, below 1), each nine as wide as the one before
)

// Axis is an axis of a chart.
type Axis struct {
	Label string
	Unit  Unit
	Scale Scale
}

// axis is an Axis with its range on the page.
type axis struct {
	Axis
	low, high float64 // values
	from, to  float64 // places
	ticks     []float64
}

// tailMost is the most nines of a Tail axis.
const tailMost = 6

// fit makes an axis on which all values lie, from place to place, with about so
// many ticks.
func fit(a Axis, values []float64, from, to float64, about int) (*axis, error) {
	fitted := &axis{Axis: a, from: from, to: to}
	low, high := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("axis %q: %g cannot be drawn", a.Label, v)
		}
		if a.Scale == Log && v <= 0 {
			continue
		}
		low, high = min(low, v), max(high, v)
	}
	switch {
	case a.Scale == Tail:
		fitted.low = 0
		nines := math.Ceil(tail(high) - 1e-9)
		fitted.high = 1 - math.Pow(10, -min(max(nines, 1), tailMost))
		fitted.ticks = []float64{0, 0.5}
		for n := 1; n <= int(math.Round(tail(fitted.high))); n++ {
			fitted.ticks = append(fitted.ticks, 1-math.Pow(10, -float64(n)))
		}
		return fitted, nil
	case math.IsInf(low, 1):
		low, high = 1, 10
	}
	if a.Scale == Log {
		fitted.logTicks(low, high)
		return fitted, nil
	}
	low, high = min(low, 0), max(high, 0)
	if low == high {
		high = 1
	}
	step := niceStep((high-low)/float64(about), a.Unit)
	fitted.low, fitted.high = math.Floor(low/step+1e-9)*step, math.Ceil(high/step-1e-9)*step
	for i := 0; ; i++ {
		tick := fitted.low + float64(i)*step
		if tick > fitted.high+step/2 {
			return fitted, nil
		}
		fitted.ticks = append(fitted.ticks, tick)
	}
}

// logTicks goes from a tick below to one above: 1, 2 and 5 of each decade where
// there are few decades, else 1 alone.
func (a *axis) logTicks(low, high float64) {
	heads := []float64{1, 2, 5}
	if high/low > 3000 {
		heads = []float64{1}
	}
	for decade := math.Floor(math.Log10(low)) - 1; ; decade++ {
		for _, head := range heads {
			tick := head * math.Pow(10, decade)
			if tick <= low*(1+1e-9) {
				a.ticks = a.ticks[:0]
			}
			a.ticks = append(a.ticks, tick)
			if tick >= high*(1-1e-9) && len(a.ticks) > 1 {
				a.low, a.high = a.ticks[0], tick
				return
			}
		}
	}
}

// niceStep is the next of 1, 2, 2.5 and 5 in its decade; for bytes a power of two.
func niceStep(rough float64, unit Unit) float64 {
	if unit == Bytes {
		return math.Pow(2, math.Ceil(math.Log2(rough)))
	}
	decade := math.Pow(10, math.Floor(math.Log10(rough)))
	for _, head := range []float64{1, 2, 2.5, 5} {
		if head*decade >= rough*(1-1e-9) {
			return head * decade
		}
	}
	return 10 * decade
}

func tail(p float64) float64 { return -math.Log10(1 - min(max(p, 0), 1-math.Pow(10, -tailMost))) }

// at is the place of a value; false if it has none.
func (a *axis) at(v float64) (float64, bool) {
	low, high := a.low, a.high
	switch a.Scale {
	case Log:
		if v <= 0 {
			return 0, false
		}
		low, high, v = math.Log(low), math.Log(high), math.Log(v)
	case Tail:
		low, high, v = tail(low), tail(high), tail(v)
	}
	return a.from + (v-low)/(high-low)*(a.to-a.from), true
}

// format is a number with its unit, to three digits.
func (u Unit) format(v float64) string {
	switch u {
	case PerSecond:
		if v == 0 {
			return "0"
		}
		return metric(v) + "/s"
	case Seconds:
		switch size := math.Abs(v); {
		case v == 0:
			return "0"
		case size < 999.5e-9:
			return digits(v*1e9) + " ns"
		case size < 999.5e-6:
			return digits(v*1e6) + " µs"
		case size < 999.5e-3:
			return digits(v*1e3) + " ms"
		}
		return digits(v) + " s"
	case Bytes:
		for i, name := range []string{"B", "KiB", "MiB"} {
			if size := v / math.Pow(1024, float64(i)); math.Abs(size) < 1000 {
				return digits(size) + " " + name
			}
		}
		return digits(v/(1<<30)) + " GiB"
	case Share:
		return strconv.FormatFloat(v*100, 'g', 8, 64) + " %"
	case Ratio:
		return digits(v)
	}
	return metric(v)
}

// metric is a number to three digits, with k or M for thousands and millions.
func metric(v float64) string {
	switch size := math.Abs(v); {
	case size >= 999_500:
		return digits(v/1e6) + "M"
	case size >= 9_995:
		return digits(v/1e3) + "k"
	case size >= 999.5:
		whole := strconv.FormatFloat(v, 'f', 0, 64)
		return whole[:len(whole)-3] + "," + whole[len(whole)-3:]
	}
	return digits(v)
}

// digits is a number to three digits, without an exponent where it is readable.
func digits(v float64) string {
	size := math.Abs(v)
	if v == 0 {
		return "0"
	}
	if size < 1e-4 || size >= 1e7 {
		return strconv.FormatFloat(v, 'g', 3, 64)
	}
	places := max(2-int(math.Floor(math.Log10(size))), 0)
	text := strconv.FormatFloat(v, 'f', places, 64)
	if strings.Contains(text, ".") {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	return text
}
