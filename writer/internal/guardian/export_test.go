package guardian

import "context"

// Look is one round of a partition, for tests that count them.
func (g *Guardian) Look(ctx context.Context, partition int) { g.keepers[partition].look(ctx) }
