-- +goose Up
-- stock and sold move in the one UPDATE of the transaction that inserts the
-- orders, so stock + sold = total holds at every moment; the CHECKs are the last
-- guard against overselling. total stays below 2^40, as seq does. epoch is
-- partitions.epoch, copied, so that the guard needs no join. ledger_epoch is the
-- epoch in which the voucher's ledger was created, NULL for never: a ledger that
-- is missing in that epoch was lost and is never created again. applied_at is
-- when the ledger took over rev, NULL until then: the guardian repeats what is
-- NULL.
CREATE TABLE vouchers (
  id           BIGINT       NOT NULL,
  partition_id INT UNSIGNED NOT NULL,
  title        VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
  total        BIGINT       NOT NULL,
  stock        BIGINT       NOT NULL,
  sold         BIGINT       NOT NULL DEFAULT 0,
  epoch        INT UNSIGNED NOT NULL,
  ledger_epoch INT UNSIGNED NULL,
  state        VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  rev          BIGINT       NOT NULL DEFAULT 0,
  applied_at   DATETIME(3)  NULL,
  begin_at     DATETIME(3)  NOT NULL,
  end_at       DATETIME(3)  NOT NULL,
  created_at   DATETIME(3)  NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  updated_at   DATETIME(3)  NOT NULL DEFAULT CURRENT_TIMESTAMP(3) ON UPDATE CURRENT_TIMESTAMP(3),
  PRIMARY KEY (id),
  KEY vouchers_partition (partition_id, state),
  CONSTRAINT vouchers_id CHECK (id > 0),
  CONSTRAINT vouchers_total CHECK (total > 0 AND total < 1099511627776),
  CONSTRAINT vouchers_stock CHECK (stock >= 0),
  CONSTRAINT vouchers_sold CHECK (sold >= 0),
  CONSTRAINT vouchers_sum CHECK (stock + sold = total),
  CONSTRAINT vouchers_window CHECK (begin_at < end_at),
  CONSTRAINT vouchers_state CHECK (state IN ('DRAFT', 'OPEN', 'PAUSED', 'CLOSED', 'ARCHIVED'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE vouchers;
