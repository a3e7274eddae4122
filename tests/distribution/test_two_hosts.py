"""keras.distribution over two processes that hold the data between them: `fit` as on one."""

import json
import pathlib

import keras
import numpy as np
import older
import pytest
import worker_hosts
from conftest import BACKEND
from processes import environment, free_ports, run_all

# On PyTorch it takes 20 s, and nothing where Keras has no such `fit`.
pytestmark = (
    [pytest.mark.only("torch"), older.torch_fit_on_processes]
    if BACKEND == "torch"
    else [pytest.mark.only("jax"), pytest.mark.slow]
)

HERE = pathlib.Path(__file__).parent
TIMEOUT = 600  # seconds; alone on two cores it takes 90
# What no process holds as a whole Keras cannot save on JAX. On PyTorch it brings it together.
NOT_SAVED = {"model_parallel_across_hosts"} if BACKEND == "jax" else set()
every_distribution = pytest.mark.parametrize("name", worker_hosts.DISTRIBUTIONS)


class Hosts:
    """Two processes that have run: their directory, and what they found."""

    def __init__(self, directory):
        self.directory = directory

    def found(self, name, rank=0):
        return json.loads((self.directory / name / f"host_{rank}" / "results.json").read_text())


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hosts")
    meeting_point = f"127.0.0.1:{free_ports(1)[0]}"
    environments = [
        environment(
            needs=["tensorflow"],  # `tf.data` hands each process its part
            JAX_PLATFORMS="cpu",
            GLOO_SOCKET_IFNAME="lo",
            KERAS_DISTRIBUTION_JOB_ADDRESSES=meeting_point,
            KERAS_DISTRIBUTION_NUM_PROCESSES="2",
            KERAS_DISTRIBUTION_PROCESS_ID=str(rank),
        )
        for rank in range(2)
    ]
    run_all([[HERE / "worker_hosts.py", directory]] * 2, environments, directory, TIMEOUT)
    return Hosts(directory)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds that has all of the data and one device."""
    directory = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        found = worker_hosts.run(worker_hosts.ALL, directory / "logs")
        found["sharded"] = worker_hosts.sharded()
    keras.utils.clear_session()
    return json.loads(json.dumps(found))


@every_distribution
def test_the_processes_agree_bit_for_bit(hosts, name):
    first, second = (json.dumps(hosts.found(name, rank)) for rank in range(2))
    assert first == second  # as text, in which NaN equals NaN


EXACT = ["watched", "sharded", "stopped", "resumed", "rounded", "coded"]


@pytest.mark.parametrize("what", EXACT)
@every_distribution
def test_exact_numbers_equal_those_of_one_process(hosts, alone, name, what):
    """Bit for bit: history, warnings, weights, momenta, scale, counters and measurements.

    What is bad about the data is in the hands of process 1 alone. Every number is a small multiple
    of a power of two, so that no order of summation rounds.
    """
    if what == "resumed" and name in NOT_SAVED:
        pytest.skip("Keras cannot save it, see below")
    if what == "sharded" and name in worker_hosts.SAME_DATA:
        pytest.skip("Keras gives each process a part, though all need the same")
    assert json.dumps(hosts.found(name)[what]) == json.dumps(alone[what])


@every_distribution
def test_both_round_bfloat16_by_the_same_numbers(hosts, name):
    """An update of 1 + 2**-8 is 1 or 1 + 2**-7, by chance."""
    found = hosts.found(name)["rounded"]
    (momentum,) = (x for path, x in found.items() if path.endswith("second_kernel_momentum"))
    ones = np.abs(momentum)[np.abs(momentum).round() == 1]
    assert {1.0, 1 + 2.0**-7} == set(ones.tolist())


@every_distribution
def test_a_bad_batch_of_one_process_skips_the_step_of_both(hosts, name):
    found = hosts.found(name)
    assert found["watched"]["skipped_steps"] == [2]
    assert found["watched"]["loss_scale"] == [512.0]  # halved by the overflow, not by inf
    assert found["stopped"]["because"].startswith("Step 5: 3 steps in a row were skipped")


@pytest.mark.only("torch")
@every_distribution
def test_a_bad_loss_lowers_no_scale_where_all_have_the_same_loss(hosts, alone, name):
    """As DTensors, which `ModelParallel` makes. Otherwise each process knows its own alone."""
    assert alone["unwatched"]["scale"] == 1024.0
    received = hosts.found(name)["unwatched"]["scale"]
    assert received == (512.0 if name == "data_parallel" else 1024.0)


@every_distribution
def test_both_go_back_to_before_the_divergence(hosts, alone, name):
    received, expected = hosts.found(name)["rolled_back"], alone["rolled_back"]
    assert received["rollbacks"] == expected["rollbacks"] == 1
    assert received["warnings"] == expected["warnings"]
    assert "Rollback 1 of 3 to step 13" in received["warnings"][0]
    # Real numbers: the order of summation shows, in sums of a dozen terms over twenty steps.
    for path in ("first/kernel", "second/kernel"):
        np.testing.assert_allclose(received[path], expected[path], rtol=0, atol=1e-5)


@every_distribution
def test_a_sweep_leaves_every_bit_as_it_was(hosts, alone, name):
    received, expected = hosts.found(name)["swept"], alone["swept"]
    assert received["same"] and expected["same"]
    assert received["suggestion"] == expected["suggestion"] is not None
    np.testing.assert_allclose(received["points"], expected["points"], rtol=1e-4)


@every_distribution
def test_process_0_alone_writes_event_files(hosts, name):
    directory = hosts.directory / name
    runs = [path.parent.name for path in (directory / "shared_logs").rglob("*tfevents*")]
    assert sorted(runs) == ["shared_logs", "train"]
    for logs in ["finder_logs"] + ["own_logs"] * (name not in NOT_SAVED):
        assert len(list((directory / "host_0" / logs).glob("*tfevents*"))) == 1
        assert not (directory / "host_1" / logs).exists()


def test_keras_still_cannot_save_what_no_process_holds_as_a_whole(hosts):
    for name in worker_hosts.DISTRIBUTIONS:
        resumed = hosts.found(name)["resumed"]
        if name in NOT_SAVED:
            assert "spans non-addressable" in resumed["refused"]
        else:
            assert resumed["same"]
