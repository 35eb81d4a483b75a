-- What a writer may, table by table and column by column. Run after the
-- migration, since the tables must be there; as often as one likes.

-- Orders are written once, never changed and never deleted.
GRANT SELECT, INSERT ON seckill.orders TO 'seckill_writer'@'%';

-- Outcomes are written once; only the note that the ledger was told changes.
GRANT SELECT, INSERT, UPDATE (applied_at) ON seckill.order_outcomes TO 'seckill_writer'@'%';

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
