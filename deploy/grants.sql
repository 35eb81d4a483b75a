-- What a writer may, table by table and column by column. Run after the
-- migration, since the tables must be there; as often as one likes.

-- Orders are written once, never changed and never deleted.
GRANT SELECT, INSERT ON seckill.orders TO 'seckill_writer'@'%';

-- How an order ended that is no row. Whose it is and what the stream carried
-- never changes. A held one becomes what an operator decides, or goes, where it
-- became a row after all.
GRANT SELECT, INSERT, DELETE, UPDATE (kind, reason, standing_epoch, standing_seq, tries, last_seen_at, applied_at)
  ON seckill.order_outcomes TO 'seckill_writer'@'%';

-- Entries that could not be read stay for ever; they are met again and resolved.
GRANT SELECT, INSERT, UPDATE (tries, last_seen_at, state, resolved_at) ON seckill.dead_entries TO 'seckill_writer'@'%';

-- What the ledger must still be told goes once it has been told.
GRANT SELECT, INSERT, DELETE ON seckill.ledger_updates TO 'seckill_writer'@'%';

-- What operators decided is only added to.
GRANT SELECT, INSERT ON seckill.operator_actions TO 'seckill_writer'@'%';

-- Stock moves, states change; total, partition and id never do.
GRANT SELECT, INSERT, UPDATE (stock, sold, state, rev, applied_at, ledger_epoch, updated_at)
  ON seckill.vouchers TO 'seckill_writer'@'%';

-- The guardian notes which epoch it opened. It locks a partition's row when a
-- voucher is created.
GRANT SELECT, UPDATE (open_epoch, updated_at) ON seckill.partitions TO 'seckill_writer'@'%';

-- Fingerprints of order keys are added, never changed.
GRANT SELECT, INSERT ON seckill.settings TO 'seckill_writer'@'%';

-- The version of the schema is read at the start.
GRANT SELECT ON seckill.goose_db_version TO 'seckill_writer'@'%';
