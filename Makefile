# Every target makes .venv first when it is missing or out of date.
PYTHON := .venv/bin/python
CODE := search_r1 retriever_server data_prep benchmarks examples tests setup.py
SOURCES = $(wildcard $(CODE))
export OMP_NUM_THREADS ?= 1
export GOMP_SPINCOUNT ?= 0
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help setup format lint types test test-slow test-gpu check smoke

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## .venv with the pinned CPU requirements
	@.ci/setup.sh

format: setup ## rewrite the code in the project's format
	$(PYTHON) -m ruff check --fix-only --quiet $(SOURCES)
	$(PYTHON) -m ruff format $(SOURCES)

lint: setup ## format and rules
	$(PYTHON) -m ruff check $(SOURCES)
	$(PYTHON) -m ruff format --check $(SOURCES)

types: setup ## mypy
	$(PYTHON) -m mypy

test: setup ## the suite
	$(PYTHON) -m pytest -n 2 --dist loadfile

test-slow: setup ## what takes more than a minute a test
	$(PYTHON) -m pytest -m slow

test-gpu: setup ## what needs a GPU; skipped without one
	$(PYTHON) -m pytest tests/gpu

check: lint types test ## all that CI checks of the code

smoke: setup ## the quick start, cut to two steps and 32 questions
	./quickstart.sh trainer.total_steps=2 data.max_val_questions=32
