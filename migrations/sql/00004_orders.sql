-- +goose Up
-- Live orders. An order is its position in the ledger, which is unique by
-- construction and makes inserts of a batch neighbours; one order per user and
-- voucher is the final judge of duplicates. No other index: each costs the
-- writer about a third of its throughput.
CREATE TABLE orders (
  voucher_id   BIGINT          NOT NULL,
  epoch        INT UNSIGNED    NOT NULL,
  seq          BIGINT UNSIGNED NOT NULL,
  user_id      BIGINT          NOT NULL,
  reference    VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
  admitted_at  DATETIME(3)     NOT NULL,
  persisted_at DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  PRIMARY KEY (voucher_id, epoch, seq),
  UNIQUE KEY orders_user_voucher (user_id, voucher_id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE orders;
