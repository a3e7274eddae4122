"""Two JAX processes that save with Orbax: one is killed, and both go on bit for bit.

And what one process alone loses in silence, in Keras itself.

Orbax is in the extra `orbax`; `make orbax` installs it and runs this.
"""

import importlib.util
import pathlib
import time

import keras
import numpy as np
import older
import pytest
import worker_orbax
from processes import environment, free_ports, run_all, started
from worker_hosts import DISTRIBUTIONS

pytestmark = [
    pytest.mark.only("jax"),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("orbax") is None, reason="orbax-checkpoint is not installed"
    ),
]

WORKER = pathlib.Path(__file__).parent / "worker_orbax.py"
TIMEOUT = 400  # seconds; alone on two cores a pair takes 40


def environments():
    """Of two processes that meet at a port of their own."""
    return [
        environment(
            JAX_PLATFORMS="cpu",
            GLOO_SOCKET_IFNAME="lo",
            KERAS_DISTRIBUTION_JOB_ADDRESSES=f"127.0.0.1:{port}",
            KERAS_DISTRIBUTION_NUM_PROCESSES="2",
            KERAS_DISTRIBUTION_PROCESS_ID=str(rank),
        )
        for port in free_ports(1)
        for rank in range(2)
    ]


def run(directory, *names):
    run_all([[WORKER, directory, -1, *names]] * 2, environments(), directory, TIMEOUT)


def run_until_one_is_killed(directory, name, epoch):
    """Process 0 ends by itself or, as a scheduler does, is killed."""
    commands = [[WORKER, directory, epoch, name]] * 2
    deadline = time.monotonic() + TIMEOUT
    with started(commands, environments(), directory) as (first, second):
        while second.poll() is None and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        said = "\n".join(x.read_text()[-3000:] for x in directory.glob("process_*.log"))
        assert second.poll() == -9 and first.poll() != 0, said


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    run(directory, *DISTRIBUTIONS)
    return directory


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("killed")
    for name in DISTRIBUTIONS:
        run_until_one_is_killed(directory, name, epoch=3)
        saved = [x.name for x in (directory / name / "checkpoints").iterdir() if x.name.isdigit()]
        assert saved and not (directory / name / "host_0.npz").exists()
    run(directory, *DISTRIBUTIONS)
    return directory


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_all_arrays_are_those_of_a_run_that_nobody_killed(uninterrupted, resumed, name, rank):
    with (
        np.load(uninterrupted / name / f"host_{rank}.npz") as expected,
        np.load(resumed / name / f"host_{rank}.npz") as received,
    ):
        assert expected.keys() == received.keys() and len(expected) > 20
        for path in expected:
            np.testing.assert_array_equal(received[path], expected[path], err_msg=path)
        steps = worker_orbax.EPOCHS * worker_orbax.STEPS
        assert expected["loss_scale_optimizer.iteration"] == steps
        assert 0 < expected["loss_scale_optimizer.skipped_steps"] < steps


# Orbax says so of each checkpoint that is read on one device, where Keras gives it no shardings.
without_shardings = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def sequential():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def saved_by_keras(directory):
    """The arrays of a model that plain Keras trained and saved, without its zeros."""
    model = sequential()
    model.compile("adam", "mse")
    save = keras.callbacks.OrbaxCheckpoint(str(directory), save_on_background=False)
    model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0, callbacks=[save])
    return arrays(model)


def arrays(model):
    return [v.numpy() for v in (*model.trainable_variables, *model.optimizer.variables)]


def restored(model, saved):
    return sum(np.array_equal(a, b) for a, b in zip(saved, arrays(model), strict=True) if a.any())


@without_shardings
def test_keras_still_restores_nothing_into_a_second_model(tmp_path):
    """Any other warning would fail this test."""
    keras.utils.clear_session()
    saved = saved_by_keras(tmp_path)
    second = sequential()
    second.compile(keras.optimizers.Adam(name="adam"), "mse")
    second.optimizer.build(second.trainable_variables)
    second.load_weights(tmp_path)
    assert restored(second, saved) == 2  # the count of steps and the learning rate


@without_shardings
@pytest.mark.skipif(not older.is_before("3.16.0"), reason="Keras 3.16 gives layers their prefix")
def test_keras_still_loads_a_sequential_model_without_its_weights(tmp_path):
    """keras#23251."""
    keras.utils.clear_session()
    saved = saved_by_keras(tmp_path)
    loaded = keras.models.load_model(tmp_path)
    assert restored(loaded, saved) == 2


@without_shardings
def test_load_weights_into_a_model_of_the_same_names_restores_all(tmp_path):
    keras.utils.clear_session()
    saved = saved_by_keras(tmp_path)
    keras.utils.clear_session()
    again = sequential()
    again.compile("adam", "mse")
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path)
    assert restored(again, saved) == sum(x.any() for x in saved) > 10
