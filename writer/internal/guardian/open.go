package guardian

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/seckill/seckill/pkg/ledger"
	"github.com/seckill/seckill/pkg/telemetry"
	"github.com/seckill/seckill/writer/internal/orderstore"
)

// first makes the ledger of a partition that never was open, and opens it.
// Every step may be repeated after a crash; the note in the database comes
// before anything can be sold.
func (k *keeper) first(ctx context.Context, row orderstore.Partition) (Status, error) {
	status := Status{Epoch: row.Epoch}
	err := k.dedicated(ctx, func(ctx context.Context, client rueidis.CoreClient) error {
		server, durability, err := k.fit(ctx, client)
		if err != nil {
			return err
		}
		if err := ledger.CreatePartition(ctx, client, k.partition, row.Epoch, k.Bound); err != nil {
			return err
		}
		if err := k.Store.MarkOpened(ctx, k.partition, row.Epoch); err != nil {
			return err
		}
		return k.open(ctx, client, row.Epoch, durability, server.RunID)
	})
	if errors.Is(err, ledger.ErrLedgerInUse) {
		// It may even be open: the database was put back to before its first day.
		return k.shut(ctx, status, ledger.FaultPrefix+reasonOf(err))
	}
	if err != nil {
		return status, err
	}
	k.log.Info("partition opened for the first time", telemetry.KeyEpoch, row.Epoch)
	status.Open = true
	return status, nil
}

// adopt goes on with a ledger that was proven on this very server and is open
// for another version of the admission script: writers are being upgraded. The
// gateways that know the old version go on with it, it stays loaded.
func (k *keeper) adopt(ctx context.Context, row orderstore.Partition, meta ledger.Meta) (bool, error) {
	if meta.AdmitSHA == "" || meta.RunID == "" {
		return false, nil
	}
	adopted := false
	err := k.dedicated(ctx, func(ctx context.Context, client rueidis.CoreClient) error {
		loaded, err := ledger.ScriptLoaded(ctx, client, meta.AdmitSHA)
		if err != nil || !loaded {
			return err
		}
		server, durability, err := k.fit(ctx, client)
		if err != nil || server.RunID != meta.RunID {
			return err
		}
		adopted = true
		return k.open(ctx, client, row.Epoch, durability, server.RunID)
	})
	return adopted && err == nil, err
}

// prove checks a ledger on which the door is shut, and opens it if the check
// passes. A ledger that fails it stays closed until it is rebuilt, or until
// somebody brings back what is missing.
func (k *keeper) prove(ctx context.Context, row orderstore.Partition, meta ledger.Meta) (Status, error) {
	status := Status{Epoch: row.Epoch, Reason: k.current().Reason}
	if time.Now().Before(k.recheck) {
		return status, nil
	}
	k.metrics.setViolations(k.label(), nil)
	err := k.dedicated(ctx, func(ctx context.Context, client rueidis.CoreClient) error {
		server, durability, err := k.fit(ctx, client)
		if err != nil {
			return err
		}
		behind, err := k.check(ctx, client, row, meta, server, durability)
		if err != nil {
			return err
		}
		// What was recorded while the ledger was away comes first: a voucher that
		// was closed must not sell in between.
		for _, voucher := range behind {
			if err := k.Carry(ctx, voucher); err != nil {
				return err
			}
		}
		return k.open(ctx, client, row.Epoch, durability, server.RunID)
	})
	var failed *checkError
	switch {
	case err == nil:
		k.log.Info("ledger proven, partition opened", telemetry.KeyEpoch, row.Epoch)
		k.recheckWait = 0
		k.forget()
		return Status{Epoch: row.Epoch, Open: true}, nil
	case errors.As(err, &failed):
		k.recheckWait = min(max(2*k.recheckWait, time.Second), recheckMax)
		k.recheck = time.Now().Add(k.recheckWait)
		// The rebuild of the ledger from the database has its place here.
		return k.shut(ctx, status, failed.Error())
	}
	return status, err
}

// open is the last thing: meta first, the admission script last. All on the
// connection on which the ledger was proven, so to the server that was proven.
func (k *keeper) open(ctx context.Context, client rueidis.CoreClient, epoch int64, durability ledger.Durability, runID string) error {
	if err := ledger.EnsureGroup(ctx, client, k.partition, epoch); err != nil {
		return err
	}
	if err := ledger.LoadWriterScripts(ctx, client); err != nil {
		return err
	}
	if err := ledger.OpenPartition(ctx, client, k.partition, epoch, k.Bound, durability, runID); err != nil {
		return err
	}
	return ledger.LoadAdmit(ctx, client, k.partition, epoch)
}

// dedicated runs a proof on one connection. If that breaks the proof is void,
// for what answers next may be another server.
func (k *keeper) dedicated(ctx context.Context, do func(context.Context, rueidis.CoreClient) error) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	client, release := k.Client.Dedicate()
	defer release()
	return do(ctx, client)
}

// fit reads what the server is and whether it may hold a ledger.
func (k *keeper) fit(ctx context.Context, client rueidis.CoreClient) (ledger.Server, ledger.Durability, error) {
	server, err := ledger.ReadServer(ctx, client)
	if err != nil {
		return server, "", err
	}
	k.reading.mu.Lock()
	server = server.Since(k.reading.server)
	k.reading.mu.Unlock()
	durability, err := k.judge(server)
	return server, durability, err
}

// judge is a checkError where the server's configuration is not good enough.
func (g *Guardian) judge(server ledger.Server) (ledger.Durability, error) {
	durability, problems := server.Durability()
	if durability == "" || (g.Durability == ledger.DurabilityStrict && durability != ledger.DurabilityStrict) {
		return "", failed("redis is not configured for %s durability: %s", g.Durability, strings.Join(problems, "; "))
	}
	return durability, nil
}

// serverReading is the server's configuration as all keepers of a process share
// it: one reading a look serves them all.
type serverReading struct {
	mu     sync.Mutex
	at     time.Time
	server ledger.Server
	// unsure is the first reading of a server that could not tell whether its log
	// of writes is complete: it was being rewritten, and there was none before.
	unsure *ledger.Server
}

// configuration is never older than an interval.
func (g *Guardian) configuration(ctx context.Context) (ledger.Server, error) {
	g.reading.mu.Lock()
	defer g.reading.mu.Unlock()
	if time.Since(g.reading.at) < g.Interval {
		return g.reading.server, nil
	}
	server, err := ledger.ReadServer(ctx, g.Client)
	if err != nil {
		return server, err
	}
	// What one reading cannot tell, whether the log of writes is complete, the one
	// before may.
	server = server.Since(g.reading.server)
	switch {
	case server.AOFComplete:
		g.reading.unsure = nil
	case g.reading.server.RunID != server.RunID:
		g.reading.unsure = &server
	case g.reading.unsure != nil && !server.Unchanged(*g.reading.unsure):
		g.reading.unsure = nil
	}
	g.reading.at, g.reading.server = time.Now(), server
	return server, nil
}
