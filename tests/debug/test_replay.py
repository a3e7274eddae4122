"""The replay sees what it should, and changes nothing of what is computed."""

import threading

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, make, plant
from keras import layers, ops

import kmp
from kmp._backend import backend
from kmp.debug import replay as _replay


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_watching_changes_no_gradient(architecture):
    """The gradients of a watched run are those of an unwatched one, bit for bit."""
    model, x, y = make(architecture)
    batch = (_replay.as_batch(x), _replay.as_batch(y), None)
    recorder, *_ = _replay.forward(model, batch, training=False)
    seen = []
    ends = [
        _replay.backward(
            model, batch, 8.0, keys, lambda *place: seen.append(place[:3]), training=False
        )
        for keys in (set(), {call.key for call in recorder.calls})
    ]
    for a, b in zip(*[end[1] for end in ends], strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(a), ops.convert_to_numpy(b))
    assert float(ends[0][0]) == float(ends[1][0])
    assert {call.key for _, call, _ in seen} <= {call.key for call in recorder.calls}
    assert len(seen) > len(recorder.calls)


@keras.saving.register_keras_serializable(package="test")
class Around(layers.Layer):
    """Hands its input on; what masks it knows nothing of."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.pool = layers.GlobalAveragePooling1D()
        self.supports_masking = True

    def call(self, x):
        return self.pool(x)

    def compute_mask(self, x, previous_mask):
        return None


def test_masks_ride_on_what_is_watched():
    """The mean is over the words that are not padding."""
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(5, 2, mask_zero=True, embeddings_initializer="ones")(inputs)
    model = keras.Model(inputs, Around(name="around")(x))
    model.compile("sgd", loss=keras.losses.MeanSquaredError(reduction="sum"))
    batch = (_replay.as_batch(np.array([[1, 0, 0, 0]])), ops.zeros((1, 2)), None)
    recorder, *_ = _replay.forward(model, batch, training=True)
    keys = {call.key for call in recorder.calls}
    _, (gradient,) = _replay.backward(model, batch, 1.0, keys, lambda *_: None)
    # d mean(w^2, w^2) / d w for the one word, all of it: 0.25 without a mask.
    assert ops.convert_to_numpy(backend.gradient_rows(gradient)).max() == 1.0


class OtherThread(layers.Layer):
    """While it is called another thread calls a layer of its own, which ends in NaN."""

    def call(self, x):
        bad = layers.Lambda(lambda x: x * np.nan, output_shape=lambda s: s, name="bad")
        thread = threading.Thread(target=lambda: bad(np.ones((2, 2), "float32")))
        thread.start()
        thread.join()
        return x * np.inf


def test_other_threads_are_not_looked_at():
    model = keras.Sequential([keras.Input((2,)), OtherThread(name="here")])
    assert kmp.debug.locate_nonfinite(model, np.ones((2, 2))).path.endswith("here")


def test_calls_know_their_parents_and_times():
    model, x, _ = make("subclassed")
    batch = (_replay.as_batch(x), None, None)
    recorder, *_ = _replay.forward(model, batch, training=False)
    keys = [call.key for call in recorder.calls]
    assert keys[0] == "/subclassed#1"
    assert keys[2:4] == ["/subclassed#1/shared#1", "/subclassed#1/shared#2"]
    assert keys[-1] == "/subclassed#1/head#1/logits#1"
    for call in recorder.calls[1:]:
        assert call.parent.span[0] < call.span[0] < call.span[1] < call.parent.span[1]
        assert call in call.parent.children
    assert {call.dtype for call in recorder.calls} == {"float16"}


class Namesakes(keras.Model):
    """Two layers of one name under one parent, which a functional model would refuse."""

    def __init__(self):
        super().__init__(name="namesakes")
        self.blocks = [layers.Dense(n, kernel_initializer="ones", name="block") for n in (3, 5)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_of_one_name_are_told_apart():
    model = Namesakes()
    model(np.ones((2, 4)))
    rows = kmp.debug.compare_precisions(model, np.ones((2, 4))).rows
    assert [row.max_abs for row in rows if "block" in row.path] == [4.0, 12.0]
    report = kmp.debug.locate_nonfinite(model, np.full((2, 4), 4e37))
    assert report.path == "namesakes/block (call 2)"


class WithoutTraining(keras.Model):
    """A `compute_loss` of the time before Keras 3.3, as many programs still have."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)


@pytest.mark.parametrize("tool", ["locate_nonfinite", "compare_precisions", "diagnose"])
def test_compute_loss_without_training(tool):
    inputs = keras.Input((4,))
    model = WithoutTraining(inputs, layers.Dense(1, name="logits")(inputs))
    model.compile("sgd", loss="mse")
    report = getattr(kmp.debug, tool)(model, np.ones((2, 4)), np.ones((2, 1)))
    assert "logits" in str(report) or "is finite" in str(report)


