"""Each danger in a layer is found where it is, and nowhere else."""

import re

import keras
import numpy as np
import pytest
from audited import CROSSENTROPY, Masked, float16, kinds_of, model_of  # noqa: F401
from keras import layers
from oracle import BACKEND

import kmp
from kmp._keras import path_of


def test_half_statistics():
    keras.config.set_dtype_policy("bfloat16")
    sound = [layers.BatchNormalization(momentum=0.9), kmp.layers.Float32BatchNormalization()]
    model = model_of(layers.BatchNormalization(), *sound)
    (finding,) = kmp.audit(model).of_kind("half statistics")
    assert finding.path == path_of(model.layers[0])
    assert "within 20% of them" in finding.problem and "Float32BatchNorm" in finding.advice


# The sizes of windows that are added up wrongly on all CPUs, by the backend; others are on some,
# such as those of TensorFlow in bfloat16 on AMD's. PyTorch uses float32.
WRONG = {
    "bfloat16": {"jax": [(16, 16), (768,), (56, 56)]},
    "float16": {"tensorflow": [(56, 56)]},
}


@pytest.mark.parametrize("dtype", WRONG)
@pytest.mark.parametrize("size", [(2, 2), (16, 16), (768,), (56, 56)])
def test_averages_of_many_numbers(dtype, size):
    pooling = layers.AveragePooling1D if len(size) == 1 else layers.AveragePooling2D
    x = np.random.default_rng(1).uniform(1, 2, (4, *size, 16)).astype("float32")

    def build(policy):
        keras.config.set_dtype_policy(policy)
        pool = pooling(size, name="pool")
        stack = [pool, layers.Flatten(), layers.Dense(8, dtype="float32")]
        return keras.Sequential([keras.Input(x.shape[1:]), *stack])

    def error(model):
        y = keras.ops.cast(model.get_layer("pool")(x), "float32")
        exact = x.mean(axis=tuple(range(1, x.ndim - 1)))
        return np.abs(np.ravel(keras.ops.convert_to_numpy(y)) / np.ravel(exact) - 1).max()

    model = build(f"mixed_{dtype}")
    wrong = bool(error(model) > 0.03)
    assert wrong or size not in WRONG[dtype].get(BACKEND, [])
    assert not (wrong and (BACKEND == "torch" or size == (2, 2)))
    findings = kmp.audit(model).of_kind("half statistics")
    assert [each.path for each in findings] == ["pool"] * wrong
    model = build("float32")
    report = kmp.to_mixed_precision(model, f"mixed_{dtype}")
    assert error(model) < 0.01
    assert ("pool" in report.kept) == wrong
    assert kmp.audit(model).of_kind("half statistics") == ()


def test_keras_still_stalls_in_bfloat16():
    """From 1 the moving mean of batches of 1.19 does not move, as the finding says."""
    layer = layers.BatchNormalization(dtype="bfloat16", moving_mean_initializer="ones")
    for mean, moves in ((1.19, False), (1.6, True)):
        layer(np.full((4, 2), mean, "float32"), training=True)
        assert moves == (float(keras.ops.convert_to_numpy(layer.moving_mean)[0]) != 1)


def test_activity_regularizer():
    model = model_of(layers.Dense(8, activity_regularizer="l2"))
    (finding,) = kmp.audit(model).findings
    assert (finding.kind, finding.path) == ("activity regularizer", path_of(model.layers[0]))


def test_half_preprocessing():
    model = model_of(layers.Rescaling(1e-5), layers.Dense(8))
    assert kinds_of(model) == ["half preprocessing"]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_activations_are_no_raw_inputs(policy):
    """As where a residual block scales what it adds."""
    keras.config.set_dtype_policy(policy)
    inputs = x = keras.Input((8,))
    for raw in (False, True):
        scaled = keras.layers.Rescaling(0.25)(inputs if raw else keras.layers.Dense(8)(x))
        x = keras.layers.Add()([x, scaled])
    model = keras.Model(inputs, keras.layers.Dense(8, dtype="float32")(x))
    (finding,) = kmp.audit(model).of_kind("half preprocessing")
    (_, raw) = [layer for layer in model.layers if isinstance(layer, keras.layers.Rescaling)]
    assert finding.path == path_of(raw)


