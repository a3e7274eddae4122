"""Keras's own tests of its LossScaleOptimizer, with kmp's class in its place."""

import pytest

import kmp

keras_own = pytest.importorskip(
    "keras.src.optimizers.loss_scale_optimizer_test", reason="Keras's wheels hold no tests yet"
)

DELIBERATE_DIFFERENCES = {
    # kmp's config holds the whole strategy under `loss_scale`, not two of its numbers.
    "test_serialization",
}


# They apply gradients whose loss nobody has scaled.
@pytest.mark.filterwarnings("ignore:Gradients are applied")
class TestKerasOwn(keras_own.LossScaleOptimizerTest):
    @pytest.fixture(autouse=True)
    def in_the_place_of_kerass_class(self, monkeypatch):
        if self._testMethodName in DELIBERATE_DIFFERENCES:
            pytest.skip("a documented, deliberate difference")
        monkeypatch.setattr(keras_own, "LossScaleOptimizer", kmp.LossScaleOptimizer)
