package deploy_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seckill/seckill/pkg/devstack"
	"github.com/seckill/seckill/pkg/faultpoint"
)

// What is released cannot be told to kill itself: neither the variable that arms
// a fault point nor the name of one is in it. That both are found in a build for
// tests shows that they would be.
func TestRelease_HoldsNoFaultPoint(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	tagged, err := devstack.Build(ctx, nil, devstack.BuildOptions{Tags: []string{"faultpoint"}},
		"github.com/seckill/seckill/gateway/cmd/gateway", "github.com/seckill/seckill/writer/cmd/writer")
	require.NoError(t, err)
	points := regexp.MustCompile(`Point = "([\w.]+)"`).FindAllStringSubmatch(read(t, "pkg/faultpoint/faultpoint.go"), -1)
	require.Greater(t, len(points), 5)
	for _, program := range []string{"gateway", "writer"} {
		released, err := os.ReadFile(binary(t, program))
		require.NoError(t, err)
		testing, err := os.ReadFile(filepath.Join(tagged, program))
		require.NoError(t, err)
		// Not by require.Contains, which would print the program.
		require.False(t, bytes.Contains(released, []byte(faultpoint.Variable)), program)
		require.True(t, bytes.Contains(testing, []byte(faultpoint.Variable)), program)
		for _, point := range points {
			require.False(t, bytes.Contains(released, []byte(point[1])), "%s: %s", program, point[1])
			// A program holds the points that it passes; the guardian's are in a writer.
			require.Equal(t, strings.HasPrefix(point[1], "gateway.") == (program == "gateway"), bytes.Contains(testing, []byte(point[1])), "%s: %s", program, point[1])
		}
	}
}
