"""memory_report: the hand count by hand, and XLA's answer where there is one."""

import math

import keras
import numpy as np
import pytest
from architectures import make
from keras import layers, ops
from older import of_keras

import kmp

pytestmark = pytest.mark.slow


def mlp(optimizer="adam"):
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(32, name="a"), layers.Dense(8, name="b")]
    )
    model.compile(optimizer, loss="mse")
    return model


@pytest.mark.parametrize(
    "optimizer, slots", [("adam", 2), ("sgd", 0), (kmp.scaled("adam"), 2), ("lion", 1)]
)
def test_the_hand_count(optimizer, slots):
    report = kmp.debug.memory_report(mlp(optimizer), 10)
    parameters = 16 * 32 + 32 + 32 * 8 + 8
    outputs = 10 * (32 + 8)
    found = {r.precision: (r.parameters, r.gradients, r.slots, r.activations) for r in report.rows}
    n, s = parameters, parameters * slots
    assert found == {
        "float32": (4 * n, 4 * n, 4 * s, 4 * outputs),
        "mixed half": (6 * n, 4 * n, 4 * s, 2 * outputs),
        "pure half": (2 * n, 2 * n, 2 * s, 2 * outputs),
    }
    assert all(r.total == r.parameters + r.gradients + r.slots + r.activations for r in report.rows)


def by_path():
    adam_of_heads = of_keras("optimizers.OptimizerMap")(
        keras.optimizers.SGD(), {".*head.*": keras.optimizers.Adam()}
    )
    return keras.optimizers.MultiOptimizer(adam_of_heads)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        keras.optimizers.Adafactor,
        keras.optimizers.Muon,
        lambda: keras.optimizers.Muon(exclude_layers=["head"]),
        lambda: keras.optimizers.SGD(momentum=0.9),
        by_path,
    ],
    ids=["adafactor", "muon", "muon_by_path", "sgd", "multi_optimizer_by_path"],
)
def test_slots_that_depend_on_the_variable(make_optimizer):
    """Adafactor keeps rows and columns of a kernel, Muon only one slot of it."""
    words = keras.Input((5,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(7, 16)(words))
    model = keras.Model(words, layers.Dense(8, name="head")(x))
    optimizer = make_optimizer()
    model.compile(optimizer, loss="mse")
    slots = kmp.debug.memory_report(model, 2).rows[0].slots
    bare = type(optimizer).from_config(optimizer.get_config())
    bare.build([])
    optimizer.build(model.trainable_variables)
    numbers = [sum(math.prod(v.shape) for v in o.variables) for o in (optimizer, bare)]
    assert slots == 4 * (numbers[0] - numbers[1])


def test_a_stateful_layer_has_a_batch_size_of_its_own():
    rnn = layers.SimpleRNN(3, stateful=True, unroll=True)
    model = keras.Sequential([keras.Input(batch_shape=(8, 5, 2)), rnn])
    full, mixed, _ = kmp.debug.memory_report(model, 8).rows
    assert full.activations == 2 * mixed.activations == 4 * 8 * 3 * 5  # steps
    with pytest.raises(ValueError, match="batch_size=16 and inputs of 8 samples"):
        kmp.debug.memory_report(model, 16)


def test_what_two_layers_return_is_counted_once():
    """A cell's output is its state too, and a linear activation returns what it is given."""
    cell = keras.Sequential([keras.Input((5, 2)), layers.SimpleRNN(3, unroll=True)])
    assert kmp.debug.memory_report(cell, 8).rows[0].activations == 4 * 8 * 3 * 5
    same = keras.Sequential([keras.Input((16,)), layers.Dense(8), layers.Activation("linear")])
    assert kmp.debug.memory_report(same, 8).rows[0].activations == 4 * 8 * 8


def test_a_float32_head_is_counted_as_it_is():
    model = keras.Sequential([keras.Input((16,)), kmp.layers.Float32OutputDense(8)])
    full, mixed, _ = kmp.debug.memory_report(model, 10).rows
    assert full.activations == mixed.activations == 4 * 80
    assert full.slots == 0


class ScaleNorm(layers.Layer):
    """Keeps float32 weights in a conversion, as any normalization."""

    def build(self, shape):
        self.gamma = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * self.gamma


@pytest.mark.quick
@pytest.mark.parametrize("how", ["built", "converted"])
@pytest.mark.parametrize("policy, row", [("mixed_bfloat16", 1), ("bfloat16", 2)])
def test_layers_in_float32_are_counted_as_they_are(how, policy, row):
    built_under, head = ("float32", None) if how == "converted" else (policy, "float32")
    keras.config.set_dtype_policy(built_under)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(32),
            ScaleNorm(dtype=head),
            layers.Dense(512, dtype=head),
        ]
    )
    model.compile(kmp.scaled("adam", "none"), loss="mse")
    if how == "converted":
        kmp.to_mixed_precision(model, policy)
    assert {v.dtype for v in model.layers[-1].weights} == {"float32"}
    model.optimizer.build(model.trainable_variables)
    found = kmp.debug.memory_report(model, 8).rows[row]
    copies = 2 * (16 * 32 + 32 + (0 if head else 32)) if row == 1 else 0
    counters = 8  # iterations and learning rate of the inner optimizer, int32 and float32
    assert found.parameters == held(model.variables) + copies
    assert found.gradients == held(model.trainable_variables)
    outputs = 32 * 2 + 32 * (4 if head else 2) + 512 * 4
    assert found.activations == 8 * outputs
    assert abs(found.slots - held(model.optimizer.inner_optimizer.variables) + counters) <= 4


