"""Models without blocks are cut into segments, and train as they do without recomputation."""

import keras
import numpy as np
import pytest
from flat_models import ROWS, batches, masked, mobile, residual, stack, transfer
from keras import layers
from oracle import BACKEND, number
from recomputed_models import assert_same, loss, state
from test_recomputed_bytes import kept_on_torch

import kmp
from kmp._keras.blocks import recomputed_in

flat = pytest.mark.any_backend
EAGER = pytest.param("eager", marks=pytest.mark.wide)
MODES = {"tensorflow": ["graph", EAGER], "jax": ["jit"], "torch": ["eager"]}[BACKEND]
# XLA compiles two other programs, and rounds in other places.
TOLERANCES = {"float32": 1e-6, "mixed_float16": 1e-4, "mixed_bfloat16": 2e-3}
POLICIES = [pytest.param(x, marks=pytest.mark.wide) for x in ("float32", "mixed_bfloat16")]
MODELS = [residual, *(pytest.param(x, marks=pytest.mark.wide) for x in (stack, masked, transfer))]
MODELS += [pytest.param(mobile, marks=[pytest.mark.wide, pytest.mark.slow])]


def train(make, policy, mode, recomputed):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = make()
    keras.config.set_dtype_policy("float32")
    if recomputed:
        rows = kmp.recompute(model).rows
        assert len(rows) > 1 and isinstance(rows[0], kmp.models.RecomputedSegment)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    if policy == "mixed_float16":
        optimizer = kmp.scaled(optimizer, kmp.DynamicLossScale(2.0**17))
    compiled = {"run_eagerly": mode == "eager", "jit_compile": mode == "jit"}
    model.compile(optimizer, loss(), **compiled)
    x, y = batches(model, 1 if BACKEND == "jax" else 3)
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [*POLICIES, "mixed_float16"])
@pytest.mark.parametrize("make", MODELS)
def test_the_run_is_that_without_it(make, policy, mode):
    """Weights, statistics, seeds, slots, counters, skipped steps and the loss scale."""
    if (mode, policy, make) == ("jit", "mixed_bfloat16", mobile):
        pytest.skip("52 normalizations over 8 images: XLA at another level moves it further")
    plain, model = (train(make, policy, mode, again) for again in (False, True))
    assert_same(state(plain), state(model), TOLERANCES[policy] if mode == "jit" else 0)
    if make is residual:
        assert number(model.get_layer("noted0").calls) == (1 if BACKEND == "jax" else 3)


@flat
def test_segments_follow_each_other_and_leave_the_last_layers():
    model = stack()
    report = kmp.recompute(model)
    names = [layer.name for layer in model.layers]
    first = [names.index(each.first) for each in report.rows]
    last = [names.index(each.path) for each in report.rows]
    assert first == [0, *(i + 1 for i in last[:-1])]
    assert [each.layers for each in report.rows] == [
        j - i + 1 for i, j in zip(first, last, strict=True)
    ]
    assert last[-1] < len(names) - 2
    assert sum(each.parameters for each in report.rows) <= model.count_params()
    assert str(report).splitlines()[0].split()[:3] == ["segment", "up", "to"]


@flat
def test_names_and_a_number_choose_segments():
    model = residual()
    ends = kmp.recompute(model).paths
    assert kmp.recompute(model, segments=ends[:1]).paths == ends[:1]
    assert kmp.recompute(model, segments=("add3", "add1")).paths == ("add1", "add3")
    assert recomputed_in(model)[0].first == "stem"
    assert 1 <= len(kmp.recompute(model, segments=3).rows) <= 2
    assert len(kmp.recompute(model, segments=1000).rows) < 10
    assert kmp.recompute(model, segments=[]).rows == ()


@flat
def test_the_largest_model_in_the_model_is_cut():
    model = transfer()
    ends = kmp.recompute(model).paths
    assert len(ends) > 3 and set(ends) <= {each.name for each in model.layers[1].operations}
    assert kmp.recompute(model, segments=ends).paths == ends
    assert len(kmp.recompute(model, segments=3).rows) == 2


@flat
def test_a_model_whose_blocks_are_a_small_part_is_cut():
    inputs = x = keras.Input((8, 16))
    for i in range(4):
        x = x + layers.MultiHeadAttention(1, 4, name=f"attention{i}")(x, x)
        for _ in range(6):
            x = layers.Dense(16, "gelu")(layers.LayerNormalization()(x))
    rows = kmp.recompute(keras.Model(inputs, x)).rows
    assert isinstance(rows[0], kmp.models.RecomputedSegment)
    inputs = keras.Input((8, 16))
    x = layers.MultiHeadAttention(1, 4)(layers.Dense(16)(inputs), inputs)
    assert kmp.recompute(keras.Model(inputs, x)).rows[0].layer == "MultiHeadAttention"


