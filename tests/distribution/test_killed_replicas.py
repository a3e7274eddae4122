"""Training on two and four replicas, killed and taken up again, in each mode of half memory."""

import pathlib

import numpy as np
import pytest
from oracle import few
from processes import environment, run_all
from worker_replicas import BATCHES, EPOCHS, INTERRUPTED, MODES, SCALE

pytestmark = [pytest.mark.only("tensorflow", "jax"), pytest.mark.slow]

WORKER = pathlib.Path(__file__).parent / "worker_replicas.py"
REPLICAS = (2, 4)
TIMEOUT = 400  # seconds
# The significant bits of a number, by the dtypes that hold it.
BITS = {"float32": 24, "bfloat16+int16": 24, "bfloat16+int8": 16, "bfloat16": 8}
# Codes stand for powers of (code + offset) / (levels + offset): the largest code, offset and power.
CODES = {"int8": (127, 44, 12), "uint8": (255, 72, 20)}


def run(root, name, code):
    """Run worker_replicas.py with each number of replicas, side by side."""
    commands = [[WORKER, name, number, root / str(number)] for number in REPLICAS]
    run_all(commands, [environment()] * 2, root, TIMEOUT, [code] * 2)


@pytest.fixture(scope="module")
def taken_up(tmp_path_factory):
    """The directory in which runs were killed, and a new process has gone on with them."""
    root = tmp_path_factory.mktemp("replicas")
    run(root, "killed", -9)
    assert not list(root.rglob("restarted.npz"))
    run(root, "restarted", 0)
    return root


def arrays(path):
    with np.load(path) as found:
        return dict(found)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_killed_run_ends_as_one_that_nobody_killed(taken_up, replicas, mode):
    """All weights, remainders, codes, scales and counters bit for bit, and on each replica."""
    directory = taken_up / str(replicas) / mode
    whole, restarted = (arrays(directory / f"{name}.npz") for name in ("whole", "restarted"))
    assert whole.pop("epochs").tolist() == list(range(EPOCHS))
    assert restarted.pop("epochs").tolist() == list(range(INTERRUPTED[0], EPOCHS))
    for (name, x), y in zip(whole.items(), restarted.values(), strict=True):
        assert len(x) == replicas
        np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape), err_msg=name)
        np.testing.assert_array_equal(y, x, err_msg=name)
    counted = {name.split("/")[-1]: x[0] for name, x in whole.items()}
    assert counted["skipped_steps"] == EPOCHS  # one in each epoch, of the last replica's making
    assert counted["dynamic_scale"] == SCALE / 2
    applied = [x[0] for name, x in whole.items() if name.endswith("adam/iteration")]
    assert applied == [EPOCHS * (BATCHES - 1)]


@pytest.mark.parametrize("mode", [mode for mode in MODES if "int8" in mode])
def test_the_runs_have_codes_and_their_scales(taken_up, mode):
    whole = arrays(taken_up / "2" / mode / "whole.npz")
    dtypes = [x.dtype for x in whole.values()]
    remainders = [x for name, x in whole.items() if name.endswith("_remainder")]
    assert dtypes.count("uint8") == 2  # of a table and a kernel
    assert dtypes.count("int8") == (5 if mode.startswith("24") else 2)  # three remainders
    assert len([name for name in whole if name.endswith("_scales")]) == 4
    assert all(x.any() for x in remainders) and bool(remainders) != mode.startswith("mixed")


@pytest.mark.parametrize("saved", few(MODES, "bfloat16", "24_bits_int8"))
@pytest.mark.parametrize("loaded", few(MODES, "mixed_int8", "24_bits_int8"))
def test_a_file_of_replicas_loads_into_every_mode(taken_up, saved, loaded):
    """Each number is the nearest that the loading mode holds, and training moves it."""
    directory = taken_up / "2"
    before = arrays(directory / saved / "exact.npz")
    after, on = (arrays(directory / loaded / f"{x}from_{saved}.npz") for x in ("", "on_"))
    for (name, x), (held, y), z in zip(before.items(), after.items(), on.values(), strict=True):
        kind, _, was = name.split()
        np.testing.assert_allclose(y, x, **tolerance(x, kind, was, held.split()[-1]), err_msg=name)
        assert np.isfinite(z).all()
        assert (z != y).any() or "learning_rate" in name or kind == "slot"


def tolerance(x, kind, was, held):
    """Of the numbers `x`, which dtypes of the name `was` held, in dtypes of the name `held`."""
    if held in CODES and was != held:
        levels, offset, power = CODES[held]
        # Half a step: the widest, relative to its middle, leads from code 1 to code 2. A number
        # below code 1 becomes that or zero. A group's scale is the next bfloat16 above its maximum.
        step = ((2 + offset) / (1 + offset)) ** power
        smallest = ((1 + offset) / (levels + offset)) ** power * (1 + 2.0**-7)
        return {"rtol": (step - 1) / (step + 1) + 1e-5, "atol": smallest * np.abs(x).max()}
    if held in CODES or was == held:
        return {"rtol": 0}
    # Keras rounds the float32 weights of a file when it assigns them to bfloat16 ones.
    by_keras = kind == "weight" and was == "float32" and held.startswith("bfloat16")
    bits = BITS["bfloat16"] if by_keras else BITS[held]
    return {"rtol": 2.0**-bits if bits < BITS.get(was, 24) else 0}
