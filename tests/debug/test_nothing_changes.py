"""The tools leave everything that they touch as it was, also when the model raises."""

import random

import keras
import numpy as np
import pytest
from architectures import make
from keras import layers, ops
from oracle import BACKEND, COMPILED_MODES, compiled

import kmp
from kmp._keras import layers_of

pytestmark = pytest.mark.slow

TOOLS = {
    "locate": lambda m, x, y: kmp.debug.locate_nonfinite(m, x, y),
    "locate_forward": lambda m, x, y: kmp.debug.locate_nonfinite(m, x),
    "compare": lambda m, x, y: kmp.debug.compare_precisions(m, x, y),
    "diagnose": lambda m, x, y: kmp.debug.diagnose(m, x, y),
}
FAILING = {"locate": "call", "locate_forward": "call", "compare": "loss", "diagnose": "loss"}


def train_some(model, x, y):
    """So that there are slots, statistics, metrics, counters and cached functions to lose."""
    model.compile(
        kmp.scaled("adam"),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(x, y, verbose=0)
    model.predict(x, verbose=0)


def bits(value):
    """An array's bytes, whatever its dtype."""
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)):
        value = ops.cast(value, "float32")
    return ops.convert_to_numpy(value).tobytes()


def state_of(model):
    """Everything that could have moved, in comparable form."""
    from keras.src.backend.common import global_state

    seed = global_state.get_global_attribute("global_seed_generator")
    attributes = {
        (layer.name, name): id(value) if not isinstance(value, (bool, int, str)) else value
        for layer in layers_of(model)
        for name, value in vars(layer).items()
        if name != "_torch_params"  # on torch made anew by Keras at will
    }
    state = {
        "variables": [bits(v.value) for v in model.variables],
        "metrics": [bits(v.value) for v in model.metrics_variables],
        "optimizer": [bits(v.value) for v in model.optimizer.variables],
        "gradients": [getattr(v.value, "grad", None) for v in model.variables],
        "losses": [list(map(id, layer._losses)) for layer in layers_of(model)],
        "policies": [id(layer._dtype_policy) for layer in layers_of(model)],
        "functions": [
            id(f) for f in (model.train_function, model.test_function, model.predict_function)
        ],
        "attributes": attributes,
        "methods": [
            keras.Layer.__call__,
            keras.Layer.add_weight,
            keras.Operation.__call__,
            keras.Variable._direct_assign,
        ],
        "python": random.getstate(),
        "numpy": [str(x) for x in np.random.get_state()],
        "seed": None if seed is None else (id(seed), bits(seed.state.value)),
        "policy": keras.config.dtype_policy().name,
        "loss_built": model._compile_loss.built,
    }
    if BACKEND == "torch":
        import torch

        state["torch"] = torch.get_rng_state().tolist()
    if BACKEND == "tensorflow":
        from tensorflow.python.eager import context

        state["tensorflow"] = context.context()._rng.getstate()
    return state


def assert_unchanged(before, after):
    for part in before:
        assert before[part] == after[part], part


class Restless(layers.Layer):
    """Draws from every generator there is, adds a loss, counts, and raises when told to."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.raises_in = None

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x, training=False):
        self.count.assign_add(1.0)
        self.add_loss(ops.zeros(()))
        random.random()
        np.random.normal()
        if BACKEND == "torch":
            import torch

            torch.rand(1)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            tf.random.uniform((1,))
        if BACKEND != "jax":  # which refuses it when it is traced
            x = x + 0 * ops.cast(keras.random.normal(ops.shape(x)), x.dtype)
        if self.raises_in == "call":
            raise RuntimeError("as told")
        return x


@pytest.fixture(scope="module")
def trained_once():
    """Compiling takes seconds, and if the tools do what they say one model serves all tests."""
    model, x, y = make("cnn")
    restless = Restless(name="restless", dtype="mixed_float16")
    h = model.get_layer("dropout")(model.get_layer("flatten").output)
    model = keras.Model(model.input, model.get_layer("logits")(restless(h)), name="outer")
    train_some(model, x, y)
    return model, x, y


@pytest.fixture
def trained(trained_once):
    keras.random.normal((1,))  # makes Keras's global seed
    trained_once[0].get_layer("restless").raises_in = None
    return trained_once


@pytest.mark.parametrize("tool", TOOLS)
def test_after_success(tool, trained):
    model, x, y = trained
    before = state_of(model)
    TOOLS[tool](model, x, y)
    assert_unchanged(before, state_of(model))


@pytest.mark.parametrize("tool", TOOLS)
def test_after_an_exception(tool, trained):
    model, x, y = trained
    if FAILING[tool] == "call":
        model.get_layer("restless").raises_in = "call"
    else:
        y = np.zeros((3, 5, 7), "float32")  # no targets for these outputs
    before = state_of(model)
    with pytest.raises(Exception, match=r".") as error:
        TOOLS[tool](model, x, y)
    assert "as told" in str(error.value) or FAILING[tool] == "loss"
    assert_unchanged(before, state_of(model))


@pytest.mark.parametrize("tool", ["locate", "compare", "diagnose"])
def test_a_loss_that_was_never_called_stays_so(tool):
    """Its metrics would be built by the first call, and a model of two outputs would gain some."""
    inputs = keras.Input((3,))
    outputs = [layers.Dense(2, name="a")(inputs), layers.Dense(2, name="b")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss=["mse", "mse"])
    x, y = np.ones((4, 3), "float32"), [np.ones((4, 2), "float32")] * 2
    before = state_of(model)
    TOOLS[tool](model, x, y)
    assert_unchanged(before, state_of(model))
    assert not model._compile_loss.built


@pytest.mark.parametrize(
    "tool", [kmp.debug.locate_nonfinite, kmp.debug.compare_precisions, kmp.debug.diagnose]
)
def test_variables_that_no_list_has(tool):
    """The state of a stateful RNN (Keras cannot train it on torch), and the seed in a closure."""
    seed = keras.random.SeedGenerator(7)
    noise = layers.Lambda(lambda x: keras.random.dropout(x, 0.5, seed=seed))
    rnn = layers.LSTM(3, stateful=True, unroll=True)
    inputs = keras.Input(batch_shape=(2, 3, 4))
    model = keras.Model(inputs, layers.Dense(1)(noise(rnn(inputs))))
    x = np.ones((2, 3, 4), "float32")
    model(x)
    before = [bits(v.value) for v in (*rnn.states, seed.state)]
    tool(model, x)
    assert [bits(v.value) for v in (*rnn.states, seed.state)] == before


@pytest.mark.parametrize("built", [False, True])
def test_nobody_has_asked_for_the_loss_scale(built):
    """A training step that never does is warned of: a tool that asks must not hide that."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile(kmp.scaled("sgd", 256.0), loss="mse")
    if built:
        model.optimizer.build(model.trainable_variables)
    assert not model.optimizer.scale_was_read
    report = kmp.debug.locate_nonfinite(model, np.ones((4, 3)), np.ones((4, 2)))
    assert "loss scale 256" in str(report)
    assert not model.optimizer.scale_was_read