RAW = {
    "bins": lambda: layers.Discretization(bin_boundaries=list(np.arange(2048.5, 2060.0))),
    "tokens": lambda: layers.CategoryEncoding(num_tokens=3000, output_mode="multi_hot"),
    "rescaled": lambda: layers.Rescaling(2.0**-6),
}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", RAW)
def test_raw_inputs_are_said_to_be_rounded_where_they_are(name, policy):
    """The oracle is the same layer in float32, on numbers that half precision does not hold."""
    x = np.arange(2049.0, 2057.0, dtype="float32")[None]
    outputs = []
    for each in (policy, "float32"):
        keras.config.set_dtype_policy(each)
        model = model_of(RAW[name](), layers.Identity(dtype="float32"))
        outputs.append(model.predict(x, verbose=0).astype("float32"))
        found = kmp.audit(model).of_kind("half preprocessing")
        if each == policy:
            said = bool(found)
    assert said == (not np.array_equal(*outputs)) and not found


class Normalized(layers.Layer):
    def __init__(self, epsilon):
        super().__init__()
        self.epsilon = epsilon

    def call(self, x):
        return x / (keras.ops.mean(x, -1, keepdims=True) + self.epsilon)


@pytest.mark.parametrize("epsilon, found", [(1e-8, True), (1e-7, False), (1e-3, False)])
def test_epsilon_of_a_layer(epsilon, found):
    model = model_of(Normalized(epsilon), layers.LayerNormalization(epsilon=epsilon))
    findings = kmp.audit(model).of_kind("epsilon")
    assert [x.path for x in findings] == [path_of(model.layers[0])] * found  # Keras's is float32's
    assert not found or "the constant 1e-08 is below 5.96e-08" in findings[0].problem


@pytest.mark.filterwarnings("ignore:Weights in float16")
def test_epsilon_of_an_optimizer_of_half_weights():
    keras.config.set_dtype_policy("float16")
    adam = kmp.scaled("adam", epsilon=1e-9)
    model = model_of(layers.Dense(8), loss="mse", optimizer=adam)
    assert [x.path for x in kmp.audit(model).of_kind("epsilon")] == ["optimizer"]
    keras.config.set_dtype_policy("mixed_float16")
    model = model_of(layers.Dense(8), loss="mse", optimizer=kmp.scaled("adam", epsilon=1e-9))
    assert kmp.audit(model).of_kind("epsilon") == ()


NEGATIVE = -1e9


def masks():
    """How programs spell the number of a mask, each a layer or a function of a tensor."""
    ops = keras.ops

    def masked(s, number=NEGATIVE):
        return ops.softmax(ops.where(s > 0, s, number))

    def layer_of(function, **attributes):
        made = type("Own", (layers.Layer,), {"call": function})()
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    return {
        "literal": layer_of(lambda self, s: ops.softmax(ops.where(s > 0, s, -1e9))),
        "arithmetic": layer_of(lambda self, s: s + (1 - ops.cast(s > 0, s.dtype)) * -1e9),
        "constant of the module": layer_of(lambda self, s: ops.where(s > 0, s, NEGATIVE)),
        "attribute": layer_of(lambda self, s: masked(s, self.number), number=-1e9),
        "method": layer_of(lambda self, s: masked(s)),
        "default": layer_of(lambda self, s, number=-1e9: masked(s, number)),
        "integer": layer_of(lambda self, s: ops.where(s > 0, s, -(10**9))),
        "Lambda": layers.Lambda(masked),
        "Activation": layers.Activation(masked),
        "Masking": layers.Masking(mask_value=-1e9),
        "where of a graph": masked,
        "arithmetic of a graph": lambda s: s + (1.0 - ops.cast(s > 0, s.dtype)) * -1e9,
        "epsilon of a graph": lambda s: s / (ops.sum(s, axis=-1, keepdims=True) + 1e-9),
    }


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("name", masks())
def test_constants_are_found_however_they_are_spelled(name):
    inputs = keras.Input((8,))
    hidden = layers.Dense(8)(inputs)
    model = keras.Model(inputs, layers.Dense(8, dtype="float32")(masks()[name](hidden)))
    (found,) = [x for x in kmp.audit(model).findings if x.kind in ("constant", "epsilon")]
    assert found.kind == ("epsilon" if "epsilon" in name else "constant")
    assert ("1e-09 is below" in found.problem) or ("-1e+09 is beyond 65504" in found.problem)
    keras.config.set_dtype_policy("float32")  # as the advice has it
    in_float32 = masks()[name](keras.ops.cast(hidden, "float32"))
    assert kinds_of(keras.Model(inputs, layers.Dense(8)(in_float32))) == []


