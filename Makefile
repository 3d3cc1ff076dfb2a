PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo federation-demo test test-slow test-federation-quick test-federation test-all test-torch campaign chaos intrusion examples docs lint types bench bench-check bench-torch bench-peers bench-growth bench-federation clean

demo: .venv/installed
	$(BIN)/fedbilevel demo

federation-demo: .venv/deployable
	$(BIN)/fedbilevel federation demo

test: .venv/developed
	$(BIN)/pytest

test-slow: .venv/developed
	$(BIN)/pytest -m "slow and not federation"

test-federation-quick: .venv/developed
	$(BIN)/pytest -m "federation and not slow" -n 0

test-federation: .venv/developed
	$(BIN)/pytest -m federation -n 0

test-all: .venv/developed
	$(BIN)/pytest -m "not federation"
	$(BIN)/pytest -m federation -n 0

test-torch: .venv/developed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[torch,bench]'
	$(BIN)/pytest tests/test_from_torch.py tests/test_torch_everywhere.py tests/test_docs.py tests/test_examples.py -m "not federation" -k torch

campaign: .venv/developed
	$(BIN)/python -m campaign

chaos: .venv/developed
	$(BIN)/python tests/chaos.py

intrusion: .venv/developed
	timeout 1800 $(BIN)/pytest -m intrusion -n 0

examples: .venv/developed
	$(BIN)/pytest tests/test_examples.py -m slow

docs: .venv/documented
	NO_MKDOCS_2_WARNING=1 XLA_FLAGS=--xla_backend_optimization_level=0 $(BIN)/mkdocs build --quiet --strict

lint: .venv/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: .venv/developed
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/rounds.py
	$(BIN)/python benchmarks/time_spent.py
	$(BIN)/python benchmarks/sweep.py

bench-check: .venv/installed
	$(BIN)/python benchmarks/check.py

bench-torch: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python benchmarks/sequential_torch.py

bench-peers: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python benchmarks/peers.py --install

bench-growth: .venv/installed
	$(BIN)/python benchmarks/growth.py

bench-federation: .venv/deployable
	$(BIN)/python benchmarks/federation_exchange.py

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedbilevel needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/deployable: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[deploy]'
	touch $@

.venv/developed: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

.venv/documented: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
