-- +goose Up
-- One row a partition. epoch fences stale gateways, writers and entries;
-- open_epoch is the last epoch that was open, 0 where none ever was: only then
-- may a guardian create a ledger from nothing.
CREATE TABLE partitions (
  id         INT UNSIGNED NOT NULL,
  epoch      INT UNSIGNED NOT NULL,
  open_epoch INT UNSIGNED NOT NULL DEFAULT 0,
  created_at DATETIME(3)  NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  updated_at DATETIME(3)  NOT NULL DEFAULT CURRENT_TIMESTAMP(3) ON UPDATE CURRENT_TIMESTAMP(3),
  PRIMARY KEY (id),
  CONSTRAINT partitions_open_epoch CHECK (open_epoch <= epoch)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE partitions;
