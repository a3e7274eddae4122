"""Sums by index in half precision: they are found, and left in float32 by a conversion.

So are look-ups, whose gradients are such sums. The oracle is how often each index comes.
"""

import inspect

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracle import BACKEND

import kmp
from kmp._backend import backend
from kmp._keras import path_of
from kmp.models import sums_by_index

ON_TORCH_IN_FLOAT32 = pytest.mark.only("jax", "tensorflow")
STOPS = {"bfloat16": 256, "float16": 2048}
NODES = 5120


def segments(x, ids):
    return ops.segment_sum(x, ops.reshape(ids, (-1,)), num_segments=2)


def scattered(x, ids):
    return ops.scatter(ops.reshape(ids, (-1, 1)), x, (2, 4))


def updated(x, ids):
    zeros = ops.zeros((2, 4), x.dtype)
    return ops.scatter_update(zeros, ops.reshape(ids, (-1, 1)), x, reduction="add")


class Readout(layers.Layer):
    """Adds up the nodes of each of two graphs."""

    def __init__(self, add_up=segments, **kwargs):
        super().__init__(**kwargs)
        self.add_up = add_up

    def call(self, x, ids):
        return self.add_up(x, ids)


class Weighted(Readout):
    def build(self, shape, *others):
        self.gain = self.add_weight(name="gain", shape=(4,), initializer="ones")

    def call(self, x, ids):
        return self.add_up(x * self.gain, ids)


def graphs(make, nodes=NODES + 64, policy="mixed_bfloat16"):
    """Two graphs, the nodes of which come as a batch, and what `make()` makes of them."""
    keras.config.set_dtype_policy(policy)
    x = keras.Input(batch_shape=(nodes, 4))
    ids = keras.Input(batch_shape=(nodes, 1), dtype="int32")
    hidden = layers.Dense(4, kernel_initializer="identity")(x)
    outputs = layers.Dense(4, kernel_initializer="identity", dtype="float32")(make()(hidden, ids))
    return keras.Model([x, ids], outputs)


def by_index(model):
    return kmp.audit(model).of_kind("sum by index")


def totals(model):
    ids = np.repeat([[0], [1]], [NODES, 64], axis=0)
    return ops.convert_to_numpy(model([np.ones((len(ids), 4), "float32"), ids]))[:, 0]


ADDS = [segments, scattered] if BACKEND != "torch" else []
ADDS += [updated] * ("reduction" in inspect.signature(ops.scatter_update).parameters)


@pytest.mark.parametrize("dtype", STOPS)
@pytest.mark.parametrize("add_up", ADDS)
def test_they_are_found_where_they_stop(add_up, dtype):
    model = graphs(lambda: Readout(add_up), policy=f"mixed_{dtype}")
    assert totals(model).tolist() == [STOPS[dtype], 64]
    (found,) = by_index(model)
    assert found.path == path_of(model.layers[-2])
    assert f"of ones it stays at {STOPS[dtype]}," in found.problem


@ON_TORCH_IN_FLOAT32
@pytest.mark.parametrize("dtype", STOPS)
def test_a_conversion_leaves_them_in_float32(dtype):
    model = graphs(Readout, policy="float32")
    report = kmp.to_mixed_precision(model, f"mixed_{dtype}")
    (row,) = [each for each in report.rows if each.layer == "Readout"]
    assert row.reason == "adds up by index" and not by_index(model)
    assert {x.compute_dtype for x in model.layers if isinstance(x, layers.Dense)} == {
        dtype,
        "float32",
    }
    assert totals(model).tolist() == [NODES, 64]


def cast(x, ids):
    return segments(ops.cast(x, "float32"), ids)


@ON_TORCH_IN_FLOAT32
def test_what_has_weights_and_an_operation_are_told_to_cast():
    model = graphs(Weighted, policy="float32")
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert model.layers[-2].compute_dtype == "bfloat16"
    (of_layer,) = by_index(model)
    (of_operation,) = by_index(graphs(lambda: segments))
    assert of_layer.advice == (
        'Add up keras.ops.cast(x, "float32") in place of x, or give the layer dtype="float32".'
    )
    assert of_operation.advice == 'Add up keras.ops.cast(x, "float32") in place of x.'
    sound = lambda: Weighted(cast), lambda: Weighted(dtype="float32"), lambda: cast
    for model in map(graphs, sound):
        assert not by_index(model) and totals(model).tolist() == [NODES, 64]


@ON_TORCH_IN_FLOAT32
def test_few_numbers_are_none():
    assert not by_index(graphs(Readout, nodes=256))
    assert by_index(graphs(Readout, nodes=257))
    for add_up in ADDS:
        assert by_index(graphs(lambda add_up=add_up: Readout(add_up), nodes=None))
    assert not by_index(graphs(Readout, nodes=2048, policy="mixed_float16"))


