package deploy_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"gopkg.in/yaml.v3"
)

// compose is what the tests ask of compose.yaml. A field that is not here is an
// error, so that nothing in the file goes unlooked at.
type compose struct {
	Name     string                    `yaml:"name"`
	Services map[string]service        `yaml:"services"`
	Volumes  map[string]any            `yaml:"volumes"`
	Secrets  map[string]secret         `yaml:"secrets"`
	Shared   map[string]map[string]any `yaml:",inline"` // x-...
}

type secret struct {
	File string `yaml:"file"`
}

type service struct {
	Image       string            `yaml:"image"`
	Build       build             `yaml:"build"`
	User        string            `yaml:"user"`
	Entrypoint  []string          `yaml:"entrypoint"`
	Command     []string          `yaml:"command"`
	Environment map[string]string `yaml:"environment"`
	Volumes     []string          `yaml:"volumes"`
	Secrets     []string          `yaml:"secrets"`
	Ports       []string          `yaml:"ports"`
	Restart     string            `yaml:"restart"`
	Init        bool              `yaml:"init"`
	StopGrace   string            `yaml:"stop_grace_period"`
	Deploy      struct {
		Replicas int `yaml:"replicas"`
	} `yaml:"deploy"`
	Healthcheck struct {
		Test              []string `yaml:"test"`
		Interval, Timeout string
		Retries           int
	} `yaml:"healthcheck"`
	DependsOn map[string]struct {
		Condition string `yaml:"condition"`
	} `yaml:"depends_on"`
}

type build struct {
	Context    string `yaml:"context"`
	Dockerfile string `yaml:"dockerfile"`
	Target     string `yaml:"target"`
}

func readCompose(t testing.TB) compose {
	t.Helper()
	decoder := yaml.NewDecoder(strings.NewReader(read(t, "compose.yaml")))
	decoder.KnownFields(true)
	var c compose
	require.NoError(t, decoder.Decode(&c))
	require.Contains(t, c.Services, "gateway")
	return c
}

const (
	healthy   = "service_healthy"
	completed = "service_completed_successfully"
)

func TestCompose_StartsInAnOrderInWhichNothingIsMissing(t *testing.T) {
	c := readCompose(t)
	after := map[string]map[string]string{}
	for name, s := range c.Services {
		after[name] = map[string]string{}
		for other, on := range s.DependsOn {
			require.Contains(t, c.Services, other, "%s depends on it", name)
			after[name][other] = on.Condition
			if on.Condition == healthy {
				require.NotEmpty(t, c.Services[other].Healthcheck.Test, "%s waits for the health of %s", name, other)
			} else {
				require.Equal(t, completed, on.Condition, "%s waits for %s", name, other)
				require.Empty(t, c.Services[other].Restart, "%s is a one-shot command", other)
			}
		}
	}
	require.Equal(t, map[string]map[string]string{
		"redis": {}, "mysql": {}, "keygen": {},
		"database-users":  {"mysql": healthy},
		"migrate":         {"database-users": completed},
		"database-grants": {"migrate": completed},
		"writer":          {"redis": healthy, "keygen": completed, "database-grants": completed},
		"gateway":         {"redis": healthy, "keygen": completed, "writer": healthy},
	}, after)
	require.Equal(t, 3, c.Services["writer"].Deploy.Replicas)
	for name, s := range c.Services {
		oneShot := s.Restart == ""
		require.Equal(t, oneShot, len(s.Healthcheck.Test) == 0, "%s: what stays up has a health check", name)
	}
}

