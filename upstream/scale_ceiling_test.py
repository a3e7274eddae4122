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


class ScaleCeilingTest(testing.TestCase):
    def test_scale_stays_finite(self):
        variable = backend.Variable([1.0])
        optimizer = LossScaleOptimizer(
            SGD(1.0), initial_scale=2.0**126, dynamic_growth_steps=1
        )
        optimizer.build([variable])
        for _ in range(3):
            step(optimizer, variable, [0.0])
        self.assertLess(float(optimizer.dynamic_scale), float("inf"))
