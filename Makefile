# The environment lives in .venv; nothing outside this folder is changed. Only Python (>= 3.10) and make are needed.

PYTHON ?= python3
# Processes that run tests at the same time.
JOBS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help setup setup-bench demo test test-long checks bench lint format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.setup-done ## Make .venv and install Stepwell with torch and the development tools

.venv/.setup-done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Stepwell needs Python 3.10 or newer; name one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@# torch goes first and alone, at the pinned version: no other requirement can then pull in another build of it.
	@echo "Installing torch and the rest into .venv (a few minutes) ..."
	$(PIP) "$$(grep -E '^torch==' constraints.txt)"
	$(PIP) -e '.[torch,dev]'
	@touch $@

setup-bench: .venv/.setup-bench-done

.venv/.setup-bench-done: .venv/.setup-done
	$(PIP) -e '.[torch,dev,bench]'
	@touch $@

demo: setup ## Train a small GPT, kill it in the middle of a save, resume, compare bit for bit
	$(BIN)/stepwell demo

test: checks ## Every check: format, lint, strict types, tests
	$(PYTEST)

test-long: checks ## The same with the long suites (thousands of kills)
	$(PYTEST) -m "long or not long"

checks: lint
	$(BIN)/python -m mypy

lint: setup ## Check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup-bench ## Measure Stepwell beside its peers; writes a table, JSON and plots
	$(BIN)/python -m benchmarks

clean: ## Remove .venv, caches and builds
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
