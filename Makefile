# Targets: setup demo test test-criu test-gpu lint bench bench-store torture sanitize clean. Nothing needs to be done before; run as root (CRIU needs it).
#   make test ARGS="-k codec -x"    arguments for pytest; ARGS="--workers 1": one test at a time
#   make PYTHON=/path/to/python3.11 …

PYTHON ?= python3
ARGS ?=
CRIU_PREFIX ?= /usr/local/lib/icecore/criu

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: setup demo test test-criu test-gpu lint bench bench-store torture sanitize clean machine machine-tests criu criu-newer

# Folders count too: their time changes when a module is removed or renamed.
SOURCES := $(shell find icecore -name __pycache__ -prune -o -print) LICENSE README.md
BUILT := $(addprefix icecore/host/,jobs/icecore-init criu/libicecore-*.so kernel/libicecore-scan.so resident/icecore-keeper resident/libicecore-resident.so)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

# .venv: the editable installation for working, the demo and the benchmarks.
setup: .stamps/venv criu criu-newer

demo: setup
	.venv/bin/python tools/demo $(ARGS)

# .venv-test: a normal installation, checked and tested from outside the source root.
# Many tests wait: for CRIU, for a job's next step, for a time-out. So there are more workers than a machine of 2 cores has.
# CRIU, which takes 17 s, and the packages are installed in parallel.
test: machine-tests
	$(MAKE) criu criu-newer & criu=$$!; trap 'kill $$criu 2>/dev/null || :' EXIT; $(MAKE) .stamps/installed; wait $$criu
	.venv-test/bin/python tools/run-tests --workers 5 $(ARGS)

# What CRIU itself does, in each version on the machine, and to each program of the tests; 'make test' runs a part of it, 'make torture' all.
CRIU_TESTS := $(addprefix tests/,test_programs.py test_programs_criu.py host/test_criu.py host/test_criu_detach.py host/test_criu_memcpy.py)
test-criu: machine-tests criu criu-newer .stamps/installed
	.venv-test/bin/python tools/run-tests --only tests --every-case --workers 3 $(CRIU_TESTS) $(ARGS)

lint: .stamps/installed
	.venv-test/bin/python tools/run-tests --only lint --only types

# With the Python that has torch: make test-gpu PYTHON=/path/to/python3. Skipped, and said so, where there is no NVIDIA GPU.
test-gpu:
	$(PYTHON) tools/test-gpu $(ARGS)

bench: setup
	$(PYTHON) tools/install-peers --allow-expired
	.venv/bin/python benchmarks/run.py $(ARGS)

# S3 clients side by side, the whole way to and from a bucket against the bare client, over a link of 1 Gb/s and 80 ms, and freeing space against restic.
bench-store: setup
	.venv/bin/python $(PIP_INSTALL) -e '.[bench]'
	$(PYTHON) tools/install-peers --allow-expired
	.venv/bin/python benchmarks/object_clients.py $(ARGS)
	.venv/bin/python benchmarks/bucket.py
	.venv/bin/python benchmarks/link.py
	.venv/bin/python benchmarks/prune.py

torture: criu criu-newer .stamps/installed
	$(PYTHON) tools/prepare-machine --torture
	.venv-test/bin/python $(PIP_INSTALL) 'atheris>=2.3' || echo "going on without atheris: its test is skipped"
	.venv-test/bin/python tools/run-tests --only tests --every-case --workers 2 $(ARGS)
	.venv-test/bin/python tools/run-tests --only tests -m torture --timeout=7200 $(ARGS)

# The preload and the keeper under AddressSanitizer and UndefinedBehaviorSanitizer, with the tests that need no job.
SANITIZED := $(addprefix tests/resident/test_,allocation.py ipc.py recycling.py tree.py window.py)
sanitize: machine-tests .stamps/installed
	ICECORE_SANITIZE=1 .venv-test/bin/python tools/run-tests --only tests --workers 1 $(SANITIZED) $(ARGS)

machine:
	$(PYTHON) tools/prepare-machine

machine-tests:
	$(PYTHON) tools/prepare-machine --tests

criu: machine
	$(PYTHON) tools/install-criu --prefix $(CRIU_PREFIX)

# From Linux 6.16 on, CRIU before 4.2 cannot dump an internet socket: a newer one is put beside the first, and icecore takes the one that fits.
# Its suite is never released, so a mirror may hold a state of it that has expired (its signatures are checked all the same); where it cannot be
# had, jobs with sockets are refused on such kernels, and their tests are skipped.
criu-newer: criu
	$(PYTHON) tools/install-criu --suite sid --allow-expired --prefix $(CRIU_PREFIX)-sid || echo "going on without a second CRIU"

.stamps/venv: pyproject.toml setup.py $(wildcard icecore/host/*/*.[ch]) | machine
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) -e '.[dev]'
	mkdir -p .stamps && touch $@

.stamps/test-venv: pyproject.toml | machine
	$(PYTHON) -m venv .venv-test
	mkdir -p .stamps && touch $@

# A fresh copy is built, so that no module that was removed since lingers in build/.
.stamps/installed: pyproject.toml setup.py $(SOURCES) .stamps/test-venv
	copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && \
	cp -a pyproject.toml setup.py LICENSE README.md icecore "$$copy/" && \
	.venv-test/bin/python -m pip uninstall --quiet --yes icecore 2>/dev/null && \
	.venv-test/bin/python $(PIP_INSTALL) "icecore[dev] @ file://$$copy"
	touch $@

clean:
	rm -rf .venv .venv-test .stamps build icecore.egg-info $(BUILT) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find icecore tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +
