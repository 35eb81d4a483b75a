-- +goose Up
-- How the few admitted orders ended that are not a row of orders. A position
-- is in one of the two tables, never in both: whoever writes here locks the
-- voucher row first and gives up if the order row exists. standing_* names the
-- order that stands where kind is CONFLICT. applied_at is when the ledger was
-- told, NULL until then.
CREATE TABLE order_outcomes (
  voucher_id     BIGINT          NOT NULL,
  epoch          INT UNSIGNED    NOT NULL,
  seq            BIGINT UNSIGNED NOT NULL,
  user_id        BIGINT          NOT NULL,
  kind           VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  standing_epoch INT UNSIGNED    NULL,
  standing_seq   BIGINT UNSIGNED NULL,
  reference      VARCHAR(64)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
  reason         VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
  entry_id       VARCHAR(41)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
  admitted_at    DATETIME(3)     NULL,
  persisted_at   DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  applied_at     DATETIME(3)     NULL,
  PRIMARY KEY (voucher_id, epoch, seq),
  CONSTRAINT order_outcomes_kind CHECK (kind IN ('CONFLICT', 'REJECTED', 'HELD', 'CANCELLED', 'LOST'))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE order_outcomes;
