PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := $(VENV)/.frameworks
CODE := $(wildcard src tests examples benchmarks)
WORKERS ?= 4# tests at a time; ranks in most of them wait most of the time

.DEFAULT_GOAL := help
.PHONY: help demo test quick check format bench figures clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## train a model on two processes, compare it with torch DDP (about a minute)
	@$(BIN)/python examples/demo.py

test: $(STAMP) $(FRAMEWORKS) ## run all tests (some 15 minutes on two quiet cores)
	@$(BIN)/python -m pytest -n $(WORKERS)

quick: $(STAMP) ## run three in four of them: those without ranks in processes (some four minutes)
	@$(BIN)/python -m pytest -n $(WORKERS) -m "not ranks and not slow"

check: $(STAMP) ## format, lint and types
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy

format: $(STAMP) ## rewrite the code as make check wants it
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

bench: $(STAMP) ## measure the overhead per parameter against torch DDP
	@$(BIN)/python benchmarks/overhead.py

figures: $(STAMP) ## measure and draw all of docs/overlap.md and docs/benchmarks.md (about 15 minutes, on a quiet machine)
	@$(BIN)/python benchmarks/overlap_page.py
	@$(BIN)/python benchmarks/figures.py all

clean: ## remove what make made, .venv included
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last, so an install that was cut short starts again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("stretto needs Python 3.10 or later: make PYTHON=python3.11" if sys.version_info < (3, 10) else 0)'
	@echo "Installing stretto, torch (most of the download) and what tests and examples need into $(VENV): once, some minutes."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[examples,test,dev]'
	@touch $(STAMP)

# Apart, since the demo has no use for them.
$(FRAMEWORKS): $(STAMP)
	@echo "Installing accelerate, Lightning and transformers, which the tests run with stretto: once, a minute."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[frameworks]'
	@touch $(FRAMEWORKS)
