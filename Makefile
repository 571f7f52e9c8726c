# Every target sets up what it needs in .venv; all that must be there is Python >= 3.10 (with its headers)
# and a C++ compiler, which Inductor needs. A second run with nothing changed skips the set-up.

PYTHON ?= python3
# Inductor's threads multiply with the ranks that a test starts; one each suits two cores.
OMP_NUM_THREADS ?= 1
PINNED_TORCH := $(shell sed -n 's/^torch==[^ ;]*/&/p' constraints-dev.txt)
TORCH ?= $(PINNED_TORCH)
ARGS ?=
# Processes that tests are dealt to, a file at a time; 0: none but this one.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# The set-up is done again when any of these changes (the folder too: scripts in .venv name it).
KEY := $(shell { cat pyproject.toml constraints-dev.txt; echo '$(TORCH)' '$(CURDIR)'; } | cksum | cut -d ' ' -f 1)
# TORCH replaces the pin of torch, and then Triton is left to torch: a CUDA build asks for the one it was built with.
UNPINNED := $(if $(filter $(PINNED_TORCH),$(TORCH)),torch,torch|triton)
CONSTRAINTS := $(VENV)/constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint format wheel clean
.DELETE_ON_ERROR:

help: ## show this
	@echo 'make TARGET [ARGS="..."] [PYTHON=python3] [TORCH=$(TORCH)]'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	    printf '  %-8s %s\n' "$$name" "$$text"; done
	@echo
	@echo '  ARGS     goes to the command: make demo ARGS="--quick --scheme nvfp4"; make test ARGS="-m \"not slow\""'
	@echo '  WORKERS  processes that tests are dealt to (2); 0 where a debugger wants the terminal'
	@echo '  PYTHON   the interpreter that makes .venv (>= 3.10)'
	@echo '  TORCH    another torch than the pinned one, say a CUDA build: export TORCH="torch==2.14.1";'
	@echo '           keep it exported, or the next make goes back to the pin'

demo: $(VENV)/ready-demo-$(KEY) ## run Gemma 3 270M, tensor-parallel and quantised, with its seams fused
	$(BIN)/torchseam demo $(ARGS)

test: $(VENV)/ready-dev-$(KEY) ## run all tests, the slow ones too
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-gpu: $(VENV)/ready-dev-$(KEY) ## run what needs CUDA GPUs (TORCH names a CUDA build)
	$(BIN)/python tests/gpu.py $(ARGS)

lint: $(VENV)/ready-dev-$(KEY) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready-dev-$(KEY) ## repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/ready-dev-$(KEY) ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## remove what builds and tests leave behind (.venv stays)
	rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python-$(KEY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo 'torchseam needs Python 3.10 or newer; PYTHON=$(PYTHON) is' \
	        "$$($(PYTHON) --version 2>&1 || true). Name another: make PYTHON=python3.12 TARGET" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo 'Making $(VENV)'; \
	    $(PYTHON) -m venv --clear $(VENV) || { \
	    echo 'No virtual environment: does $(PYTHON) have the venv module (python3-venv on Debian)?' >&2; exit 1; }; }
	@rm -f $(VENV)/python-* $(VENV)/ready-*
	@{ echo '$(TORCH)'; grep -vE '^($(UNPINNED))==' constraints-dev.txt; } > $(CONSTRAINTS)
	$(PIP_INSTALL) '$(TORCH)'
	@touch $@

$(VENV)/ready-demo-$(KEY): $(VENV)/python-$(KEY)
	$(PIP_INSTALL) -e '.[demo]'
	@touch $@

# Everything that the demo needs is in dev as well.
$(VENV)/ready-dev-$(KEY): $(VENV)/python-$(KEY)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/ready-demo-$(KEY) $@
