# Headrace from the command line. `make` lists the targets; ARGS= passes arguments on, PYTHON= names the interpreter.
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
BOOTSTRAP = PYTHONPATH= "$(PYTHON)" -B -m tools.bootstrap
BIN = "$$($(BOOTSTRAP) where-venv)"/bin
RUN = $(BIN)/python

.PHONY: help setup model demo demo-tiny test test-all lint types contracts check lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup:  ## install everything (once; about 3 GB in the cache), make .venv
	@$(BOOTSTRAP) setup

model: setup  ## fetch the demo's model (93 MB, once)
	@$(BOOTSTRAP) model

demo: setup model  ## train SmolLM2-135M on this machine: the whole system, live
	@HEADRACE_CACHE="$$($(BOOTSTRAP) where-cache)" $(BIN)/headrace up --config configs/demo.yaml $(ARGS)

demo-tiny: setup  ## the same with a model of under a million parameters
	@HEADRACE_CACHE="$$($(BOOTSTRAP) where-cache)" $(BIN)/headrace up --config configs/demo-tiny.yaml $(ARGS)

test: setup  ## unit and integration tests, without the slow ones
	@$(RUN) -m pytest -m "not slow and not gpu" $(ARGS)

test-all: setup  ## every test; those marked gpu only where there is one
	@if nvidia-smi -L >/dev/null 2>&1; then select=""; else select="not gpu"; fi; $(RUN) -m pytest -m "$$select" $(ARGS)

lint: setup  ## ruff: rules and format
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

types: setup  ## mypy, strict
	@$(RUN) -m mypy

contracts: setup  ## import-linter: who may import whom
	@$(BIN)/lint-imports

check: lint types contracts test  ## what a change must pass

lock: setup  ## renew requirements/cpu.lock
	@$(BOOTSTRAP) lock

clean:  ## remove .venv and the tools' leftovers; the cache stays
	@$(BOOTSTRAP) clean