def held(variables):
    return sum(ops.convert_to_numpy(v).nbytes for v in variables)


@pytest.mark.only("jax")
def test_xla_needs_less_for_half_activations():
    """Eight layers of 512 units and 4,096 samples: activations are nearly all there is."""
    stack = [layers.Dense(512, activation="tanh", name=f"d{i}") for i in range(8)]
    model = keras.Sequential([keras.Input((512,)), *stack])
    full, mixed, pure = kmp.debug.memory_report(model, 4096).rows
    assert full.activations == 8 * 4096 * 512 * 4
    assert 0.5 * full.activations < full.compiled < 2 * full.activations
    assert mixed.compiled is not None
    assert pure.compiled is None


@pytest.mark.only("tensorflow", "torch")
def test_without_a_compiler_that_says():
    assert [row.compiled for row in kmp.debug.memory_report(mlp(), 4).rows] == [None] * 3


def test_nested_inputs_and_other_dtypes():
    words, numbers = keras.Input((5,), dtype="int32", name="words"), keras.Input((4,), name="n")
    x = layers.Flatten()(layers.Embedding(7, 3)(words))
    inputs = {"words": words, "n": numbers}
    model = keras.Model(inputs, layers.Concatenate()([x, numbers]))
    full = kmp.debug.memory_report(model, 2).rows[0]
    assert full.parameters == 4 * 21
    assert full.activations >= 2 * 4 * (15 + 15 + 19)


def test_nothing_changes():
    model, x, y = make("cnn")
    model.train_on_batch(x, y)
    before = [np.array(w) for w in model.get_weights()]
    kmp.debug.memory_report(model, 8)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {layer.compute_dtype for layer in model.layers} == {"float16"}


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, "many"])
def test_the_batch_size_must_be_one(batch_size):
    with pytest.raises(ValueError, match="`batch_size` of memory_report must be"):
        kmp.debug.memory_report(mlp(), batch_size)


def words_model():
    words = keras.Input((None,), dtype="int32")
    x = layers.Embedding(50, 8)(words)
    return keras.Model(words, layers.Dense(3)(x))


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_inputs_of_unknown_length_are_counted_by_a_batch(samples):
    words = np.ones((samples, 12), "int32")
    full, mixed, _ = kmp.debug.memory_report(words_model(), 4, words).rows
    assert full.activations == 2 * mixed.activations == 4 * 4 * 12 * (8 + 3)


@pytest.mark.parametrize("samples", [1, 8])
def test_a_subclassed_model_is_counted_by_a_batch(samples):
    model, x, _ = make("subclassed", policy="float32")
    full, _, _ = kmp.debug.memory_report(model, 8, x[:samples]).rows
    # first, shared, shared, hidden and logits
    assert full.activations == 4 * 8 * (5 + 5 + 5 + 5 + 4)


class Similarities(layers.Layer):
    """Compares each sample with each other one."""

    def call(self, x):
        return ops.matmul(x, ops.transpose(x))


def test_a_whole_batch_is_run_as_it_is():
    """What grows with the square of the batch cannot be counted by one sample."""
    model = keras.Sequential([keras.Input((4,)), Similarities()])
    found = kmp.debug.memory_report(model, 16, np.ones((16, 4), "float32")).rows[0]
    assert found.activations == 4 * 16 * 16


@pytest.mark.parametrize("model", [words_model, lambda: make("subclassed")[0]])
def test_without_shapes_a_batch_is_asked_for(model):
    with pytest.raises(
        ValueError, match=r"must know the shapes .*memory_report\(model, batch_size, x"
    ):
        kmp.debug.memory_report(model(), 8)


@pytest.mark.parametrize(
    "x, message", [(np.float32(1), "`x` of memory_rep"), (iter([1]), "one batch")]
)
def test_x_must_be_a_batch(x, message):
    with pytest.raises(ValueError, match=message):
        kmp.debug.memory_report(words_model(), 8, x)


@pytest.mark.parametrize(
    ("memory", "slots"),
    [
        ({}, (8, 8, 4)),
        ({"slot_dtype": "bfloat16"}, (4, 4, 4)),
        ({"slot_dtype": "float32"}, (8, 8, 8)),
        ({"master_weights": True}, (8, 8, 6)),
        ({"slot_dtype": "int8"}, (2.125, 2.125, 2.125)),
        ({"master_weights": 24, "slot_dtype": "int8"}, (2.125, 2.125, 3.125)),
    ],
    ids=str,
)
def test_slots_are_counted_as_they_were_chosen(memory, slots):
    """Bytes a parameter of Adam's two slots, and of a remainder beside half weights."""
    dense = keras.layers.Dense(64, use_bias=False)
    model = keras.Sequential([keras.Input((64,)), dense])
    model.compile(kmp.scaled("adam", "none", **memory), "mse")
    parameters = 64 * 64
    found = [row.slots / parameters for row in kmp.debug.memory_report(model, 4).rows]
    assert found == list(slots)


@pytest.mark.only("jax")
def test_what_xla_counts_is_of_the_weights_that_there_are():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(512), layers.Dense(10)])
    model.compile("adam", "mse")

    def counted():
        return [row.compiled is not None for row in kmp.debug.memory_report(model, 8).rows]

    assert counted() == [True, True, False]
    kmp.to_mixed_precision(model, "bfloat16")
    assert {v.dtype for v in model.layers[0].weights} == {"bfloat16"}
    assert counted() == [False, False, True]