class TwoTowers(keras.Model):
    """Retrieval: `call` embeds the query, and the loss alone calls the tower of the items."""

    def __init__(self):
        super().__init__(name="towers")
        half = {"kernel_initializer": "ones", "dtype": "mixed_float16"}
        self.query = layers.Dense(4, name="query", **half)
        self.item = layers.Dense(4, name="item", **half)

    def build(self, shape):
        self.query.build((None, 4))
        self.item.build((None, 4))

    def call(self, x):
        return self.query(x["query"])

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        items = ops.cast(self.item(self.before(x["item"])), "float32")
        scores = ops.sum(ops.cast(y_pred, "float32") * items, axis=-1)
        return ops.mean(ops.square(y - self.after(scores)))

    def before(self, x):
        return x

    def after(self, x):
        return x


def towers():
    x = {"query": np.ones((2, 4), "float32"), "item": np.ones((2, 4), "float32")}
    model = TwoTowers()
    model(x)
    model.compile("sgd")
    return model, x, np.ones((2,), "float32")


def test_layers_that_the_loss_alone_calls_are_seen():
    model, x, y = towers()
    assert kmp.debug.locate_nonfinite(model, x, y).phase is None
    model.item.kernel.assign(model.item.kernel * np.nan)
    report = kmp.debug.locate_nonfinite(model, x, y)
    assert (report.phase, report.part, report.path) == ("forward", "layer", "towers/item")
    assert report.cause == f"16 numbers of its variable {model.item.kernel.path} are not finite"


@pytest.mark.parametrize("fault, phase", [("overflow", "forward"), ("gradient", "backward")])
def test_faults_of_layers_that_the_loss_calls(fault, phase):
    model, x, y = towers()
    plant(model.item, fault)
    report = kmp.debug.locate_nonfinite(model, x, y, loss_scale=1.0)
    assert (report.phase, report.path, report.dtype) == (phase, "towers/item", "float16")
    assert "left float16" in report.cause


def test_the_code_of_the_loss_is_placed_between_the_layers_that_it_calls():
    model, x, y = towers()
    model.after = lambda x: x * 1e30
    report = kmp.debug.locate_nonfinite(model, x, y)
    assert (report.phase, report.part, report.path) == ("loss", "loss", None)
    assert (report.after, report.before) == ("towers/item", None)
    assert "the outputs are finite, the loss is not: its code after towers/item" in str(report)
    model, x, y = towers()
    model.before = lambda x: ops.log(-x)
    report = kmp.debug.locate_nonfinite(model, x, y)
    assert (report.phase, report.after, report.before) == ("loss", None, "towers/item")


def test_the_gradient_of_the_code_of_the_loss():
    model, x, y = towers()
    model.after = lambda x: x * 1e5  # the gradients at both towers leave float16
    report = kmp.debug.locate_nonfinite(model, x, y, loss_scale=1.0)
    assert (report.phase, report.part, report.path) == ("backward", "loss", None)
    assert report.after == "towers/item"


def test_targets_that_are_not_finite_are_the_batchs_fault():
    model, x, y = towers()
    for targets in (y * np.nan, np.array([1.0, np.inf], "float32")):
        report = kmp.debug.locate_nonfinite(model, x, targets)
        assert (report.phase, report.part, report.path) == ("forward", "data", None)


def test_diagnose_sees_and_keeps_layers_of_the_loss():
    model, x, y = towers()
    plant(model.item, "overflow")
    diagnosis = kmp.debug.diagnose(model, x, y)
    assert [row.path for row in diagnosis.ranges] == ["towers/query", "towers/item"]
    assert diagnosis.float32_layers == ("towers/item",)
    assert diagnosis.gradients_finite


class Autoencoder(keras.Model):
    """A model without `call`, whose `train_step` calls its parts."""

    def __init__(self):
        super().__init__(name="vae")
        self.encoder = keras.Sequential([keras.Input((4,)), layers.Dense(2)], name="encoder")
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(4)], name="decoder")


@pytest.mark.parametrize("tool", ["locate_nonfinite", "compare_precisions", "diagnose"])
def test_a_model_without_call_is_looked_at_part_by_part(tool):
    model, x = Autoencoder(), np.ones((2, 4))
    with pytest.raises(ValueError, match=rf"without one.* kmp\.debug\.{tool}\(model\.encoder, "):
        getattr(kmp.debug, tool)(model, x)
    getattr(kmp.debug, tool)(model.encoder, x)
