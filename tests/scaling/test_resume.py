"""A run that is killed, or goes on elsewhere, ends where it would have ended: bit for bit."""

import keras
import numpy as np
import older
import pytest
import training_run
from processes import TESTS, environment, run_all

BACKEND = keras.backend.backend()
OTHERS = sorted({"tensorflow", "jax", "torch"} - {BACKEND})
TIMEOUT = 50  # seconds


# The second keeps weights and slots in bfloat16, and overflows where the first does.
POLICIES = ["mixed_float16", "p=bf16,c=f16"]


def run(directory, *names, backend=BACKEND, codes=None):
    """Run parts of training_run.py side by side, each in a new process."""
    directory.mkdir(exist_ok=True)
    policy = POLICIES["bfloat16" in directory.name]
    commands = [[TESTS / "scaling" / "training_run.py", directory, name] for name in names]
    environments = [environment(KERAS_BACKEND=backend, RUN_POLICY=policy)] * len(names)
    run_all(commands, environments, directory, TIMEOUT, codes)


def assert_same(expected, received):
    """Compare two states in order: a loaded model names its optimizer's variables differently."""
    for (name, x), y in zip(expected.items(), received.values(), strict=True):
        np.testing.assert_array_equal(y, x, err_msg=name)


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def interrupted(tmp_path_factory, request):
    """Where one run went to its end and another was killed in the third of four epochs."""
    directory = tmp_path_factory.mktemp(f"interrupted_{request.param}")
    run(directory, "whole", "killed", codes=[0, -9])
    return directory


def test_the_run_has_overflows_before_and_after_the_interruption(interrupted):
    """One in each epoch, before the batch after which the run dies; the scale grows in between."""
    state = {key.split("/")[-1]: x for key, x in np.load(interrupted / "whole.npz").items()}
    assert state["skipped_steps"] == training_run.EPOCHS
    assert state["gradient_health"][:, 4].max() == training_run.EPOCHS
    assert state["dynamic_scale"] == 128.0
    assert np.isfinite(state["moving_variance"]).all()
    assert not (interrupted / "killed.npz").exists()


def test_killed_and_restarted_from_a_backup(interrupted):
    run(interrupted, "restarted")
    assert_same(np.load(interrupted / "whole.npz"), np.load(interrupted / "restarted.npz"))


def test_saved_in_mid_epoch_and_continued_elsewhere(interrupted):
    run(interrupted, "continued")
    assert_same(np.load(interrupted / "whole.npz"), np.load(interrupted / "continued.npz"))


@pytest.mark.only("tensorflow")  # files are the same code on all backends
def test_killed_while_writing_the_backup(interrupted, tmp_path):
    """Keras keeps the last backup but one on request; a torn file leads to it."""
    directory = tmp_path / f"double_{interrupted.name}"  # names what it is
    run(directory, "killed", codes=[-9])
    backup = directory / "backup" / "latest.weights.h5"
    backup.write_bytes(backup.read_bytes()[: backup.stat().st_size // 2])
    run(directory, "restarted")
    assert_same(np.load(interrupted / "whole.npz"), np.load(directory / "restarted.npz"))


@pytest.mark.parametrize(
    "writer", [pytest.param(each, marks=older.installed(each)) for each in OTHERS]
)
def test_written_on_another_backend(tmp_path, writer):
    """Same state, rule and settings; and it trains on."""
    run(tmp_path, "one_epoch", backend=writer)
    model = keras.models.load_model(tmp_path / "one_epoch.keras")
    if BACKEND == "torch":  # JAX's file asks for it, and torch.compile warns of what it splits
        model.jit_compile = False
    assert_same(np.load(tmp_path / "one_epoch.npz"), training_run.whole_state(model))
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
