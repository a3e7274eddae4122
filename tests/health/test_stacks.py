"""Gradients reduced together give the numbers of each of them alone, on every path of the step."""

import functools
import re
import sys

import keras
import numpy as np
import pytest
from keras import ops
from oracle import COMPILED_MODES, MODES, Run, compilations, compiled, few

import kmp
from kmp._backend import backend
from kmp.health import measure as health
from kmp.health.measure import group_gradients

SHAPES = [
    *[(3,), (70, 70), (3,), (2, 2), (70, 70), (4,)],  # two of a size, two of a shape, one alone
    *[
        (3, 3, 16, 32),
        (32, 9, 5, 32),
        (3, 3, 32, 16),
        (17, 256),
        (0, 4),
        (),
    ],  # with 32 channels, 16
    *[(5,)] * 70,  # more than XLA fuses into one kernel
]
SIZES = [int(np.prod(shape)) for shape in SHAPES]


def gradients():
    """Integers, so that every order of adding gives the same sum; some numbers are not finite."""
    random = np.random.default_rng(0)
    values = [random.integers(-3, 4, shape).astype("float32") for shape in SHAPES]
    values[1][2, 3], values[6][1, 2, 3, 4], values[21][0] = np.inf, np.nan, -np.inf
    return values


@pytest.mark.parametrize("mode", COMPILED_MODES or MODES)
@pytest.mark.parametrize("together", few([False, True], True))
def test_each_gradient_keeps_its_row(mode, together):
    def measure(present):
        present = [present[0], None, *present[1:]]
        sizes = [SIZES[0], 7, *SIZES[1:]]
        groups = group_gradients(present, sizes, [None] * 10 + ["another kind"] * (len(sizes) - 10))
        found = health.find_nonfinite(groups, len(sizes), together=together)
        return health.measure(groups, sizes, together=together), found

    values = gradients()
    levels, found = compiled(measure, mode)([ops.convert_to_tensor(v) for v in values])
    levels, found = ops.convert_to_numpy(levels), ops.convert_to_numpy(found)
    np.testing.assert_array_equal(levels[1], 0)
    rows = np.delete(levels, 1, axis=0)
    np.testing.assert_array_equal(np.delete(found, 1) > 0, rows[:, health.NONFINITE] > 0)
    for row, value in zip(rows, values, strict=True):
        finite = value[np.isfinite(value)].astype("float64")
        zeros = (value == 0).mean() if value.size else 0
        # A square root of an integer that float32 holds; the rest is exact.
        np.testing.assert_allclose(row[0], np.sqrt((finite**2).sum()), rtol=2e-7)
        # TensorFlow multiplies by the reciprocal of a constant size.
        np.testing.assert_allclose(row[2], zeros, rtol=2e-7)
        expected = [np.abs(finite).max(initial=0), value.size - finite.size]
        np.testing.assert_array_equal(row[[1, 3]], expected)


