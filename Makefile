# Commands for developers. dev/lab/setup/setup prepares the machine, cargo builds, xtask does the rest.

CARGO ?= cargo
ARGS ?=

# rustup installs cargo here, which is not in every shell's path.
export PATH := $(PATH):$(HOME)/.cargo/bin

.DEFAULT_GOAL := help

## help: this list
.PHONY: help
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST) | awk -F': ' '{ printf "  make %-15s %s\n", $$1, $$2 }'

## setup: prepare this machine (packages, Rust check, the Valkey server); the targets that need it call it
.PHONY: setup
setup:
	@dev/lab/setup/setup

# The developer's commands are built together with the module and run without cargo: the module is a library for C programs, which
# needs machine code of all its crates. A program alone needs only their bitcode, so a `cargo run` of one would compile all crates again.
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(CARGO) build --release --locked --target-dir $(TARGET) -p remora-agent -p remora-module

# What a demonstration needs: neither backups in buckets, nor encrypted ones, nor the screen of `remora status --watch`. Their crates are
# two fifths of all.
DEMO := $(CARGO) build --profile demo --locked --target-dir $(TARGET) --no-default-features -p remora-agent -p remora-module -p xtask

## build: the command, target/release/remora, and the module for servers beside it
.PHONY: build
build:
	$(RELEASE)

## demo: replicas with Remora and with the servers' own replication, side by side; ARGS="--size 100MiB --json FILE"
.PHONY: demo
demo:
	@dev/lab/setup/setup --demo
	$(DEMO)
	CARGO=$(CARGO) $(TARGET)/demo/xtask demo $(ARGS)

## demo-migrate: a server with clients becomes one of the other family, and goes back; ARGS="--size 1GiB --rate 5000"
.PHONY: demo-migrate
demo-migrate:
	@dev/lab/setup/setup --demo
	$(DEMO)
	CARGO=$(CARGO) $(TARGET)/demo/xtask demo-migrate $(ARGS)

## demo-rdma: an exact replica over RDMA, in a virtual machine with two Soft-RoCE devices
.PHONY: demo-rdma
demo-rdma: setup build
	dev/lab/rdma-vm/rdma-vm -n 2 "$(CURDIR)/dev/lab/rdma-vm/demo $(abspath $(TARGET))/release"

## demo-volume: a block device, and a Redis server's files, in the memory of three servers while hosts fail; ARGS="--size 1GiB --json FILE"
.PHONY: demo-volume
demo-volume: setup
	$(RELEASE) -p xtask
	CARGO=$(CARGO) $(TARGET)/release/xtask demo-volume $(ARGS)

## test: each promise once, and all tests without servers; a test that this machine cannot run prints the reason; ARGS="-- sentinel"
.PHONY: test
test:
	@dev/lab/setup/setup --test
	CARGO=$(CARGO) dev/lab/run-tests $(ARGS)

## test-all: every test, and the interleavings of the publishing protocol (loom); with CI=true a skipped test fails
.PHONY: test-all
test-all: setup
	CARGO=$(CARGO) dev/lab/run-tests --all $(ARGS)
	$(MAKE) --no-print-directory loom

## test-rest: what `make test` leaves to `make test-all`
.PHONY: test-rest
test-rest: setup
	CARGO=$(CARGO) dev/lab/run-tests --rest $(ARGS)
	$(MAKE) --no-print-directory loom

# In a separate folder, because `--cfg loom` rebuilds everything; as a release, because every interleaving is a run.
## loom: the publishing protocol of the table, all interleavings; part of test-all
.PHONY: loom
loom:
	RUSTFLAGS="--cfg loom" CARGO_PROFILE_RELEASE_LTO=off \
		$(CARGO) test --locked -p remora-table --lib --release --target-dir target/loom

## simulate: schedules of whole syncs in a simulated world, for long; ARGS="--hours 8", ARGS="--seed 7"
.PHONY: simulate
simulate:
	$(CARGO) run --release --locked -p remora-simulation --bin simulate -- $(ARGS)