@ON_TORCH_IN_FLOAT32
def test_a_batch_of_few_numbers_each_is_none():
    """Whoever adds up ten numbers of each sample may have a batch of any size."""

    def of_each(x, ids):
        count = ops.shape(x)[0]
        rows = ops.broadcast_to(ops.arange(count, dtype="int32")[:, None, None], (count, 10, 1))
        ids = ops.concatenate([rows, ids], axis=-1)
        if BACKEND == "jax":
            return ops.zeros((count, 4), x.dtype).at[ids[..., 0], ids[..., 1]].add(x)
        return ops.scatter(ids, x, (count, 4))

    keras.config.set_dtype_policy("mixed_bfloat16")
    x, ids = keras.Input((10,)), keras.Input((10, 1), dtype="int32")
    hidden = layers.Dense(10)(x)
    outputs = layers.Dense(4, dtype="float32")(Readout(of_each)(hidden, ids))
    assert not by_index(keras.Model([x, ids], outputs))


def test_numbers_that_are_put_somewhere_are_none():
    def put(x, ids):
        return ops.scatter_update(ops.zeros((2, 4), x.dtype), ops.reshape(ids, (-1, 1)), x)

    assert not by_index(graphs(lambda: Readout(put)))


def test_a_machine_that_adds_up_in_float32_has_none(monkeypatch):
    model = graphs(lambda: Readout(ADDS[-1]))
    assert by_index(model)
    monkeypatch.setattr(sums_by_index, "_rounds_each", lambda dtype: False)
    assert not by_index(model)


# Look-ups


def taken(x, ids):
    return ops.take(x, ops.reshape(ids, (-1,)), axis=0)


def along(x, ids):
    return ops.take_along_axis(x, ids, axis=0)


def by_name(x, ids):
    """As the code of each backend writes it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.gather_nd(x, ids)
    return x[ids[:, 0]]


fallible = taken if BACKEND == "torch" else along


class Lookup(layers.Layer):
    """Looks up rows of what it is given or, without that, of a table of its own."""

    def __init__(self, look_up=taken, **kwargs):
        super().__init__(**kwargs)
        self.look_up = look_up

    def call(self, *given):
        return self.look_up(*given)


class Table(Lookup):
    def build(self, shape):
        self.table = self.add_weight(name="table", shape=(2, 1), initializer="ones")

    def call(self, ids):
        return self.look_up(self.table, ids)


def of_two_rows(layer, policy="mixed_bfloat16", of_float32=False):
    """Looks up NODES rows of two, which are a layer's weight times 1 and 0; also that layer."""
    keras.config.set_dtype_policy(policy)
    x, ids = keras.Input(batch_shape=(2, 1)), keras.Input(batch_shape=(NODES, 1), dtype="int32")
    last = layers.Dense(1, kernel_initializer="ones", dtype="float32")
    if isinstance(layer, Table):
        return layer, keras.Model(ids, last(layer(ids)))
    dense = layers.Dense(1, kernel_initializer="ones", dtype="float32" if of_float32 else None)
    return dense, keras.Model([x, ids], last(layer(dense(x), ids)))


def gradient(layer, model):
    """How often the first row is looked up, as the gradient has it."""
    inputs = [np.array([[1], [0]], "float32"), np.zeros((NODES, 1), "int32")]
    inputs = list(map(ops.convert_to_tensor, inputs))[-len(model.inputs) :]

    def total():
        return ops.sum(model(inputs if len(inputs) > 1 else inputs[0]))

    _, (found, *_) = backend.gradients(total, layer.trainable_variables)
    return float(np.max(ops.convert_to_numpy(backend.dense(found))))


@pytest.mark.parametrize("dtype", STOPS)
@pytest.mark.parametrize("look_up", [taken, along, by_name])
@pytest.mark.parametrize("make, of_float32", [(Lookup, False), (Lookup, True), (Table, True)])
def test_lookups_are_found_where_the_gradient_stops(make, of_float32, look_up, dtype):
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    layer, model = of_two_rows(make(look_up), f"mixed_{dtype}", of_float32)
    adds_in_float32 = {"torch": look_up is along, "tensorflow": of_float32 and look_up is not along}
    found = by_index(model)
    assert bool(found) != adds_in_float32.get(BACKEND, False)
    assert gradient(layer, model) == (STOPS[dtype] if found else NODES)
    for each in found:
        assert each.problem == (
            f"the gradient of what it looks up is added up by index in {dtype}, and this machine "
            f"rounds the sum after each number: of ones it stays at {STOPS[dtype]}, however many "
            "more come."
        )


def test_a_conversion_leaves_lookups_in_float32():
    layer, model = of_two_rows(Lookup(fallible), "float32")
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    (row,) = [each for each in report.rows if each.layer == "Lookup"]
    assert row.reason == "adds up by index" and layer.compute_dtype == "bfloat16"
    assert not by_index(model) and gradient(layer, model) == NODES


