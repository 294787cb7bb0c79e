# Tessera: the commands people use. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),$(CURDIR)/target)
RELEASE := $(TARGET)/release
CARGO := cargo
# No test may touch the machine's own state: see tests/isolated.
ISOLATED := --config "target.'cfg(unix)'.runner = '$(CURDIR)/tests/isolated'"
# Everything that users or tests run as a file, but for the shim, which has its own link step.
ARTEFACTS := -p tessera-cli -p simgpu -p simcuda -p simnvml -p tessera-tenant-program -p tessera-pipeline

.PHONY: help build demo test soak test-loom python programs lint e2e bench figures clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

build: ## build the plugin, the shim and the simulated GPU into target/release
	$(CARGO) build --release --locked $(ARTEFACTS)
	@mkdir -p $(RELEASE)/sim
	@# rename(2), so that a process that has the old file mapped keeps it
	@for file in libsimcuda.so:libcuda.so.1 libsimnvml.so:libnvidia-ml.so.1 simgpu-ctl:simgpu-ctl; do \
	    cp $(RELEASE)/$${file%%:*} $(RELEASE)/sim/.new && mv $(RELEASE)/sim/.new $(RELEASE)/sim/$${file##*:}; \
	done
	shim/release $(RELEASE)

demo: build ## share a simulated GPU among tenants and watch the quotas hold
	$(RELEASE)/tessera demo

python: ## make the Python environment that the client tests use
	tests/python/setup.sh

programs: ## install what tests start and cannot bring along (root on Debian): Chromium, buildah
	tests/install-programs.sh

test-loom: ## check the lock-free accounting with loom
	CARGO_TARGET_DIR=$(TARGET)/loom RUSTFLAGS="--cfg loom" $(CARGO) test --locked --release -p tessera-region --test loom

# The same inputs each time: a property that fails one input of many thousands would fail a change that has nothing to do
# with it. `make soak` draws others, and far more.
test: export PROPTEST_RNG_SEED ?= 1
test: build python programs test-loom ## all tests that need neither root nor a GPU
	TESSERA_ARTEFACTS=$(RELEASE) $(CARGO) test --locked --workspace --no-fail-fast $(ISOLATED)

soak: ## draw far more inputs for every property, other ones each time (ROUNDS, CASES: see tests/soak)
	tests/soak $(ROUNDS) $(CASES)

lint: ## formatting, clippy, dependency rules, links and figures of the documentation, the shim for aarch64
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	tests/lint/dependencies
	@# Assembly is checked by assembling, and its names by linking.
	shim/release $(TARGET)/aarch64 aarch64-unknown-linux-gnu
	tests/lint/links
	tests/bench/figures check

e2e: build ## the whole on a real Kubernetes (root; see tests/e2e/README.md)
	TESSERA_ARTEFACTS=$(RELEASE) tests/e2e/run

bench: build programs ## measure; prints a table and writes target/bench/summary.json
	$(CARGO) build --release --locked -p tessera-bench -p tessera-suite-page --bins
	TESSERA_ARTEFACTS=$(RELEASE) $(RELEASE)/tessera-bench --out $(TARGET)/bench/summary.json

figures: ## write the figures of the last `make bench` into docs/benchmarks.md and README.md
	tests/bench/figures write $(TARGET)/bench/summary.json

clean: ## remove build products
	$(CARGO) clean