@flat
def test_blocks_or_segments_whichever_was_chosen_last():
    blocks = [keras.Sequential([layers.Dense(4), layers.Dense(4)], name=f"b{i}") for i in range(9)]
    model = keras.Sequential([keras.Input((4,)), *blocks])
    assert len(kmp.recompute(model).rows) == 9
    assert 0 < len(kmp.recompute(model, segments=4).rows) < 4
    assert not any("call" in vars(block) for block in blocks)
    model.train_function = "compiled"
    kmp.recompute(model, lambda layer, path: layer is blocks[0])
    assert recomputed_in(model) == [blocks[0]] and model.train_function is None
    kmp.recompute(model, segments=4)
    kmp.recompute(model, lambda layer, path: False)
    assert recomputed_in(model) == []


class OwnCall(keras.Model):
    """A graph that is never run."""

    def call(self, inputs):
        return self.layers[-1](inputs)


@flat
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (stack, {"segments": 1}, "whole number of at least 2"),
        (stack, {"segments": True}, "whole number of at least 2"),
        (stack, {"segments": 2.5}, "whole number of at least 2"),
        (stack, {"segments": "relu1"}, "whole number of at least 2"),
        (stack, {"segments": ["relu1", "relu9"]}, r"names of layers.*'relu9'"),
        (masked, {"segments": ["twice"]}, "calls once"),
        (residual, {"segments": ["head"]}, "without the last"),
        (residual, {"segments": 2, "filter_fn": lambda layer, path: True}, "not both"),
    ],
)
def test_bad_segments_are_refused(make, arguments, message):
    model = make()
    kmp.recompute(model, segments=2)
    before = recomputed_in(model)
    with pytest.raises(ValueError, match=message):
        kmp.recompute(model, **arguments)
    assert recomputed_in(model) == before


@flat
def test_a_model_with_a_call_of_its_own_cannot_be_cut():
    inputs = keras.Input((4,))
    model = OwnCall(inputs, layers.Dense(4)(layers.Dense(4)(inputs)))
    with pytest.raises(ValueError, match="calls its layers in code of its own"):
        kmp.recompute(model, segments=2)


@flat
def test_files_copies_and_layers_added_know_nothing_of_it(tmp_path):
    model = stack()
    config = model.get_config()
    kmp.recompute(model)
    assert model.get_config() == config
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert recomputed_in(loaded) == recomputed_in(keras.models.clone_model(model)) == []
    x, _ = batches(model, 1)
    np.testing.assert_array_equal(
        *(np.array(each.predict(x, verbose=0)) for each in (model, loaded))
    )
    assert recomputed_in(model)
    model.add(layers.Dense(2))  # Keras makes another graph
    assert recomputed_in(model) == []


@flat
def test_a_conversion_keeps_segments():
    model = residual()
    ends = kmp.recompute(model).paths
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert tuple(each.last for each in recomputed_in(model)) == ends


def test_the_debugging_tools_see_the_layers_in_segments():
    """In a pure function JAX has tracers, which have no numbers."""
    infinite = layers.Lambda(lambda x: keras.ops.exp(0 * x + 200), name="infinite")
    before, after = ([layers.Dense(4) for _ in range(4)] for _ in range(2))
    model = keras.Sequential([keras.Input((4,)), *before, infinite, *after, layers.Dense(1)])
    model.compile("sgd", "mse")
    kmp.recompute(model, segments=[after[2].name])
    x, y = np.ones((2, 4)), np.ones((2, 1))
    assert f"FORWARD: {infinite.path}" in str(kmp.debug.locate_nonfinite(model, x, y))
    assert before[0].path in str(kmp.debug.compare_precisions(model, x, y))


@flat
def test_graphs_are_called_symbolically_as_before():
    model = residual()
    kmp.recompute(model)
    assert model.compute_output_shape((2, 8, 8, 3)) == (2, 3)  # not the shape that it was made for
    assert model(keras.Input((8, 8, 3))).shape == (None, 3)


@pytest.mark.only("torch")
def test_segments_keep_what_they_hand_on():
    """By hand: 64 numbers a layer and row, in nine layers; kept are three and the last three."""
    stack = [layers.Dense(64, "tanh", name=f"dense{i}") for i in range(9)]
    model = keras.Sequential([keras.Input((64,)), *stack])
    x = np.ones((32, 64), "float32")
    without = kept_on_torch(model, x)
    kmp.recompute(model, segments=["dense2", "dense5"])
    assert kept_on_torch(model, x) == without * 6 // 10  # the input, two and three


@pytest.mark.only("torch")
def test_a_model_of_keras_applications_keeps_a_third():
    model = keras.applications.MobileNetV2(weights=None, classes=10, input_shape=(96, 96, 3))
    x = np.ones((2, 96, 96, 3), "float32")
    without = kept_on_torch(model, x)
    kmp.recompute(model)
    assert kept_on_torch(model, x) < without / 3
