-- +goose Up
-- What operators decided about dead letters, for ever: rows are only added.
-- Written in the transaction of the decision. Withhold UPDATE and DELETE on this
-- table from the writer's user.
CREATE TABLE operator_actions (
  id       BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
  at       DATETIME(3)     NOT NULL DEFAULT CURRENT_TIMESTAMP(3),
  operator VARCHAR(64)  CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  action   VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  reason   VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  target   VARCHAR(96)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  result   VARCHAR(16)  CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
  detail   VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
  PRIMARY KEY (id),
  KEY operator_actions_target (target)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin;

-- +goose Down
DROP TABLE operator_actions;
