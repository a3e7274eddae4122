from keras.src import backend
from keras.src import ops
from keras.src import testing
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.optimizers.sgd import SGD


def step(optimizer, variable, gradient):
    grads = [ops.convert_to_tensor(gradient)]
    if backend.backend() != "jax":
        optimizer.apply(grads, trainable_variables=[variable])
        return
    _, own = optimizer.stateless_apply(
        [v.value for v in optimizer.variables], grads, [variable.value]
    )
    for v, value in zip(optimizer.variables, own):
        v.assign(value)


class GrowthCounterTest(testing.TestCase):
    def test_grows_from_a_counter_beyond_the_interval(self):
        """As when training resumes with fewer `dynamic_growth_steps`."""
        variable = backend.Variable([1.0])
        optimizer = LossScaleOptimizer(
            SGD(1.0), initial_scale=8.0, dynamic_growth_steps=10
        )
        optimizer.build([variable])
        optimizer.step_counter.assign(15)
        step(optimizer, variable, [0.0])
        self.assertEqual(float(optimizer.dynamic_scale), 16.0)
