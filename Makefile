# Everything is run through here; `make` lists what there is. Each target sets up what is missing first.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

# The first of these that runs and is a version that diffusers, numpy < 2 and the server's stubs all work with.
CANDIDATES := python3.11 python3.12 python3
PYTHON ?= $(shell for candidate in $(CANDIDATES); do \
	"$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo "$$candidate" && break; done)

# Further arguments: make serve ARGS="--strict -- --model-control-mode=poll", make test ARGS="tests/serve -x"
ARGS ?=
# Handed on through the environment and not expanded by make, so that quotes and dollar signs in it survive.
PROMPT ?= red apple
override export PROMPT := $(value PROMPT)

.PHONY: help setup serve test check bench demo train-emoji emoji-report coverage-report dashboard soak soak-tests clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'serve reads MODEL_REPOSITORY, HOST, HTTP_PORT, GRPC_PORT and METRICS_PORT from the environment.'
	@echo 'serve, test, bench, demo, train-emoji, emoji-report, coverage-report, dashboard, soak and soak-tests take further arguments: make serve ARGS="--help"'

setup: $(STAMP) ## make .venv from requirements.lock (PYTHON=... chooses the Python)

$(STAMP): requirements.lock pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
		python="$(PYTHON)"; \
		if [ -z "$$python" ]; then \
			echo "error: no Python 3.11 or 3.12 was found (tried $(CANDIDATES))." >&2; \
			echo "Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "making $(VENV) with $$python"; \
		"$$python" -m venv $(VENV) || { \
			rm -rf $(VENV); \
			echo "error: $$python cannot make a virtual environment. Debian, Ubuntu: apt-get install python3-venv" >&2; \
			exit 1; \
		}; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# On a terminal the launcher becomes a job of its own (set -m), so that Ctrl-C reaches it and not make, which would
# die of it and never return the launcher's 0.
serve: setup ## serve the models until Ctrl-C
	@if [ -t 0 ]; then set -m; $(BIN)/python -m diffusion_backend.serve $(ARGS); \
	else exec $(BIN)/python -m diffusion_backend.serve $(ARGS); fi

test: setup ## run all tests
	$(BIN)/python -m pytest $(ARGS)

check: setup ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## measure this server and what one would write instead; write the figures of both READMEs
	$(BIN)/python -m benchmarks $(ARGS)

demo: setup ## draw PROMPT="red apple" into out/
	@$(BIN)/python -m diffusion_backend.demo --prompt "$$PROMPT" $(ARGS)

train-emoji: setup ## train the model that ships again, from nothing
	$(BIN)/python -m tools.emoji.train $(ARGS)

emoji-report: setup ## measure the quality of the model that ships
	$(BIN)/python -m tools.emoji.report --documents docs $(ARGS)

coverage-report: setup ## measure which pipeline classes are batched, and write docs/coverage.md
	$(BIN)/python -m tools.coverage $(ARGS)

dashboard: setup ## make the Grafana dashboard, and the picture of it under a load of some minutes (needs Prometheus)
	$(BIN)/python -m tools.dashboard $(ARGS)

soak: setup ## thousands of mixed requests: is anything lost, leaked or miscounted?
	$(BIN)/python -m tools.soak $(ARGS)

soak-tests: setup ## the tests of races, faults and inputs with as many rounds as they can do
	SOAK=1 $(BIN)/python -m pytest tests/model_based tests/fuzz tests/server $(ARGS)

clean: ## remove .venv and what the tools have cached
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis backend_src/*.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
