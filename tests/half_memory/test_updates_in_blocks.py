"""Updates in blocks, on PyTorch: bit for bit those of each weight by itself."""

import contextlib
import functools
import gc
import shutil

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops
from oracle import Run, few

import kmp
from kmp._backend import backend
from kmp.half_memory.blocks import Block
from kmp.half_memory.rounding import bits_from, key_of, random_bits, starts_of

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
    "schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.0, 3, warmup_target=0.01, warmup_steps=2),
        weight_decay=3.0,
    ),
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
# Of weights in float32.
FULL = [{"slot_dtype": "bfloat16"}, {"slot_dtype": "int8"}]
CASES = [(each, "bfloat16") for each in MEMORY] + [(each, "float32") for each in FULL]


def noted_compilations(monkeypatch):
    """A list that gets the inputs of each block that is compiled."""
    compiled, noted = type(backend).compiled_block, []

    def note(self, function, inputs):
        program = compiled(self, function, inputs)
        noted.extend([] if program is None else [inputs])
        return program

    monkeypatch.setattr(type(backend), "compiled_block", note)
    return noted


@contextlib.contextmanager
def compiling(monkeypatch):
    """Within, blocks are traced as in a compiled model, and run operation by operation."""
    import torch

    from kmp._backend import torch as ours

    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
    token = ours._compiles.set(True)
    try:
        yield
    finally:
        ours._compiles.reset(token)


def state_after(optimizer, memory, dtype="bfloat16", settings=({},)):
    """Of the optimizer, after some steps, each of which begins with the next settings."""
    random = np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=s).astype(ml_dtypes.bfloat16), dtype=dtype, name=n)
        for n, s in SHAPES.items()
    ]
    if optimizer.weight_decay:
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    run = Run(kmp.scaled(optimizer, "none", **memory), "eager", variables)
    for step in range(max(STEPS, len(settings))):
        for name, value in (settings[step] if step < len(settings) else {}).items():
            setattr(optimizer, name, value)
        run.step([random.normal(size=shape).astype("float32") for shape in SHAPES.values()])
    return run.state()


