package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/seckill/pkg/command"
	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
)

type backlogCommand struct{}

// Run shows the backlog.
func (c *backlogCommand) Run(ctx context.Context, to *connection, std command.Streams) error {
	return to.withWriter(func(s *server, _ seckillv1.VoucherServiceClient, operators seckillv1.WriterServiceClient) error {
		resp, err := call(ctx, s, operators.GetBacklog, &seckillv1.GetBacklogRequest{})
		if err != nil {
			return err
		}
		if to.Output == "json" {
			return printJSON(std.Out, resp)
		}
		return printBacklog(std.Out, resp)
	})
}

func printBacklog(w io.Writer, resp *seckillv1.GetBacklogResponse) error {
	const unknown = "unknown"
	table := newTable(w)
	fmt.Fprintln(table, "partition\tepoch\topen\tin flight\tlag\toldest\tconsumers\treason")
	for _, p := range resp.GetPartitions() {
		open, inFlight, lag, oldest := "no", unknown, unknown, unknown
		if p.GetOpen() {
			open = "yes"
		}
		if p.GetEpoch() != 0 {
			inFlight = strconv.FormatInt(p.GetInFlight(), 10)
		}
		if p.LagEntries != nil {
			lag, oldest = strconv.FormatInt(p.GetLagEntries(), 10), "-"
		}
		if p.GetOldestAge() != nil {
			oldest = p.GetOldestAge().AsDuration().Round(time.Millisecond).String()
		}
		consumers := make([]string, len(p.GetConsumers()))
		for i, consumer := range p.GetConsumers() {
			consumers[i] = fmt.Sprintf("%s:%d (idle %s)", printable(consumer.GetName()), consumer.GetPendingEntries(), consumer.GetIdle().AsDuration().Round(100*time.Millisecond))
		}
		fmt.Fprintf(table, "%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\n", p.GetPartition(), p.GetEpoch(), open, inFlight, lag, oldest,
			cmp.Or(strings.Join(consumers, " "), "-"), cmp.Or(printable(p.GetReason()), "-"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	letters := unknown
	if resp.DeadLetters != nil {
		letters = strconv.FormatInt(resp.GetDeadLetters(), 10)
	}
	_, err := fmt.Fprintf(w, "dead letters: %s, database: %s\n", letters, resp.GetDatabaseState())
	return err
}
