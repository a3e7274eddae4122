"""The rules of others that spikes.py compares with, as functions and as optimizers of `fit`."""

from typing import NamedTuple

import keras
from keras import ops

# The optimizers that the rules of others are tried with; nothing, and kmp's, with all.
WITH_RIVALS = ("SGD, momentum", "Adam")


class Peer(NamedTuple):
    """A rule of the field: the factor of a step's gradients, 0 to leave it out."""

    init: object  # () -> state, a list of tensors
    next: object  # (state, norm, loss, step) -> (state, factor)


def olmo(length=128, sigmas=6):
    """OLMo-core's `SkipStepOptimizer`: the last 128 losses and norms, mean and 6 deviations."""

    def deviates(history, known, value):
        count = ops.sum(ops.cast(known, "float32"))
        mean = ops.sum(ops.where(known, history, 0.0)) / count
        squares = ops.sum(ops.where(known, (history - mean) ** 2, 0.0))
        return value - mean > sigmas * ops.sqrt(squares / (count - 1))

    def following(state, norm, loss, step):
        places = ops.arange(length)
        acts = [deviates(h, places < step, x) for h, x in zip(state, (norm, loss), strict=True)]
        skips = (acts[0] | acts[1]) & (step + 1 >= length // 2)
        here = places == step % length
        state = [ops.where(here, x, h) for h, x in zip(state, (norm, loss), strict=True)]
        return state, 1.0 - ops.cast(skips, "float32")

    return Peer(lambda: [ops.zeros(length), ops.zeros(length)], following)


def zclip(alpha=0.97, threshold=2.5, warmup=25):
    """ZClip (Kumar et al. 2025): clips to fewer deviations the further a norm is away."""

    def following(state, norm, loss, step):
        first, mean, variance = state
        here = (ops.arange(warmup) == step % warmup) & (step < warmup)
        first = ops.where(here, norm, first)
        mean = ops.where(step == warmup, ops.mean(first), mean)
        variance = ops.where(step == warmup, ops.var(first), variance)
        deviation = ops.sqrt(variance)
        score = (norm - mean) / (deviation + 1e-6)
        clips = (score > threshold) & (step >= warmup) & (deviation > 1e-6)
        limit = mean + threshold * deviation * threshold / ops.where(clips, score, threshold)
        seen = ops.where(clips, limit, norm)
        new_mean = alpha * mean + (1 - alpha) * seen
        new_variance = alpha * variance + (1 - alpha) * (seen - new_mean) ** 2
        state = [
            first,
            ops.where(step >= warmup, new_mean, mean),
            ops.where(step >= warmup, new_variance, variance),
        ]
        return state, ops.where(clips, limit / norm, 1.0)

    return Peer(lambda: [ops.zeros(warmup), ops.zeros(()), ops.zeros(())], following)


class TellsLoss(keras.Sequential):
    """A model whose optimizer gets the loss too: as the gradient of a weight that does nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.told = self.add_weight(shape=(), initializer="zeros", name="told")

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + (self.told - ops.stop_gradient(self.told)) * ops.stop_gradient(loss)


class FollowsPeer:
    """Beside a Keras optimizer in the bases of a class: it scales or leaves out steps by `peer`.

    The model is a `TellsLoss`. A step that is left out changes no weight and no slot.
    """

    peer: Peer
    steps: int  # of the run, of which `acted` notes those that the rule acted on

    def build(self, variables):
        """Add what the rule remembers."""
        if self.built:
            return
        super().build(variables)
        self.changed = list(self.variables)
        self.memory = [self.add_variable(tuple(x.shape), name="rule") for x in self.peer.init()]
        self.step = self.add_variable((), dtype="int32", name="step")
        self.acted = self.add_variable((self.steps,), name="acted")

    def apply(self, grads, trainable_variables=None):
        """Update the variables as far as the rule lets the step pass."""
        variables = list(trainable_variables or self._trainable_variables)
        self.build(variables)
        grads = list(grads)
        told = [v.name for v in variables].index("told")
        loss, grads[told] = grads[told], ops.zeros(())
        norm = ops.sqrt(sum(ops.sum(g**2) for g in grads))
        step = ops.convert_to_tensor(self.step)
        memory, factor = self.peer.next(
            [ops.convert_to_tensor(v) for v in self.memory], norm, loss, step
        )
        changed = [*self.changed, *variables]
        before = [ops.copy(v) for v in changed]
        super().apply([g * ops.where(factor > 0, factor, 1.0) for g in grads], variables)
        for variable, old in zip(changed, before, strict=True):
            variable.assign(ops.where(factor > 0, ops.convert_to_tensor(variable), old))
        for variable, new in zip(self.memory, memory, strict=True):
            variable.assign(new)
        here = ops.arange(self.steps) == step
        acts = ops.cast(factor < 1, "float32")
        self.acted.assign(ops.where(here, acts, ops.convert_to_tensor(self.acted)))
        self.step.assign_add(1)


def following(peer, inner, steps):
    """Return the optimizer `inner` as one of the same kind that follows the rule of a `Peer`."""
    kind = type("Follows", (FollowsPeer, type(inner)), {"peer": peer, "steps": steps})
    return kind.from_config(inner.get_config())
