-- +goose Up
-- A HELD outcome is a dead letter: an order that could not be stored as it is
-- and waits for an operator. raw is what the stream carried for it, tries how
-- often a writer met it (0 for an outcome that never was held). of_entry marks
-- the positions of an entry that could not be read as a whole: they are held by
-- their row of dead_entries and listed and resolved through it.
--
-- order_outcomes_held serves the list of dead letters, oldest first, by keyset.
--
-- The writer tells the ledger of its own verdicts by settling, hence the default
-- of applied_at; NULL is what an operator decided and the ledger does not know.
ALTER TABLE order_outcomes
  ADD COLUMN raw           MEDIUMBLOB   NULL,
  ADD COLUMN of_entry      TINYINT      NOT NULL DEFAULT 0,
  ADD COLUMN tries         INT UNSIGNED NOT NULL DEFAULT 0,
  ADD COLUMN first_seen_at DATETIME(3)  NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  ADD COLUMN last_seen_at  DATETIME(3)  NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  MODIFY COLUMN applied_at DATETIME(3)  NULL DEFAULT CURRENT_TIMESTAMP(3),
  ADD KEY order_outcomes_held (kind, of_entry, first_seen_at, voucher_id, epoch, seq),
  ADD KEY order_outcomes_user (user_id, voucher_id);

-- +goose Down
ALTER TABLE order_outcomes
  DROP KEY order_outcomes_user,
  DROP KEY order_outcomes_held,
  MODIFY COLUMN applied_at DATETIME(3) NULL,
  DROP COLUMN last_seen_at,
  DROP COLUMN first_seen_at,
  DROP COLUMN tries,
  DROP COLUMN of_entry,
  DROP COLUMN raw;
