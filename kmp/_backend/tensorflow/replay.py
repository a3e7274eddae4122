"""What a replay in the debugging tools asks of TensorFlow."""

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.eager import context  # no public way to the state of the random seeds

from kmp._backend.tensorflow.core import is_concrete
from kmp._backend.types import Gradient, Tensor, Variable


def watch_gradient(x: Tensor, record: Callable[[Tensor], None]) -> Tensor:

    @tf.custom_gradient
    def identity(x):
        def backward(gradient):
            if is_concrete(gradient):
                record(gradient)
            return gradient

        return tf.identity(x), backward

    return identity(x)


def gradients(
    loss: Callable[[], Tensor], variables: list[Variable]
) -> tuple[Tensor, list[Gradient]]:
    with tf.GradientTape() as tape:
        value = loss()
    return value, tape.gradient(value, [v.value for v in variables])


@contextlib.contextmanager
def without_functions() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def preserved(variable: Variable) -> Callable[[], None]:
    # On each replica its own value.
    stored = variable._value
    parts = stored.values if isinstance(stored, tf.distribute.DistributedValues) else [stored]
    values = [tf.identity(part) for part in parts]

    def restore():
        for part, value in zip(parts, values, strict=True):
            part.assign(value)

    return restore


def random_state() -> Callable[[], None]:
    generator = getattr(context.context(), "_rng", None)
    if generator is None:
        return lambda: None
    state = generator.getstate()
    return lambda: generator.setstate(state)
