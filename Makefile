# make demo: set up and run the demo.   make real: the same on a real model.   make test: set up and pass the tests.
# make docs: build the site into build/site.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Drafters of the real model, in checkouts that have them.
HEADS = $(addprefix --heads ,$(wildcard heads/smollm2))
# The same versions also where pip builds a package in an environment of its own.
export PIP_CONSTRAINT = $(CURDIR)/constraints.txt

.PHONY: setup demo real test docs style quality

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e ".[all]"
	touch $@

demo: setup
	$(BIN)/hf-specdec demo

real: setup
	$(BIN)/hf-specdec demo --model smollm2 --dtype float32 --stock --max-seconds 600 $(HEADS)

test: setup
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 -m "not slow and not gpu"

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir build/site

style: setup
	$(BIN)/ruff check --fix . && $(BIN)/ruff format hf_specdec tests benchmarks tools
	$(BIN)/python -m tools.benchmark_pages
	$(BIN)/python -m tools.method_tables

$(VENV)/.quality: $(VENV)/.installed
	$(BIN)/pip install --quiet -e ".[quality]"
	touch $@

quality: $(VENV)/.quality
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python -m tools.type_completeness
