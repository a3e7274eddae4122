"""What every column does with a program: make it, train it, look at its outputs and weights."""

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
from program import BATCH, Program

import kmp

SCALE, STEPS = 2.0**15, 4


class KerasCannotError(Exception):
    """Plain Keras fails in the same place."""


def plain(optimizer):
    """An optimizer as it is."""
    return optimizer


def keras_scaled(optimizer):
    """Keras's own loss scaling."""
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=SCALE)


def kmp_scaled(optimizer):
    """The same rule in kmp."""
    return kmp.scaled(optimizer, loss_scale=kmp.DynamicLossScale(initial_scale=SCALE))


# One step is sooner run than traced on TensorFlow; JAX compiles each operation of an eager one.
QUICK = {"run_eagerly": True} if keras.backend.backend() != "jax" else {}


def made(program: Program, policy="float32", wrap=plain, **arguments) -> keras.Model:
    """The program's model under `policy`, compiled, the same at every call."""
    arguments = arguments or QUICK
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = program.compiled(program.make(), wrap, **arguments)
    keras.utils.set_random_seed(1)
    return model


def fitted(model: keras.Model, program: Program, steps=STEPS, callbacks=None) -> list[float]:
    """Train for some epochs of one step; the losses."""
    x, y = program.batch()
    arguments = dict(batch_size=BATCH, epochs=steps, shuffle=False, verbose=0)
    return model.fit(x, y, **arguments, callbacks=callbacks).history[program.logged]


def eager_by_keras(program: Program) -> None:
    """What the tools do with a model: a step in mixed_float16 that is not compiled."""
    losses = fitted(made(program, "mixed_float16", keras_scaled, run_eagerly=True), program, 1)
    assert np.isfinite(losses).all(), f"losses {losses}"


def outputs(model: keras.Model, program: Program) -> list[np.ndarray]:
    """All outputs of a batch, as float32; none of a model that cannot be called."""
    if not program.callable:
        return []
    reseed(model)
    found = keras.tree.flatten(model.predict(program.batch()[0], batch_size=BATCH, verbose=0))
    return [np.asarray(x, "float32") for x in found]


def sqnr(reference: list[np.ndarray], found: list[np.ndarray]) -> float:
    """The worst agreement of two sets of outputs, in dB."""
    return min((kmp.debug.sqnr(a, b) for a, b in zip(reference, found, strict=True)), default=999)


def leaves(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers with trainable weights of their own, in order."""
    found = {}
    for layer in model._flatten_layers(include_self=False):
        inner = {id(w) for part in layer._layers for w in part.weights}
        if any(id(w) not in inner for w in layer.trainable_weights):
            found[id(layer)] = layer
    return list(found.values())


def reseed(model: keras.Model) -> None:
    """Let random numbers begin anew: Keras's files do not hold how far they are."""
    for layer in model._flatten_layers():
        for i, generator in enumerate(layer._seed_generators):
            generator.state.assign(np.array([i, 7], "uint32"))


def norms(optimizer) -> list[float]:
    """A number for each variable of an optimizer."""
    values = (keras.ops.convert_to_numpy(v) for v in optimizer.variables)
    return [float(np.abs(value.astype("float64")).sum()) for value in values]


def weights(model: keras.Model) -> list[np.ndarray]:
    """Copies of all weights."""
    return [np.array(keras.ops.convert_to_numpy(w)) for w in model.weights]


@contextlib.contextmanager
def untouched(model: keras.Model) -> Iterator[None]:
    """Raise if the block, which only looks, has changed a weight."""
    before = weights(model)
    yield
    pairs = zip(before, weights(model), strict=True)
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
    assert same, "the weights are not what they were"


def said(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
