-- Users of the database, and what the migrator may. Run before the migration,
-- by an administrator, as often as one likes; grants.sql follows after it.
-- mysql-apply.sh puts the passwords in.

CREATE DATABASE IF NOT EXISTS seckill CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;

CREATE USER IF NOT EXISTS 'seckill_migrator'@'%' IDENTIFIED BY '@MIGRATOR_PASSWORD@';
CREATE USER IF NOT EXISTS 'seckill_writer'@'%' IDENTIFIED BY '@WRITER_PASSWORD@';
-- A password that was changed in its file.
ALTER USER 'seckill_migrator'@'%' IDENTIFIED BY '@MIGRATOR_PASSWORD@';
ALTER USER 'seckill_writer'@'%' IDENTIFIED BY '@WRITER_PASSWORD@';

-- Makes and changes tables, and fills settings and partitions. Its password is
-- needed for a migration only and is given to no process that serves.
GRANT CREATE, ALTER, DROP, INDEX, REFERENCES, SELECT, INSERT, UPDATE, DELETE ON seckill.* TO 'seckill_migrator'@'%';
