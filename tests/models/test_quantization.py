"""quantize_aware, freeze_observers, to_int8: the rounding in training is that of inference."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import processes
import pytest
from conftest import BACKEND
from keras import layers, ops
from quantized_models import IMAGES, MODELS, TARGETS, Subclassed, functional

import kmp
from kmp._keras import layers_of
from kmp.models.fake_quantization import FakeQuantized, FakeQuantizedDense
from kmp.models.range_quantizer import RangeQuantizer

JIT = [  # JAX runs its steps uncompiled for debugging alone, and takes a minute for each
    pytest.param(False, marks=pytest.mark.only("tensorflow", "torch")),
    pytest.param(True, marks=pytest.mark.only("tensorflow", "jax")),
]
OBSERVER = ("input_range", "observed_batches", "freeze_at")
BAD = {"nan": np.nan, "inf": np.inf, "float16_overflow": 1e6}


def value(variable):
    return ops.convert_to_numpy(variable).copy()


def values(variables):
    return [value(v) for v in variables]


def assert_equal(some, others):
    for a, b in zip(some, others, strict=True):
        np.testing.assert_array_equal(a, b)


def prepared(model):
    return [layer for layer in model._flatten_layers() if isinstance(layer, FakeQuantized)]


def observers(model):
    return [getattr(layer, name) for layer in prepared(model) for name in OBSERVER]


def optimizer(scale="dynamic"):
    """Without the measurements, which take long to compile and are tested elsewhere."""
    inner = keras.optimizers.SGD(0.01, momentum=0.5)
    return kmp.LossScaleOptimizer(inner, loss_scale=scale, measure_gradients=False)


def one_dense(policy="float32", jit=False, **settings):
    """A prepared Dense layer of three inputs."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype=policy)])
    kmp.quantize_aware(model, **settings)
    model.compile(optimizer(1.0), "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    return model, model.layers[0]


def fit(model, *batches):
    for x in batches:
        x = np.broadcast_to(np.float32(x), (2, 3))
        model.fit(x, np.zeros((2, 2)), batch_size=2, verbose=0)


# What is rounded, and how


def rounded(x, step, bits):
    """By its definition, in NumPy: to multiples of a step, symmetric, in so many bits."""
    levels = 2 ** (bits - 1) - 1
    return np.clip(np.floor(x / step + 0.5), -levels, levels) * step


LAYERS = {
    "dense": (lambda: layers.Dense(5, "relu"), (4, 6)),
    "heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 3, 2), bias_axes="de"), (2, 4, 6)),
    "joined": (lambda: layers.EinsumDense("abde,def->abf", (None, 5), bias_axes="f"), (2, 4, 3, 2)),
    "apart": (lambda: layers.EinsumDense("abc,bcd->abd", (3, 2)), (2, 3, 4)),
    "conv1": (lambda: layers.Conv1D(4, 2, padding="causal", dilation_rate=2), (2, 5, 3)),
    "conv2": (lambda: layers.Conv2D(4, (2, 3), strides=(1, 2), groups=2), (2, 4, 5, 2)),
    "conv3": (lambda: layers.Conv3D(2, 2, padding="same", use_bias=False), (2, 3, 3, 3, 2)),
}


SUMMED = {"heads": (0,), "joined": (0, 1), "apart": (1,)}  # axes of the kernel, of EinsumDense


@pytest.mark.parametrize("name", LAYERS)
def test_training_and_int8_both_give_what_rounding_by_hand_gives(name):
    """The oracle is Keras's plain layer on kernel and inputs that NumPy has rounded."""
    make, shape = LAYERS[name]
    bits = (8, 8) if name in ("dense", "conv2") else (4, 6)
    x = np.random.default_rng(2).normal(size=shape).astype("float32")
    model = keras.Sequential([keras.Input(shape[1:]), make()])
    plain = keras.Sequential([keras.Input(shape[1:]), make()])
    kernel, *bias = model.get_weights()
    bias = [np.linspace(-1, 1, b.size).astype("float32").reshape(b.shape) for b in bias]
    model.set_weights([kernel, *bias])

    summed = SUMMED.get(name, tuple(range(kernel.ndim - 1)))
    weight_step = np.abs(kernel).max(summed, keepdims=True) / (2 ** (bits[0] - 1) - 1)
    # The range is that of the smaller batch: the other one has inputs beyond it.
    range_ = np.abs(x / 2).max()
    input_step = range_ / (2 ** (bits[1] - 1) - 1)
    plain.set_weights([rounded(kernel, weight_step, bits[0]), *bias])
    expected = value(plain(rounded(x, input_step, bits[1])))

    kmp.quantize_aware(model, weight_bits=bits[0], activation_bits=bits[1])
    model(x / 2, training=True)
    assert value(model.layers[0].input_range) == np.float32(range_)
    # A sum of at most 16 products, each rounded to 2**-24 of itself.
    close = {"rtol": 0, "atol": 16 * 2.0**-22 * np.abs(expected).max()}
    np.testing.assert_allclose(value(model(x)), expected, **close)

    report = kmp.to_int8(model)
    integers = value(model.layers[0].kernel)
    assert integers.dtype == "int8"
    assert np.abs(integers).max() == 2 ** (bits[0] - 1) - 1
    np.testing.assert_allclose(value(model(x)), expected, **close)
    assert [row.after for row in report.rows] == ["int8_from_float32"]


@pytest.mark.parametrize("kind", ["dense", "heads", "conv2"])
def test_the_kernel_in_training_has_the_integers_of_the_int8_one(kind):
    make, shape = LAYERS[kind]
    model = keras.Sequential([keras.Input(shape[1:]), make()])
    kmp.quantize_aware(model)
    model(np.ones(shape), training=True)
    layer = model.layers[0]
    before = value(layer.rounded_kernel())
    kmp.to_int8(model)
    integers, scale = value(layer.kernel).astype("float32"), value(layer.kernel_scale)
    np.testing.assert_array_equal(np.round(before * np.squeeze(scale)), integers)
    # The backend's division and NumPy's: the last bit.
    np.testing.assert_allclose(before, integers / np.squeeze(scale), rtol=2.0**-22)


def test_the_float32_kernel_is_rounded_under_half_precision():
    """Inside of a layer's call Keras would hand out its copy in half precision."""
    layer = FakeQuantizedDense(8, dtype="mixed_float16")
    layer.build((None, 64))
    with keras.src.backend.AutocastScope("float16"):
        inside = value(layer.rounded_kernel())
    kernel = value(layer.kernel)
    step = np.abs(kernel).max(0) / 127
    assert inside.dtype == "float16"
    np.testing.assert_array_equal(inside, value(layer.rounded_kernel()))
    np.testing.assert_allclose(inside, rounded(kernel, step, 8), rtol=2.0**-10)


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


def test_int8_dense_layers_are_keras_own():
    model, layer = one_dense()
    fit(model, [1.0, 2.0, 3.0])
    kmp.to_int8(model)
    assert type(layer) is layers.Dense
    assert layer.quantization_mode == "int8"
    assert isinstance(layer.inputs_quantizer, RangeQuantizer)
    assert layer.inputs_quantizer.max_abs == 3.0


def gradients(layer, x):
    """Of the sum of the outputs, with respect to inputs and kernel."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(layer(x, training=False))
        found = tape.gradient(total, [x, layer._kernel.value])
    elif keras.backend.backend() == "jax":
        import jax

        def total(x, kernel):
            state = [kernel, *(v.value for v in layer.trainable_variables[1:])]
            others = [v.value for v in layer.non_trainable_variables]
            return ops.sum(layer.stateless_call(state, others, x, training=False)[0])

        found = jax.grad(total, (0, 1))(ops.convert_to_tensor(x), layer._kernel.value)
    else:
        layer.zero_grad()  # of the training before
        x = ops.convert_to_tensor(x).requires_grad_()
        ops.sum(layer(x, training=False)).backward()
        found = x.grad, layer._kernel.value.grad
    return values(found)


def test_gradients_pass_straight_through_but_beyond_the_range():
    model, layer = one_dense()
    fit(model, [[1.0, 0.3, 0.0], [-2.0, 0.7, 0.0]])
    kernel = value(layer.rounded_kernel())
    to_inputs, to_kernel = gradients(layer, np.float32([[1.99, 2.5, -0.1], [-3.0, 0.7, 0.7]]))
    inside = [[1, 0, 1], [0, 1, 1]]
    np.testing.assert_allclose(to_inputs, inside * kernel.sum(1), rtol=1e-6)
    # The kernel's are the rounded inputs, clipped ones included; all weights get theirs.
    inputs = rounded(np.float32([[1.99, 2.5, -0.1], [-3.0, 0.7, 0.7]]), 2 / 127, 8)
    np.testing.assert_allclose(to_kernel, inputs.sum(0)[:, None] * np.ones(2), rtol=1e-5)


@pytest.mark.only("jax", "torch")  # TensorFlow's own kernel rounds otherwise
def test_keras_still_loses_the_gradient_of_the_largest_weights():
    """Why the kernel is not rounded by fake_quant_with_min_max_vars: its range ends below them."""
    ends = np.random.default_rng(0).uniform(0.5, 2, 4000).astype("float32")
    fake = keras.quantizers.fake_quant_with_min_max_vars
    inside = fake(ops.convert_to_tensor(ends)[None], -ends, ends, narrow_range=True, axis=1)
    assert (value(inside)[0] < ends).any()


# The observer


@pytest.mark.parametrize("jit", JIT)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_range_is_a_float32_moving_average_of_good_batches(policy, jit):
    model, layer = one_dense(policy, jit, momentum=0.75)
    expected = None
    for largest in (1.0, 4.0, *BAD.values(), 0.5):
        fit(model, [0.25, -largest, 0.125])
        if largest <= 4.0:
            mean = largest if expected is None else 0.75 * expected + 0.25 * largest
            expected = np.float32(mean)
        elif policy == "mixed_bfloat16" and largest == 1e6:
            expected = np.float32(0.75 * expected + 0.25 * 999424)  # 1e6 in bfloat16
        assert value(layer.input_range) == pytest.approx(expected, rel=1e-6)
    assert all(v.dtype == "float32" for v in observers(model))
    assert value(layer.observed_batches) == (3 if policy == "mixed_float16" else 4)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_batch_leaves_the_observer_as_it_was_and_is_not_hidden(bad):
    """Clipping to the range would turn an overflow into a number, and its step into a good one."""
    model, _ = one_dense("mixed_float16")
    fit(model, [1.0, 2.0, 3.0])
    before = values(observers(model))
    fit(model, [1.0, BAD[bad], 3.0])
    assert_equal(values(observers(model)), before)
    assert int(model.optimizer.skipped_steps) == 1


def test_inference_and_frozen_layers_do_not_move_the_range():
    model, layer = one_dense()
    fit(model, [1.0, 2.0, 3.0])
    before = values(observers(model))
    x = np.full((2, 3), 9.0)
    model.predict(x, verbose=0)
    model.evaluate(x, np.zeros((2, 2)), verbose=0)
    layer.trainable = False
    model(x, training=True)
    assert_equal(values(observers(model)), before)


@pytest.mark.parametrize("how", ["freeze_after", "asked", "asked_in_fit"])
def test_the_range_freezes(how):
    model, layer = one_dense(freeze_after=2 if how == "freeze_after" else None)
    fit(model, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    if how == "asked":
        kmp.freeze_observers(model)
    before = value(layer.input_range)
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: kmp.freeze_observers(callback.model)
    )
    callbacks = [callback] if how == "asked_in_fit" else []
    model.fit(np.full((2, 3), 9.0), np.zeros((2, 2)), verbose=0, callbacks=callbacks)
    assert value(layer.input_range) == before > 1


@pytest.mark.parametrize("jit", JIT)
def test_a_skipped_step_never_happened(jit):
    """Its activations are finite, its gradients are not: kmp's callbacks put the ranges back."""
    model = functional()
    kmp.to_mixed_precision(model, "mixed_float16")
    kmp.quantize_aware(model)
    model.compile(kmp.scaled("sgd", kmp.DynamicLossScale(1024)), "mse", jit_compile=jit)
    settings = {"batch_size": 8, "verbose": 0, "callbacks": [kmp.callbacks.TerminateOnNaN()]}
    model.fit(IMAGES, TARGETS * 1e-3, **settings)
    state = [*model.trainable_variables, *observers(model)]
    state += model.optimizer.inner_optimizer.variables
    before = values(state)
    model.fit(IMAGES * 2, TARGETS * 1e6, **settings)
    assert int(model.optimizer.skipped_steps) == 1
    assert_equal(values(state), before)
    model.fit(IMAGES * 2, TARGETS * 1e-3, **settings)
    assert int(model.optimizer.skipped_steps) == 1
    assert value(prepared(model)[0].input_range) > before[len(model.trainable_variables)]


# Models that exist


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


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of each model, prepared and int8, and what they give for the images."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        model = make()
        model.compile(optimizer(), "mse")
        kmp.to_mixed_precision(model, "mixed_bfloat16")
        kmp.quantize_aware(model, weight_bits=5, freeze_after=3)
        model.run_eagerly = BACKEND == "tensorflow"  # tracing would take longer
        model.fit(IMAGES, TARGETS, epochs=2, verbose=0)
        kmp.to_mixed_precision(model, "float32")  # where files give what was given, to the bit
        for kind in ("prepared", "int8"):
            if kind == "int8":
                kmp.to_int8(model)
            model.save(folder / f"{name}_{kind}.keras")
        np.save(folder / f"{name}_int8.npy", model.predict(IMAGES, verbose=0))
        np.savez(folder / f"{name}_int8.npz", *values(model.variables))
    return folder


LOAD = """
import sys, keras, numpy as np, kmp, quantized_models
keras.config.set_dtype_policy("mixed_float16")  # of the process, which the files need not care for
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    given = model.predict(quantized_models.IMAGES, verbose=0)
    np.testing.assert_array_equal(given, np.load(path.replace(".keras", ".npy")))
"""


@pytest.mark.only("tensorflow")  # files are the same code on all backends
def test_files_load_in_a_new_process(files):
    paths = [str(files / f"{name}.keras") for name in ("functional_int8", "subclassed_int8")]
    environ = processes.environment()
    environ["PYTHONPATH"] += f":{pathlib.Path(__file__).parent}"
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True, env=environ)


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_file_goes_on_where_its_model_was(files, name):
    model = keras.models.load_model(files / f"{name}_prepared.keras")
    layer = prepared(model)[0]
    assert (layer.weight_bits, *values(observers(model)[1:3])) == (5, 2, 3)
    kmp.to_int8(model)
    with np.load(files / f"{name}_int8.npz") as expected:
        for got, key in zip(values(model.variables), expected, strict=True):
            np.testing.assert_array_equal(got, expected[key])


