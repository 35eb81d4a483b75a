# Everything here needs Go alone; the servers, buf and staticcheck are fetched
# into .dev/ when they are first needed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

GO ?= go
# Flags for demo, run, bench and the tests: make demo ARGS=--help, make bench
# ARGS=--list, make test ARGS="-run Reclaimer -v"
ARGS ?=
# How many packages are built and tested at once. Each may run a Redis, a
# database and a few processes of its own, and waits more than it works, so
# three are right for two cores.
TEST_PARALLEL ?= 3
# The package that takes longest, named first so that nothing waits for it alone
# at the end.
TEST_LONGEST := github.com/seckill/seckill/tests/e2e

MODULES := proto pkg migrations gateway writer tests
DEV := $(CURDIR)/.dev
DEVSTACK := $(GO) run ./pkg/devstack/cmd/devstack

BUF_VERSION := 1.75.0
BUF_NPM := $(DEV)/buf/node_modules/.bin/buf
BUF_GO := $(DEV)/bin/buf
STATICCHECK_VERSION := 0.8.2
STATICCHECK := $(DEV)/bin/staticcheck-$(STATICCHECK_VERSION)
# A tool has its own versions of everything: neither go.work nor go.mod may
# take part when it is built.
TOOL_INSTALL := GOBIN=$(DEV)/bin GOWORK=off GOFLAGS=-mod=mod $(GO) install

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## sell out 10,000 units on a private stack, kill a writer in the middle, prove the books
	@$(GO) run ./tests/cmd/demo $(ARGS)

.PHONY: run
run: ## keep a private stack up, with an open voucher and calls to copy; Ctrl-C ends it
	@$(GO) run ./tests/cmd/run $(ARGS)

.PHONY: test
test: ## run the tests, all but the fleet's long ones, on real servers, with the race detector where a C compiler is found
	@$(DEVSTACK) fetch
	@race=-race; \
	if [ "$$($(DEVSTACK) race)" != yes ]; then race=; echo "make test: no C compiler was found: running WITHOUT the race detector"; fi; \
	set -x; $(GO) test $$race -p $(TEST_PARALLEL) -timeout 540s $(ARGS) $(TEST_LONGEST) work

# Built with the tag fleet, the package holds its long tests beside the others.
# The race detector bounds goroutines, so "make test" opens 2,000 streams where it
# is on; here it is off, and all 10,000 are opened.
.PHONY: test-fleet
test-fleet: ## run the end-to-end tests with the fleet's long ones: outages, dead letters, kills at every point, a stream taken apart
	@$(DEVSTACK) fetch
	@set -x; $(GO) test -tags fleet -count=1 -timeout 1500s $(ARGS) $(TEST_LONGEST); \
	$(GO) test -count=1 -timeout 120s -run ThousandsOfStreams ./gateway/internal/rpc

# What may touch the database: the modules that use it, and the servers' own
# package. No gateway can reach one. Code 3 is "not available today".
.PHONY: test-mysql
test-mysql: ## run the tests that use a database, the fleet's long ones too, on real MySQL instead of what "make test" found
	@mkdir -p $(DEV)/bin; $(GO) build -o $(DEV)/bin/devstack ./pkg/devstack/cmd/devstack; \
	code=0; $(DEV)/bin/devstack fetch --mysql || code=$$?; \
	if [ $$code = 3 ]; then echo "SKIPPED: the tests on real MySQL (it is not available here today)"; exit 0; fi; \
	[ $$code = 0 ] || exit $$code; \
	race=-race; \
	if [ "$$($(DEV)/bin/devstack race)" != yes ]; then race=; echo "make test-mysql: no C compiler was found: running WITHOUT the race detector"; fi; \
	export SECKILL_DATABASE=mysql; \
	set -x; $(GO) test $$race -p $(TEST_PARALLEL) -count=1 -timeout 540s $(ARGS) ./pkg/devstack/... ./migrations/... ./writer/... $$($(GO) list ./tests/... | grep -v $(TEST_LONGEST)); \
	$(GO) test -tags fleet -count=1 -timeout 1500s $(ARGS) $(TEST_LONGEST)

