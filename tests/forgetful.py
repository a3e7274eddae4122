"""A model with a train step of its own, which may forget what kmp needs of it."""

import keras
from conftest import BACKEND
from keras import ops


class Forgetful(keras.Sequential):
    """Whose train step hands the gradients to `stepped`, or to nobody.

    Attributes:
        stepped: the optimizer; "its own"; or None, for nobody.
        scales: whether the loss is scaled.
        tells: whether Keras's average of the loss is updated.
        clips: what it clips to 1 by itself, while gradients are scaled: the norm of
            "all" together or of "each", or a "value" for each number; None if it does not.
    """

    stepped, scales, tells, clips = None, True, False, None

    @property
    def hands_to(self):
        return self.optimizer if self.stepped == "its own" else self.stepped

    def scaled(self, loss):
        return (self.hands_to or self.optimizer).scale_loss(loss) if self.scales else loss

    def clipped(self, gradients):
        if self.clips is None:
            return gradients
        if self.clips == "value":
            return [ops.clip(x, -1.0, 1.0) for x in gradients]
        squares = [ops.sum(ops.square(x)) for x in gradients]
        if self.clips == "all":
            squares = [sum(squares)] * len(squares)
        return [x / ops.maximum(ops.sqrt(s), 1.0) for x, s in zip(gradients, squares, strict=True)]

    def train_step(self, *args):
        step = {"jax": self.of_jax, "tensorflow": self.of_tensorflow, "torch": self.of_torch}
        return step[BACKEND](*args)

    def of_jax(self, state, data):
        import jax

        trainable, others, of_optimizer, metrics = state
        x, y, *_ = data

        def loss_of(trainable):
            if self.scales:
                arguments = (trainable, others, metrics, x, y, None, True, of_optimizer)
                return self.compute_loss_and_updates(*arguments)[0]
            outputs, _ = self.stateless_call(trainable, others, x, training=True)
            arguments = {"x": x, "y": y, "y_pred": outputs, "training": True}
            loss, _ = self.stateless_compute_loss(trainable, others, metrics, **arguments)
            return loss

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        gradients = self.clipped(gradients)
        if self.hands_to is not None:
            trainable, of_optimizer = self.hands_to.stateless_apply(
                of_optimizer, gradients, trainable
            )
        if self.tells:
            known = list(zip(self.metrics_variables, metrics, strict=True))
            with keras.StatelessScope(state_mapping=known) as scope:
                self._loss_tracker.update_state(loss)
            metrics = [scope.get_current_value(v) for v in self.metrics_variables]
        return {"loss": loss}, (trainable, others, of_optimizer, metrics)

    def of_tensorflow(self, data):
        import tensorflow as tf

        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.scaled(loss)
        gradients = self.clipped(tape.gradient(scaled, self.trainable_weights))
        if self.hands_to is not None:
            self.hands_to.apply(gradients, self.trainable_weights)
        if self.tells:
            self._loss_tracker.update_state(loss)
        return {"loss": loss}

    def of_torch(self, data):
        x, y, *_ = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        self.scaled(loss).backward()
        if self.hands_to is not None:
            gradients = self.clipped([v.value.grad for v in self.trainable_weights])
            self.hands_to.apply(gradients, self.trainable_weights)
        if self.tells:
            self._loss_tracker.update_state(loss)
        return {"loss": loss}