@pytest.mark.wide
@pytest.mark.only("tensorflow", "jax")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode in ("xla", "jit")])
def test_the_step_of_an_accelerator_is_that_of_a_cpu(mode, monkeypatch):
    """The other path, which no machine without an accelerator would take, in its numbers."""

    random = np.random.default_rng(1)
    shapes = [(3,), (70, 70), (70, 70), (3, 3, 16, 32)]
    # The sums of squares are of integers below 2**24: exact in any order.
    gradients = [random.integers(1, 4, shape).astype("float32") for shape in shapes]

    def train(details):
        weights = [keras.Variable(np.ones(shape, "float32")) for shape in shapes]
        run = Run(kmp.scaled(keras.optimizers.Adam(0.125), 1024.0), mode, weights)
        run.optimizer.steps.assign(200)  # past those that are all measured
        run.optimizer.sample_gradients(2, details=details)
        for factor in (np.inf, 1.0, 2.0):  # measured, measured, not
            run.step([factor * g for g in gradients])
        return [ops.convert_to_numpy(v) for v in [*weights, *run.optimizer.variables]]

    for details in (False, True):
        expected = train(details)
        for device in ("gpu", "tpu"):
            with monkeypatch.context() as patch:
                patch.setattr(backend, "per_target", lambda f, shapes, *x, d=device: f(d, *x))
                found = train(details)
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.only("jax")
def test_neither_masks_nor_true_gradients_are_written():
    """The compiled step writes what plain Adam's does: the gradient, two slots and the kernel."""
    import jax

    def arrays_written(optimizer):
        kernel = keras.Variable(np.ones((512, 512), "float32"))
        optimizer.build([kernel])

        def step(state, kernel, x):
            if isinstance(optimizer, kmp.LossScaleOptimizer):
                x = x * optimizer.stateless_scale_loss(state, 1.0)
            gradient = jax.grad(lambda k: ((x @ k) ** 2).sum())(kernel)
            return optimizer.stateless_apply(state, [gradient], [kernel])

        state = [v.value for v in optimizer.variables]
        arguments = (state, kernel.value, np.ones((8, 512), "float32"))
        step = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
        entry = step.as_text().split("\nENTRY ")[1]
        return re.findall(r"= \w+\[(?:1,)?512,512\]\S* (fusion|dot|reduce-window)\(", entry)

    adam = keras.optimizers.Adam
    plain = arrays_written(adam())
    assert sorted(plain) == ["dot", "fusion", "fusion", "fusion"]
    for measures in (False, True):
        ours = arrays_written(kmp.LossScaleOptimizer(adam(), measure_gradients=measures))
        assert sorted(ours) == sorted(plain)


@pytest.mark.only("jax")
def test_an_eager_step_compiles_nothing_that_an_earlier_one_did():
    import jax

    run = Run(kmp.scaled("adam"))
    good, bad = [np.ones((4, 3)), np.ones(3)], [np.full((4, 3), np.nan), np.ones(3)]
    for gradients in (good, bad):
        run.step(gradients)
    with compilations() as heard:
        for gradients in (good, bad):
            run.step(gradients)
        assert not heard
        jax.jit(lambda x: x + 1)(1.0)
        assert heard  # a new function is


@pytest.mark.only("jax")
def test_an_eager_step_compiles_few_programs():
    """However many variables of a shape there are."""
    import jax

    def programs(optimizer):
        jax.clear_caches()
        variables = [keras.Variable(np.ones(shape)) for shape in [(16, 16), (16,)] * 70]
        optimizer.build(variables)
        if isinstance(optimizer, kmp.LossScaleOptimizer):
            optimizer.scale_loss(1.0)
        with compilations() as heard:
            optimizer.apply([jax.numpy.ones(v.shape) for v in variables], variables)
        return len(heard)

    adam = keras.optimizers.Adam
    plain = programs(adam())
    assert programs(kmp.LossScaleOptimizer(adam(), measure_gradients=False)) <= plain + 15
    assert programs(kmp.LossScaleOptimizer(adam())) <= plain + 20