.PHONY: build
build: ## build static binaries of gateway, writer and seckillctl into bin/
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/ ./gateway/cmd/gateway ./gateway/cmd/seckillctl ./writer/cmd/writer

.PHONY: generate
generate: ## generate the Go code of the API from proto/
	@buf=$$($(MAKE) -s buf-path) || { echo "make generate: npm is not there, building buf from source (some minutes)"; $(TOOL_INSTALL) github.com/bufbuild/buf/cmd/buf@v$(BUF_VERSION); buf=$(BUF_GO); }; \
	"$$buf" format -w; "$$buf" generate

.PHONY: baseline
baseline: ## take the API as it is now as the one that later changes must not break
	@buf=$$($(MAKE) -s buf-path); "$$buf" build -o proto/baseline.binpb; echo "wrote proto/baseline.binpb"

.PHONY: lint
lint: lint-go lint-modules lint-proto ## gofmt, vet, staticcheck, each module by itself, the API's form, compatibility and generated code

.PHONY: lint-go
lint-go: $(STATICCHECK)
	@unformatted=$$(gofmt -l $(MODULES)); if [ -n "$$unformatted" ]; then echo "not formatted by gofmt:"; echo "$$unformatted"; exit 1; fi
	$(GO) vet work
	$(STATICCHECK) work

# Each go.mod must be right by itself, not only together with go.work.
.PHONY: lint-modules
lint-modules:
	@for module in $(MODULES); do echo "GOWORK=off $(GO) build ./... in $$module"; (cd $$module && GOWORK=off $(GO) build -o /dev/null ./...); done

# Compatibility is judged against a committed image and not against an earlier
# commit: a fresh or shallow clone may have none, and what callers hold is the
# released API, which "make baseline" records, and not the commit of yesterday.
.PHONY: lint-proto
lint-proto:
	@buf=$$($(MAKE) -s buf-path) || { echo "SKIPPED: buf lint, format, breaking and the check of the generated code (npm is not there)"; exit 0; }; \
	echo "buf lint"; "$$buf" lint; \
	echo "buf format"; "$$buf" format -d --exit-code; \
	echo "buf breaking"; "$$buf" breaking --against proto/baseline.binpb; \
	echo "generated code"; fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; "$$buf" generate -o "$$fresh"; \
	diff -r --exclude='*.proto' "$$fresh/proto/seckill" proto/seckill || { echo "the generated code is not what proto/ says: run make generate"; exit 1; }

# Prints where buf is, installing it by npm if need be; fails where there is no npm.
.PHONY: buf-path
buf-path:
	@if [ -x $(BUF_NPM) ] && [ "$$($(BUF_NPM) --version)" = $(BUF_VERSION) ]; then echo $(BUF_NPM); \
	elif [ -x $(BUF_GO) ] && [ "$$($(BUF_GO) --version)" = $(BUF_VERSION) ]; then echo $(BUF_GO); \
	elif command -v npm >/dev/null; then npm install --prefix $(DEV)/buf --no-save --no-audit --no-fund @bufbuild/buf@$(BUF_VERSION) >&2; $(BUF_NPM) --version >/dev/null; echo $(BUF_NPM); \
	else exit 1; fi

$(STATICCHECK):
	@mkdir -p $(DEV)/bin
	$(TOOL_INSTALL) honnef.co/go/tools/cmd/staticcheck@v$(STATICCHECK_VERSION)
	@mv $(DEV)/bin/staticcheck $@

# Whether bounds are met is in what they print; they fail only where something
# could not be measured, and continuous integration does not run them.
.PHONY: bench
bench: ## measure everything beside the tutorial's stages and the bare limits, in one go (up to 15 minutes)
	@$(GO) run ./tests/bench $(ARGS)

.PHONY: bench-quick
bench-quick: ## the same, once and shortly (under 3 minutes)
	@$(GO) run ./tests/bench --quick $(ARGS)

.PHONY: ci
ci: ## what continuous integration runs: lint, test, test-fleet, test-mysql, demo
	@bash .ci/run

.PHONY: clean
clean: ## remove what was built; the fetched servers and tools go with "rm -r .dev"
	rm -rf bin tests/bench/out
