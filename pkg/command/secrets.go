package command

import (
	"fmt"
	"io"
	"os"
)

// SecretFile is a file that holds a secret, and the flag that names it.
type SecretFile struct{ Flag, Path string }

// WarnExposed writes a line for each file that its group or others may read. It
// is a warning and no problem: that is how orchestrators mount secrets for a
// process that is not root. A path that is empty or cannot be looked at is for
// those who read the file to tell.
func WarnExposed(w io.Writer, files ...SecretFile) {
	for _, file := range files {
		if file.Path == "" {
			continue
		}
		if info, err := os.Stat(file.Path); err == nil && info.Mode().Perm()&0o044 != 0 {
			fmt.Fprintf(w, "warning: %s %s may be read by others (mode %s)\n", file.Flag, file.Path, info.Mode())
		}
	}
}
