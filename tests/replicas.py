"""What the tests under tf.distribute share: strategies of CPU devices, and a run under one."""

import contextlib

import keras
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

OVERFLOWS = {"none": set(), "first": {0}, "last": {-1}, "all": None}


def mirrored(replicas):
    # TensorFlow's own tests do so: strategies of different sizes must not share collective groups.
    tf.distribute.MirroredStrategy._collective_key_base += 100_000
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


@contextlib.contextmanager
def no_merge_call(strategy):
    """The path of MirroredStrategy over GPUs under XLA, by TensorFlow's own test trick."""
    strategy.extended._use_merge_call = lambda: False
    yield strategy


class Run:
    """One variable and one optimizer under a strategy; feeds it gradients replica by replica."""

    def __init__(self, strategy, make_optimizer, start=(1.0, 2.0), graph=True, dtype="float32"):
        self.strategy, self.graph = strategy, graph
        with strategy.scope():
            self.variable = keras.Variable(np.array(start, "float32"), dtype=dtype, name="kernel")
            self.optimizer = make_optimizer()
            self.optimizer.build([self.variable])
        self.start = [v.numpy() for v in self.variables]
        self.compiled = None

    @property
    def variables(self):
        return [self.variable, *self.optimizer.variables]

    def restart(self):
        """Put every variable back to where it began; what has been compiled stays."""
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)

    def step(self, per_replica):
        """per_replica: float32[replicas, 2], the gradient of the unscaled loss on each."""
        scale = float(self.optimizer.dynamic_scale.numpy()) if self.is_kmp else 1.0
        values = self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                np.asarray(per_replica[context.replica_id_in_sync_group], "float32") * scale
            )
        )

        def replica_step(gradient):
            # A gradient that a replica computes stands on its device; an argument does not.
            self.optimizer.apply([tf.identity(gradient)], [self.variable])

        def run(values):
            self.strategy.run(replica_step, args=(values,))

        if self.compiled is None:
            self.compiled = tf.function(run) if self.graph else run
        self.compiled(values)

    @property
    def is_kmp(self):
        return isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)

    def on_each_replica(self, variable):
        local = self.strategy.experimental_local_results(variable.value)
        return [x.numpy() for x in local]


def gradients(replicas, overflow, value=(0.5, -0.25)):
    """Each replica holds its share; the chosen ones hold an inf too."""
    grads = np.tile(np.array(value, "float32") / replicas, (replicas, 1))
    chosen = range(replicas) if OVERFLOWS[overflow] is None else OVERFLOWS[overflow]
    for i in chosen:
        grads[i, 0] = np.inf
    return grads
