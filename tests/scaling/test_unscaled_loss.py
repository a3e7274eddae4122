"""A train step that forgets to scale its loss is told so, by a warning and by the verdict."""

import inspect
import warnings

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from oracle import few

import kmp


class Forgetful(keras.Model):
    """A model with a train step of its own, as many older ones: it never calls `scale_loss`."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, *arguments):
        return {
            "tensorflow": self._on_tensorflow,
            "jax": self._on_jax,
            "torch": self._on_torch,
        }[BACKEND](*arguments)

    def _on_tensorflow(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}

    def _on_torch(self, data):
        x, y = data
        self.zero_grad()
        loss = ops.mean((self(x) - y) ** 2)
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_weights]
        import torch

        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}

    def _on_jax(self, state, data):
        import jax

        x, y = data
        trainable, others, optimizer, metrics = state

        def loss_of(trainable):
            outputs, _ = self.stateless_call(trainable, others, x)
            return ops.mean((outputs - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss}, (trainable, others, optimizer, metrics)


X, Y = np.ones((16, 2), "float32"), np.ones((16, 1), "float32")


def compiled(optimizer, **settings):
    model = Forgetful()
    model(X[:1])
    model.compile(optimizer, **settings)
    return model


@pytest.mark.parametrize("jit_compile", few([False, True], False), ids=["no_xla", "xla"])
def test_a_step_without_scale_loss_is_noticed(jit_compile):
    if jit_compile and BACKEND == "torch":
        pytest.skip("Keras compiles no step on torch here")
    model = compiled(kmp.scaled("sgd"), jit_compile=jit_compile)
    watch = kmp.callbacks.GradientHealth()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=8, callbacks=[watch], verbose=0)
    messages = [str(w.message) for w in caught]
    assert sum("nothing has scaled their loss" in m for m in messages) == 1
    assert any("self.optimizer.scale_loss(loss)" in m for m in messages)
    assert watch.verdict.state == "STALLED"
    assert "divided by a loss scale of 32768" in watch.verdict.reason


def save(model, path):
    model.save(path / "model.keras")


def log(model, path):
    assert float(model.optimizer.dynamic_scale) == 32768


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "in between"])
@pytest.mark.parametrize("reads", [save, log])
def test_who_saves_or_logs_the_scale_scales_no_loss(tmp_path, reads, when):
    model = compiled(kmp.scaled("sgd"))
    model.optimizer.build(model.trainable_variables)
    watch = kmp.callbacks.GradientHealth()
    at_end = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: reads(model, tmp_path))
    if when == "before":
        reads(model, tmp_path)
    callbacks = [watch] if when == "before" else [watch, at_end]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(X, Y, batch_size=8, epochs=3, callbacks=callbacks, verbose=0)
    assert sum("nothing has scaled their loss" in str(w.message) for w in caught) == 1
    assert list(map(str, history.history["verdict"])) == ["STALLED"] * 3


def test_nor_does_who_looks_at_an_optimizer():
    optimizer = kmp.scaled("sgd", learning_rate=0.1)
    optimizer.build([keras.Variable([1.0])])
    inspect.getmembers(optimizer)
    assert not optimizer.scale_was_read
    with pytest.warns(kmp.PrecisionWarning, match="nothing has scaled their loss"):
        optimizer.apply([ops.ones(1)])


@pytest.mark.parametrize("loss_scale", ["none", 1.0])
def test_where_nothing_is_divided_nothing_is_said(loss_scale):
    model = compiled(kmp.scaled("sgd", loss_scale))
    watch = kmp.callbacks.GradientHealth()
    history = model.fit(X, Y, batch_size=8, callbacks=[watch], verbose=0)
    assert watch.verdict.state == "HEALTHY"
    assert history.history["loss"] == [0.0]  # Keras's metric was told of no loss


@pytest.mark.parametrize("read", ["dynamic_scale", "scale_state"])
def test_who_scales_by_hand_is_left_in_peace(read):
    variable = keras.Variable(np.float32([1.0]))
    optimizer = kmp.scaled("sgd", 4.0, learning_rate=1.0)
    optimizer.build([variable])
    scale = getattr(optimizer, read)
    scale = float(ops.convert_to_numpy(scale.scale if read == "scale_state" else scale))
    optimizer.apply([ops.convert_to_tensor(np.float32([scale]))], [variable])
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [0.0])
