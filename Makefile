# `make demo` and `make test` work on a fresh machine with python3 and make.
# All targets create the environment in .venv, and rebuild it only when pyproject.toml changes.

PYTHON ?= python3
# Four at a time, even on two cores: most tests wait for processes. loadfile: the tests of a file share their runs.
# tests/conftest.py orders the files.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder
NOW := $(shell date +%Y%m%d-%H%M%S)
DEMO_DIR ?= runs/demo-$(NOW)
# All GPUs if there are any, otherwise two CPU processes.
DEMO_DEVICES ?= $(if $(shell nvidia-smi --list-gpus 2>/dev/null),--gpus all,--nproc 2)

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint docs bench faults faults-quick fuzz package release-notes setup clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready-dev ## Train darkroom in minutes: collect histories, train on all devices, evaluate unseen goals, write a report
	$(BIN)/unisono train darkroom --config examples/darkroom/demo.yaml $(DEMO_DEVICES) --output_dir "$(DEMO_DIR)"
	@echo
	@cat "$$(ls "$(DEMO_DIR)"/previews/*_in_context.txt | tail -n 1)"
	@echo "Figure:           $$(ls "$(DEMO_DIR)"/previews/*_in_context.png | tail -n 1)"
	@echo "Report:           $$($(BIN)/unisono report "$(DEMO_DIR)")"
	@echo "Curves:           $(BIN)/tensorboard --logdir runs"
	@echo "Your own model:   examples/own_model/recipe.py; make demo again starts a fresh folder"

test: lint ## Run everything a change must pass: ruff, mypy, import-linter, pytest (without the slow tests)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: .venv/.ready-dev ## Run the slow tests: larger forms of what `make test` checks
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: .venv/.ready-dev ## Run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.ready-dev ## Build the documentation site into site/ (open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

bench: .venv/.ready-dev .venv/.ready-bench ## Compare the overhead with a hand-written loop, Accelerate and Lightning Fabric
	$(BIN)/python benchmarks/overhead.py

faults: .venv/.ready-dev ## Inject hundreds of real faults into runs and compare the results (about 40 minutes)
	$(BIN)/python benchmarks/faults.py --output benchmarks/results

faults-quick: .venv/.ready-dev ## The same with a few faults of each kind (a few minutes)
	$(BIN)/python benchmarks/faults.py --quick

fuzz: .venv/.ready-dev ## Damage files of every reader of foreign bytes (about 5 minutes; FUZZ_SECONDS=60: a minute per reader)
	PYTHONPATH=tests $(BIN)/python -m fuzz

package: .venv/.ready-dev ## Build sdist and wheel into dist/, install the wheel into a fresh environment and use it there
	$(BIN)/python release/package.py

release-notes: .venv/.ready-dev ## Print the changes of VERSION (by default the unreleased ones) from CHANGELOG.md
	@$(BIN)/python release/notes.py $(VERSION)

setup: .venv/.ready-dev ## Create the environment in .venv

clean: ## Remove .venv and caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch and its dependents are installed by one pip command, so that the version range in pyproject.toml applies to all.
.venv/.ready-%: pyproject.toml | .venv/bin/pip
	@echo "Installing unisono, torch and the other packages into .venv (several GB); this takes minutes"
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

# venv installs pip last: if it is missing, the environment is missing or incomplete.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "unisono needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another one: make PYTHON=python3.12 ..." >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq python3-venv; \
	  fi; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make environments here; on Debian and Ubuntu: sudo apt-get install -y python3-venv" >&2; \
	  exit 2; }
	$(PYTHON) -m venv .venv
