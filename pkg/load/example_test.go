package load_test

import (
	"context"
	"fmt"
	"time"

	"github.com/seckill/seckill/pkg/load"
)

// shop has so many units. A real target is made by NewUnary or NewStreams.
type shop int64

func (s shop) Grab(_ context.Context, userID, _ int64) (load.Outcome, error) {
	if userID > int64(s) {
		return load.SoldOut, nil
	}
	return load.Admitted, nil
}

func ExampleRun() {
	result, err := load.Run(context.Background(), shop(60), load.Plan{VoucherID: 7, Rate: 1000, Duration: 100 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(result.Offered, "offered", result.Dropped, "dropped")
	fmt.Println(result.Count(load.Admitted), "admitted", result.Count(load.SoldOut), "sold out")
	// Output:
	// 100 offered 0 dropped
	// 60 admitted 40 sold out
}
