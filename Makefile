# SPDX-License-Identifier: Apache-2.0
# The front door. `make` alone says what there is.

CARGO ?= cargo
SOAK_TRANSACTIONS ?= 2000000
FUZZ_SECONDS ?= 60
# CI builds exactly what the lock file says; who adds a dependency gets it updated.
LOCKED := $(if $(CI),--locked)
# What `make bench` passes on; `make bench ARGS='run --help'` says what there is, QUICK=1 takes the profile quick.
ARGS ?= run $(if $(QUICK),--quick)

.DEFAULT_GOAL := help
.PHONY: help run build test test-lanes test-soak test-drivers test-regress test-versions test-kernels test-compat lint fmt bench \
	fuzz-smoke ci ci-full

help: ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## build, start a private PostgreSQL (or UPSTREAM=postgres://user:password@host:port/db) and the pooler
	@scripts/run.sh

build: ## all programs, optimised
	$(CARGO) build $(LOCKED) --release --workspace --bins

test: ## every cargo test: unit, fixtures with real servers, a short soak (some minutes)
	@scripts/test.sh

test-lanes: ## the tests that start a pooler, with kernel lanes required (root); each transaction in user space must have a reason
	@UNDERPASS_TEST_KERNEL_PATH=require scripts/test.sh

test-soak: ## the leak checker, 2,000,000 transactions (SOAK_TRANSACTIONS=...)
	@scripts/soak.sh $(SOAK_TRANSACTIONS)

test-drivers: build ## real client drivers: in session and transaction pooling, and recorded
	tests/drivers/run.sh

test-regress: build ## PostgreSQL's own regression suite through the pooler
	tests/regress/run.sh

test-versions: build ## PostgreSQL 14 to 18, MySQL 5.6 (recorder and replayer)
	tests/versions/run.sh

test-kernels: build ## the oldest supported kernel, in a virtual machine
	tests/kernels/run.sh

test-compat: build ## console and behaviour, compared with PgBouncer
	tests/compat/run.sh

lint: ## formatting, clippy, documentation, rules of the source tree
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(LOCKED) --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(LOCKED) --workspace --no-deps --quiet
	$(CARGO) test $(LOCKED) --quiet -p underpass-testkit --test tidy

fmt: ## format the code
	$(CARGO) fmt --all

bench: ## the benchmarks against PgBouncer and a direct connection (QUICK=1: some minutes; docs/benchmarks.md)
	$(CARGO) build $(LOCKED) --release --workspace --bins
	$(or $(CARGO_TARGET_DIR),target)/release/underpass-bench $(ARGS)

fuzz-smoke: ## every fuzz target for a short time (FUZZ_SECONDS=...)
	@scripts/fuzz.sh $(FUZZ_SECONDS)

# With the program that the tests have built: half a minute more, and every behaviour that PgBouncer's users rely on.
ci: lint test ## what every change must pass
	UNDERPASS_BIN=$${UNDERPASS_BIN:-$(realpath $(or $(CARGO_TARGET_DIR),target))/debug/underpass} tests/compat/run.sh

ci-full: ## everything; writes docs/ci-full.md
	@scripts/ci-full.sh