BOUNDS = {
    "clip": (1 - 1e-4, lambda p, b: keras.ops.log(1 - keras.ops.clip(p, 1e-4, b))),
    "minimum": (1 - 1e-4, lambda p, b: keras.ops.log(1 - keras.ops.minimum(p, b))),
    "negative": (1e-4 - 1, lambda p, b: keras.ops.log(1 + keras.ops.maximum(-p, b))),
    "above": (1 + 1e-4, lambda p, b: 1 / (keras.ops.maximum(p, b) - 1)),
    "next to 1": (0.9999999, lambda p, b: keras.ops.log(1 - keras.ops.minimum(p, b))),
}


@pytest.mark.parametrize("is_layer", [True, False])
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_bounds_that_become_1(policy, name, is_layer):
    """Half precision has 1 in place of 1 - 1e-4: what is to stay below it reaches it."""
    bound, function = BOUNDS[name]

    def bounded_by(number):
        inputs = keras.Input((8,))
        hidden = layers.Dense(8, "sigmoid", bias_initializer="ones")(inputs)
        code = layers.Lambda(lambda p: function(p, number), name="bounded")
        outputs = code(hidden) if is_layer else function(hidden, number)
        return keras.Model(inputs, layers.Dense(8, dtype="float32")(outputs))

    large = np.full((1, 8), 1e4, "float32")
    model = bounded_by(bound)
    if is_layer:
        report = kmp.to_mixed_precision(model, policy)
        assert "has a constant that half precision loses" in report.kept.values()
        assert np.isfinite(model.predict(large, verbose=0)).all()
    keras.config.set_dtype_policy(policy)
    model = bounded_by(bound)
    assert not np.isfinite(model.predict(large, verbose=0)).all()
    (found,) = kmp.audit(model).of_kind("constant")
    assert f"the bound {bound:.7g} becomes {np.sign(bound):g} in {policy[6:]}" in found.problem
    advised = float(re.match(r"Use (\S+), or keep it in float32", found.advice)[1])
    model = bounded_by(advised)
    assert kmp.audit(model).of_kind("constant") == ()
    assert np.isfinite(model.predict(large, verbose=0)).all()


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:.*overflow encountered in cast:RuntimeWarning")
def test_a_constant_in_the_code_of_an_operation_of_keras():
    """Nobody can write another one there."""
    inputs = keras.Input((8,))

    def normalized(cast):
        hidden = cast(layers.Dense(8, use_bias=False)(inputs))
        return keras.Model(inputs, layers.Dense(2, dtype="float32")(keras.ops.normalize(hidden)))

    keras.config.set_dtype_policy("mixed_float16")
    model = normalized(lambda x: x)
    assert np.isnan(model.predict(np.zeros((1, 8)), verbose=0)).all()
    (found,) = kmp.audit(model).of_kind("constant")
    assert "the constant 1e+07 is beyond 65504" in found.problem
    assert found.advice == 'Call it on keras.ops.cast(x, "float32") in place of x.'
    model = normalized(lambda x: keras.ops.cast(x, "float32"))
    assert kmp.audit(model).of_kind("constant") == ()
    assert np.isfinite(model.predict(np.zeros((1, 8)), verbose=0)).all()


def test_sound_constants_are_no_findings():
    """Of Keras's own layers, which compute with their epsilons in float32, and of -inf."""
    infinite = layers.Lambda(lambda s: keras.ops.where(s > 0, s, -float("inf")))
    small = layers.Lambda(lambda s: s + 1e-4)
    fading = layers.Lambda(lambda s: 0.9999 * keras.ops.clip(s, 0.1, 1))
    norms = [layers.LayerNormalization(epsilon=1e-12), layers.BatchNormalization(epsilon=1e-9)]
    last = [layers.Softmax(), layers.LeakyReLU(), layers.Dense(8)]
    model = model_of(layers.Dense(8), infinite, small, fading, *norms, *last)
    assert kinds_of(model) == []


