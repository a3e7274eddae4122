"""Models without blocks on several devices: segments change nothing there either."""

import pathlib

import keras
import numpy as np
import pytest
from flat_models import ROWS, batches, residual, stack
from processes import environment, run_all
from recomputed_models import assert_same, loss, state

import kmp

pytestmark = pytest.mark.slow
HERE = pathlib.Path(__file__).parent


def train(model, recomputed, policy, steps=3):
    if recomputed:
        assert len(kmp.recompute(model).rows) > 1
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if policy == "mixed_float16":
        optimizer = kmp.scaled(optimizer, kmp.DynamicLossScale(2.0**17))
    model.compile(optimizer, loss(), jit_compile=keras.backend.backend() == "jax")
    x, y = batches(model, steps)
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return state(model)


def made(make, policy):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = make()
    keras.config.set_dtype_policy("float32")
    return model


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("make", [stack, residual])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_segments_on_replicas(make, policy):
    """Bit for bit, on two replicas with masks and statistics of their own."""
    from replicas import mirrored

    def run(recomputed):
        with mirrored(2).scope():
            return train(made(make, policy), recomputed, policy)

    assert_same(run(False), run(True))


@pytest.mark.only("jax")
@pytest.mark.parametrize("kind", ["data", "model"])
def test_segments_that_are_split_over_devices(kind):
    """XLA compiles two other programs, and rounds in other places."""
    distribution = keras.distribution
    devices = distribution.list_devices("cpu")[:4]
    if kind == "data":
        chosen = distribution.DataParallel(devices=devices)
    else:
        mesh = distribution.DeviceMesh((2, 2), ["data", "model"], devices)
        layout = distribution.LayoutMap(mesh)
        layout[".*conv.*kernel"] = (None, None, None, "model")
        chosen = distribution.ModelParallel(layout_map=layout, batch_dim_name="data")
    distribution.set_distribution(chosen)
    try:
        plain, model = made(stack, "float32"), made(stack, "float32")
        assert_same(train(plain, False, "float32"), train(model, True, "float32"), 1e-6)
    finally:
        distribution.set_distribution(None)
    kernel = model.get_layer("conv1").kernel.value
    assert len(kernel.sharding.device_set) == 4
    assert kernel.sharding.is_fully_replicated == (kind == "data")


@pytest.mark.only("torch")
def test_segments_in_two_processes(tmp_path):
    """Bit for bit on each rank, whose weights are those of the other."""
    results = [tmp_path / f"{rank}.npz" for rank in range(2)]
    commands = [
        [HERE / "worker_segments.py", rank, tmp_path / "meeting_point", result]
        for rank, result in enumerate(results)
    ]
    path = environment()["PYTHONPATH"]
    variables = environment(KERAS_BACKEND="torch", PYTHONPATH=f"{path}:{HERE}")
    run_all(commands, [variables] * 2, tmp_path, timeout=240)
    first, second = (dict(np.load(result)) for result in results)
    for found in (first, second):
        for key in (key for key in found if key.startswith("plain")):
            np.testing.assert_array_equal(found[key.replace("plain", "again")], found[key], key)
    kernels = [key for key in first if key.endswith("kernel")]
    moments = [key for key in first if key.endswith("moving_mean")]
    assert all(np.array_equal(first[key], second[key]) for key in kernels)
    assert not any(np.array_equal(first[key], second[key]) for key in moments)
