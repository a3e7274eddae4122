# `make quickstart`, `make test` and `make test-all` need nothing but Python 3.11+ (with venv) and
# make: each builds the virtual environment it uses.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Python compiles what it imports, and need not compile the rest: that is half of the time. Where it
# may not store that, each process would compile TensorFlow again, in 7 seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile \
  --constraint constraints.txt
CORE = tests/test_contract.py tests/test_faults.py
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
# On two cores a third process works while tests wait for the programs that they start.
PYTEST_REST = $(BIN)/python -m pytest -n 3 --dist worksteal --durations=25
PYTEST_OLDEST = $(VENV)-oldest/bin/python -m pytest -n 2 --dist worksteal
NARROW = "not wide and (not slow or quick)"
# What `make test` runs compiles as users do, and so does the contract on all versions. The other
# tests leave out what XLA's CPU compiler does for speed: on JAX half of the time; and
# tests/conftest.py what TensorFlow does with graphs: a quarter of the time. The code that XLA emits
# without its fusion emitters multiplies and adds in one rounding where the CPU can: two programs
# that compute the same would differ.
AVX = $(if $(filter x86_64,$(shell uname -m)),--xla_cpu_max_isa=AVX)
QUICK = XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false $(AVX)"
REST = KMP_A_FIFTH_RESTS=1
# What the oldest versions run besides: layers, callbacks, conversion, checkpoints.
OLDEST = tests/layers tests/callbacks tests/models/test_convert.py tests/precision \
  tests/saved_files tests/scaling/test_checkpoint.py tests/scaling/test_optimizer.py \
  tests/scaling/test_resume.py
# The core, which PyTorch runs.
TORCH = $(CORE) $(patsubst %,tests/%,test_custom_loops.py test_defects.py test_floatx.py \
  test_messages.py scaling health precision half_memory layers callbacks distribution recompute \
  saved_files debug models/test_convert.py models/test_indices.py models/test_optimizers.py \
  models/test_retype.py models/test_sums_by_index.py)

# Those that need keras-hub; `make programs` has it.
RECIPES = tests/test_examples.py tests/test_notebooks.py -k "test_a_program_works or test_the_page_is \
  or finetune or float16_on_a_t4 or a_plan_counts or preset"

.PHONY: quickstart test test-all test-whole test-oldest test-pre test-pre-quick dist-check lint site \
  notebooks programs trackers orbax compiled-counts gpu clean

quickstart: $(VENV)/quickstart.stamp
	KERAS_BACKEND=tensorflow $(BIN)/python examples/quickstart.py

# Lint, types, the contract and a sixth of the other tests on TensorFlow, and the core on JAX.
test: $(VENV)/test.stamp lint
	KERAS_BACKEND=tensorflow $(PYTEST) -m first
	KERAS_BACKEND=jax $(PYTEST) -m "core and not wide and not slow" $(CORE)

# Every test: on TensorFlow and JAX, which share the further points of the grids; the core on PyTorch;
# the contract and a sixth of the others on the oldest versions. CI runs this. Of the wide and slow
# tests a fifth rests each day, another one the next. What `make test` has just run is left out.
test-all: test $(VENV)-oldest/stamp
	$(QUICK) KERAS_BACKEND=jax $(PYTEST_OLDEST) -m first $(CORE) $(OLDEST)
	$(REST) $(QUICK) KERAS_BACKEND=tensorflow $(PYTEST_REST) -m "not first"
	$(REST) $(QUICK) KERAS_BACKEND=jax $(PYTEST_REST) -m "not core or wide or slow"
	KERAS_BACKEND=torch $(PYTEST_REST) -m $(NARROW) $(TORCH)
	$(MAKE) test-pre-quick

# Every test and every point of every grid on every backend, and the oldest versions: two hours,
# before a release.
test-whole: $(VENV)/test.stamp lint test-oldest
	for backend in tensorflow jax torch; do \
	  KMP_WHOLE_GRID=1 KERAS_BACKEND=$$backend $(PYTEST) || exit 1; \
	done

# The oldest Keras and JAX that kmp runs on, without any other backend: the whole core, ten minutes;
# see docs/versions.md.
test-oldest: $(VENV)-oldest/stamp
	KERAS_BACKEND=jax $(PYTEST_OLDEST) -m $(NARROW) $(CORE)
	$(QUICK) KERAS_BACKEND=jax $(PYTEST_OLDEST) -m $(NARROW) $(OLDEST)

$(VENV)-oldest/stamp: setup.cfg pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install --quiet --disable-pip-version-check --no-compile \
	  --constraint constraints-oldest.txt --editable '.[jax,test]'
	@touch $@

# The nightly Keras with the newest backends: a failure is reported, and is no error.
PRE_PIP = $(VENV)-pre/bin/pip install --quiet --disable-pip-version-check
PRE = $(VENV)-pre/bin/python -m pytest -n 2 --dist worksteal -m "not wide and not slow" $(CORE) \
  $(patsubst %,tests/%,layers callbacks precision scaling health)
