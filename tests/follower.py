"""A model whose own code moves frozen weights by small steps, as that of a momentum encoder."""

import keras
import numpy as np
from keras import layers, ops

STEPS, MOMENTUM = 100, 0.999
MOVED = 1 - MOMENTUM**STEPS  # of the way to the weights that are followed


class Pair(keras.Model):
    """Two networks, of which one is frozen."""

    def __init__(self):
        super().__init__(name="pair")
        self.student, self.teacher = (
            keras.Sequential([layers.Dense(8, use_bias=False) for _ in range(2)], name=name)
            for name in ("student", "teacher")
        )
        self.head = layers.Dense(1)
        self.teacher.trainable = False
        self(np.ones((2, 8), "float32"))

    def call(self, x):
        return self.head(ops.subtract(self.student(x), self.teacher(x)))


class Follower(Pair):
    """Whose frozen network follows the other one."""

    def follow(self):
        for mine, its in zip(self.teacher.weights, self.student.weights, strict=True):
            step = ops.add(MOMENTUM * mine, (1 - MOMENTUM) * its)
            mine.assign(ops.cast(step, mine.dtype))


class Copier(Pair):
    """Whose frozen network becomes the other one at times."""

    def follow(self):
        self.teacher.set_weights(self.student.get_weights())


def share_moved(model):
    """How much of the way the teacher goes in some steps, if all weights are to go from 1 to 2."""
    for network, number in (model.teacher, 1.0), (model.student, 2.0):
        network.set_weights([np.full(v.shape, number) for v in network.weights])
    for _ in range(STEPS):
        model.follow()
    return float(np.mean([np.asarray(w, "float32") - 1 for w in model.teacher.get_weights()]))
