# Two commands do everything on a fresh machine with python3 and make: `make demo` and `make test`.
# Both build the environment in .venv first, and again only when pyproject.toml has changed.

PYTHON ?= python3
# Two at a time: most tests wait for processes that start. loadfile: a file's tests share what they have made.
PYTEST_ARGS ?= -n 2 --dist loadfile
NOW := $(shell date +%Y%m%d-%H%M%S)
DEMO_DIR ?= runs/demo-$(NOW)
# All GPUs where there are any, otherwise two processes on the CPU.
DEMO_DEVICES ?= $(if $(shell nvidia-smi --list-gpus 2>/dev/null),--gpus all,--nproc 2)

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint bench faults faults-quick setup clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready-dev ## Distil a learning algorithm in minutes: collect, train on all devices, play unseen goals, report
	$(BIN)/unisono train darkroom --config examples/darkroom/demo.yaml $(DEMO_DEVICES) --output_dir "$(DEMO_DIR)"
	@echo
	@cat "$$(ls "$(DEMO_DIR)"/previews/*_in_context.txt | tail -n 1)"
	@echo "Figure:           $$(ls "$(DEMO_DIR)"/previews/*_in_context.png | tail -n 1)"
	@echo "Report:           $$($(BIN)/unisono report "$(DEMO_DIR)")"
	@echo "Curves:           $(BIN)/tensorboard --logdir runs"
	@echo "Your own model:   examples/own_model/recipe.py; make demo again starts a fresh folder"

test: lint ## Run everything a change must pass: ruff, mypy, import-linter, pytest (without the slow tests)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: .venv/.ready-dev ## Run the tests that take minutes
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

lint: .venv/.ready-dev ## Run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.ready-dev .venv/.ready-bench ## Compare the overhead with a hand-written loop, Accelerate and Lightning Fabric
	$(BIN)/python benchmarks/overhead.py

faults: .venv/.ready-dev ## Disturb runs by hundreds of real faults and compare what is left (about 40 minutes)
	$(BIN)/python benchmarks/faults.py --output benchmarks/results

faults-quick: .venv/.ready-dev ## The same with a few faults of each kind (some minutes)
	$(BIN)/python benchmarks/faults.py --quick

setup: .venv/.ready-dev ## Make the environment in .venv

clean: ## Remove .venv and caches; runs/ stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch and what depends on it come in one pip command, so that the range in pyproject.toml holds for all of them.
.venv/.ready-%: pyproject.toml | .venv/bin/pip
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

# pip is the last thing venv installs: where it is missing, the environment is missing or half made.
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
