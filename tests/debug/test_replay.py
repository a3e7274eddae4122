"""The replay sees what it should, and changes nothing of what is computed."""

import threading

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, make
from keras import layers, ops

import kmp
from kmp import _backend
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
    assert ops.convert_to_numpy(_backend.gradient_rows(gradient)).max() == 1.0


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
