import pytest

from keras.src import backend
from keras.src import testing
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.sgd import SGD


@pytest.mark.skipif(backend.backend() != "tensorflow", reason="tf.distribute")
class AllReplicasDecideTest(testing.TestCase):
    def test_an_overflow_on_the_last_replica_skips_the_step(self):
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
