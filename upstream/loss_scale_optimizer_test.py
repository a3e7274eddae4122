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
        own = optimizer.variables
        (value,), values = optimizer.stateless_apply(
            [v.value for v in own], grads, [variable.value]
        )
        for v, value in zip([variable, *own], [value, *values]):
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

    def test_exclude_from_weight_decay(self):
        inner = SGD(1.0, weight_decay=0.5)
        optimizer = LossScaleOptimizer(inner)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        bias = backend.Variable([1.0], name="bias")
        optimizer.build([bias])
        self.assertFalse(inner._use_weight_decay(bias))

    def test_one_loss_scale(self):
        with self.assertRaisesRegex(ValueError, "already scales"):
            LossScaleOptimizer(LossScaleOptimizer(SGD(1.0)))

    def test_config_twice(self):
        config = LossScaleOptimizer(SGD(0.5)).get_config()
        LossScaleOptimizer.from_config(config)
        self.assertIn("inner_optimizer", config)

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