class Auxiliary(keras.Model):
    """Calls one of its layers in training alone."""

    def __init__(self):
        super().__init__(name="auxiliary")
        self.body, self.aux = layers.Dense(2, name="body"), layers.Dense(2, name="aux")

    def build(self, shape):
        self.body.build(shape)

    def call(self, x, training=False):
        return self.body(x) + self.aux(x) if training else self.body(x)


@pytest.mark.parametrize("tool", [kmp.debug.locate_nonfinite, kmp.debug.diagnose])
def test_weights_that_only_training_makes_are_asked_for(tool):
    model = Auxiliary()
    x = np.ones((2, 3), "float32")
    model(x)
    with pytest.raises(ValueError, match=r"'auxiliary/aux' .* Call model\(x, training=True\) once"):
        tool(model, x)
    assert not model.aux.weights
    model(x, training=True)
    tool(model, x)
    assert len(model.weights) == 4


class Function(layers.Layer):
    """Calls its layer inside a compiled function, which keeps what it has traced."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(5, 2, dtype="mixed_float16")
        self.embedding.build()
        pure = self.embedding.stateless_call
        self.function = compiled(lambda weights, x: pure(weights, [], x)[0], COMPILED_MODES[0])

    def call(self, x):
        return self.function([v.value for v in self.embedding.trainable_variables], x)


@pytest.mark.only("tensorflow", "jax")
@pytest.mark.parametrize("called", [False, True])
def test_a_function_keeps_no_trace_in_another_dtype(called):
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, Function()(inputs))
    words = ops.ones((2, 3), "int32")
    if called:
        model(words)
    sqnr = kmp.debug.compare_precisions(model, words).output_sqnr
    assert 60 < sqnr < 90  # and not of a precision against itself
    assert kmp.debug.diagnose(model, words).sqnr == sqnr
    kmp.debug.memory_report(model, 2)
    assert model(words).dtype == "float16"
    if BACKEND == "tensorflow":
        import tensorflow as tf

        assert not tf.config.functions_run_eagerly()


def test_the_next_step_is_the_same(trained):
    """The proof of the pudding: two runs from the same weights, one of them looked into."""
    model, x, y = trained
    values = [ops.convert_to_numpy(v.value) for v in [*model.variables, *model.optimizer.variables]]
    ends = []
    for look in (False, True):
        for v, value in zip([*model.variables, *model.optimizer.variables], values, strict=True):
            v.assign(value)
        if look:
            kmp.debug.locate_nonfinite(model, x, y)
            kmp.debug.diagnose(model, x, y)
        model.fit(x, y, verbose=0, shuffle=False)
        ends.append([bits(v.value) for v in model.trainable_variables])
    assert ends[0] == ends[1]


def test_a_map_that_layers_share_is_not_written_to():
    policies = keras.dtype_policies.DTypePolicyMap("mixed_float16")
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype=policies, name="a")])
    kmp.debug.diagnose(model, np.ones((2, 3)))
    assert len(policies) == 0
    assert model.layers[0].dtype_policy is policies
