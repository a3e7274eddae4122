"""keras.distribution over two JAX processes, each with half of the data: `fit` as on one."""

import json
import pathlib

import pytest
import worker_jax
from processes import environment, free_ports, run_all

pytestmark = pytest.mark.only("jax")

HERE = pathlib.Path(__file__).parent
TIMEOUT = 180  # seconds, two starts of JAX included


def run_two(distribution, directory):
    """What each of two processes found; each runs in a directory of its own."""
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    results = [directory / f"results_{rank}.json" for rank in range(2)]
    commands = [
        [HERE / "worker_jax.py", rank, coordinator, distribution, path]
        for rank, path in enumerate(results)
    ]
    run_all(commands, [environment(JAX_PLATFORMS="cpu")] * 2, directory, TIMEOUT)
    return [json.loads(path.read_text()) for path in results]


@pytest.mark.parametrize("distribution", worker_jax.DISTRIBUTIONS)
def test_fit_equals_that_of_one_process(tmp_path, distribution):
    """Bit for bit: history, weights, momenta, scale, counters and measurements, after two skips.

    Both skips are due to process 1 alone. Every number is a small multiple of a power of two, so
    that no order of summation rounds.
    """
    first, second = run_two(distribution, tmp_path)
    assert first == second
    assert first["skipped_steps"] == [2] and first["loss_scale"] == [512.0]
    assert first == worker_jax.train()
