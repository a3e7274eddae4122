"""One backend a process: KERAS_BACKEND=tensorflow|jax|torch pytest."""

import datetime
import gc
import os
import shutil
import tempfile
import zlib

import processes

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# JAX would look for a TPU where its compiler is installed, and say that there is none.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Several host devices, so that distribution is tested on any machine.
if processes.DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {processes.DEVICES}".strip()
# PyTorch's threads wait busily, and there is a process for each core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Many tests compile the same small programs: one of them does it, in whatever process it runs.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/kmp-{os.getpid()}")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", f"{tempfile.gettempdir()}/kmp-hypothesis")

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    import tensorflow as tf
    from tensorflow.python.framework.ops import gradient_registry
    from tensorflow.python.util import tf_stack

    # TensorFlow notes for each operation of a graph where it was made: a tenth of the time.
    HERE = tf_stack.extract_stack()
    tf_stack.extract_stack = lambda stacklevel=1: HERE
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )
    if "--xla_backend_optimization_level=0" in os.environ["XLA_FLAGS"]:
        # Nor is a graph optimized then, which takes as long as to run it.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def pytest_unconfigure():
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    if cache.endswith(f"kmp-{os.getpid()}"):  # a worker has that of the process that started it
        shutil.rmtree(cache, ignore_errors=True)


# Each slow test, and each point of a slow grid, runs on one of these; KMP_WHOLE_GRID=1: on both.
SHARE_THE_GRID = ("tensorflow", "jax")
MODES = {"graph", "xla", "jit"}  # what is about one of these is about this backend


ALL_OF = {"test_contract.py", "test_faults.py", "test_house.py"}  # of these the first run has all


# They have tests of a minute and more, and begin: at the end a process would wait for the other.
LONG = {"test_examples.py", "test_gpu.py", "test_killed_replicas.py", "test_notebooks.py"}


def is_first(item):
    """Whether `make test` runs this test on TensorFlow: the core, and a sixth of the others."""
    marks = {mark.name for mark in item.iter_markers()}
    if "wide" in marks or ("slow" in marks and "quick" not in marks):
        return False
    if item.path.name in ALL_OF or "quick" in marks:
        return True
    return zlib.crc32(item.nodeid.encode()) % 6 == 0


def is_the_others(item):
    """Whether the other backend runs this test, which is wide or slow."""
    if BACKEND not in SHARE_THE_GRID or os.environ.get("KMP_WHOLE_GRID"):
        return False
    marks = {mark.name for mark in item.iter_markers()}
    stays = {"quick", "core", "only", "any_backend", "skipif"}
    if not marks & {"wide", "slow"} or marks & stays:
        return False
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if MODES & {x for x in parameters if isinstance(x, str)}:
        return False
    return SHARE_THE_GRID[zlib.crc32(item.nodeid.encode()) % 2] != BACKEND


def rests_today(item):
    """Whether this wide or slow test is in the fifth that `make test-all` leaves out today."""
    marks = {mark.name for mark in item.iter_markers()}
    if not os.environ.get("KMP_A_FIFTH_RESTS") or not marks & {"wide", "slow"} or "quick" in marks:
        return False
    return zlib.crc32(item.nodeid.encode()) // 2 % 5 == datetime.date.today().toordinal() % 5


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(config, items):
    theirs = {item for item in items if is_the_others(item) or rests_today(item)}
    config.hook.pytest_deselected(items=list(theirs))
    items[:] = [item for item in items if item not in theirs]
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if is_first(item):
            item.add_marker("first")
        markers = list(item.iter_markers("only"))  # all hold: a function's and its parameter's
        if item.get_closest_marker("any_backend") and not markers:
            markers = [pytest.mark.only("tensorflow")]
        for marker in markers:
            if BACKEND not in marker.args:
                reason = f"about {', '.join(marker.args)}; this run is on {BACKEND}"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    gc.freeze()  # Keras collects garbage often, and need not look at all that has been imported
    # Tracing makes objects by the million, of which few are garbage in circles.
    gc.set_threshold(100_000, 50, 100)


def pytest_sessionfinish():
    gc.freeze()  # pytest collects five times before a process ends


def forget_graphs():
    """Let go of the graphs of a test: TensorFlow keeps each that has a gradient of its own."""
    if BACKEND == "tensorflow":
        kept = gradient_registry._registry
        for name in [name for name in kept if name.startswith("CustomGradient-")]:
            del kept[name]


@pytest.fixture(autouse=True)
def fresh_keras_state():
    """No test inherits another's seed, policy, names or distribution."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    forget_graphs()
    keras.utils.clear_session(free_memory=False)  # collecting after each test is most of the time


@pytest.fixture
def backend():
    return BACKEND


@pytest.fixture
def quick_weights(monkeypatch):
    """Random weights from NumPy: JAX compiles a program for each shape, which takes a second."""

    def uniform(shape, minval, maxval, dtype, seed):
        return keras.ops.cast(np.random.uniform(minval, maxval, shape), dtype)

    monkeypatch.setattr("keras.src.backend.random.uniform", uniform)
