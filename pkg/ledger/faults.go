package ledger

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/rueidis"
)

// FaultsChannel is the channel on which gateways tell the guardian of a
// partition what they saw of its ledger that must not be. It is only a hint
// that makes the guardian look earlier: what it decides, it reads itself.
func FaultsChannel(partition int) string {
	return "sk:{" + strconv.Itoa(partition) + "}:faults"
}

// FaultKind names what a gateway met.
type FaultKind string

// The kinds.
const (
	// FaultRewound: the ledger went back behind an order that it had answered.
	// No figure in it shows that.
	FaultRewound FaultKind = "rewound"
	// FaultBroken: the ledger answered what it never should. A look shows it.
	FaultBroken FaultKind = "broken"
)

// ReportFault tells the guardian of a partition of a fault. Nobody listening is
// no error.
func ReportFault(ctx context.Context, client rueidis.CoreClient, partition int, kind FaultKind, text string) error {
	message := string(kind) + " " + text
	err := client.Do(ctx, client.B().Publish().Channel(FaultsChannel(partition)).Message(message).Build()).Error()
	if err = classify(err); err != nil {
		return fmt.Errorf("reporting a fault of partition %d: %w", partition, err)
	}
	return nil
}

// ListenFaults hears what gateways report of all partitions until ctx ends or
// the connection breaks, and returns why.
func ListenFaults(ctx context.Context, client rueidis.Client, partitions int, hear func(partition int, kind FaultKind, text string)) error {
	channels := make([]string, partitions)
	byChannel := make(map[string]int, partitions)
	for partition := range partitions {
		channels[partition] = FaultsChannel(partition)
		byChannel[channels[partition]] = partition
	}
	err := client.Receive(ctx, client.B().Subscribe().Channel(channels...).Build(), func(message rueidis.PubSubMessage) {
		if partition, ok := byChannel[message.Channel]; ok {
			kind, text, _ := strings.Cut(message.Message, " ")
			hear(partition, FaultKind(kind), text)
		}
	})
	return classify(err)
}