def test_int8_is_a_quarter_and_cannot_be_converted_further(files):
    model = keras.models.load_model(files / "functional_int8.keras")
    kernels = [v for v in model.variables if v.path.endswith("kernel")]
    assert {v.dtype for v in kernels} == {"int8"}
    with pytest.raises(ValueError, match="Quantized layers cannot change their policy"):
        kmp.to_mixed_precision(model, "mixed_bfloat16")
    for layer in model.layers[-1], model.get_layer("conv2"):
        with pytest.raises(ValueError, match="already quantized"):
            layer.quantize("int8")


# What is refused


def refuses(model, message, error=ValueError, **settings):
    before = [type(layer) for layer in model._flatten_layers()] if hasattr(model, "layers") else 0
    with pytest.raises(error, match=message):
        kmp.quantize_aware(model, **settings)
    if before:
        assert [type(layer) for layer in model._flatten_layers()] == before


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
    refuses(half, "weights in float16")
    quiet = Subclassed(hands_on_training=False)
    quiet(IMAGES)
    refuses(quiet, "Layers must be told that they train")


def test_to_int8_refuses_what_has_learned_no_range():
    model, layer = one_dense()
    with pytest.raises(ValueError, match="have seen no training batch"):
        kmp.to_int8(model)
    assert isinstance(layer, FakeQuantized)
    for function in (kmp.to_int8, kmp.freeze_observers):
        with pytest.raises(ValueError, match=r"kmp\.quantize_aware has prepared"):
            function(functional())


def test_a_range_quantizer_refuses_what_is_no_range():
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        RangeQuantizer(float("inf"))
