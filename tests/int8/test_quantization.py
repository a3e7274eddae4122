"""quantize_aware and to_int8 on whole models: what is converted, kept and refused."""

import gc

import keras
import numpy as np
import pytest
from keras import layers
from older import needs
from quantized_models import (
    IMAGES,
    TARGETS,
    Subclassed,
    assert_equal,
    fit,
    functional,
    one_dense,
    optimizer,
    prepared,
    value,
    values,
)

import kmp
from kmp._keras import layers_of
from kmp.int8.fake_quantization import FakeQuantized
from kmp.int8.range_quantizer import RangeQuantizer

pytestmark = pytest.mark.slow


@needs("quantization_config")
def test_the_projections_of_attention_are_quantized():
    inputs = keras.Input((4, 8))
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    model = keras.Model(inputs, attention(inputs, inputs))
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    report = kmp.quantize_aware(model)
    names = {path.split("/")[-1] for path in report.converted}
    assert names == {"query", "key", "value", "attention_output"}
    x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
    model.compile(optimizer(), "mse")
    model.fit(x, x, verbose=0)
    assert all(value(layer.observed_batches) == 1 for layer in prepared(model))
    kmp.to_mixed_precision(model, "float32")
    expected = value(model(x))
    kmp.to_int8(model)
    projections = [x for x in layers_of(model) if isinstance(x, layers.EinsumDense)]
    assert {type(x) for x in projections} == {layers.EinsumDense}
    assert {x.kernel.dtype for x in projections} == {"int8"}
    # A sum that is rounded otherwise may take an input to the neighbouring integer.
    np.testing.assert_allclose(
        value(model(x)), expected, rtol=0, atol=2 * np.abs(expected).max() / 127
    )


def test_keras_still_takes_no_ellipsis_in_int8():
    """So `quantize_aware` leaves such a layer alone."""
    model = keras.Sequential([keras.Input((6,)), layers.EinsumDense("...a,ab->...b", 4)])
    refuses(model, r"Keras's int8 takes no \.\.\. in an equation")
    with pytest.raises(TypeError):
        model.layers[0].quantize("int8")


@needs("quantization_config")
def test_int8_dense_layers_are_keras_own():
    model, layer = one_dense()
    fit(model, [1.0, 2.0, 3.0])
    kmp.to_int8(model)
    assert type(layer) is layers.Dense
    assert layer.quantization_mode == "int8"
    assert isinstance(layer.inputs_quantizer, RangeQuantizer)
    assert layer.inputs_quantizer.max_abs == 3.0


@needs("quantization_config")
def test_no_garbage_is_collected_for_each_layer(monkeypatch):
    """A collection takes a tenth of a second, and more where much has been traced."""
    model, _ = one_dense()
    fit(model, 1.0)
    collections = []
    monkeypatch.setattr(gc, "collect", lambda *_: collections.append(1) or 0)
    kmp.to_int8(model)
    assert collections == []


def test_conversion_keeps_variables_and_the_state_of_the_optimizer():
    model = functional()
    model.compile(optimizer(), "mse")
    model.fit(IMAGES, TARGETS, verbose=0)
    weights = [id(v) for v in model.trainable_variables]
    before = values([*model.trainable_variables, *model.optimizer.variables])
    report = kmp.quantize_aware(model)
    assert [id(v) for v in model.trainable_variables] == weights
    assert_equal(values([*model.trainable_variables, *model.optimizer.variables]), before)
    assert {path.split("/")[-1] for path in report.converted} == {*("conv1", "conv2", "head")}
    assert list(report.kept.values()) == ["no Dense, EinsumDense, Conv1D, Conv2D, Conv3D"]
    model.fit(IMAGES, TARGETS, verbose=0)
    assert all((value(layer.observed_batches) == 1).all() for layer in prepared(model))
    assert int(model.optimizer.iterations) == 2


def test_what_filter_fn_excludes_stays_with_all_that_is_inside():
    model = functional()
    report = kmp.quantize_aware(
        model, filter_fn=lambda layer, path: layer.name not in ("inner", "head")
    )
    assert {layer.name for layer in prepared(model)} == {"conv2"}
    assert sorted(report.kept.values())[:2] == ["excluded by filter_fn"] * 2
    report = kmp.quantize_aware(model)
    assert {path.split("/")[-1] for path in report.converted} == {"conv1", "head"}
    assert "prepared already" in report.kept.values()


def refuses(model, message, error=ValueError, **settings):
    before = [type(layer) for layer in layers_of(model)] if hasattr(model, "layers") else 0
    with pytest.raises(error, match=message):
        kmp.quantize_aware(model, **settings)
    if before:
        assert [type(layer) for layer in layers_of(model)] == before


@pytest.mark.quick
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"weight_bits": 1}, "`weight_bits` .* from 2 to 8. Received: weight_bits=1"),
        ({"activation_bits": 16}, "`activation_bits` .* from 2 to 8"),
        ({"weight_bits": 4.5}, "`weight_bits` .* whole number"),
        ({"momentum": 1.0}, "`momentum` .* at least 0 and below 1"),
        ({"freeze_after": 0}, "`freeze_after` .* whole number of steps"),
        ({"filter_fn": lambda layer, path: False}, "nothing to quantize .*excluded by filter_fn"),
    ],
    ids=["weight_bits", "activation_bits", "fraction", "momentum", "freeze_after", "filter_fn"],
)
def test_bad_settings_change_nothing(settings, message):
    refuses(functional(), message, **settings)


def test_models_that_cannot_be_prepared_are_refused():
    refuses(layers.Dense(2), "must be a keras.Model", TypeError)
    refuses(keras.Sequential([layers.Dense(2)]), "must be built")
    half = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype="float16")])
    refuses(half, "weights in float16: first write kmp.to_mixed_precision")
    quiet = Subclassed(hands_on_training=False)
    quiet(IMAGES)
    refuses(quiet, "Layers must be told that they train")


@pytest.mark.quick
@needs("quantization_config")
def test_to_int8_refuses_what_has_learned_no_range():
    model, layer = one_dense()
    with pytest.raises(ValueError, match="have seen no training batch"):
        kmp.to_int8(model)
    assert isinstance(layer, FakeQuantized)
    for function in (kmp.to_int8, kmp.freeze_observers):
        with pytest.raises(ValueError, match=r"kmp\.quantize_aware has prepared"):
            function(functional())


@needs("quantization_config")
def test_to_int8_says_what_to_do_about_frozen_layers():
    """A frozen layer learns no range, and advice to train would not help."""
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(3, trainable=False, name="teacher"), layers.Dense(2)]
    )
    kmp.quantize_aware(model)
    model(np.ones((2, 3)), training=True)
    with pytest.raises(ValueError, match=r"'.*teacher' is frozen.*filter_fn"):
        kmp.to_int8(model)


def test_a_range_quantizer_refuses_what_is_no_range():
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        RangeQuantizer(float("inf"))
