# `make quickstart` and `make test` need nothing but Python 3.11+ (with venv) and make:
# each builds the virtual environment it uses.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
BACKENDS ?= tensorflow jax torch
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test lint clean

quickstart: $(VENV)/quickstart.stamp
	KERAS_BACKEND=tensorflow $(BIN)/python examples/quickstart.py

test: $(VENV)/test.stamp lint
	@set -e; for backend in $(BACKENDS); do \
	  echo "== tests on $$backend =="; \
	  KERAS_BACKEND=$$backend $(BIN)/python -m pytest -n 2; \
	done

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/quickstart.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[tensorflow,examples]'
	@touch $@

$(VENV)/test.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[tensorflow,jax,torch,tpu,test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info logs
