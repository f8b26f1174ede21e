# Every target makes .venv and installs the pinned dependencies itself; at once when that is already done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup test test-all check format quickstart bench clean

setup: $(READY)

# torch goes first: with no torch present, a range pulls several GB of CUDA packages.
$(READY): pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	touch $@

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY)
	$(MAKE) check
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not slow" tests/unit

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

quickstart: $(READY)
	$(BIN)/paceline quickstart $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
