//go:build unix && !linux

package devstack

import "syscall"

// reaperKills is true: without a parent-death signal the reaper kills the
// process groups that are left when this process has died.
const reaperKills = true

func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}

func standsStill(int) bool { return true }
