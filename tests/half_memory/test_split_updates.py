"""On a TPU an update with codes is computed with an axis for the groups: every bit is the same."""

import jax
import keras
import numpy as np
import pytest
from keras import optimizers

import kmp
from kmp._backend import backend
from kmp.half_memory import codes, updates

pytestmark = pytest.mark.only("jax")

MODES = {
    "int8": ("bfloat16", {}),
    "remainders": ("bfloat16", {"master_weights": True}),
    "24_bits": ("bfloat16", {"master_weights": 24}),
    "float32": ("float32", {}),
}
ELEMENTWISE = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda: optimizers.Adam(1e-2, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(1e-2, use_ema=True),
    "Adamax": lambda: optimizers.Adamax(1e-2),
    "Adagrad": lambda: optimizers.Adagrad(1e-2),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Nadam": lambda: optimizers.Nadam(1e-2, gradient_accumulation_steps=2),
    "RMSprop": lambda: optimizers.RMSprop(1e-2, momentum=0.9),
    "Lion": lambda: optimizers.Lion(1e-3, clipnorm=0.5),
}


@pytest.fixture
def split(monkeypatch):
    """How many tensors updates have split: a list that grows by their shapes."""
    shapes, split_by = [], updates.split_by

    def counted(groups, x):
        shapes.append(tuple(x.shape))
        return split_by(groups, x)

    monkeypatch.setattr(codes, "_FEWEST", 64)
    monkeypatch.setattr(updates, "split_by", counted)
    return shapes


def trained(make, dtype, arguments, splits, monkeypatch):
    """All that five steps leave, one of them skipped."""
    monkeypatch.setattr(type(backend), "splits_groups", lambda self: splits)
    random = np.random.default_rng(1)
    shapes = ((96, 64), (64,), (8, 24, 32))
    variables = [keras.Variable(random.normal(size=shape), dtype=dtype) for shape in shapes]
    optimizer = kmp.LossScaleOptimizer(make(), loss_scale="none", slot_dtype="int8", **arguments)
    optimizer.build(variables)
    weights, state = [v.value for v in variables], [v.value for v in optimizer.variables]
    step = jax.jit(optimizer.stateless_apply)
    for number in range(5):
        gradients = [random.normal(size=shape).astype("float32") for shape in shapes]
        gradients[0][0, 0] = np.inf if number == 3 else 0.0
        weights, state = step(state, gradients, weights)
    return [np.asarray(x) for x in (*weights, *state)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_bit_is_that_of_an_update_in_the_shape_of_the_weight(name, mode, split, monkeypatch):
    dtype, arguments = MODES[mode]
    found = [trained(ELEMENTWISE[name], dtype, arguments, x, monkeypatch) for x in (False, True)]
    assert split == [(96, 64), (64,), (8, 24, 32)]  # the gradients, while the second is traced
    for expected, got in zip(*found, strict=True):
        np.testing.assert_array_equal(
            got.reshape(-1).view("uint8"), expected.reshape(-1).view("uint8")
        )


class OfAUser(optimizers.Adam):
    """May compute what it likes from a weight."""


@pytest.mark.parametrize("make", [OfAUser, lambda: optimizers.Muon(1e-3)], ids=["own", "Muon"])
def test_an_update_that_may_see_the_shape_is_not_split(make, split, monkeypatch):
    trained(make, "bfloat16", {}, True, monkeypatch)
    assert split == []