def cast_table(x, ids):
    return fallible(ops.cast(x, "float32"), ids)


def test_a_table_is_told_to_cast():
    keras.config.set_dtype_policy("mixed_bfloat16")
    (found,) = by_index(of_two_rows(Table(fallible))[1])
    assert found.advice == (
        'Look up in keras.ops.cast(x, "float32") in place of x, or give the layer dtype="float32".'
    )
    for table in Table(cast_table), Table(fallible, dtype="float32"):
        layer, model = of_two_rows(table)
        assert not by_index(model) and gradient(layer, model) == NODES


@pytest.mark.only("tensorflow")
def test_slices_are_told_to_multiply_what_is_cast():
    """In float32 their gradient is cast back to half precision before it is added up."""
    for in_float32 in (True, False):
        keras.config.set_dtype_policy("mixed_bfloat16")
        layer, model = of_two_rows(Lookup(taken, dtype="float32" if in_float32 else None))
        (found,) = by_index(model)
        assert gradient(layer, model) == STOPS["bfloat16"] and "lookup" in found.path
        assert found.advice == (
            'Look up in keras.ops.cast(x, "float32") * 1.0 in place of x: without the product '
            "TensorFlow casts back first, and adds up then."
        )
        kmp.to_mixed_precision(model, "float32")
        report = kmp.to_mixed_precision(model, "mixed_bfloat16")
        assert "adds up by index" not in {row.reason for row in report.rows}
    layer, model = of_two_rows(Lookup(lambda x, ids: taken(ops.cast(x, "float32") * 1.0, ids)))
    assert not by_index(model) and gradient(layer, model) == NODES


@pytest.mark.only("jax", "tensorflow")
def test_a_protected_model_adds_up_its_gradients_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = of_two_rows(Lookup())[1]
    model.compile(kmp.scaled("sgd"), "mse")
    assert by_index(model)
    with kmp.protect(model):
        assert not by_index(model)
    model = graphs(Readout)
    model.compile(kmp.scaled("sgd"), "mse")
    with kmp.protect(model):  # in `predict` its sums still stop
        assert by_index(model)


def finds(function, shape, *of_indices, trained=True):
    """Whether looking up in numbers of a shape is found, by integers that come as inputs."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = keras.Input(batch_shape=shape)
    ids = [keras.Input(batch_shape=each, dtype="int32") for each in of_indices]
    hidden = layers.Dense(shape[-1])(x) if trained else x
    outputs = Lookup(function)(hidden, *ids)
    return bool(by_index(keras.Model([x, *ids], layers.Dense(1, dtype="float32")(outputs))))


def test_few_lookups_and_those_of_no_weight_are_none():
    assert finds(fallible, (2, 1), (257, 1))
    assert not finds(fallible, (2, 1), (256, 1))
    assert not finds(fallible, (2, 1), (257, 1), trained=False)


@pytest.mark.parametrize("rows, is_often", [(4, True), (8, False)])
def test_of_known_indices_their_average_decides(rows, is_often):
    """A bias by the distance of two positions may have few rows; each is looked up often."""
    known = (np.arange(1280) % rows).astype("int32")[:, None]
    assert finds(lambda x: fallible(x, known), (rows, 1)) == is_often


@ON_TORCH_IN_FLOAT32  # which tells no batch from other axes
def test_rows_of_a_batch_are_looked_up_any_number_of_times():
    assert finds(lambda x, ids: taken(x * 1, ids), (None, 4), (None, 1))
    assert not finds(lambda x, ids: ops.take_along_axis(x, ids, 1), (None, 300, 1), (None, 256, 1))
    assert finds(lambda x, ids: ops.take_along_axis(x, ids, 1), (None, 300, 1), (None, 257, 1))


@ON_TORCH_IN_FLOAT32
def test_the_last_word_of_each_sample_is_none():
    def last(x, lengths):
        rows = ops.arange(ops.shape(x)[0])
        if BACKEND == "jax":
            return x[rows, lengths[:, 0]]
        import tensorflow as tf

        return tf.gather_nd(x, tf.stack([rows, lengths[:, 0]], axis=1))

    assert not finds(last, (None, 300, 4), (None, 1))


def test_an_embedding_has_a_rule_of_its_own():
    """Its table has no cast to float32 before it under "bfloat16", and the model's code has it."""

    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = layers.Embedding(9, 4), layers.Dense(1, dtype="float32")

        def call(self, ids):
            return self.head(self.embedding(ids))

    keras.config.set_dtype_policy("bfloat16")
    model = Words()
    model(np.zeros((3, 400), "int32"))
    assert not by_index(model)


@pytest.mark.only("jax", "torch")  # TensorFlow indexes by masks in another way
def test_a_mask_takes_no_row_twice():
    assert not finds(lambda x: x[np.arange(300) >= 0], (300, 1))
