import numpy as np
import pytest

from keras.src import backend
from keras.src import initializers
from keras.src import layers
from keras.src import models
from keras.src import ops
from keras.src import testing
from keras.src.backend.common.remat import RematScope


class LayerChangesTest(testing.TestCase):
    def remat_fits(self, layer):
        with RematScope(mode="full"):
            model = models.Sequential([layer(), layers.Dense(1)])
        model.compile("sgd", "mse")
        failed = None
        try:
            model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
        except Exception as e:
            failed = e
        self.assertIsNone(failed)

    @pytest.mark.skipif(backend.backend() != "torch", reason="Others do not.")
    def test_variance_of_a_constant(self):
        _, variance = ops.moments(ops.full((64, 1), 1000.5), axes=[0])
        self.assertAllClose(variance, [0.0], atol=1e-3)

    def test_autocast_outside_a_scope(self):
        """A train step on JAX calls a model without the scope of its policy."""

        class Reads(layers.Layer):
            def build(self, shape):
                self.w = self.add_weight(shape=(), name="w")

            def call(self, x):
                self.read = str(ops.convert_to_tensor(self.w).dtype)
                return x

        layer = Reads(autocast=False, dtype="mixed_bfloat16")
        layer(np.ones((2, 2)))
        self.assertIn("float32", layer.read)

    def test_orthogonal_in_bfloat16(self):
        failed = None
        try:
            initializers.Orthogonal()((4, 4), dtype="bfloat16")
        except Exception as e:
            failed = e
        self.assertIsNone(failed)

    @pytest.mark.skipif(
        backend.backend() != "tensorflow", reason="Others take keywords."
    )
    def test_remat_with_keywords(self):
        self.remat_fits(lambda: layers.Dense(4))

    @pytest.mark.skipif(backend.backend() != "torch", reason="Others do not.")
    def test_remat_in_mixed_precision(self):
        """What is computed again is in the compute dtype, as the first time."""
        self.remat_fits(lambda: layers.Dense(4, dtype="mixed_bfloat16"))