@pytest.mark.only("torch")
@pytest.mark.parametrize("case", few(CASES, CASES[0], CASES[4], CASES[7]), ids=str)
@pytest.mark.parametrize("name", few(OPTIMIZERS, "adamw", "nadam", "schedule"))
def test_the_numbers_are_those_of_each_weight_by_itself(name, case, monkeypatch):
    monkeypatch.setattr(backend, "block_sizes", lambda: None)
    alone = state_after(OPTIMIZERS[name](), *case)
    monkeypatch.setattr(backend, "block_sizes", lambda: (1000, 1000))
    in_blocks = state_after(OPTIMIZERS[name](), *case)
    for (path, a), b in zip(in_blocks.items(), alone.values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.only("torch")
@pytest.mark.parametrize("case", few(CASES, CASES[0], CASES[4], CASES[7]), ids=str)
@pytest.mark.parametrize("name", few(OPTIMIZERS, "adamw", "nadam", "schedule"))
def test_the_numbers_are_those_of_compiled_blocks(name, case, monkeypatch):
    """Of the graphs that are compiled, run operation by operation."""
    monkeypatch.setattr(backend, "block_sizes", lambda: (1000, 1000))
    plain = state_after(OPTIMIZERS[name](), *case)
    kinds = noted_compilations(monkeypatch)
    with compiling(monkeypatch):
        compiled = state_after(OPTIMIZERS[name](), *case)
    assert kinds or name == "lamb"
    for (path, a), b in zip(compiled.items(), plain.values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.only("torch")
@pytest.mark.parametrize("setting", ["weight_decay", "momentum", "nesterov"])
def test_a_setting_that_is_assigned_between_steps_is_that_of_the_next_one(setting, monkeypatch):
    """However often it is: of more settings than programs are made for, too."""
    values = [True] * STEPS if setting == "nesterov" else [i / 10 for i in range(11)]
    settings = [{}, *({setting: value} for value in values)]

    def optimizer():
        return keras.optimizers.SGD(0.1, momentum=0.5, weight_decay=0.1)

    monkeypatch.setattr(backend, "block_sizes", lambda: (1000, 1000))
    plain = state_after(optimizer(), {}, settings=settings)
    compiled = noted_compilations(monkeypatch)
    with compiling(monkeypatch):
        found = state_after(optimizer(), {}, settings=settings)
    kinds = {len(inputs[0]) for inputs in compiled}
    assert len(compiled) == len(kinds) * (2 if setting == "nesterov" else 8)
    for (path, a), b in zip(found.items(), plain.values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.only("torch")
def test_a_program_takes_gradients_and_rates_of_other_dtypes(monkeypatch):
    """A loop of the user's own may have a float32 gradient first, and half ones after it."""
    rates = [np.float32(0.01), np.float64(0.02), 1]

    def state(dtypes):
        variable = keras.Variable(np.linspace(-1, 1, 4096, dtype="float32").reshape(64, 64))
        inner = keras.optimizers.AdamW(lambda: rates[len(done)], weight_decay=0.1)
        done, optimizer = [], kmp.scaled(inner, "none", slot_dtype="int8")
        for dtype in dtypes:
            optimizer.apply([ops.cast(ops.sin(variable * 7), dtype)], [variable])
            done.append(dtype)
        return [ops.convert_to_numpy(ops.cast(v, "float32")) for v in (variable, *inner.variables)]

    dtypes = ["float32", "bfloat16", "float64"]
    plain = state(dtypes)
    with compiling(monkeypatch):
        compiled = state(dtypes)
    for a, b in zip(compiled, plain, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.only("torch")
def test_weight_decay_that_comes_later_spares_what_is_excluded(monkeypatch):
    """Though all of one kind were joined while there was none."""
    found = []
    for sizes in (None, (1000, 1000)):
        monkeypatch.setattr(backend, "block_sizes", lambda sizes=sizes: sizes)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        found.append(state_after(optimizer, {}, settings=[{}, {"weight_decay": 3.0}]))
    for (path, a), b in zip(found[0].items(), found[1].values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.only("torch")
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here, which torch.compile needs")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own functions
def test_a_compiled_model_updates_weights_of_any_length_by_one_program(monkeypatch):
    compiled = noted_compilations(monkeypatch)

    def weights_of(jit_compile):
        keras.utils.set_random_seed(0)
        sizes = (160, 144, 136)  # too large to be joined, each another length
        hidden = [keras.layers.Dense(n, "tanh", dtype="bfloat16") for n in sizes]
        model = keras.Sequential([keras.Input((128,)), *hidden])
        model.compile(kmp.scaled("adam", "none"), "mse", jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(64, 128)).astype("float32")
        model.fit(x, np.tile(x, 2)[:, : sizes[-1]], batch_size=32, shuffle=False, verbose=0)
        return [ops.convert_to_numpy(ops.cast(v, "float32")) for v in model.trainable_variables]

    plain, programs = weights_of(False), weights_of(True)
    assert [inputs[0].ndim for inputs in compiled] == [1, 1]  # kernels; biases, joined
    for a, b in zip(programs, plain, strict=True):
        # Adam's first steps are 0.001 each; the compiled model rounds its gradients elsewhere.
        np.testing.assert_allclose(a, b, rtol=2.0**-6, atol=3e-3)


@pytest.mark.only("torch")
def test_steps_of_ever_other_weights_do_not_pile_up_blocks(monkeypatch):
    """As where an expert that no token was sent to has no gradient."""
    monkeypatch.setattr(backend, "block_sizes", lambda: (1000, 1000))
    weights = [keras.Variable(np.ones(4), dtype="bfloat16", name=f"w{i}") for i in range(10)]
    optimizer = kmp.scaled(keras.optimizers.SGD(0.5), "none")
    optimizer.build(weights)
    for i in range(30):
        chosen = [w for j, w in enumerate(weights) if (i + 1) >> j % 5 & 1]
        optimizer.apply([ops.ones(4, "bfloat16") for _ in chosen], chosen)
    blocks = [each for each in gc.get_objects() if type(each) is Block]
    assert 0 < sum(any(each.view.variable is w for w in weights) for each in blocks) <= 8
    steps = sum((i + 1) & 1 for i in range(30))
    np.testing.assert_array_equal(ops.convert_to_numpy(weights[0]), np.full(4, 1 - steps / 2))


@pytest.mark.only("torch")
def test_a_block_has_no_more_than_it_should(monkeypatch):
    """Large weights are taken in parts, which groups are not cut by, and small ones together."""
    monkeypatch.setattr(backend, "block_sizes", lambda: (1000, 1000))
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
    key = key_of(seed, step)
    found = ops.convert_to_numpy(bits_from(starts_of(draws, key), 40))
    expected = [whole[0][8:20], whole[1], whole[1][20:]]
    np.testing.assert_array_equal(found, np.concatenate(expected))
    alone = ops.convert_to_numpy(bits_from(starts_of(draws[:1], key), 12))
    np.testing.assert_array_equal(alone, expected[0])
