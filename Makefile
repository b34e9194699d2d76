# Two commands on a fresh machine: `make demo` runs the training, `make test` the tests. Both set everything up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TIMM ?= timm==1.0.31
SHELL := /bin/bash

.PHONY: help setup slurm browser prometheus demo test base-pythons slurm-versions soak chaos walk mutants check lint types contract grain docs recording bench trainer-faults history gpu clean

help:
	@echo "make setup   virtual environment with the CPU build of torch; leaves $(BIN)/tr11"
	@echo "make demo    corpus, tokenizer, a 2x2x2-parallel training in three array tasks, resume, kill switch, status"
	@echo "make test    all tests, on a real Slurm of this machine when it can be installed"
	@echo "make base-pythons  the base install without torch, on each Python from 3.11 to 3.14 (3.14 is fetched where it is not here)"
	@echo "make slurm-versions  the tests that need a Slurm on 22.05, 24.11 and 26.05; a table; two hours"
	@echo "make soak    the tests that take long: a hundred kills in mid-save, an hour of drawn faults"
	@echo "make chaos   25 faults of nodes, site, disk and controller under a rehearsal on a twin, in ten minutes; TR11_SCENARIO=FILE gives a course again"
	@echo "make walk    ten minutes of a random walk through saves, copies, damage and prunes: nothing may be lost"
	@echo "make mutants whether the tests notice: features of the operation are broken one at a time; about 15 minutes"
	@echo "make check   lint, types, import contract, and how dense the code is"
	@echo "make docs    the documentation as a site in site/, with every link checked"
	@echo "make recording  a first run, typed and recorded: the picture of README; five minutes"
	@echo "make bench   the measurements of benchmarks/"
	@echo "make trainer-faults  ten faults for each unchanged trainer; about an hour; into docs/reference/trainer-faults*.md. FAULT_OPTIONS=\"--trainer plain --scheduler slurm\""
	@echo "make history what befell the 176-billion training, in order, on a twin of 52 nodes; half an hour; into docs/explanation/tr11-again.md"
	@echo "make gpu     on the first GPU at hand, 8 minutes: right against the processor, how fast; into benchmarks/RESULTS.md"
	@echo "make clean   remove the virtual environment and the demo's run directory"

setup: $(VENV)/.installed slurm

# timm without its torchvision: the tests compare LAMB with its optimizer alone.
# torch first: a plain dependency on it could pull gigabytes of GPU packages where no GPU is.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tr11 needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no virtual environment could be made: install your system's python3-venv package"; exit 1; }
	@echo "installing $(TORCH), then tr11 and what it needs, into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check setuptools wheel "$(TORCH)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation "deepspeed==0.19.8"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[test]"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "$(TIMM)"
	@touch $@
	@echo "ready: $(BIN)/tr11 --help"

slurm:
	@bash .ci/install-slurm

browser:
	@bash .ci/install-browser

prometheus: setup
	@bash .ci/install-prometheus

demo: setup
	@$(BIN)/python benchmarks/demo.py

test: setup browser prometheus
	@$(BIN)/python .ci/run-tests $(PYTEST_OPTIONS)

# Each Python that tr11 supports; the newest is fetched where it is not here. `make test` tries the newest that is here.
base-pythons: $(VENV)/.installed
	@with=.ci/python-version; $$with true || with=; TR11_BASE_PYTHONS=all $$with $(BIN)/python -m pytest tests/test_base_install.py -rs $(PYTEST_OPTIONS)

# Needs root. Fetches the packages of newer Debian releases, and installs none of them.
slurm-versions: setup
	@$(BIN)/python .ci/slurm-versions $(PYTEST_OPTIONS)

soak: setup
	@$(BIN)/python -m pytest tests -m soak -s $(PYTEST_OPTIONS)

# A draw of its own, which is printed; TR11_FAULT_SEED or TR11_SCENARIO=FILE gives one again. An hour: TR11_FAULTS=200.
chaos: setup
	@TR11_FAULTS=$${TR11_FAULTS:-25} TR11_SCENARIO=$(TR11_SCENARIO) $(BIN)/python -m pytest tests/twin/test_soak.py -k scenario -m soak -s $(PYTEST_OPTIONS)

walk: setup
	@$(BIN)/python -m pytest tests/tr11ops/walk -m soak -s $(PYTEST_OPTIONS)

# Goes on where it was; MUTANT_OPTIONS="--only NAME" for those with NAME in their name.
mutants: setup
	@$(BIN)/python .ci/mutants $(MUTANT_OPTIONS)

# In this order; each for itself with `make -j`.
check: lint types contract grain

lint: $(VENV)/.installed
	@$(BIN)/ruff check tr11ops trainer tests benchmarks
	@$(BIN)/ruff format --check tr11ops trainer tests benchmarks

types: $(VENV)/.installed
	@$(BIN)/mypy

contract: $(VENV)/.installed
	@$(BIN)/lint-imports

grain: $(VENV)/.installed
	@$(BIN)/python .ci/grain

$(BIN)/mkdocs: | $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]"

docs: $(BIN)/mkdocs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "ready: site/index.html"

recording: $(BIN)/mkdocs
	@$(BIN)/python benchmarks/recording.py

bench: setup
	@$(BIN)/python benchmarks/run.py

# FAULT_OPTIONS="--scheduler local --trainer plain --fault hang --patience 2": some cells, on a busy machine.
trainer-faults: setup
	@PYTHONPATH=. $(BIN)/python benchmarks/trainer_faults.py $(FAULT_OPTIONS)

# HISTORY_OPTIONS="--nodes 4": a trial on a small twin.
history: setup
	@PYTHONPATH=. $(BIN)/python benchmarks/history.py $(HISTORY_OPTIONS)

# GPU_OPTIONS="--json FOLDER": each figure with its peer's as JSON.
gpu: setup
	@$(BIN)/python benchmarks/gpu.py $(GPU_OPTIONS)

clean:
	@rm -rf $(VENV) demo-run site
