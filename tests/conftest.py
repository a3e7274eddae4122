"""One backend a process: KERAS_BACKEND=tensorflow|jax|torch pytest."""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# JAX would look for a TPU where its compiler is installed, and say that there is none.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Several host devices, so that distribution is tested on any machine.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import keras
import pytest

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "only(*backends): runs on these backends alone")


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("only")
        if marker and BACKEND not in marker.args:
            reason = f"about {', '.join(marker.args)}; this run is on {BACKEND}"
            item.add_marker(pytest.mark.skip(reason=reason))


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