# Three tests, one after the other, on every processor.
SECONDS ?= 1200
JOBS ?= $(shell nproc)
## simulate-volume: the volume's schedules and its simulated device, for long; SECONDS=9600 for each of three tests
.PHONY: simulate-volume
simulate-volume:
	REMORA_PLAY_SECONDS=$(SECONDS) REMORA_PLAY_JOBS=$(JOBS) $(CARGO) test --release --locked -p remora-volume --lib -- \
		--include-ignored --nocapture --test-threads=1 nothing_that_was_ a_copy_is_found_as_it_was_at_or_after_the_last_sync

## cut-volume: hosts whose server writes into a volume lose their cable, a hundred times (ROUNDS=100) for each kind of server, and how long a host takes to be replaced whose server has a gigabyte of data
.PHONY: cut-volume
cut-volume: ROUNDS ?= 100
cut-volume: setup
	REMORA_CABLE_ROUNDS=$(ROUNDS) REMORA_TAKE_OVER_BYTES=1000000000 $(CARGO) test --release --locked -p remora-agent --test it -- \
		--include-ignored --nocapture --test-threads=1 volume_hosts::a_host_

# With the profile of the tests: overflow checks and debug assertions find more than speed does.
## soak: servers and agents for an hour under a random script of faults, compared again and again; ARGS="--minutes 60 --seed N"
.PHONY: soak
soak: setup
	$(CARGO) run --locked -p xtask -- soak $(ARGS)

## judge: the servers' own replication tests with Remora serving every full copy; ARGS="--suite redis-7.0 --with attend --only psync2"
.PHONY: judge
judge: setup
	@dev/judge/setup
	$(CARGO) build --locked -p remora-agent -p remora-module -p xtask
	CARGO=$(CARGO) $(TARGET)/debug/xtask judge $(ARGS)

