import numpy as np
import pytest

from keras.src import backend
from keras.src import dtype_policies
from keras.src import layers
from keras.src import metrics
from keras.src import models
from keras.src import testing
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer


class TrainerChangesTest(testing.TestCase):
    @pytest.mark.skipif(
        backend.backend() != "tensorflow", reason="Others promote the dtypes."
    )
    def test_losses_of_two_dtypes(self):
        """That of `compile` is float32, that of a layer half precision."""
        x = layers.Input((2,))
        y = layers.Dense(1, activity_regularizer="l2", dtype="mixed_bfloat16")
        model = models.Model(x, y(x))
        model.compile("sgd", "mse")
        failed = None
        try:
            model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        except Exception as e:
            failed = e
        self.assertIsNone(failed)

    def test_metric_in_half(self):
        """The square of 300 is beyond float16."""
        metric = metrics.MeanSquaredError()
        metric.update_state(
            np.zeros((1, 1), "float32"), np.full((1, 1), 300, "float16")
        )
        self.assertAllClose(metric.result(), 90000.0)

    def test_scaled_by_its_compute_dtype(self):
        policy = dtype_policies.DTypePolicyMap(
            dtype_policies.DTypePolicy("mixed_float16")
        )
        x = layers.Input((2,))
        model = models.Model(x, layers.Dense(1, dtype=policy)(x))
        model.dtype_policy = policy
        model.compile("sgd", "mse")
        self.assertIsInstance(model.optimizer, LossScaleOptimizer)

    def test_state_of_other_names(self):
        """As from an Orbax checkpoint, where layers are numbered otherwise."""

        def model(name):
            x = layers.Input((2,))
            model = models.Model(x, layers.Dense(1, name=name)(x))
            model.compile("sgd", "mse")
            return model

        state = model("dense").get_state_tree()
        with self.assertWarnsRegex(UserWarning, "dense/kernel"):
            model("dense_1").set_state_tree(state)
