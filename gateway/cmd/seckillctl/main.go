// Command seckillctl is how a person works with a running system: a thin client
// of the services that gateways and writers serve. It reaches no server but
// these, and holds no secret but its certificate.
//
// Read in this order: main.go (commands), connect.go (flags and connections),
// fault.go (how an error reads), print.go (how an answer reads); then
// vouchers.go, orders.go, backlog.go, deadletters.go and load.go (the commands).
package main

import (
	"os"

	"github.com/alecthomas/kong"

	"github.com/seckill/seckill/pkg/command"
)

const description = `Works with a running system, through its gateways and writers.

Answers go to standard output, as text or as one line of JSON each (--output json: numbers of 64 bits are strings there); progress and errors go to standard error.

Exit codes: 0 done, 1 failed or refused, 2 the command line was not understood.`

type commands struct {
	connection `embed:""`

	Backlog backlogCommand `cmd:"" help:"Show what lies between admission and the database, partition by partition."`
	Books   booksCommand   `cmd:"" help:"Reckon the books of a voucher. Code 1 where they are violated."`

	Voucher struct {
		Create  createCommand  `cmd:"" help:"Record a voucher, as a draft."`
		Get     getCommand     `cmd:"" help:"Show a voucher."`
		List    listCommand    `cmd:"" help:"Show all vouchers."`
		Open    openCommand    `cmd:"" help:"Bring a draft on sale."`
		Pause   pauseCommand   `cmd:"" help:"Stop a sale for a while."`
		Resume  resumeCommand  `cmd:"" help:"Let a paused sale go on."`
		Close   closeCommand   `cmd:"" help:"End a sale for good."`
		Archive archiveCommand `cmd:"" help:"Remove the ledger of a sale that is closed and proven."`
	} `cmd:"" help:"Run sales."`

	Order struct {
		Find findCommand `cmd:"" help:"Find an order in the database, however it ended."`
	} `cmd:"" help:"Look at an order."`
	Orders ordersCommand `cmd:"" help:"Print committed orders as lines of JSON, all of them, in a stable order."`

	DeadLetters struct {
		List    lettersCommand `cmd:"" help:"Show what could not be stored and waits for an operator."`
		Requeue requeueCommand `cmd:"" help:"Write held orders into the database now."`
		Cancel  cancelCommand  `cmd:"" help:"Give held orders up: their units, and their users' right to buy, return."`
	} `cmd:"" name:"dead-letters" help:"Settle what could not be stored."`

	Grab     grabCommand     `cmd:"" help:"Grab a unit for a user, as a caller of the gateway would."`
	GetOrder getOrderCommand `cmd:"" name:"get-order" help:"Show a user's order as the ledger has it, as a caller would see it."`
	Load     loadCommand     `cmd:"" help:"Load gateways with Grabs and measure. Takes real units."`

	Version kong.VersionFlag `help:"Print the version and exit."`
}

// AfterApply hands the connection flags to whichever command runs.
func (c *commands) AfterApply(parsed *kong.Context) error {
	parsed.Bind(&c.connection)
	return nil
}

func main() { os.Exit(execute(os.Args[1:], command.Streams{Out: os.Stdout, Err: os.Stderr})) }

func execute(args []string, std command.Streams) int {
	return command.Run("seckillctl", description, &commands{}, args, std)
}
