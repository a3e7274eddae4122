"""A train step that accumulates gradients in variables of its model, as Keras's guides show."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from linear_runs import JIT, SPE
from oracle import BACKEND

import kmp

EVERY = 4  # micro-batches a step


class Accumulating(keras.Model):
    """Applies the sum of the gradients of four batches, and begins anew whatever came of it."""

    def __init__(self):
        super().__init__()
        self.dense, self.calls = layers.Dense(1), None

    def build(self, shape):
        self.dense.build(shape)
        settings = {"initializer": "zeros", "trainable": False}
        self.calls = self.add_weight((), name="calls", **settings)
        self.count = self.add_weight((), dtype="int32", name="count", **settings)
        shapes = [v.shape for v in self.trainable_variables]
        self.sums = [self.add_weight(x, name=f"sum{i}", **settings) for i, x in enumerate(shapes)]

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + ops.mean(x))
        return self.dense(x)

    def train_step(self, *args):
        return getattr(self, f"on_{BACKEND}")(*args)

    def on_tensorflow(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        self.add_up(tape.gradient(scaled, self.trainable_variables))
        tf.cond(self.count.value >= EVERY, self.apply, lambda: True)
        return {"loss": loss}

    def on_torch(self, data):
        import torch

        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            self.add_up([v.value.grad for v in self.trainable_variables])
            if int(self.count.value) >= EVERY:
                self.apply()
        return {"loss": loss}

    def add_up(self, gradients):
        self.count.assign(self.count + 1)
        for each, gradient in zip(self.sums, gradients, strict=True):
            each.assign(each + gradient)

    def apply(self):
        self.optimizer.apply([ops.copy(x) for x in self.sums], self.trainable_variables)
        for each in (self.count, *self.sums):
            each.assign(ops.zeros_like(each))
        return True

    def on_jax(self, state, data):
        import jax

        x, y = data
        weights, rest, slots, metrics = state

        def loss_of(weights):
            y_pred, changed = self.stateless_call(weights, rest, x, training=True)
            loss = self.compute_loss(x, y, y_pred)
            return self.optimizer.stateless_scale_loss(slots, loss), (loss, changed)

        (_, (loss, rest)), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        names = [v.name for v in self.non_trainable_variables]
        first = names.index("count")
        count, *sums = rest[first : first + 1 + len(weights)]
        sums = [x + g for x, g in zip(sums, gradients, strict=True)]

        def apply():
            new, changed = self.optimizer.stateless_apply(slots, sums, weights)
            return ops.zeros_like(count), [ops.zeros_like(x) for x in sums], new, changed

        (count, sums, weights, slots) = jax.lax.cond(
            count + 1 >= EVERY, apply, lambda: (count + 1, sums, weights, slots)
        )
        rest = [*rest[:first], count, *sums, *rest[first + 1 + len(weights) :]]
        return {"loss": loss}, (weights, rest, slots, metrics)


HOW = [{}, {"run_eagerly": True}, *({"jit_compile": jit} for jit in JIT[1:])]
HOW += [{"steps_per_execution": spe} for spe in SPE[1:]]


@pytest.mark.quick
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_step_that_sets_back_its_sums_does_so_when_it_is_skipped(how):
    """As without protection. What its calls assign is undone all the same."""
    x = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")

    def fit(protected):
        keras.utils.set_random_seed(0)
        model = Accumulating()
        model.build((None, 3))
        rule = kmp.DynamicLossScale(2.0**126, max_scale=2.0**126)  # the first steps overflow
        model.compile(kmp.scaled("sgd", rule, learning_rate=0.1), "mse", **how)
        if protected:
            kmp.protect(model)
        model.fit(x, x[:, :1] * 10, batch_size=2, epochs=2, shuffle=False, verbose=0)
        return model

    plain, protected = fit(False), fit(True)
    skipped = [int(ops.convert_to_numpy(m.optimizer.skipped_steps)) for m in (plain, protected)]
    assert skipped[0] == skipped[1] >= 3
    for one, other in zip(plain.weights, protected.weights, strict=True):
        if one.name == "calls":
            assert float(one.numpy()) != float(other.numpy())
        else:
            np.testing.assert_array_equal(one.numpy(), other.numpy(), one.path)


class Averaging(Accumulating):
    """Does not set back its sums."""

    def apply(self):
        self.optimizer.apply([ops.copy(x) for x in self.sums], self.trainable_variables)
        return True


@pytest.mark.only("tensorflow", "torch")
def test_what_a_skipped_step_makes_nan_of_its_own_is_restored():
    model = Averaging()
    model.build((None, 3))
    model.compile(kmp.scaled("sgd", "none"), "mse")
    kmp.protect(model)
    x = np.ones((10, 3), "float32")
    x[6] = np.nan
    model.fit(x, x[:, :1], batch_size=1, shuffle=False, verbose=0)
    assert all(np.isfinite(v.numpy()).all() for v in model.variables)
    assert int(model.optimizer.skipped_steps.numpy()) == 1