@pytest.mark.only("torch")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("path", ["_extremes_are_finite", "_norms_are_finite"])  # CPUs', GPUs'
def test_a_number_that_is_not_finite_is_found_wherever_it_stands(path, dtype):
    """Vectorised loops have heads, tails and threads' borders."""
    import torch

    from kmp._backend import torch as ours

    find, dtype = getattr(ours, path), getattr(torch, dtype)
    largest = torch.finfo(dtype).max
    for size in (1, 2, 17, 64, 127, 4097, 70001):
        good = torch.linspace(-1, 1, size, dtype=torch.float64).to(dtype) * largest
        for bad in (np.nan, np.inf, -np.inf):
            for place in {0, size // 2, size - 1}:
                poisoned = good.clone()
                poisoned[place] = bad
                rows = torch.stack([good, poisoned, good])
                found = find([good, poisoned, good[None], rows])
                assert found.tolist() == [True, False, True, False]
    other = torch.tensor([1e300], dtype=torch.float64)  # beside one that is wider
    assert find([good, other]).tolist() == [True, True]


@pytest.mark.only("torch")
@pytest.mark.parametrize("measures", [False, True])
def test_a_step_takes_no_more_operators_for_more_variables(measures, monkeypatch):
    """Beside those of the inner optimizer, on a GPU; a view of a tensor is none that runs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from kmp._backend import torch as ours

    # On a CPU it takes one for each variable, which is quicker than a stack of them.
    monkeypatch.setattr(ours, "_extremes_are_finite", ours._norms_are_finite)

    class Counter(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += not function.is_view
            return function(*args, **(kwargs or {}))

    def operators(optimizer, number):
        variables = [keras.Variable(np.ones((8, 8), "float32")) for _ in range(number)]
        run = Run(optimizer, variables=variables)
        gradients = [torch.ones(8, 8) for _ in variables]
        if isinstance(optimizer, kmp.LossScaleOptimizer):
            optimizer.scale_loss(0.0)
            optimizer.apply(gradients, run.variables)
            optimizer.steps.assign(200)  # past those that are all measured
        with Counter() as counter:
            optimizer.apply(gradients, run.variables)
        return counter.number

    def added(number):
        adam = keras.optimizers.Adam
        ours = kmp.LossScaleOptimizer(adam(), measure_gradients=measures)
        return operators(ours, number) - operators(adam(), number)

    assert added(60) == added(6)


@pytest.mark.only("torch")
@pytest.mark.parametrize("measures", [False, True])
def test_a_step_calls_no_more_functions_than_with_kerass_optimizer(measures):
    """Python's and torch's, of which a step of small tensors consists."""
    import torch

    def called(make):
        optimizer = make(keras.optimizers.Adam())
        run = Run(optimizer, variables=[keras.Variable(np.ones((8, 8))) for _ in range(6)])
        gradients = [torch.ones(8, 8) for _ in run.variables]
        if isinstance(optimizer, kmp.LossScaleOptimizer):
            optimizer.scale_loss(0.0)
            optimizer.apply(gradients, run.variables)
            optimizer.steps.assign(200)  # past those that are all measured
        events = []
        for _ in range(2):  # the first one fills caches
            events.clear()
            sys.setprofile(lambda frame, event, argument: events.append(event))
            try:
                optimizer.scale_loss(torch.ones(()))
                optimizer.apply(gradients, run.variables)
            finally:
                sys.setprofile(None)
        return events.count("call") + events.count("c_call")

    ours = functools.partial(kmp.LossScaleOptimizer, measure_gradients=measures)
    assert called(ours) <= called(keras.optimizers.LossScaleOptimizer)


@pytest.mark.only("tensorflow")
def test_a_masked_assignment_is_masked_once():
    import tensorflow as tf

    from kmp._backend.tensorflow.updates import masked

    variable = keras.Variable(np.ones(3, "float32"))

    @tf.function
    def change(flag):
        with masked(flag, [variable]):
            variable.value.assign_add([1.0, 2.0, 3.0])

    graph = change.get_concrete_function(tf.TensorSpec((), tf.bool)).graph
    kinds = [node.op for node in graph.as_graph_def().node]
    assert kinds.count("SelectV2") == kinds.count("ReadVariableOp") == 1


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_masked_assignments_keep_or_are_the_assignments(mode):
    import tensorflow as tf

    from kmp._backend.tensorflow.updates import masked

    def change_if(variables, change, flag):
        with masked(flag, variables):
            change(variables[0].value)

    slices = tf.IndexedSlices(tf.constant([2.0, 3.0, 5.0]), tf.constant([0, 2, 2]))
    start = np.float32([-0.0, 0.0, 1.5])
    changes = {
        "assign": lambda v: v.assign([1.0, 2.0, 3.0]),
        "assign_add": lambda v: v.assign_add([1.0, 2.0, np.nan]),
        "assign_sub": lambda v: v.assign_sub([1.0, 2.0, np.inf]),
        "scatter_add": lambda v: v.scatter_add(slices),
        "scatter_sub": lambda v: v.scatter_sub(slices),
        "scatter_update": lambda v: v.scatter_update(
            tf.IndexedSlices(tf.constant([4.0]), tf.constant([1]))
        ),
    }
    for name, change in changes.items():
        for keep in (True, False):
            variable, plain = keras.Variable(start), keras.Variable(start)
            change_masked = functools.partial(change_if, [variable], change)
            compiled(change_masked, mode)(tf.constant(keep))
            change(plain.value)
            expected = ops.convert_to_numpy(plain) if keep else start
            found = ops.convert_to_numpy(variable)
            assert found.tobytes() == expected.tobytes(), name
            assert "assign" not in vars(variable.value), name
