package orderstore

// errLockWait is the server's number for a lock wait that timed out.
const errLockWait = 1205

// Locked tells whether a transaction failed only because it waited too long for
// a row that somebody else holds.
func Locked(err error) bool { return isServerError(err, errLockWait) }