def test_a_masked_softmax_is_no_finding():
    """It masks by -3e4 in float16 and by -1e9 in float32; a maximum begins with -inf."""
    keras.config.set_dtype_policy("mixed_float16")
    scores, mask = keras.Input((4, 8)), keras.Input((4, 8), dtype="bool")
    outputs = layers.Softmax()(layers.Dense(8)(scores), mask)
    model = keras.Model([scores, mask], layers.Dense(2, dtype="float32")(outputs))
    assert kmp.audit(model).of_kind("constant") == ()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_constants():
    model = model_of(Masked(), layers.Masking(mask_value=-1e6), layers.ReLU(negative_slope=0.1))
    found = kmp.audit(model).of_kind("constant")
    assert [x.path for x in found] == [path_of(model.layers[0])]  # of the mask it is no constant
    masks = [x.path for x in kmp.audit(model).of_kind("half preprocessing")]
    assert path_of(model.layers[1]) in masks
    assert "-1e+09 is beyond 65504" in found[0].problem and "-32752" in found[0].advice
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert kinds_of(model_of(Masked())) == []


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, KeyError])
def test_a_layer_whose_config_cannot_be_read_is_audited(error):
    """keras-hub's Llama reads an attribute that it does not set."""

    class WithoutConfig(Masked):
        def get_config(self):
            raise error("there is no config")

    model = model_of(WithoutConfig())
    assert kinds_of(model) == ["constant"]


def test_tensor_cores():
    model = model_of(layers.Dense(13), layers.Dense(16), layers.Dense(8, dtype="float32"))
    found = kmp.audit(model).of_kind("tensor cores")
    assert [x.path for x in found] == [path_of(layer) for layer in model.layers[:2]]
    assert "8 x 13" in found[0].problem and found[0].advice == "Round 13 up to 16."


def test_tensor_cores_have_nothing_to_say_of_heads_biases_colours_and_look_ups():
    """12 heads of 64 features are one axis of 768 in the product; of 5 heads of 5 it is 25."""
    images, tokens = keras.Input((8, 8, 3)), keras.Input((4,), dtype="int32")
    x = layers.Embedding(1001, 768)(tokens)
    x = layers.MultiHeadAttention(12, 64)(x, x)
    y = layers.Flatten()(layers.Conv2D(16, 3)(images))
    outputs = layers.Dense(8)(layers.Concatenate()([layers.Flatten()(x), y]))
    of_words = ["half gradient"] if keras.backend.backend() == "jax" else []
    assert kinds_of(keras.Model([images, tokens], outputs)) == of_words
    x = keras.Input((4, 8))
    odd = keras.Model(x, layers.MultiHeadAttention(5, 5, name="mha")(x, x))
    found = kmp.audit(odd).of_kind("tensor cores")
    names = {each.path.split("/")[-1] for each in found}
    assert names == {"query", "key", "value", "attention_output"}
    assert {each.advice for each in found} == {"Round 25 up to 32."}


def test_tensor_cores_multiply_by_a_tied_embedding():
    tokens = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(1001, 8)
    model = keras.Model(tokens, embedding(embedding(tokens), reverse=True))
    (finding,) = kmp.audit(model).of_kind("tensor cores")
    assert finding.advice == "Round 1001 up to 1008."


class Waves(layers.Layer):
    """Sines of times, as diffusion models and forecasts have them."""

    def call(self, time):
        return keras.ops.sin(time * keras.ops.cast([[1.0, 0.1, 0.01]], time.dtype))


@pytest.mark.quick
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_sines_of_raw_times(policy):
    """Nobody knows how large they are: at 900 the sine in half precision is that of another."""
    keras.config.set_dtype_policy(policy)
    time = np.linspace(900.25, 990.25, 91)[:, None]
    exact = np.sin(time * [[1.0, 0.1, 0.01]])

    def error(**given):
        model = keras.Sequential([keras.Input((1,)), Waves(**given)])
        found = [x.path for x in kmp.audit(model).of_kind("half indices")]
        outputs = np.asarray(model.predict(time, verbose=0), "float64")
        return bool(found), np.abs(outputs - exact).max()

    found, wrong = error()
    assert found and wrong > 0.2
    found, wrong = error(dtype="float32")  # as the finding has it
    assert not found and wrong < 1e-3
