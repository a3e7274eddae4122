"""Two JAX processes that save with Orbax: one is killed, and both go on bit for bit.

Orbax is in the extra `orbax`; `make orbax` installs it and runs this.
"""

import importlib.util
import pathlib
import time

import numpy as np
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
