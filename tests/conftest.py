"""One backend a process: KERAS_BACKEND=tensorflow|jax|torch pytest."""

import gc
import os
import shutil
import tempfile

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

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )


def pytest_unconfigure():
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    if cache.endswith(f"kmp-{os.getpid()}"):  # a worker has that of the process that started it
        shutil.rmtree(cache, ignore_errors=True)


# Of statistics, files and texts: the same code runs whatever the backend.
ABOUT_NO_BACKEND = {
    "test_common.py",
    "test_costs.py",
    "test_dashboard.py",
    "test_equivalence.py",
    "test_float_formats.py",
    "test_gpu.py",
    "test_ledger.py",
    "test_notebooks.py",
    "test_printing.py",
    "test_house.py",
    "test_spike_detector.py",
    "test_summaries.py",
}

# Processes of their own, scripts, or minutes in all: for `make test-all`.
SLOW_FILES = {
    "test_applications.py",
    "test_batch_gradients.py",
    "test_bench.py",
    "test_blocks.py",
    "test_certify.py",
    "test_convert.py",
    "test_diagnosis.py",
    "test_divergence_guard.py",
    "test_examples.py",
    "test_fake_quantization.py",
    "test_fused_kernel.py",
    "test_gpu.py",
    "test_jax.py",
    "test_half_memory_replicas.py",
    "test_keras_limits.py",
    "test_kinds.py",
    "test_learning_rate_finder.py",
    "test_loss_tracker.py",
    "test_memory.py",
    "test_mirrored.py",
    "test_multi_worker.py",
    "test_normalization.py",
    "test_nothing_changes.py",
    "test_observers.py",
    "test_packaging.py",
    "test_peers.py",
    "test_planted_faults.py",
    "test_precisions.py",
    "test_protection.py",
    "test_quantization.py",
    "test_quantization_float8.py",
    "test_quantized_files.py",
    "test_resume.py",
    "test_saved_files.py",
    "test_standstill.py",
    "test_threads.py",
    "test_together.py",
    "test_two_hosts.py",
    "test_weights.py",
}


# What a device of another kind could compute otherwise.
GPU_FILES = {
    "test_contract.py",
    "test_dense.py",
    "test_faults.py",
    "test_normalization.py",
    "test_rounding.py",
    "test_updates.py",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in GPU_FILES:
            item.add_marker(pytest.mark.gpu)
        if item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        markers = list(item.iter_markers("only"))  # all hold: a function's and its parameter's
        if item.path.name in ABOUT_NO_BACKEND and not markers:
            markers = [pytest.mark.only("tensorflow")]
        for marker in markers:
            if BACKEND not in marker.args:
                reason = f"about {', '.join(marker.args)}; this run is on {BACKEND}"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    gc.freeze()  # Keras collects garbage often, and need not look at all that has been imported
    # Tracing makes objects by the million, of which few are garbage in circles.
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def fresh_keras_state():
    """No test inherits another's seed, policy, names or distribution."""
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
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
