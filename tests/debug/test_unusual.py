"""`explain_spike` names what is unusual about a batch, and changes nothing."""

import re

import keras
import numpy as np
import pytest
import spiky_runs
from keras import layers

import kmp

explain = kmp.debug.explain_spike


def regression(seed=0, rows=8):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 4)).astype("float32")
    return x, x[:, :1] - x[:, 1:2]


def regressor():
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(8, "relu", name="hidden")
    model = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(1, name="head")])
    model.compile(kmp.scaled("sgd", spikes="skip"), "mse")
    return model


def names(found):
    return [growth.name for growth in found]


def test_a_column_in_another_unit_and_its_row():
    model, (x, y) = regressor(), regression()
    bad = x.copy()
    bad[5, 2] = 1e4
    found = explain(model, bad, y, (x, y))
    assert names(found.columns) == ["x[..., 2]"]
    assert found.columns[0].value == 1e4
    assert found.columns[0].usual == np.abs(x[:, 2]).max()
    assert names(found.rows) == ["row 5"]
    # The loss of a row on its own is what the row adds to the loss of the batch.
    row = model.evaluate(bad[5:6], y[5:6], verbose=0)
    np.testing.assert_allclose(found.rows[0].value, row, rtol=1e-5)
    assert names(found.layers)[0].endswith("hidden")
    assert "x[..., 2]: 1e+04" in str(found) and "their unit" in str(found)


def test_gradients_are_those_of_the_batches():
    """The norms, against a finite difference of the loss along the gradient of one weight."""
    model, (x, y) = regressor(), regression()
    found = explain(model, x, y + 100.0, (x, y))
    bias = model.get_layer("head").bias
    (growth,) = [g for g in found.gradients if g.name == bias.path]
    losses = []
    for shift in (1e-2, -1e-2):
        before = keras.ops.convert_to_numpy(bias)
        bias.assign(before + shift)
        losses.append(model.evaluate(x, y + 100.0, verbose=0))
        bias.assign(before)
    assert growth.value == pytest.approx(abs(losses[0] - losses[1]) / 2e-2, rel=1e-2)
    assert found.norm.value >= growth.value and found.norm.ratio > 3


def test_a_wrong_label_is_found_by_its_loss():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="head")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kmp.scaled("sgd", spikes="skip"), loss)
    model.get_layer("head").set_weights([20 * np.eye(4, 3), np.zeros(3)])
    x = np.eye(4, dtype="float32")[[0, 1, 2, 0, 1]]
    y = np.array([0, 1, 2, 0, 1])
    wrong = np.array([0, 1, 2, 0, 2])
    found = explain(model, x, wrong, (x, y))
    assert not found.columns and names(found.rows) == ["row 4"]
    assert "Look at their labels" in str(found)


def test_targets_in_another_unit():
    model, (x, y) = regressor(), regression()
    found = explain(model, x, 1e3 * y, (x, y))
    assert names(found.columns) == ["y[..., 0]"] and len(found.rows) > 0 and not found.layers


def test_the_furthest_comes_first():
    x, y = regression()
    found = explain(regressor(), x * [1.0, 10.0, 1000.0, 1.0], y, (x, y))
    assert names(found.columns) == ["x[..., 2]", "x[..., 1]"]


def test_an_ordinary_batch_is_ordinary():
    found = explain(regressor(), *regression(0, 64), regression(1, 64))
    assert not (found.columns or found.rows or found.layers or found.gradients)
    assert str(found).endswith(
        "Nothing about this batch is 3 times as large as in the ordinary one."
    )


def test_a_category_that_the_other_batch_lacks_is_not_unusual():
    model, y = regressor(), np.zeros((2, 1))
    one_hot = np.eye(4, dtype="float32")
    assert not explain(model, one_hot[:2], y, (one_hot[2:], y)).columns


def test_nested_data_weights_and_words():
    words = keras.Input((3,), dtype="int32", name="words")
    size = keras.Input((2,), name="size")
    embedded = layers.Flatten()(layers.Embedding(9, 4)(words))
    outputs = layers.Dense(1)(layers.Concatenate()([embedded, size]))
    model = keras.Model({"words": words, "size": size}, outputs)
    model.compile(kmp.scaled("sgd", spikes="skip"), "mse")
    x = {"words": np.ones((4, 3), "int32"), "size": np.ones((4, 2))}
    bad = dict(x, size=x["size"] * [1.0, 50.0])
    y, weight = np.ones((4, 1)), np.array([1.0, 1.0, 0.0, 1.0])
    found = explain(model, bad, y, (x, y, weight), weight)
    assert names(found.columns) == ["x['size'][..., 1]"]
    assert "row 2" not in names(found.rows)  # its weight is 0


def test_the_advice_of_the_warning_leads_to_the_cause():
    """One input of one batch is in another unit. The warning has the number of the batch."""
    x, y = spiky_runs.digits(40)
    x[29, :, 6] *= 1e4
    model = spiky_runs.classifier()
    with pytest.warns(kmp.PrecisionWarning, match="explain_spike") as warnings:
        spiky_runs.fit(model, x, y, callbacks=[kmp.callbacks.GradientHealth(verbose=0)])
    said = next(str(w.message) for w in warnings if "gradient spike" in str(w.message))
    bad = int(re.search(r"batch (\d+) of this epoch", said).group(1))
    found = explain(model, x[bad], y[bad], (x[bad - 1], y[bad - 1]))
    assert names(found.columns) == ["x[..., 6]"]


def test_nothing_changes():
    """Weights, statistics, metrics, optimizer and the random state are as they were."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    )
    model.compile(kmp.scaled("adam", spikes="skip"), "mse", metrics=["mae"])
    x, y = regression()
    model.train_on_batch(x, y)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
    explain(model, 1e4 * x, y, (x, y))
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)


def test_the_ordinary_batch_has_targets():
    model, (x, y) = regressor(), regression()
    with pytest.raises(ValueError, match=r"Write kmp.debug.explain_spike\(model, x, y, "):
        explain(model, x, y, x)
    with pytest.raises(ValueError, match="a batch with its targets"):
        explain(model, x, y, (x,))
    with pytest.raises(ValueError, match="must be compiled"):
        explain(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), x, y, (x, y))
