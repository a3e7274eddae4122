"""What `bench` and `certify` train is protected, as a `fit` with one of kmp's callbacks is."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from kmp.cli.runs import Run

WORD = np.zeros((8, 640), "int32")  # one word 5,120 times, beyond 256 and 2048, where sums stall


def one_word():
    table = layers.Embedding(4, 2, embeddings_initializer="zeros")
    add_up = layers.Lambda(lambda x: ops.sum(ops.cast(x, "float32"), axis=1))
    output = layers.Dense(2, kernel_initializer="identity", trainable=False)
    model = keras.Sequential([keras.Input(WORD.shape[1:], dtype="int32"), table, add_up, output])
    model.compile(keras.optimizers.SGD(2.0**-10), lambda _, y: ops.sum(y, axis=-1))
    return model, WORD, np.zeros((8, 2))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_all_of_a_frequent_words_gradient_counts(policy):
    run = Run(one_word, policy, seed=0)
    assert run.model.layers[0].variable_dtype == "float32"
    assert run.model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    for steps in (1, 2):  # a second `fit` is protected too
        run.fit(*run.data, batch_size=8)
        (table,) = run.model.trainable_variables
        assert float(-ops.convert_to_numpy(table)[0, 0]) == steps * 640 / 2**10


def test_the_model_is_kerass_own_afterwards():
    run = Run(one_word, "mixed_bfloat16", seed=0)
    before = run.model.make_train_function
    run.fit(*run.data, batch_size=8)
    assert run.model.make_train_function == before
