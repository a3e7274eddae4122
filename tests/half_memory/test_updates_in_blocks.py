"""Updates in blocks, on PyTorch: bit for bit those of each weight by itself."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops
from oracle import Run, few

import kmp
from kmp._backend import backend
from kmp.half_memory.rounding import keys_of, random_bits, random_bits_of

pytestmark = pytest.mark.gpu

# In parts: the kernel, with groups of rows, and the embeddings, with groups of columns. The others
# are joined.
SHAPES = {
    "kernel": (96, 48),
    "bias": (3,),
    "embeddings": (70, 64),
    "gamma": (5,),
    "cube": (2, 3, 4),
}
STEPS = 3
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=3.0),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "lion": lambda: keras.optimizers.Lion(0.01, weight_decay=0.1, use_ema=True),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "lamb": lambda: keras.optimizers.Lamb(0.01),  # by itself: its norms are of whole weights
}
MEMORY = [
    {},
    {"rounding": "nearest"},
    {"master_weights": True},
    {"slot_dtype": "int8"},
    {"master_weights": 24, "slot_dtype": "int8"},
    {"slot_dtype": "float32"},
]


def state_after(optimizer, memory):
    random = np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=s).astype(ml_dtypes.bfloat16), dtype="bfloat16", name=n)
        for n, s in SHAPES.items()
    ]
    if optimizer.weight_decay:
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    run = Run(kmp.scaled(optimizer, "none", **memory), "eager", variables)
    for _ in range(STEPS):
        run.step([random.normal(size=shape).astype("float32") for shape in SHAPES.values()])
    return run.state()


@pytest.mark.only("torch")
@pytest.mark.parametrize("memory", few(MEMORY, {}, MEMORY[4]), ids=str)
@pytest.mark.parametrize("name", few(OPTIMIZERS, "adamw", "nadam"))
def test_the_numbers_are_those_of_each_weight_by_itself(name, memory, monkeypatch):
    monkeypatch.setattr(backend, "block_size", lambda: None)
    alone = state_after(OPTIMIZERS[name](), memory)
    monkeypatch.setattr(backend, "block_size", lambda: 1000)
    in_blocks = state_after(OPTIMIZERS[name](), memory)
    for (path, a), b in zip(in_blocks.items(), alone.values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.only("torch")
def test_a_block_has_no_more_than_it_should(monkeypatch):
    """Large weights are taken in parts, which groups are not cut by, and small ones together."""
    monkeypatch.setattr(backend, "block_size", lambda: 1000)
    seen = []
    read = type(backend).read_rows

    def noted(self, parts):
        seen.append([(tuple(x.shape), rows.start, rows.stop) for x, rows in parts])
        return read(self, parts)

    monkeypatch.setattr(type(backend), "read_rows", noted)
    state_after(keras.optimizers.SGD(0.1, momentum=0.9), {"slot_dtype": "int8"})
    kernel = [parts[0][1:] for parts in seen if parts[0][0] == SHAPES["kernel"]]
    assert set(kernel) == {(0, 32), (32, 64), (64, 96)}
    joined = max(seen, key=len)
    assert [shape for shape, *_ in joined] == [SHAPES["bias"], SHAPES["gamma"], SHAPES["cube"]]


def test_parts_of_random_numbers_are_those_of_the_whole():
    seed, step = ops.convert_to_tensor(3), ops.convert_to_tensor(5)
    whole = [ops.convert_to_numpy(random_bits((6, 4), seed, step, n)).ravel() for n in (1, 7)]
    draws = [(1, 8, 12), (7, 0, 24), (7, 20, 4)]
    found = ops.convert_to_numpy(random_bits_of(draws, keys_of(seed, step)))
    expected = [whole[0][8:20], whole[1], whole[1][20:]]
    np.testing.assert_array_equal(found, np.concatenate(expected))
    alone = ops.convert_to_numpy(random_bits_of(draws[:1], keys_of(seed, step)))
    np.testing.assert_array_equal(alone, expected[0])
