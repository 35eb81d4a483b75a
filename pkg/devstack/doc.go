// Package devstack runs the real servers that seckill needs on a developer's
// machine: it finds redis-server and MariaDB or MySQL, fetches them into a
// private folder when they are missing, and runs private, throw-away instances
// of them on free ports. The demo, "make run" and every test use it, so all of
// them see the same servers with the same durability settings as production.
//
// Everything it starts dies with the process that started it, and every folder
// it makes goes with it, after a panic, Ctrl-C and SIGKILL too (see process.go
// and folder.go). It also has what fault tests need: kill -9, SIGSTOP, restart
// with the same data, and a TCP proxy that loses replies.
//
// It runs on Linux and other Unix systems. It is no part of the product: no
// binary that is deployed imports it.
//
// Environment:
//
//	SECKILL_DEV_DIR          the private folder; default .dev beside go.work
//	SECKILL_DATABASE         "mysql" or "mariadb": the database must be this one;
//	                         empty takes what is found, and fetches MariaDB
//	SECKILL_REDIS_SERVER     use this redis-server and look no further
//	SECKILL_DATABASE_SERVER  use this mariadbd or mysqld and look no further
package devstack