test-pre:
	$(PYTHON) -m venv --clear $(VENV)-pre
	($(PRE_PIP) --editable '.[tensorflow,jax,torch,test]' && \
	  $(VENV)-pre/bin/pip uninstall --quiet --yes keras && $(PRE_PIP) --pre keras-nightly && \
	  $(VENV)-pre/bin/pip list --format freeze | grep -E '^(keras-nightly|jax|tensorflow|torch)==') \
	|| echo "WARNING: the pre-releases could not be installed."
	KERAS_BACKEND=jax $(PRE) $(patsubst %,tests/%,half_memory int8 models debug saved_files \
	  test_house.py) || echo "WARNING: kmp does not pass with JAX on the pre-releases above."
	KERAS_BACKEND=torch $(PRE) tests/distribution/test_two_hosts.py \
	  || echo "WARNING: kmp does not pass with PyTorch on the pre-releases above."
	KERAS_BACKEND=tensorflow $(PRE) \
	  || echo "WARNING: kmp does not pass with TensorFlow on the pre-releases above."
	KERAS_BACKEND=tensorflow $(VENV)-pre/bin/python -m pytest tests/test_upstream.py \
	  || echo "WARNING: a change in upstream/ is no longer needed, or does not apply."

# The contract with the nightly Keras alone, beside what is installed: two minutes, and no error.
NIGHTLY = $(VENV)/keras-nightly
test-pre-quick: $(VENV)/test.stamp
	rm -rf $(NIGHTLY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --pre --target $(NIGHTLY) \
	  keras-nightly || echo "WARNING: Keras's nightly could not be installed."
	for backend in tensorflow jax torch; do \
	  test ! -d $(NIGHTLY) || PYTHONPATH=$(NIGHTLY) KERAS_BACKEND=$$backend $(PYTEST) \
	    -m $(NARROW) tests/test_contract.py \
	    || echo "WARNING: kmp does not pass with $$backend on Keras's nightly."; \
	done

# The wheel and the sdist in dist/, checked as the package index would; see docs/releasing.md.
dist-check:
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	$(VENV)-dist/bin/python -m build
	$(VENV)-dist/bin/twine check --strict dist/*

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Other people's programs through everything, an hour or two, into docs/lab/programs.md; then the tests
# that `make test-all` leaves out where keras-hub and keras-rs are missing.
programs: $(VENV)-programs/stamp
	$(VENV)-programs/bin/python compat/table.py
	KERAS_BACKEND=tensorflow $(VENV)-programs/bin/python -m pytest tests/test_programs.py $(RECIPES)
	KERAS_BACKEND=jax $(VENV)-programs/bin/python -m pytest tests/test_programs.py $(RECIPES)

$(VENV)-programs/stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-programs
	$(VENV)-programs/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[tensorflow,jax,torch,programs,test]'
	@touch $@

# The trackers of docs/trackers.md, which `make test-all` leaves out.
trackers:
	$(PYTHON) -m venv $(VENV)-trackers
	$(VENV)-trackers/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[tensorflow,trackers,test]'
	KERAS_BACKEND=tensorflow $(VENV)-trackers/bin/python -m pytest tests/test_trackers.py

# Orbax's checkpoints of two processes on JAX, which `make test-all` leaves out.
orbax:
	$(PYTHON) -m venv $(VENV)-orbax
	$(VENV)-orbax/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[jax,orbax,test]'
	KERAS_BACKEND=jax $(VENV)-orbax/bin/python -m pytest tests/distribution/test_orbax.py

# The site, in build/site. A warning, or a link that leads nowhere, is an error.
site: $(VENV)-site/stamp
	NO_MKDOCS_2_WARNING=1 $(VENV)-site/bin/mkdocs build --quiet --strict
	@echo "Look at it: $(PYTHON) -m http.server --directory build/site"

$(VENV)-site/stamp: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-site
	$(VENV)-site/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[docs]'
	@touch $@

# Write the notebooks of the recipes anew, run all, and store what they print and draw in them.
notebooks: $(VENV)-programs/stamp
	$(VENV)-programs/bin/python notebooks/from_examples.py
	KERAS_BACKEND=tensorflow $(VENV)-programs/bin/python -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False \
	  --ExecutePreprocessor.extra_arguments=--IPKernelApp.capture_fd_output=False notebooks/*.ipynb

# What the compiled step runs and moves on a TPU and on an H100, counted without either.
compiled-counts: $(VENV)/test.stamp $(VENV)-h100/stamp
	$(BIN)/python benchmarks/compiled_counts.py --target tpu
	$(VENV)-h100/bin/python benchmarks/compiled_counts.py --target h100

# On a machine with an NVIDIA GPU, in parts of at most 8 minutes: all that docs/gpu.md says.
gpu: $(VENV)-gpu/stamp
	$(VENV)-gpu/bin/python benchmarks/gpu.py

$(VENV)-gpu/stamp: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/pip install --quiet --disable-pip-version-check \
	  --editable '.[bench,examples,gpu,test]'
	@touch $@

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
	rm -rf $(VENV) $(VENV)-h100 $(VENV)-oldest $(VENV)-pre $(VENV)-dist $(VENV)-programs $(VENV)-trackers \
	  $(VENV)-orbax $(VENV)-site $(VENV)-gpu build dist *.egg-info logs
