"""What cannot be converted is refused, and left as it was."""

import keras
import pytest
from converted import Raw, X, sequential
from keras import layers

import kmp
from kmp._keras import layers_of, path_of


class NeedsData(Raw):
    """Looks at numbers, and computes on in float32 alone."""

    def call(self, x):
        assert float(keras.ops.max(keras.ops.abs(x))) > 0
        x = self.head(x)
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("float32 is needed")
        return self.body(x)


@pytest.mark.only("tensorflow", "jax")  # torch traces with tensors that hold numbers
def test_a_model_that_could_not_be_tried_is_said_to():
    model = NeedsData()
    model(X)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert "was not tried in mixed_float16" in report.untried
    assert str(report).splitlines()[-1] == report.untried
    with pytest.raises(TypeError, match="float32 is needed"):
        model(X)
    assert kmp.to_mixed_precision(sequential(), "mixed_float16").untried == ""


class Parts(keras.Model):
    """A model without `call`."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts


def test_a_model_without_call_whose_parts_are_not_built_is_refused():
    with pytest.raises(ValueError, match="must be built"):
        kmp.to_mixed_precision(Parts(sequential(), layers.Dense(2)), "mixed_float16")


def test_layers_that_only_a_train_step_calls_cannot_be_tried():
    parts = layers.Dense(2), layers.Dense(3)
    for layer in parts:
        layer.build((None, 6))
    report = kmp.to_mixed_precision(Parts(*parts), "mixed_float16")
    assert [x.compute_dtype for x in parts] == ["float16", "float32"]
    assert "was not tried" in report.untried


class Fussy(layers.Layer):
    def __init__(self, always=True, **kwargs):
        super().__init__(**kwargs)
        self.always = always

    def call(self, x, training=False):
        half = keras.backend.standardize_dtype(x.dtype) != "float32"
        if half and (training or self.always):
            raise TypeError("Fussy wants float32")
        return x


def nothing_converted(model, convert, error, match):
    model.compile("sgd", "mse")
    optimizer, kind = model.optimizer, type(model)
    before = [(x, x.dtype_policy) for x in layers_of(model)]
    model.predict_function = marker = object()
    with pytest.raises(error, match=match):
        convert(model)
    assert all(layer.dtype_policy is policy for layer, policy in before)
    assert model.optimizer is optimizer and type(model) is kind
    assert model.predict_function is marker


class Around(layers.Layer):
    """Half precision does not reach what it calls."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.dense = inner, layers.Dense(3)

    def call(self, x, training=False):
        return self.dense(self.inner(x, training=training))


@pytest.mark.parametrize("kind", ["sequential", "functional"])
@pytest.mark.parametrize("always", [True, False])
def test_layers_that_raise_in_half_precision_stay_in_float32(always, kind):
    """Or in training: an auxiliary loss may run in training alone."""
    fussy, inner = Fussy(always), Fussy(always)
    stack = [keras.Input((6,)), layers.Dense(3), fussy, Around(inner), layers.Dense(2)]
    model = sequential = keras.Sequential(stack)
    if kind == "functional":
        model = keras.Model(sequential.inputs[0], sequential.outputs[0])
    report = kmp.to_mixed_precision(model, "mixed_float16")
    reasons = {path_of(x): "raises in half precision" for x in (fussy, inner)}
    assert report.kept == reasons | {path_of(model.layers[-1]): "output layer"}
    assert [fussy.compute_dtype, inner.compute_dtype] == ["float32", "float32"]
    model(X)


def test_a_layer_that_raises_inside_an_output_layer_of_half_precision():
    """Which has the dtype that was asked for."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), Around(Fussy(True))])
    convert = lambda model: kmp.to_mixed_precision(model, "p=f32,c=bf16,o=bf16")  # noqa: E731
    nothing_converted(model, convert, ValueError, "cannot be called in")


class OfItsOwn(keras.Model):
    """Its own code raises in half precision, in inference or in training."""

    def __init__(self, always):
        super().__init__()
        self.body, self.head, self.always = layers.Dense(4), layers.Dense(2), always

    def call(self, x, training=False):
        x = self.body(x)
        half = keras.backend.standardize_dtype(x.dtype) != "float32"
        if half and (training or self.always):
            raise TypeError("float32 is needed")
        return self.head(x)


@pytest.mark.only("tensorflow", "jax")  # on torch it can still be called with integers
@pytest.mark.parametrize("always", [True, False])
def test_a_model_that_could_not_be_called_any_more_is_not_converted(always):
    model = OfItsOwn(always)
    model(X)
    convert = lambda model: kmp.to_mixed_precision(model, "mixed_float16")  # noqa: E731
    nothing_converted(model, convert, ValueError, "cannot be called in mixed_float16")
    inputs = keras.Input(X.shape[1:])
    around = keras.Model(inputs, model(inputs))
    nothing_converted(around, convert, ValueError, "that of a model in it.*exclude the layers")
    kmp.to_mixed_precision(around, "mixed_float16", lambda layer, path: layer is not model.body)
    around(X, training=True)


def test_an_error_in_filter_fn_converts_nothing():
    def filter_fn(layer, path):
        if layer.name == "head":
            raise RuntimeError("from filter_fn")
        return True

    convert = lambda model: kmp.to_mixed_precision(model, "mixed_float16", filter_fn)  # noqa: E731
    nothing_converted(sequential(), convert, RuntimeError, "from filter_fn")


@pytest.mark.parametrize(
    "policy, match",
    [
        ("p=f64,c=bf16", "float64 are not converted.*Received: policy='p=f64,c=bf16'"),
        ("mixed_flaot16", "Received: 'mixed_flaot16'"),
        ("p=f32,q=f16", "unknown key 'q'"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy, match):
    convert = lambda model: kmp.to_mixed_precision(model, policy)  # noqa: E731
    nothing_converted(sequential(), convert, ValueError, match)


@pytest.mark.slow
def test_quantized_layers_are_refused():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)])
    for layer in model.layers:
        layer.quantize("int8")
    with pytest.raises(ValueError, match=r"Quantized layers.*and 1 more.*before model\.quantize"):
        kmp.to_mixed_precision(model, "mixed_bfloat16")


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(ValueError, match=r"must be built.*model\.build\(input_shape\)"):
        kmp.to_mixed_precision(keras.Sequential([layers.Dense(2)]), "mixed_bfloat16")
    with pytest.raises(TypeError, match=r"must be a keras\.Model.*dtype_policy = kmp\.Policy"):
        kmp.to_mixed_precision(layers.Dense(2), "mixed_bfloat16")


class Towers(keras.Model):
    """Two towers whose outputs meet in the code of the model, as in CLIP."""

    def __init__(self, product):
        super().__init__()
        self.left, self.right = layers.Dense(4), layers.Dense(4)
        self.product = product

    def call(self, x):
        return self.product(self.left(x), self.right(x))


@pytest.mark.only("tensorflow")  # the others multiply any two dtypes
def test_the_advice_where_a_model_mixes_dtypes():
    """No layer could be left out: it is the model whose code mixes."""
    model = Towers(lambda a, b: a * b)
    model(X)
    with pytest.raises(ValueError, match=r"keras\.ops\.multiply\(a, b\) for a \* b"):
        kmp.to_mixed_precision(model, "mixed_float16")
    model = Towers(keras.ops.multiply)
    expected = model(X)
    kmp.to_mixed_precision(model, "mixed_float16")
    assert keras.ops.max(keras.ops.abs(model(X) - expected)) < 0.05
