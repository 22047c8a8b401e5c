# `make help` lists the targets.
SHELL := /bin/bash
VENV := .venv/bin
CHECKPOINT ?= openbmb/MiniCPM-o-4_5
SERVE_ARGS ?=
PYTEST_ARGS ?=

.PHONY: help setup demo serve test test-gpu lint doctor clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## make .venv (pinned) and .triton (embedded tritonserver); seconds when nothing changed
	@requirements/setup.sh

demo: setup ## serve a tiny checkpoint, answer about a picture and a recording, stop
	@exec $(VENV)/python examples/demo.py

serve: setup ## serve CHECKPOINT=folder-or-id until interrupted
	@exec $(VENV)/minicpmo-triton serve --checkpoint "$(CHECKPOINT)" $(SERVE_ARGS)

test: setup lint ## all tests: unit, engine, and the pipeline on a real tritonserver
	@$(VENV)/python -m pytest $(PYTEST_ARGS)

test-gpu: ## the encoders' graphs on an NVIDIA GPU; uses the active environment, or .venv
	@$(if $(VIRTUAL_ENV),python,$(VENV)/python) -m pytest tests/gpu -s -p no:cacheprovider $(PYTEST_ARGS)

lint: setup ## ruff and mypy
	@$(VENV)/ruff check . && $(VENV)/ruff format --check . && $(VENV)/mypy

doctor: setup ## check what this machine has
	@$(VENV)/minicpmo-triton doctor

clean: ## remove .venv, .triton and caches
	rm -rf .venv .triton .triton.part .setup.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis
