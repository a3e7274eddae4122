# `make quickstart`, `make test` and `make test-all` need nothing but Python 3.11+ (with venv) and
# make: each builds the virtual environment it uses.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
CORE = tests/test_contract.py tests/test_faults.py
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: quickstart test test-all lint site notebooks programs compiled-counts clean

quickstart: $(VENV)/quickstart.stamp
	KERAS_BACKEND=tensorflow $(BIN)/python examples/quickstart.py

# Lint, types, the contract and every public name: TensorFlow, and the contract's core on JAX.
test: $(VENV)/test.stamp lint
	KERAS_BACKEND=tensorflow $(PYTEST) -m "not wide and not slow"
	KERAS_BACKEND=jax $(PYTEST) -m "core and not wide and not slow" $(CORE)

# Everything, on three backends. CI runs this. What `make test` has just run is left out.
test-all: test
	KERAS_BACKEND=tensorflow $(PYTEST) --durations=25 -m "wide or slow"
	KERAS_BACKEND=jax $(PYTEST) --durations=25 -m "not core or wide or slow"
	KERAS_BACKEND=torch $(PYTEST) --durations=25

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

# Other people's programs through everything, an hour or two, into docs/programs.md; then the tests
# that `make test-all` leaves out where keras-hub and keras-rs are missing.
programs: $(VENV)-programs/stamp
	$(VENV)-programs/bin/python benchmarks/programs/table.py
	KERAS_BACKEND=tensorflow $(VENV)-programs/bin/python -m pytest tests/test_programs.py
	KERAS_BACKEND=jax $(VENV)-programs/bin/python -m pytest tests/test_programs.py

$(VENV)-programs/stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-programs
	$(VENV)-programs/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[tensorflow,jax,programs,test]'
	@touch $@

# The site, in build/site. A warning, or a link that leads nowhere, is an error.
site: $(VENV)-site/stamp
	NO_MKDOCS_2_WARNING=1 $(VENV)-site/bin/mkdocs build --quiet --strict
	@echo "Look at it: $(PYTHON) -m http.server --directory build/site"

$(VENV)-site/stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-site
	$(VENV)-site/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[docs]'
	@touch $@

# Run the notebooks, and store what they print and draw in them.
notebooks: $(VENV)/test.stamp
	KERAS_BACKEND=tensorflow $(BIN)/python -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False \
	  --ExecutePreprocessor.extra_arguments=--IPKernelApp.capture_fd_output=False notebooks/*.ipynb

# What the compiled step runs and moves on a TPU and on an H100, counted without either.
compiled-counts: $(VENV)/test.stamp $(VENV)-h100/stamp
	$(BIN)/python benchmarks/compiled_counts.py --target tpu
	$(VENV)-h100/bin/python benchmarks/compiled_counts.py --target h100

$(VENV)-h100/stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-h100
	$(VENV)-h100/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[jax,h100]'
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/quickstart.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[tensorflow,examples]'
	@touch $@

$(VENV)/test.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[tensorflow,jax,torch,tpu,test]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-h100 $(VENV)-programs $(VENV)-site build dist *.egg-info logs
