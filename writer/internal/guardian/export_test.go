package guardian

import "context"

// Look is one round of a partition, for tests that count them.
func (g *Guardian) Look(ctx context.Context, partition int) { g.keepers[partition].look(ctx) }

// Quiet tells whether the next round of a partition may wait longer.
func (g *Guardian) Quiet(partition int) bool { return g.keepers[partition].quiet }
