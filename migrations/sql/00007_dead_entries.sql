-- +goose Up
-- Stream entries that could not be read as a whole. Where voucher, epoch, first
-- seq and number were sound, units is how many positions the entry stands for,
-- each a HELD outcome of user 0; else it stands for none and units is 0.
CREATE TABLE dead_entries (
  partition_id  INT UNSIGNED    NOT NULL,
  epoch         INT UNSIGNED    NOT NULL,
  entry_id      VARCHAR(41)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  units         INT UNSIGNED    NOT NULL,
  voucher_id    BIGINT          NULL,
  first_seq     BIGINT UNSIGNED NULL,
  raw           MEDIUMBLOB      NULL,
  reason        VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
  first_seen_at DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  last_seen_at  DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  tries         INT UNSIGNED    NOT NULL DEFAULT 1,
  state         VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT 'HELD',
  resolved_at   DATETIME(3)     NULL,
  PRIMARY KEY (partition_id, epoch, entry_id),
  KEY dead_entries_held (state, first_seen_at, partition_id, epoch, entry_id),
  CONSTRAINT dead_entries_state CHECK (state IN ('HELD', 'CANCELLED')),
  CONSTRAINT dead_entries_units CHECK (units = 0 OR (voucher_id > 0 AND first_seq > 0))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE dead_entries;
