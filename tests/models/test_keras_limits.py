"""What Keras itself cannot do in mixed precision: docs/limits.md says so until these tests fail."""

import keras
import numpy as np
import older
import pytest
from keras import layers

import kmp

pytestmark = pytest.mark.slow


def train_with_remat():
    keras.config.set_dtype_policy("mixed_bfloat16")
    with keras.RematScope(mode="full"):
        stack = [keras.Input((4,)), layers.Dense(4), layers.Dense(2, dtype="float32")]
        model = keras.Sequential(stack)
    model.compile("sgd", "mse")
    return model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0).history["loss"]


@pytest.mark.only("tensorflow", "torch")
def test_keras_still_cannot_fit_in_a_remat_scope():
    """keras#21448. On TensorFlow in float32 too; on PyTorch the weights are recomputed in it."""
    with pytest.raises(Exception, match=r"custom_gradient decorator|different metadata"):
        train_with_remat()


@pytest.mark.only("jax")
def test_a_remat_scope_works_on_jax():
    assert np.isfinite(train_with_remat()).all()


@pytest.mark.only("torch")
def test_keras_still_leaves_torch_modules_in_float32():
    """keras#20726. A conversion keeps them in float32, inside a layer too."""
    import torch

    class Inside(layers.Layer):
        def __init__(self):
            super().__init__()
            self.module, self.dense = torch.nn.Linear(4, 4), layers.Dense(4)

        def call(self, x):
            return self.dense(self.module(x))

    def build():
        module = layers.TorchModuleWrapper(torch.nn.Linear(4, 4))
        stack = [keras.Input((4,)), module, layers.Dense(4), Inside(), layers.Dense(2)]
        return keras.Sequential(stack)

    x = np.ones((4, 4), "float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    with pytest.raises(RuntimeError, match="same dtype"):
        build()(x)
    keras.config.set_dtype_policy("float32")
    model = build()
    model.compile(kmp.scaled("adam"), "mse")
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    dtypes = [x.compute_dtype for x in model.layers]
    assert dtypes == ["float32", "bfloat16", "bfloat16", "float32"]
    assert model.layers[2].module.compute_dtype == "float32"
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(x, np.ones((4, 2)), verbose=0)
    assert all(
        (v.numpy() != x).any() for v, x in zip(model.trainable_variables, before, strict=True)
    )


@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5"])
def test_keras_still_saves_no_seed_of_dropout(tmp_path, file):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, seed=3), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
    (model.save if file.endswith(".keras") else model.save_weights)(tmp_path / file)
    seed = model.layers[0].seed_generator.state
    assert seed.numpy().tolist() == [3, 1]
    seed.assign([3, 0])
    model.load_weights(tmp_path / file)
    assert seed.numpy().tolist() == [3, 0]


# Orbax: `load_weights` of a directory hands `set_state_tree` what it has read, and says nothing of
# what has no place. tests/distribution/test_orbax.py does both with Orbax itself.


def trained_sequential():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
    return model


def restored(model, saved):
    """How many of the saved arrays the model has after a restore; any warning fails the test."""
    model.optimizer.build(model.trainable_variables)
    model.set_state_tree(saved.get_state_tree(value_format="numpy_array"))
    pairs = zip(state(saved), state(model), strict=True)
    return sum(np.array_equal(a, b) for a, b in pairs if a.any())


def state(model):
    return [v.numpy() for v in (*model.trainable_variables, *model.optimizer.variables)]


def test_keras_still_restores_nothing_where_layers_are_numbered_otherwise():
    saved = trained_sequential()
    second = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
    second.compile(keras.optimizers.Adam(name=saved.optimizer.name), "mse")
    assert restored(second, saved) == 2  # the count of steps and the learning rate
    keras.utils.clear_session()
    saved = trained_sequential()
    keras.utils.clear_session()
    again = trained_sequential()
    assert restored(again, saved) == sum(x.any() for x in state(saved)) > 10


@pytest.mark.skipif(not older.is_before("3.16.0"), reason="Keras 3.16 gives layers their prefix")
def test_keras_still_restores_no_weight_of_a_sequential_model_from_its_config():
    """keras#23251: so `load_model` builds it, and the paths lose the name of the model."""
    keras.utils.clear_session()
    saved = trained_sequential()
    loaded = keras.Sequential.from_config(saved.get_config())
    assert saved.weights[0].path == "sequential/dense/kernel"
    assert loaded.weights[0].path == "dense/kernel"
    loaded.compile(keras.optimizers.Adam(name=saved.optimizer.name), "mse")
    assert restored(loaded, saved) == 2
