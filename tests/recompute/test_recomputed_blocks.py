"""Which layers are computed again, how that is undone, and what does not change by it."""

import keras
import numpy as np
import pytest
from keras import layers
from recomputed_models import build_model, data

import kmp
from kmp._keras import layers_of
from kmp._keras.blocks import is_recomputed

flat = pytest.mark.any_backend


def recomputed(model):
    return [layer.name for layer in layers_of(model) if is_recomputed(layer)]


def nested():
    """A backbone of two blocks and an attention in a model, with a dense layer before it."""
    blocks = [
        keras.Sequential([layers.Dense(4), layers.Dense(4)], name=f"block{i}") for i in range(2)
    ]
    attention = layers.MultiHeadAttention(1, 2, name="attention")
    inputs = keras.Input((3, 4))
    x = blocks[1](blocks[0](inputs))
    backbone = keras.Model(inputs, attention(x, x), name="backbone")
    return keras.Sequential([keras.Input((3, 4)), layers.Dense(4, name="dense"), backbone])


@flat
def test_blocks_are_the_outermost_layers_with_layers_inside():
    model = nested()
    report = kmp.recompute(model)
    assert set(recomputed(model)) == {"block0", "block1", "attention"}
    assert [row.layers for row in report.rows if row.layer == "Sequential"] == [2, 2]
    assert [row.parameters for row in report.rows if row.layer == "Sequential"] == [40, 40]
    assert len(str(report).splitlines()) == 4


@flat
def test_filter_fn_chooses_from_the_outside_in():
    model, asked = nested(), []
    kmp.recompute(model, lambda layer, path: asked.append(layer.name) or layer.name == "backbone")
    assert recomputed(model) == ["backbone"]
    assert asked == ["dense", "backbone"]


@flat
def test_the_last_call_decides():
    model = nested()
    kmp.recompute(model)
    model.train_function = "compiled"
    assert str(kmp.recompute(model, lambda layer, path: layer.name == "block0")).count("block0")
    assert recomputed(model) == ["block0"] and model.train_function is None
    assert str(kmp.recompute(model, lambda layer, path: False)) == "no block is computed again"
    assert recomputed(model) == []
    assert not any("call" in vars(layer) for layer in layers_of(model))


@flat
def test_a_call_of_the_users_own_is_put_back():
    model = nested()
    dense = model.get_layer("dense")
    mine = dense.call = lambda inputs: inputs * 0 + 7
    kmp.recompute(model, lambda layer, path: layer is dense)
    assert np.all(keras.ops.convert_to_numpy(dense(np.ones((1, 3, 4)))) == 7)
    kmp.recompute(model, lambda layer, path: False)
    assert dense.call is mine


@flat
@pytest.mark.parametrize(
    "model, filter_fn, error, message",
    [
        (lambda: layers.Dense(1), None, TypeError, "must be a keras.Model"),
        (lambda: keras.Sequential([layers.Dense(1)]), None, ValueError, "must be built"),
        (nested, "block", TypeError, "must be a function of a layer and its path"),
        (
            lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1)]),
            None,
            ValueError,
            "must have blocks.*long enough to be cut.*neither. Choose layers by filter_fn",
        ),
    ],
)
def test_bad_input_is_refused(model, filter_fn, error, message):
    model = model()
    with pytest.raises(error, match=message):
        kmp.recompute(model, filter_fn)


@flat
def test_what_is_refused_leaves_the_choice_as_it_was():
    model = nested()
    kmp.recompute(model)
    with pytest.raises(ZeroDivisionError):
        kmp.recompute(model, lambda layer, path: 1 / 0)
    assert len(recomputed(model)) == 3


@flat
def test_files_and_copies_are_those_of_a_model_without_it(tmp_path):
    model = build_model()
    config, words = model.get_config(), data()[0][:4]
    kmp.recompute(model)
    assert model.get_config() == config
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert recomputed(loaded) == recomputed(keras.models.clone_model(model)) == []
    outputs = [np.array(each(words)) for each in (model, loaded)]
    np.testing.assert_array_equal(*outputs)


@flat
def test_a_conversion_keeps_it():
    """`to_mixed_precision` overrides `call` for a moment, of models that are no graphs."""

    class Part(keras.Model):
        def __init__(self):
            super().__init__(name="part")
            self.dense = layers.Dense(4)

        def build(self, shape):
            self.dense.build(shape)
            super().build(shape)

        def call(self, x):
            return self.dense(x)

    model = keras.Sequential([keras.Input((4,)), Part(), layers.Dense(1)])
    kmp.recompute(model)
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    kmp.to_mixed_precision(model.get_layer("part"), "mixed_float16")
    assert recomputed(model) == ["part"]


def test_the_debugging_tools_see_the_layers_inside():
    """In a pure function JAX has tracers, which have no numbers."""
    dense = layers.Dense(4)
    infinite = layers.Lambda(lambda x: keras.ops.exp(0 * x + 200), name="infinite")
    block = keras.Sequential([dense, infinite], name="block")
    model = keras.Sequential([keras.Input((4,)), block, layers.Dense(1)])
    model.compile("sgd", "mse")
    kmp.recompute(model)
    x, y = np.ones((2, 4)), np.ones((2, 1))
    assert f"FORWARD: {infinite.path}" in str(kmp.debug.locate_nonfinite(model, x, y))
    assert dense.path in str(kmp.debug.compare_precisions(model, x, y))
