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


class ScaleFloorTest(testing.TestCase):
    def test_scale_stays_above_zero(self):
        variable = backend.Variable([1.0])
        optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0**-125)
        optimizer.build([variable])
        for _ in range(30):
            step(optimizer, variable, [float("inf")])
        self.assertGreater(float(optimizer.dynamic_scale), 0.0)
