PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test check serve openapi bench prove format clean

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

install: $(INSTALLED)  ## Make the virtual environment in $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED)  ## Plan GPT-2 through the service, then run a sharded GPT-2 on 4 ranks
	$(BIN)/autoshard demo

test: $(INSTALLED)  ## Run the tests
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## Lint, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/lint-imports

serve: $(INSTALLED)  ## Start the planning service on this machine
	$(BIN)/autoshard serve

openapi: $(INSTALLED)  ## Write the specification and the plan's schema from the code
	$(BIN)/python -m autoshard_server.openapi
	$(BIN)/python -m autoshard.plan.schema

bench: $(INSTALLED)  ## Measure, and regenerate the tables of docs/performance.md
	$(BIN)/python -m benchmarks

prove: $(INSTALLED)  ## Compare 100,000 random problems with brute force
	$(BIN)/python benchmarks/random_problems.py --count 100000 --processes 2

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
