"""A run that is killed, or goes on elsewhere, ends where it would have ended: bit for bit."""

import keras
import numpy as np
import older
import pytest
import training_run
from processes import TESTS, environment, run_all
from training_run import POLICIES

pytestmark = pytest.mark.slow

BACKEND = keras.backend.backend()
OTHERS = sorted({"tensorflow", "jax", "torch"} - {BACKEND})
TIMEOUT = 100  # seconds


def run(*runs, backend=BACKEND, codes=None):
    """Run training_run.py side by side, each time in a new process, which imports a backend.

    Each of `runs` is what it is to do and the directories that it is to do it in.
    """
    commands = [[TESTS / "scaling" / "training_run.py", *each] for each in runs]
    environments = [environment(KERAS_BACKEND=backend)] * len(runs)
    run_all(commands, environments, runs[0][1].parent, TIMEOUT, codes)


def made(root, prefix=""):
    """A directory for each policy."""
    directories = [root / f"{prefix}{name}" for name in POLICIES]
    for directory in directories:
        directory.mkdir()
    return directories


def assert_same(expected, received):
    """Compare two states in order: a loaded model names its optimizer's variables differently."""
    for (name, x), y in zip(expected.items(), received.values(), strict=True):
        np.testing.assert_array_equal(y, x, err_msg=name)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Where, under each policy, one run went to its end and one was killed in the third epoch."""
    directories = made(tmp_path_factory.mktemp("interrupted"))
    killed = [("killed", directory) for directory in directories]
    run(("whole", *directories), *killed, codes=[0, *[-9] * len(killed)])
    return directories


@pytest.fixture(scope="module")
def taken_up(interrupted):
    """The same directories, after a new process has gone on with what is in them."""
    assert not any((directory / "killed.npz").exists() for directory in interrupted)
    run(("restarted,continued", *interrupted))
    return {directory.name: directory for directory in interrupted}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_run_has_overflows_before_and_after_the_interruption(taken_up, policy):
    """One in each epoch, before the batch after which the run dies; the scale grows in between."""
    whole = np.load(taken_up[policy] / "whole.npz")
    state = {key.split("/")[-1]: x for key, x in whole.items()}
    spikes = state.get("skipped_spikes", 0)
    assert spikes > 0 or policy != "bfloat16"
    assert state["skipped_steps"] == training_run.EPOCHS + spikes
    assert state["gradient_health"][:, 4].max() == training_run.EPOCHS
    assert state["dynamic_scale"] == 128.0
    assert np.isfinite(state["moving_variance"]).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_killed_and_restarted_from_a_backup(taken_up, policy):
    directory = taken_up[policy]
    assert_same(np.load(directory / "whole.npz"), np.load(directory / "restarted.npz"))


@pytest.mark.parametrize("policy", POLICIES)
def test_saved_in_mid_epoch_and_continued_elsewhere(taken_up, policy):
    directory = taken_up[policy]
    assert_same(np.load(directory / "whole.npz"), np.load(directory / "continued.npz"))


@pytest.mark.only("tensorflow")  # files are the same code on all backends
def test_killed_while_writing_the_backup(interrupted, tmp_path):
    """Keras keeps the last backup but one on request; a torn file leads to it."""
    directories = made(tmp_path, "double_")  # names what it is
    run(*[("killed", directory) for directory in directories], codes=[-9] * len(directories))
    for directory in directories:
        backup = directory / "backup" / "latest.weights.h5"
        backup.write_bytes(backup.read_bytes()[: backup.stat().st_size // 2])
    run(("restarted", *directories))
    for whole, directory in zip(interrupted, directories, strict=True):
        assert_same(np.load(whole / "whole.npz"), np.load(directory / "restarted.npz"))


@pytest.mark.parametrize(
    "writer", [pytest.param(each, marks=older.installed(each)) for each in OTHERS]
)
def test_written_on_another_backend(tmp_path, writer):
    """Same state, rule and settings; and it trains on."""
    directory = tmp_path / "float16"
    directory.mkdir()
    run(("one_epoch", directory), backend=writer)
    model = keras.models.load_model(directory / "one_epoch.keras")
    if BACKEND == "torch":  # JAX's file asks for it, and torch.compile warns of what it splits
        model.jit_compile = False
    assert_same(np.load(directory / "one_epoch.npz"), training_run.whole_state(model))
    assert model.optimizer.loss_scale.growth_interval == training_run.BATCHES - 1
    before = training_run.whole_state(model)
    training_run.fit(model, epochs=1)
    assert int(model.optimizer.skipped_steps) == 2
    assert int(model.optimizer.iterations) == 2 * training_run.BATCHES - 2
    after = training_run.whole_state(model)
    trained = range(len(model.trainable_variables))
    for place, (x, y) in enumerate(zip(before.values(), after.values(), strict=True)):
        assert np.isfinite(y).all()
        assert place not in trained or (x != y).any()
