PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
IMAGE ?= autoshard:latest
BASE ?= python:3.13-slim-trixie
BUILD ?= docker build
TORCH ?= 2.15.0
TORCHS := 2.13.0 2.14.1 2.15.0
TORCH_TESTS := $(addprefix tests/,checker checkpoint costs discovery exports graph integrations launching layouts lowering measure ops plan pricing report runtime schedules zoo test_torch_private.py)
VENDORED := autoshard/report/page/files/vendored
DEVICE ?= cuda
GPU_PYTHON ?= $(if $(filter cpu,$(DEVICE)),$(BIN)/python,$(PYTHON))
# `make gpu-wheels PYTHON=3.12` names a version, not an interpreter.
INTERPRETER := $(if $(filter 3.%,$(PYTHON)),python3,$(PYTHON))

.PHONY: help install demo test test-all gpu gpu-wheels test-torch test-torchs check check-page page-pictures vendored serve generated examples bench faults hostile upgrade prove prove-pipelines prove-layouts prove-loading prove-image limits load scale hosts conformance habits interrupted-saves zoo zoo-ranks round-trips published image audit format clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

install: $(INSTALLED)  ## Make the virtual environment in $(VENV)

$(INSTALLED): pyproject.toml constraints.txt
	$(INTERPRETER) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED)  ## Plan GPT-2 through the service, then run a sharded GPT-2 on 4 ranks
	$(BIN)/autoshard demo

test: $(INSTALLED)  ## Run the tests that show every behaviour, a file per processor
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --part sample

test-rest: $(INSTALLED)  ## Run the slow proofs and the cases that `test` leaves out
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --part rest

test-all: $(INSTALLED)  ## Run all of both, and the many cases that are marked `long`
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile -m ''

check: $(INSTALLED)  ## Lint, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/lint-imports

build/page/node_modules: tests/page/package.json $(INSTALLED)
	mkdir -p build/page && cp tests/page/package.json build/page/
	PATH="$(abspath $(BIN)):$$PATH" npm install --prefix build/page --silent --no-package-lock
	touch $@

check-page: build/page/node_modules  ## Types of the plan page's modules; what its tests need of npm
	PATH="$(abspath $(BIN)):$$PATH" build/page/node_modules/.bin/tsc --project tests/page

page-pictures: $(INSTALLED)  ## Take the pictures of docs/plan-page.md (needs Chromium)
	$(BIN)/python -m docs.page_pictures

vendored: build/page/node_modules  ## Fetch the libraries of the plan page again, and compare their checksums
	cp build/page/node_modules/preact/dist/preact.mjs build/page/node_modules/preact/hooks/dist/hooks.mjs build/page/node_modules/htm/dist/htm.mjs $(VENDORED)
	cp build/page/node_modules/preact/LICENSE $(VENDORED)/LICENSE.preact
	cp build/page/node_modules/htm/LICENSE $(VENDORED)/LICENSE.htm
	cd $(VENDORED) && sha256sum --check SHA256SUMS

serve: $(INSTALLED)  ## Start the planning service on this machine
	$(BIN)/autoshard serve

generated: $(INSTALLED)  ## Write what is made from the code: openapi/, the plan's schema, pages, their outputs
	$(BIN)/python -m autoshard_server.generate
	$(BIN)/python -m autoshard.plan.schema
	$(BIN)/python -m autoshard.ops.table
	$(BIN)/python -m docs.pages

examples: $(INSTALLED)  ## Record the answers that the specification shows as examples
	$(BIN)/python -m benchmarks.examples

bench: $(INSTALLED)  ## Measure, and regenerate the tables of docs/performance.md
	$(BIN)/python -m benchmarks

faults: $(INSTALLED)  ## Kill servers, workers and databases while jobs run, into docs/reliability.md
	$(BIN)/python -m benchmarks.faults

gpu: $(if $(filter cpu,$(DEVICE)),$(INSTALLED))  ## All that one GPU can say in 8 minutes, into docs/measured.md; DEVICE=cpu: all of it in small
	$(GPU_PYTHON) -m benchmarks.gpu --device $(DEVICE) $(if $(RESULTS),--results $(RESULTS)) $(if $(COMMIT),--commit $(COMMIT)) $(if $(ALLOW_OLD_TORCH),--allow-old-torch)

gpu-wheels: $(INSTALLED)  ## Fetch the packages that a machine with a GPU lacks: PYTHON=3.12 HAVE=list.txt, of its pip list
	$(BIN)/python -m benchmarks.gpu.wheels --python $(PYTHON) --have $(HAVE)

