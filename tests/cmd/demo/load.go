package main

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	seckillv1 "github.com/seckill/seckill/proto/seckill/v1"
	"github.com/seckill/seckill/tests/internal/stack"
)

const (
	// One user in so many clicks twice at once, and one in so many comes back
	// before the sale is over.
	doubleClickEvery, comeBackEvery = 10, 10
	// grabTimeout is a caller's deadline.
	grabTimeout = 5 * time.Second
	// tries is how often a caller repeats a call that got no answer, waiting as
	// long as the answer says, else pause: together some 10 s.
	tries = 50
	pause = 200 * time.Millisecond
)

// crowd is all users, and what they were told.
type crowd struct {
	gateways []seckillv1.SeckillServiceClient
	cfg      settings
	next     atomic.Int64 // round robin over gateways
	answers  atomic.Int64
	soldOut  atomic.Int64

	mu        sync.Mutex
	users     map[int64]*user
	latencies []time.Duration
	began     time.Time
	duration  time.Duration // of the sale, once it is over
	inSale    int           // answers of the sale, which come first in latencies
	replayed  int64
	repeated  int64 // calls that were made again after an error
	failed    int64 // Grabs that got no answer at all
	failure   string
	durable   map[seckillv1.Durability]int64
}

// user is what one user was told.
type user struct {
	orderID string
	// admissions counts answers that were no replay: a second one would be a
	// second order.
	admissions int
	differed   bool // an answer had another order_id than the first
	refused    bool // an answer was no order
}

func newCrowd(s *stack.Stack, cfg settings) *crowd {
	c := &crowd{cfg: cfg, users: make(map[int64]*user), durable: make(map[seckillv1.Durability]int64)}
	for i := range s.Gateways() {
		c.gateways = append(c.gateways, s.Seckill(i))
	}
	return c
}

// visit is a user who clicks, once or twice at once.
type visit struct {
	user   int64
	clicks int
	when   float64 // between 0 and 1, the order of visits
}

// plan is every user's visits in random order.
func plan(users int64) []visit {
	visits := make([]visit, 0, users+users/comeBackEvery)
	for u := int64(1); u <= users; u++ {
		v := visit{user: u, clicks: 1, when: rand.Float64()}
		switch {
		case u%doubleClickEvery == 0:
			v.clicks = 2
		case u%comeBackEvery == 1:
			visits = append(visits, visit{user: u, clicks: 1, when: v.when + (1-v.when)*rand.Float64()})
		}
		visits = append(visits, v)
	}
	slices.SortFunc(visits, func(a, b visit) int { return cmp.Compare(a.when, b.when) })
	return visits
}

// grabAll lets every user Grab and returns when all have their answer or ctx
// ends. On their way they wait at both gates of the crash.
func (c *crowd) grabAll(ctx context.Context, crash *crash) {
	visits := plan(c.cfg.Users)
	c.mu.Lock()
	c.began = time.Now()
	c.mu.Unlock()
	middle, late := crash.gates(visits)
	c.grab(ctx, visits[:middle])
	crash.middle.wait(ctx)
	c.grab(ctx, visits[middle:late])
	crash.late.wait(ctx)
	c.grab(ctx, visits[late:])
	c.mu.Lock()
	c.duration, c.inSale = time.Since(c.began), len(c.latencies)
	c.mu.Unlock()
}

// comeBack lets up to n users who have an order Grab again.
func (c *crowd) comeBack(ctx context.Context, n int) {
	var visits []visit
	for u := range c.acknowledged() {
		if len(visits) == n {
			break
		}
		visits = append(visits, visit{user: u, clicks: 1})
	}
	c.grab(ctx, visits)
}

func (c *crowd) grab(ctx context.Context, visits []visit) {
	var next atomic.Int64
	var callers sync.WaitGroup
	for range min(c.cfg.Callers, len(visits)) {
		callers.Go(func() {
			for ctx.Err() == nil {
				i := next.Add(1) - 1
				if i >= int64(len(visits)) {
					return
				}
				v := visits[i]
				var clicks sync.WaitGroup
				for range v.clicks - 1 {
					clicks.Go(func() { c.click(ctx, v.user) })
				}
				c.click(ctx, v.user)
				clicks.Wait()
			}
		})
	}
	callers.Wait()
}

// click is one Grab, repeated until it has an answer.
func (c *crowd) click(ctx context.Context, userID int64) {
	request := &seckillv1.GrabRequest{UserId: userID, VoucherId: voucherID}
	var err error
	for range tries {
		gateway := c.gateways[c.next.Add(1)%int64(len(c.gateways))]
		began := time.Now()
		callCtx, cancel := context.WithTimeout(ctx, grabTimeout)
		var answer *seckillv1.GrabResponse
		answer, err = gateway.Grab(callCtx, request)
		cancel()
		if err == nil {
			c.note(userID, answer, time.Since(began))
			return
		}
		delay, again := retryAfter(err)
		if !again || ctx.Err() != nil {
			break
		}
		c.mu.Lock()
		c.repeated++
		c.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failed++
	c.failure = err.Error()
}

// retryAfter tells whether a Grab may be repeated and after which time, which
// is what any caller should do.
func retryAfter(err error) (time.Duration, bool) {
	st := status.Convert(err)
	switch st.Code() {
	case codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded:
	default:
		return 0, false
	}
	for _, detail := range st.Details() {
		if retry, ok := detail.(*errdetails.RetryInfo); ok {
			return retry.GetRetryDelay().AsDuration(), true
		}
	}
	return pause, true
}

func (c *crowd) note(userID int64, answer *seckillv1.GrabResponse, took time.Duration) {
	c.answers.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.latencies = append(c.latencies, took)
	u := c.users[userID]
	if u == nil {
		u = &user{}
		c.users[userID] = u
	}
	if answer.GetOutcome() != seckillv1.Outcome_OUTCOME_ADMITTED {
		u.refused = true
		if answer.GetOutcome() == seckillv1.Outcome_OUTCOME_SOLD_OUT {
			c.soldOut.Add(1)
		}
		return
	}
	c.durable[answer.GetDurability()]++
	if answer.GetReplayed() {
		c.replayed++
	} else {
		u.admissions++
	}
	orderID := answer.GetOrder().GetOrderId()
	switch {
	case u.orderID == "":
		u.orderID = orderID
	case u.orderID != orderID:
		u.differed = true
	}
}

// took is how long the sale took, so far or in all.
func (c *crowd) took() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.duration > 0 || c.began.IsZero() {
		return c.duration
	}
	return time.Since(c.began)
}

// acknowledged is the order_id of every user who was told one.
func (c *crowd) acknowledged() map[int64]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	orders := make(map[int64]string)
	for id, u := range c.users {
		if u.orderID != "" {
			orders[id] = u.orderID
		}
	}
	return orders
}

// report adds what users were told to the result.
func (c *crowd) report(r *result) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, u := range c.users {
		if u.orderID != "" {
			r.acknowledged++
		}
		if u.differed {
			r.differing++
		}
		if u.admissions > 1 || u.refused && u.orderID != "" {
			r.contradicted++
		}
	}
	r.replayed, r.soldOut, r.repeated = c.replayed, c.soldOut.Load(), c.repeated
	r.unanswered, r.failure = c.failed, c.failure
	r.answers, r.took = int64(c.inSale), c.duration
	r.durability = c.durable
	sale := slices.Sorted(slices.Values(c.latencies[:c.inSale]))
	r.p50, r.p99 = percentile(sale, 0.50), percentile(sale, 0.99)
}

// percentile of sorted values.
func percentile(sorted []time.Duration, p float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}
