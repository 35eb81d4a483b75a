// Package client is how internal services grab: Client.Grab looks like a plain
// call, and rides a small pool of GrabStreams over several connections to
// several gateways.
//
//	c, err := client.New(client.Config{
//		Target:      "dns:///gateways.sale.svc:7070",
//		DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig))},
//	})
//	if err != nil {
//		return err
//	}
//	defer c.Close(ctx) // in the shutdown, with a ctx that bounds the wait
//
//	ctx, cancel := context.WithTimeout(ctx, time.Second)
//	defer cancel()
//	result, err := c.Grab(ctx, userID, voucherID, client.WithReference(cartID))
//	switch {
//	case errors.Is(err, client.ErrVoucherNotFound), errors.Is(err, client.ErrInvalid):
//		return err // repeating it changes nothing
//	case errors.Is(err, client.ErrOutcomeUnknown):
//		return retryLater() // the order may exist: the same Grab again finds it
//	case err != nil:
//		return tryAgain() // nothing was taken
//	case result.Admitted():
//		return confirm(result.Order.ID)
//	}
//	return refuse(result.Outcome) // client.SoldOut, NotStarted, Ended, Paused
//
// # Cost
//
// Grabs of concurrent callers travel together: while a message is being sent,
// the next one gathers. There is no timer, so a lone Grab leaves at once, and no
// goroutine per Grab. One Client serves a whole process; more of them only make
// smaller messages.
//
// # What is repeated
//
// The same user and voucher always get the same order, so a Grab may be sent
// again without harm. It is, until its context ends, when its stream broke, when
// the gateway shuts down, and when the ledger is unavailable or the outcome
// unknown, after the delay that the server asks for. One that was refused as
// overloaded is sent again Config.OverloadRetries times. A bad request, an
// unknown voucher and any other error are not repeated. A refusal that follows a
// lost attempt is asked for again until the lost one can change nothing any more:
// nobody hears "sold out" and has an order. Where that takes longer than the
// context lasts, as with a gateway that hangs, the caller gets ErrOutcomeUnknown.
//
// # Where it goes
//
// Each Grab goes to the stream with the fewest outstanding, a repeated one to
// another gateway than before, if there is one: at once where the first cannot
// reach the ledger or shuts down. Such a gateway, and one that hangs, is avoided
// for a while. With few callers only some streams are used, so that messages are
// not too small. Streams are spread over the addresses of Config.Target, or over
// Config.Addresses, and are replaced every Config.StreamAge, so that gateways
// that came later get their share. A gateway that does not know GrabStream gets
// unary calls.
package client
