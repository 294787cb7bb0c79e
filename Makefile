# Tessera: the commands people use. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),$(CURDIR)/target)
RELEASE := $(TARGET)/release
DEBUG := $(TARGET)/debug
SHIPPED := $(TARGET)/shipped
CARGO := cargo
# Everything that users or tests run as a file.
ARTEFACTS := -p tessera-cli -p simgpu -p simcuda -p simnvml -p tessera-tenant-program

.PHONY: help build plugin debug demo test soak shipped lint e2e bench figures clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# rename(2), so that a process that has the old file mapped keeps it
define simulator
	@mkdir -p $(1)/sim
	@for file in libsimcuda.so:libcuda.so.1 libsimnvml.so:libnvidia-ml.so.1 simgpu-ctl:simgpu-ctl; do \
	    cp $(1)/$${file%%:*} $(1)/sim/.new && mv $(1)/sim/.new $(1)/sim/$${file##*:}; \
	done
endef

build: ## build for users: the plugin, the shim and the simulated GPU into target/release
	$(CARGO) build --release --locked $(ARTEFACTS)
	$(call simulator,$(RELEASE))
	shim/release $(RELEASE)

plugin: debug ## build of these the plugin and the shim alone; target/shipped has them beside what tests need
	$(CARGO) build --release --locked -p tessera-cli
	shim/release $(RELEASE)
	@mkdir -p $(SHIPPED)/sim
	@ln -f $(RELEASE)/{tessera,libtessera.so} $(DEBUG)/tessera-tenant $(SHIPPED)
	@ln -f $(DEBUG)/sim/* $(SHIPPED)/sim

debug: ## build the same, mostly unoptimised, into target/debug, for demo and tests; its shim is for this machine's glibc
	@[ -e $(DEBUG)/tessera ] || echo "The first build compiles 360 crates: about three minutes on two cores."
	$(CARGO) build --locked $(ARTEFACTS) -p tessera-shim
	$(call simulator,$(DEBUG))
	@cp $(DEBUG)/libtessera_shim.so $(DEBUG)/.libtessera.so && mv $(DEBUG)/.libtessera.so $(DEBUG)/libtessera.so

demo: debug ## share a simulated GPU among tenants and watch the quotas hold
	$(DEBUG)/tessera demo

# The same inputs each time: a property that fails one input of many thousands would fail a change that has nothing to do
# with it. `make soak` draws others, and far more.
test: export PROPTEST_RNG_SEED ?= 1
test: ## all tests that need neither root nor a GPU
	tests/run

shipped: plugin ## test what only the build for users has
	TESSERA_ARTEFACTS=$(SHIPPED) tests/run --shipped

soak: ## draw far more inputs for every property, other ones each time (ROUNDS, CASES: see tests/soak)
	tests/soak $(ROUNDS) $(CASES)

lint: ## formatting, clippy, dependency rules, links and figures of the documentation, the shim for aarch64
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	tests/lint/dependencies
	tests/lint/files
	@# Assembly is checked by assembling, and its names by linking.
	shim/release $(TARGET)/aarch64 aarch64-unknown-linux-gnu
	tests/lint/links
	tests/lint/budget
	@# What `proto/generate` made is what the .proto files say.
	sha256sum --check --quiet proto/generate/sha256
	tests/bench/figures check

e2e: plugin ## the whole on a real Kubernetes (root; see tests/e2e/README.md)
	tests/e2e/run

bench: build ## measure; prints figures and writes target/bench/summary.json
	$(CARGO) build --release --locked -p tessera-bench
	TESSERA_ARTEFACTS=$(RELEASE) $(RELEASE)/tessera-bench --out $(TARGET)/bench/summary.json

figures: ## write the figures of the last `make bench` into docs/benchmarks.md and README.md
	tests/bench/figures write $(TARGET)/bench/summary.json

clean: ## remove build products
	$(CARGO) clean
