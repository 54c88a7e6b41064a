# `make demo` on a fresh clone sets everything up, runs a swarm and checks it against one process.
# Variables: PYTHON (3.11 or later), CONSTRAINTS, TORCH_INDEX (an extra package index for torch, see constraints.txt).

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INDEX_ARGUMENTS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# One torch thread per process: on few cores more of them fight each other.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast lint format bench clean

help: ## say what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything (quick when nothing changed)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "make: no '$(PYTHON)' here; name a Python 3.11 or later: make setup PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: '$(PYTHON)' is $$($(PYTHON) -V 2>&1), but Python 3.11 or later is needed: make setup PYTHON=python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c $(CONSTRAINTS) $(INDEX_ARGUMENTS)
	@touch $@

demo: setup ## a swarm of six peers on this machine, with deaths and joins, checked against one process
	$(BIN)/swarm local examples/demo.toml --peers 2,2,2 --kill-every 12 --start-every 14 --verify --report runs/demo/report.json

test: setup ## all tests
	$(BIN)/python -m pytest

test-fast: setup ## only the tests that take seconds
	$(BIN)/python -m pytest -m fast

lint: setup ## style, types, which way imports point, the wire contract, generated code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/python -m swarm.wire.generate --check

format: setup ## rewrite the sources in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup ## what the swarm costs over one process
	$(BIN)/python benchmarks/overhead.py

clean: ## remove what was built and cached (.venv and runs/ stay)
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