func TestCompose_MountsWhatIsThere(t *testing.T) {
	c := readCompose(t)
	made := makeSecrets(t)
	used := map[string]bool{}
	for name, s := range c.Services {
		for _, volume := range s.Volumes {
			parts := strings.Split(volume, ":")
			require.GreaterOrEqual(t, len(parts), 2, volume)
			if strings.HasPrefix(parts[0], "./") {
				require.FileExists(t, path(t, parts[0]), name)
				require.Equal(t, "ro", parts[2], "%s: %s", name, volume)
			} else {
				require.Contains(t, c.Volumes, parts[0], name)
			}
		}
		for _, secret := range s.Secrets {
			require.Contains(t, c.Secrets, secret, name)
			used[secret] = true
		}
		// Whatever reads a secret has it mounted.
		text, err := yaml.Marshal(s)
		require.NoError(t, err)
		for _, found := range regexp.MustCompile(`/run/secrets/(\w+)`).FindAllStringSubmatch(string(text), -1) {
			require.Contains(t, s.Secrets, found[1], name)
		}
	}
	for name, secret := range c.Secrets {
		require.True(t, used[name], "nobody uses secret %s", name)
		require.Equal(t, "./deploy/secrets/"+name, secret.File)
		require.FileExists(t, filepath.Join(made, name), "secrets.sh makes it")
	}
	// The scripts read the secrets by names of their own.
	require.Subset(t, c.Services["redis"].Secrets, []string{"redis_gateway_password", "redis_writer_password", "redis_operator_password"})
	for _, name := range []string{"database-users", "database-grants"} {
		require.ElementsMatch(t, []string{"mysql_root_password", "mysql_migrator_password", "mysql_writer_password"}, c.Services[name].Secrets)
		require.FileExists(t, path(t, "deploy/"+c.Services[name].Command[0]))
	}
	require.Contains(t, read(t, "deploy/secrets/.gitignore"), "*")
}

// programs are the services that run a binary of ours, and how.
var programs = map[string]struct{ binary, command string }{
	"keygen":  {"writer", "keygen"},
	"migrate": {"writer", "migrate"},
	"writer":  {"writer", "serve"},
	"gateway": {"gateway", "serve"},
}

func TestCompose_NamesRealSettingsOfTheBinaries(t *testing.T) {
	c := readCompose(t)
	secrets := makeSecrets(t)
	key := filepath.Join(t.TempDir(), "order.key")
	out, code := run(t, nil, binary(t, "writer"), "keygen", key)
	require.Zero(t, code, out)
	for name, s := range c.Services {
		program, ours := programs[name]
		require.Equal(t, s.Image == "", ours, name)
		if !ours {
			continue
		}
		require.Equal(t, build{Context: ".", Dockerfile: "deploy/Dockerfile", Target: program.binary}, s.Build, name)
		help, code := run(t, []string{"COLUMNS=1000"}, binary(t, program.binary), program.command, "--help")
		require.Zero(t, code, help)
		known := flagsOf(t, help)
		env := []string{}
		for variable, value := range s.Environment {
			require.True(t, slices.ContainsFunc(known, func(f flagRow) bool { return f.env == variable }), "%s: %s has no %s", name, program.binary, variable)
			value = strings.Replace(value, "/run/secrets/", secrets+"/", 1)
			env = append(env, variable+"="+strings.Replace(value, "/keys/order.key", key, 1))
		}
		if program.command == "serve" {
			require.Equal(t, []string{"serve"}, s.Command, name)
			out, code := run(t, env, binary(t, program.binary), "check-config")
			require.Zero(t, code, "%s: %s", name, out)
		}
	}
	require.Equal(t, []string{"migrate"}, c.Services["migrate"].Command)
	require.Contains(t, c.Services["keygen"].Entrypoint[2], "exec writer keygen /keys/order.key")
	require.Equal(t, c.Services["gateway"].Environment["SECKILL_ORDER_KEY_FILE"], "/keys/order.key")
	require.Equal(t, c.Services["writer"].Environment["SECKILL_ORDER_KEY_FILE"], "/keys/order.key")
	for _, user := range []string{"gateway", "writer"} {
		require.Equal(t, user, c.Services[user].Environment["SECKILL_REDIS_USERNAME"])
		require.Contains(t, read(t, "deploy/users.acl"), "\nuser "+user+" on ")
	}
}

