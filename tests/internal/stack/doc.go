// Package stack runs the whole of seckill on this machine: a private Redis, a
// private database, and gateways and writers as processes built from this
// workspace, wired as in production: schema by "writer migrate", the order key
// by "writer keygen", secrets in files, health awaited over gRPC. The demo,
// "make run" and the end-to-end tests stand on it.
//
// It is a black box: it starts binaries, calls their APIs, and looks into Redis
// and the database by itself (counts.go). It imports nothing of the gateway's
// or the writer's own packages.
//
//	s := stack.Test(t, stack.Options{Gateways: 2, Writers: 3})
//	s.MustOpenVoucher(t, 1, 100)
//	answer, err := s.Seckill(0).Grab(ctx, &seckillv1.GrabRequest{UserId: 7, VoucherId: 1})
//	s.Writer(1).Kill()                    // SIGKILL; Pause and Resume are SIGSTOP and SIGCONT
//	writer, err := s.StartWriter(ctx)     // another one
//	err = s.AwaitSettled(ctx, 1)          // nothing is in flight
//	rows, err := s.Rows(ctx, 1)           // counted in the database
//
// Faults: s.Redis and s.Database can be killed, paused and restarted. A test
// that wants a proxy between a gateway and Redis starts that gateway by itself:
//
//	proxy := devstack.TestProxy(t, s.Redis.Addr())
//	gateway, err := s.StartGateway(ctx, "--redis-addr", proxy.Addr())
//
// A writer that kills itself at a fault point needs the build tag and an
// environment variable:
//
//	s := stack.Test(t, stack.Options{BuildTags: []string{"faultpoint"}})
//	writer, err := s.StartWriterEnv(ctx, []string{"SECKILL_FAULTPOINT=writer.after_commit"})
//	<-writer.Done()
//
// Everything dies with this process and leaves nothing, see package devstack.
package stack
