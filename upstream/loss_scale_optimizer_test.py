import pytest

from keras.src import backend
from keras.src import ops
from keras.src import testing
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.sgd import SGD


class LossScaleOptimizerChangesTest(testing.TestCase):
    def step(self, optimizer, variable, gradient):
        grads = [ops.convert_to_tensor(gradient)]
        if backend.backend() != "jax":
            optimizer.apply(grads, trainable_variables=[variable])
            return
        _, own = optimizer.stateless_apply(
            [v.value for v in optimizer.variables], grads, [variable.value]
        )
        for v, value in zip(optimizer.variables, own):
            v.assign(value)

    def test_scale_floor(self):
        variable = backend.Variable([1.0])
        optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0**-125)
        optimizer.build([variable])
        for _ in range(30):
            self.step(optimizer, variable, [float("inf")])
        self.assertGreater(float(optimizer.dynamic_scale), 0.0)

    def test_scale_ceiling(self):
        variable = backend.Variable([1.0])
        optimizer = LossScaleOptimizer(
            SGD(1.0), initial_scale=2.0**126, dynamic_growth_steps=1
        )
        optimizer.build([variable])
        for _ in range(3):
            self.step(optimizer, variable, [0.0])
        self.assertLess(float(optimizer.dynamic_scale), float("inf"))

    def test_growth_counter(self):
        """As when training resumes with fewer `dynamic_growth_steps`."""
        variable = backend.Variable([1.0])
        optimizer = LossScaleOptimizer(
            SGD(1.0), initial_scale=8.0, dynamic_growth_steps=10
        )
        optimizer.build([variable])
        optimizer.step_counter.assign(15)
        self.step(optimizer, variable, [0.0])
        self.assertEqual(float(optimizer.dynamic_scale), 16.0)

    @pytest.mark.skipif(backend.backend() != "tensorflow", reason="replicas")
    def test_all_replicas_decide(self):
        """An overflow on the last replica skips the step on all."""
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            variable = backend.Variable([1.0])
            optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=8.0)
            optimizer.build([variable])

        @tf.function
        def step():
            def one(context):
                bad = context.replica_id_in_sync_group == 1
                gradient = tf.where(bad, [float("inf")], [1.0])
                optimizer.apply([gradient], [variable])

            strategy.run(lambda: one(tf.distribute.get_replica_context()))

        step()
        self.assertAllClose(variable.value.values[0], [1.0])
        self.assertEqual(float(optimizer.dynamic_scale.value.values[0]), 4.0)