// The entry point of keygen makes a key once and leaves it alone then.
func TestCompose_KeygenKeepsAKeyThatIsThere(t *testing.T) {
	entrypoint := readCompose(t).Services["keygen"].Entrypoint
	require.Equal(t, []string{"sh", "-c"}, entrypoint[:2])
	dir := t.TempDir()
	script := strings.ReplaceAll(entrypoint[2], "/keys/", dir+"/")
	env := []string{"PATH=" + filepath.Dir(binary(t, "writer")) + string(os.PathListSeparator) + os.Getenv("PATH")}
	out, code := run(t, env, "sh", "-c", script)
	require.Zero(t, code, out)
	key := content(t, filepath.Join(dir, "order.key"))
	require.NotEmpty(t, key)
	out, code = run(t, env, "sh", "-c", script)
	require.Zero(t, code, out)
	require.Equal(t, key, content(t, filepath.Join(dir, "order.key")))
}

func TestCompose_PortsAreThoseOfTheBinaries(t *testing.T) {
	c := readCompose(t)
	listen := regexp.MustCompile(`(?m)^listen: :(\d+)$`)
	admin := regexp.MustCompile(`(?m)^admin: \S*:(\d+)$`)
	for _, name := range []string{"gateway", "writer"} {
		settings, _ := run(t, nil, binary(t, name), "check-config") // prints them also where some are missing
		api, metrics := listen.FindStringSubmatch(settings), admin.FindStringSubmatch(settings)
		require.NotNil(t, api, settings)
		require.NotNil(t, metrics, settings)
		s := c.Services[name]
		require.Len(t, s.Ports, 1, name)
		require.True(t, strings.HasSuffix(s.Ports[0], ":"+api[1]), "%s: %s", name, s.Ports[0])
		require.NotContains(t, s.Environment, "SECKILL_LISTEN", name)
		require.Equal(t, ":"+metrics[1], s.Environment["SECKILL_ADMIN"], name)
		require.Contains(t, s.Healthcheck.Test, "http://127.0.0.1:"+metrics[1]+"/healthz", name)
		require.Contains(t, read(t, "deploy/Dockerfile"), "EXPOSE "+api[1]+" "+metrics[1]+"\n")
	}
	require.Equal(t, "redis:6379", c.Services["writer"].Environment["SECKILL_REDIS_ADDR"])
	require.Contains(t, read(t, "deploy/redis-start.sh"), "--port 6379")
}

func TestDockerfile_BuildsWhatIsInTheTree(t *testing.T) {
	stages := map[string]bool{}
	text := read(t, "deploy/Dockerfile")
	ignored := read(t, ".dockerignore")
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) == 4 && words[0] == "FROM" && words[2] == "AS":
			stages[words[3]] = true
		case len(words) > 2 && words[0] == "COPY" && words[1] == "--from=build":
			require.True(t, stages["build"])
			require.Contains(t, text, "-o "+words[2]+" ", "built before it is copied")
		case len(words) > 2 && words[0] == "COPY":
			for _, source := range words[1 : len(words)-1] {
				_, err := os.Stat(path(t, source))
				require.NoError(t, err)
				module, _, _ := strings.Cut(source, "/")
				require.Contains(t, ignored, "\n!"+module+"\n", "the build context has it")
			}
		}
	}
	require.Equal(t, map[string]bool{"build": true, "runtime": true, "gateway": true, "writer": true}, stages)
	for _, program := range []string{"gateway", "writer"} {
		require.Contains(t, text, "RUN cd "+program+" && go build -trimpath -o /out/"+program+" ./cmd/"+program+"\n")
		require.DirExists(t, path(t, program+"/cmd/"+program))
	}
	require.Contains(t, text, "CGO_ENABLED=0")
	require.Contains(t, text, "\nUSER 65532:65532\n")
	// Each of the two needs only modules that are copied.
	for _, program := range []string{"gateway", "writer"} {
		for _, found := range regexp.MustCompile(`=> \.\./(\w+)`).FindAllStringSubmatch(read(t, program+"/go.mod"), -1) {
			require.Contains(t, text, "\nCOPY "+found[1]+" "+found[1]+"\n")
		}
	}
}
