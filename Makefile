# make demo: set up, and measure on a toy model.   make real: on a real one, an hour.   make docs: the site, build/site.
# make test: set up and pass the tests.   make test-all: those that it leaves out.   make test-slow: before a release.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Says what is wrong, and nothing else; what no program imports is not compiled.
INSTALL = $(BIN)/pip install -qq --no-compile
# The same versions also where pip builds a package in an environment of its own.
export PIP_CONSTRAINT = $(CURDIR)/constraints.txt

.PHONY: demo real test test-all test-slow docs style quality

# What users need, and beside it what those need who work on the package.
$(VENV)/.all: pyproject.toml constraints.txt
	@echo "Creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch (200 MB for CPUs; with CUDA, if that is what pip finds, 3 GB)"
	@$(INSTALL) torch==2.13.0
	@echo "Installing hf_specdec with all that its users need (600 MB; arctic-inference is compiled, for two minutes)"
	@$(INSTALL) -e ".[all]"
	@touch $@

$(VENV)/.dev: $(VENV)/.all
	@echo "Installing what tests, documentation and checks need (150 MB)"
	@$(INSTALL) -e ".[all,dev]"
	@touch $@

demo: $(VENV)/.all
	$(BIN)/hf-specdec bench

real: $(VENV)/.all
	$(BIN)/hf-specdec bench qwen2.5-coder -d suffix+recycling -d draft_model -d suffix+draft_model \
		--num-prompts 1 --max-new-tokens 64 --rounds 1

# Two processes of one thread each.
PYTEST = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

test: $(VENV)/.dev
	$(PYTEST) --budget 200

test-all: $(VENV)/.dev
	$(PYTEST) -m "full and not slow and not gpu" $(LIMIT)

test-slow: $(VENV)/.dev
	$(PYTEST) -m "slow and not gpu"

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir build/site

style: $(VENV)/.dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format hf_specdec tests benchmarks tools
	$(BIN)/python -m tools.benchmark_pages
	$(BIN)/python -m tools.method_tables

quality: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python -m tools.type_completeness
