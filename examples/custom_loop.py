"""Loss scaling in a training loop of your own, and the proof that it ends where `fit` does.

    KERAS_BACKEND=tensorflow python examples/custom_loop.py     a tf.function with a GradientTape
    KERAS_BACKEND=jax python examples/custom_loop.py            a pure step under jax.jit
    KERAS_BACKEND=torch python examples/custom_loop.py          loss.backward()

Read the loop of your backend, `train_...` below. All do the same three things:

    scale the loss             with the scale that the optimizer holds now
    differentiate that         the gradients come out as many times too large
    hand them to the optimizer which divides, checks, and updates or skips

One batch is poisoned with an infinite pixel, so that one step must be skipped. With --plan XLA says
how many bytes the step of the JAX loop needs on a card that need not be here (memory_plan.py).
"""

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import keras
import memory_plan
import numpy as np
from sklearn.datasets import load_digits

import kmp

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax
elif BACKEND == "torch":
    import torch

BATCH_SIZE = 64
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_tensorflow(model, optimizer, batches):
    """Like `model.train_step`, in a graph; leave tf.function away to debug it eagerly."""
    optimizer.build(model.trainable_variables)  # variables may not be born inside a graph

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled_loss = optimizer.scale_loss(loss)  # inside the tape: this is differentiated
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return [float(step(x, y)) for x, y in batches]


def step_of_jax(model, optimizer):
    """Everything that changes goes in and comes out; nothing is read from the model within."""

    def scaled_loss(weights, statistics, state, x, y):
        logits, statistics = model.stateless_call(weights, statistics, x, training=True)
        loss = loss_of(y, logits)
        # Not optimizer.scale_loss(loss): jit would keep the scale of the first step for ever.
        return optimizer.stateless_scale_loss(state, loss), (loss, statistics)

    def step(variables, x, y):
        weights, statistics, state = variables
        differentiate = jax.value_and_grad(scaled_loss, has_aux=True)
        (_, (loss, statistics)), gradients = differentiate(weights, statistics, state, x, y)
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        return (weights, statistics, state), loss

    return step


def train_jax(model, optimizer, batches):
    """The step above, compiled once, and its last results given back to the model."""
    optimizer.build(model.trainable_variables)
    # The old values give their memory to the new.
    compiled = jax.jit(step_of_jax(model, optimizer), donate_argnums=0)
    owners = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    variables = tuple([v.value for v in group] for group in owners)
    losses = []
    for x, y in batches:
        variables, loss = compiled(variables, x, y)
        losses.append(loss)
    # The model gets its variables back; those that it had are donated and gone.
    for group, values in zip(owners, variables, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
    return [float(loss) for loss in losses]


def train_torch(model, optimizer, batches):
    """PyTorch's own loop, with Keras's layers and kmp's optimizer."""
    optimizer.build(model.trainable_variables)
    losses = []
    for x, y in batches:
        model.zero_grad()
        loss = loss_of(torch.as_tensor(y), model(x, training=True))
        optimizer.scale_loss(loss).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
        losses.append(loss.item())
    return losses


def build_model() -> keras.Model:
    """A small mixed float16 model, always with the same weights."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            kmp.layers.Float32OutputDense(10, name="logits"),
        ]
    )


def build_optimizer() -> kmp.LossScaleOptimizer:
    """Adam with a scale that grows every 20 finite steps: in a run this short it shall move."""
    rule = kmp.DynamicLossScale(growth_interval=20)
    return kmp.scaled(keras.optimizers.Adam, rule, learning_rate=2e-3)


def plan(device: str) -> memory_plan.Plan:
    """XLA's plan of the step of JAX's loop."""
    model, optimizer = build_model(), build_optimizer()
    optimizer.build(model.trainable_variables)
    state = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    x, y = np.zeros((BATCH_SIZE, 64), "float32"), np.zeros((BATCH_SIZE,), "int32")
    step = step_of_jax(model, optimizer)
    return memory_plan.plan_step(step, (state, x, y), model.count_params(), device)


def main(argv: Sequence[str] | None = None) -> None:
    """Train twice, in the loop and in `fit`, and compare every variable."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="two epochs, to see that it runs")
    parser.add_argument("--plan", choices=memory_plan.DEVICES, help="bytes on this card, no more")
    arguments = parser.parse_args(argv)
    epochs = 2 if arguments.smoke else arguments.epochs
    if arguments.plan and not memory_plan.is_ready():
        sys.exit(memory_plan.again())
    keras.config.set_dtype_policy("mixed_float16")
    if arguments.plan:
        print(f"mixed_float16: {plan(arguments.plan)}")
        return

    digits = load_digits()
    number = len(digits.data) // BATCH_SIZE * BATCH_SIZE
    x = (digits.data[:number] / 16.0).astype("float32")
    y = digits.target[:number].astype("int32")
    x[5 * BATCH_SIZE, 0] = np.inf  # the sixth batch of every epoch
    batches = [(x[i : i + BATCH_SIZE], y[i : i + BATCH_SIZE]) for i in range(0, number, BATCH_SIZE)]

    model, optimizer = build_model(), build_optimizer()
    train = {"tensorflow": train_tensorflow, "jax": train_jax, "torch": train_torch}[BACKEND]
    print(f"Training for {epochs} epochs in a loop of our own ...", flush=True)
    losses = train(model, optimizer, batches * epochs)

    print(f"Training for {epochs} epochs in fit ...\n", flush=True)
    fitted = build_model()
    fitted.compile(build_optimizer(), loss=loss_of)
    fitted.fit(x, y, batch_size=BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0)

    print(optimizer.gradient_report())  # asks the device: seldom
    print()
    finite = np.isfinite(losses)
    print(f"Loss from {losses[0]:.3f} to {losses[-1]:.3f}; not finite in {(~finite).sum()} steps.")
    differences = [
        np.max(np.abs(keras.ops.convert_to_numpy(a) - keras.ops.convert_to_numpy(b)))
        for a, b in zip(model.weights, fitted.weights, strict=True)
    ]
    print(f"Largest difference from the weights of fit: {max(differences)}")
    for name, one in (("loop", optimizer), ("fit", fitted.optimizer)):
        print(
            f"{name:>5}: loss scale {float(one.dynamic_scale):g}, {int(one.skipped_steps)} of "
            f"{int(one.steps)} steps skipped, {int(one.iterations)} applied"
        )


if __name__ == "__main__":
    main()
