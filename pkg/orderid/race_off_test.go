//go:build !race

package orderid

const raceEnabled = false
