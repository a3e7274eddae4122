"""What tests do where Keras, or what is installed beside it, is older than what they need."""

import functools
import importlib.util

import keras
import pytest

from kmp._keras import versions


def of_keras(name):
    """`keras.<name>`, or a function that skips the test that calls it if Keras has none yet."""
    try:
        return functools.reduce(getattr, name.split("."), keras)
    except AttributeError:
        return lambda *_, **__: pytest.skip(f"Keras {keras.__version__} has no keras.{name}")


def muon(*args, **kwargs):
    """`keras.optimizers.Muon`; skips the test where Keras's cannot run."""
    if keras.backend.backend() == "tensorflow" and is_before("3.13.0"):
        pytest.skip(f"Muon of Keras {keras.__version__} fails on TensorFlow; since 3.13 it runs")
    return keras.optimizers.Muon(*args, **kwargs)


def is_before(release):
    return versions.release(keras.__version__) < versions.release(release)


def needs(feature):
    """Marks tests of what `kmp._keras.versions` says that older releases lack."""
    since, name = versions.FEATURES[feature]
    reason = f"Keras {keras.__version__} has no {name}, which came with {since}"
    return pytest.mark.skipif(not versions.has(feature), reason=reason)


def since_keras(release, because):
    """Marks tests of something that Keras itself does otherwise before a release."""
    reason = f"before Keras {release} {because}; this is {keras.__version__}"
    return pytest.mark.skipif(is_before(release), reason=reason)


torch_fit_on_processes = pytest.mark.skipif(
    not hasattr(keras.Model(), "ddp_model"),
    reason=f"Keras {keras.__version__} has no `fit` of several PyTorch processes; 3.16 will",
)


def installed(package):
    """Marks tests that run another package, such as a second backend."""
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")