## judge-sweep: files of Redis' own tests on a server that is swept all the time; FILES="unit/type/set unit/multi"
.PHONY: judge-sweep
judge-sweep: setup
	@dev/judge/setup
	rm -rf target/judge-sweep && cp -r .cache/judge/redis-7.0/source target/judge-sweep
	cp -P .cache/judge/redis-7.0/programs/* target/judge-sweep/src/
	REMORA_SUITE=$(CURDIR)/target/judge-sweep $(if $(FILES),REMORA_SUITE_FILES="$(FILES)") $(CARGO) test --locked -p remora-module --test it sweep::by_command::the_servers -- --ignored --nocapture

## judge-files: what `fetch`, `backup` and conversions write, read by a parser of RDB files that other people wrote; needs Go
.PHONY: judge-files
judge-files: setup
	cd dev/judge/reader && go build -ldflags="-s -w" -o $(abspath $(TARGET))/rdb-reader .
	REMORA_RDB_READER=$(abspath $(TARGET))/rdb-reader $(CARGO) test --locked -p remora-agent --test it -- --ignored --nocapture \
		fetch::by_command::another_parser

## chaos: full copy after full copy under random load and faults, compared value by value; ARGS="--rounds 8 --minutes 20 --seed N"
.PHONY: chaos
chaos: setup
	$(CARGO) build --locked -p remora-agent -p remora-module -p xtask
	CARGO=$(CARGO) $(TARGET)/debug/xtask chaos $(ARGS)

MINUTES ?= 60
# Another list of programs and folders, with colons between, and the command `remora` of another release.
SERVERS ?=
THOUSANDS ?=
OTHER ?=
## test-matrix: the main job on servers of many versions (docs/reference/versions.md); SERVERS=folder:program, THOUSANDS=700 commands before and after each switch, OTHER=/path/to/another/remora
.PHONY: test-matrix
test-matrix: setup
	$(if $(SERVERS),,@dev/lab/setup/versions)
	$(if $(SERVERS),REMORA_SERVERS="$(SERVERS)") $(if $(THOUSANDS),REMORA_THOUSANDS="$(THOUSANDS)") $(CARGO) test --locked -p remora-agent --test it -- --ignored --nocapture \
		versions::by_command::the_main_job migration::by_command
	$(if $(OTHER),REMORA_OTHER="$(OTHER)" $(CARGO) test --locked -p remora-agent --test it -- --ignored --nocapture \
		versions::by_command::agents_of_another_release)

## pieces: syncs over proxies that deliver in other pieces than were written; ROUNDS=1000
.PHONY: pieces
pieces: ROUNDS ?= 1000
pieces: setup
	REMORA_PIECES_ROUNDS=$(ROUNDS) $(CARGO) test --locked -p remora-agent --test it many::by_command -- --ignored --nocapture

## twins: random commands on servers that have loaded in the fast way, and on twins that have not; MINUTES=60
.PHONY: twins
twins: setup
	REMORA_TWINS_MINUTES=$(MINUTES) $(CARGO) test --locked -p remora-module --test it twins::by_command -- --ignored --nocapture

## layout: where a build of a server keeps its tables, for module/builds (docs/explanation/module.md); PROGRAM=/usr/bin/valkey-server PACKAGE="words"
.PHONY: layout
layout:
	@$(CARGO) run --quiet --locked -p xtask -- layout "$(PROGRAM)" --package "$(PACKAGE)"

## asserting: fast keys in a server that is built with assertions and AddressSanitizer; SOURCE=folder of an unpacked source package
.PHONY: asserting
asserting: setup
	CARGO=$(CARGO) $(CARGO) run --locked -p xtask -- asserting "$(SOURCE)" $(ARGS)

## prove-files: the files of a mounted volume, by fsx, pjdfstest, fio, stress-ng, git and rsync; ARGS="--only fsx --by device"
.PHONY: prove-files
prove-files: setup
	@dev/lab/setup/setup --proofs
	$(RELEASE) -p xtask
	CARGO=$(CARGO) $(TARGET)/release/xtask prove-files $(ARGS)

## dist: what users install, in target/dist: archives, .deb, .rpm, .apk, images, SBOMs, checksums, for x86_64 and aarch64; ARGS="--architectures x86_64"
.PHONY: dist
dist: setup
	@dev/lab/setup/setup --dist
	$(CARGO) run --quiet --locked -p xtask -- dist $(ARGS)

## try-dist: what is in target/dist, installed in a bare Debian that boots systemd, used, and removed again; SUITE=bookworm
.PHONY: try-dist
try-dist:
	@dev/lab/setup/setup --dist
	dev/lab/dist/try $(SUITE)

## pictures: the pictures of README.md and the manual anew, from the program itself; ARGS="--only page", "--only session"
.PHONY: pictures
pictures: setup
	$(RELEASE) -p xtask
	CARGO=$(CARGO) $(TARGET)/release/xtask pictures $(ARGS)

## book: the documentation as a site, target/book/index.html; needs the program mdbook
.PHONY: book
book:
	@command -v mdbook >/dev/null || { echo "mdbook is missing: cargo install --locked mdbook" >&2; exit 1; }
	mdbook build

## bench: the measurements behind bench/report.md and the README, into bench/runs; ARGS="--only sync"
.PHONY: bench
bench: setup
	@dev/lab/setup/setup --rivals
	$(RELEASE) -p xtask
	CARGO=$(CARGO) $(TARGET)/release/xtask bench $(ARGS)

## bench-elsewhere: an archive that measures on any Linux machine of x86-64 without a network: target/remora-bench.tar.gz
.PHONY: bench-elsewhere
bench-elsewhere: setup
	$(RELEASE) -p remora-bench
	dev/bench/elsewhere/pack $(TARGET)/release $(TARGET)/remora-bench.tar.gz

## check: format, lints, structure, documentation, fuzz targets and builds with fewer features
.PHONY: check
check: format lint structure doc fuzz-check features

.PHONY: format lint structure doc fuzz-check features
format:
	$(CARGO) fmt --all --check
lint:
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
# A separate crate, which is built in seconds.
structure:
	$(CARGO) run --quiet --locked -p remora-structure
doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# A workspace of its own. Nothing is linked, so neither the nightly compiler nor LLVM's fuzzer is needed: the variable keeps
# libfuzzer-sys from building the latter with a C++ compiler.
fuzz-check:
	CUSTOM_LIBFUZZER_PATH=/nowhere/libfuzzer.a \
		$(CARGO) check --quiet --locked --manifest-path dev/fuzz/Cargo.toml --target-dir target
# `fabric` and `volume` can be built without reads by RDMA. The other crates above `fabric` always have them. The agent can be
# built without backups in buckets, and without encrypted ones.
features:
	$(CARGO) clippy --quiet --locked -p remora-fabric --no-default-features -- -D warnings
	$(CARGO) clippy --quiet --locked -p remora-volume --no-default-features -- -D warnings
	$(CARGO) clippy --quiet --locked -p remora-agent --no-default-features -- -D warnings
	$(CARGO) clippy --quiet --locked -p remora-agent --no-default-features --features s3 -- -D warnings
	$(CARGO) clippy --quiet --locked -p remora-agent --no-default-features --features age -- -D warnings

CRATES := -p remora-redis -p remora-wire -p remora-memory -p remora-rdma -p remora-fabric -p remora-table -p remora-messenger

## crates: package the crates that others can use, and build each from its package; nothing is published
.PHONY: crates
crates:
	$(CARGO) package --locked --allow-dirty $(ARGS) $(CRATES)

## actionlint: the workflow files of the forge; needs Go
.PHONY: actionlint
actionlint:
	go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.7 .github/workflows/*.yml

# A Helm that Go has built knows no version of Kubernetes of its own.
HELM := .cache/tools/helm
HELM_FOR := --kube-version 1.34.0
VERSION = $(shell sed -n '/^\[workspace.package\]/,/^version/s/^version = "\(.*\)"/\1/p' Cargo.toml)
CHART_EXAMPLES := $(basename $(notdir $(wildcard deploy/chart/examples/*.yaml)))

## chart: the Helm chart: look at it, render its examples anew (deploy/chart/rendered), package it into target/chart; needs Go
.PHONY: chart
chart:
	@dev/lab/setup/setup --helm
	$(HELM) lint --quiet --strict $(HELM_FOR) deploy/chart/remora
	@for example in $(CHART_EXAMPLES); do set -e; \
		$(HELM) lint --quiet --strict $(HELM_FOR) deploy/chart/remora --values deploy/chart/examples/$$example.yaml; \
		echo "deploy/chart/rendered/$$example.yaml"; \
		$(HELM) template cache deploy/chart/remora $(HELM_FOR) --values deploy/chart/examples/$$example.yaml >target/rendered.yaml; \
		sum=$$(cd deploy/chart && find remora examples -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d' ' -f1); \
		{ echo "# By make chart, of files with the checksum $$sum."; cat target/rendered.yaml; } >deploy/chart/rendered/$$example.yaml; \
		rm target/rendered.yaml; \
	done
	$(HELM) package deploy/chart/remora --version $(VERSION) --app-version $(VERSION) --destination target/chart

## test-kubernetes: rolls a fleet on a real Kubernetes of one node, which is built once into .cache/kubernetes (up to an hour); needs Go and root; ARGS=redis
.PHONY: test-kubernetes
test-kubernetes:
	@dev/lab/setup/setup --kubernetes
	$(CARGO) build --locked -p remora-agent
	PROGRAM=$(TARGET)/debug/remora dev/lab/kubernetes/try $(ARGS)

## audit: sources, licences, versions and known vulnerabilities of the crates that are used; what can't be looked for is said
.PHONY: audit
audit:
	@dev/audit

## clean: remove what was built and downloaded
.PHONY: clean
clean:
	$(CARGO) clean
	rm -rf .cache