# Set for the one command, PIP_CONSTRAINT takes the place of a cap that the machine sets for all.
test-torch:  ## Run the tests that run torch with another PyTorch, in an environment of its own: TORCH=2.15.0
	$(PYTHON) -m venv build/torch-$(TORCH)
	sed -e '/^torch==/d' -e '/^setuptools==/d' constraints.txt > build/torch-$(TORCH)/constraints.txt
	PIP_CONSTRAINT='$(abspath build/torch-$(TORCH)/constraints.txt)' build/torch-$(TORCH)/bin/python -m pip install --quiet 'torch==$(TORCH)' -e '.[dev]'
	build/torch-$(TORCH)/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile -o filterwarnings= $(TORCH_TESTS)

test-torchs:  ## Do so with each PyTorch that is supported, one after the other; before a release
	set -e; for torch in $(TORCHS); do $(MAKE) test-torch TORCH=$$torch; done

upgrade: $(INSTALLED)  ## Run two releases on one database, and change between them, into docs/reliability.md
	$(BIN)/python -m benchmarks.upgrade

guard: $(INSTALLED)  ## Make thirteen plans that no change of the code alone may change
	$(BIN)/python -m benchmarks.guard

prove: $(INSTALLED)  ## Compare 100,000 random problems with brute force
	$(BIN)/python -m benchmarks.random_problems --count 100000 --processes 2

prove-pipelines: $(INSTALLED)  ## Compare the pipeline search of 200 random models with brute force
	$(BIN)/python -m benchmarks.random_pipelines --count 200

prove-layouts: $(INSTALLED)  ## Pin random layouts in 100 random models: none may be faster than the free plan
	$(BIN)/python -m benchmarks.random_pins --count 100

prove-loading: $(INSTALLED)  ## Load 1.1 billion parameters onto 4 ranks: bytes read, and memory
	$(BIN)/python -m benchmarks.loading

limits: $(INSTALLED)  ## Time 21 requests with limits of 0.5, 5 and 60 seconds
	$(BIN)/python -m benchmarks.time_limits

load: $(INSTALLED)  ## Requests per second for plans that are known, into docs/reliability.md
	$(BIN)/python -m benchmarks.load

hostile: $(INSTALLED)  ## Attack a service in all ways at the same time, into docs/reliability.md
	$(BIN)/python -m benchmarks.hostile

scale: $(INSTALLED)  ## Requests and housekeeping with 1,000,000 rows a table, into docs/reliability.md
	$(BIN)/python -m benchmarks.scale

hosts: $(INSTALLED)  ## Misses per second with 1, 2 and 4 hosts, and a host that vanishes, into docs/reliability.md (root)
	$(BIN)/python -m benchmarks.hosts

conformance: $(INSTALLED)  ## The whole API against its specification, into docs/reliability.md
	$(BIN)/python -m benchmarks.conformance

habits: $(INSTALLED)  ## 10,000 random training loops with random planned models on 4 ranks, into docs/training.md
	$(BIN)/python -m benchmarks.habits

interrupted-saves: $(INSTALLED)  ## Kill saves of checkpoints, and fail them, at each of their system calls, into docs/reliability.md
	$(BIN)/python -m benchmarks.interrupted_saves

prove-image: $(INSTALLED)  ## Build the image without an engine, run it confined, request a plan (root)
	$(BIN)/python -m benchmarks.image --write

image:  ## Build the container image; BUILD="buildah build --format docker" does without docker
	$(BUILD) --build-arg BASE=$(BASE) --tag $(IMAGE) .

audit: $(INSTALLED)  ## Look the pinned versions up in the advisories (needs the internet)
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet pip-audit
	$(VENV)/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

zoo: $(INSTALLED)  ## Plan the model families at their published sizes, into docs/zoo.md
	$(BIN)/python -m benchmarks.zoo

zoo-ranks: $(INSTALLED)  ## Run small models of all families on 4 and 8 ranks
	for precision in float64 float32; do AUTOSHARD_EVERY_FAMILY=1 $(BIN)/python -m pytest -m '' -k $$precision tests/zoo/test_zoo_on_4_ranks.py tests/zoo/test_zoo_on_8_ranks.py || failed=1; done; exit $${failed:-0}

round-trips: $(INSTALLED)  ## Export plans of small language models and read them back, into docs/exports.md
	$(BIN)/python -m benchmarks.round_trips

published: $(INSTALLED)  ## Predict published training runs, into docs/predictions.md
	$(BIN)/python -m benchmarks.published --document docs/predictions.md --details benchmarks/results --accuracy

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
