"""Models to audit, and what tests ask of the findings."""

import keras
import pytest
from keras import layers

import kmp

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy


def model_of(*stack, loss=None, optimizer=None, **compiled):
    model = keras.Sequential([keras.Input((8,)), *stack])
    if loss is not None:
        with_scaling = kmp.scaled("sgd") if optimizer is None else optimizer
        model.compile(with_scaling, loss, **compiled)
    return model


def kinds_of(model):
    return [finding.kind for finding in kmp.audit(model).findings]


class Masked(layers.Layer):
    def call(self, x):
        return keras.ops.where(x > 0, x, -1e9)


@pytest.fixture(autouse=True)
def float16():
    keras.config.set_dtype_policy("mixed_float16")
