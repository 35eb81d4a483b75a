-- +goose Up
-- What operators decided and the ledger must still be told: written in the
-- transaction of the decision, deleted once the ledger has it. A table of its
-- own, for a requeued order leaves no row of order_outcomes behind and orders
-- has no column to spare.
CREATE TABLE ledger_updates (
  voucher_id     BIGINT          NOT NULL,
  epoch          INT UNSIGNED    NOT NULL,
  seq            BIGINT UNSIGNED NOT NULL,
  partition_id   INT UNSIGNED    NOT NULL,
  user_id        BIGINT          NOT NULL,
  verdict        VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  standing_epoch INT UNSIGNED    NULL,
  standing_seq   BIGINT UNSIGNED NULL,
  created_at     DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  PRIMARY KEY (voucher_id, epoch, seq),
  KEY ledger_updates_partition (partition_id, created_at, voucher_id, epoch, seq),
  CONSTRAINT ledger_updates_verdict CHECK (verdict IN ('PERSISTED', 'CONFLICT', 'CANCELLED'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE ledger_updates;
