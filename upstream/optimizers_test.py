import numpy as np
import pytest

from keras.src import backend
from keras.src import layers
from keras.src import models
from keras.src import testing
from keras.src.optimizers.adam import Adam
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.nadam import Nadam


class OptimizerChangesTest(testing.TestCase):
    def test_nadam_product(self):
        """JAX carries from step to step what is in `variables`."""
        optimizer = Nadam()
        LossScaleOptimizer(optimizer).build([backend.Variable([1.0])])
        known = [id(v) for v in optimizer.variables]
        self.assertIn(id(optimizer._u_product), known)

    def test_adam_in_bfloat16(self):
        """The first step of Adam is one of the learning rate."""
        variable = backend.Variable([1.0], dtype="bfloat16")
        optimizer = Adam(0.5)
        optimizer.build([variable])
        grads = [backend.ops.convert_to_tensor([1.0], "bfloat16")]
        if backend.backend() == "jax":
            (value,), _ = optimizer.stateless_apply(
                [v.value for v in optimizer.variables], grads, [variable.value]
            )
            variable.assign(value)
        else:
            optimizer.apply(grads, [variable])
        moved = backend.ops.convert_to_numpy(variable).astype("float32")
        self.assertAllClose(moved, [0.5], atol=0.01)

    @pytest.mark.skipif(backend.backend() != "jax", reason="Donates buffers.")
    def test_averages_of_their_own(self):
        """The second `fit` begins with the averages that the first wrote."""
        model = models.Sequential([layers.Dense(1)])
        model.compile(Adam(use_ema=True), "mse")
        x, y = np.ones((4, 2)), np.ones((4, 1))
        model.fit(x, y, verbose=0)
        weight = model.trainable_variables[0].value
        average = model.optimizer._model_variables_moving_average[0].value
        self.assertIsNot(weight, average)
