"""Learning-rate schedules of the guides, as Keras writes them; a skipped step advances none.

    python examples/schedules.py

Each schedule drives SGD on one weight whose gradient is 1, so that the weight moves by the learning
rate. At two of the steps the gradient overflows: nothing moves there, and the step after takes the
rate that the skipped one would have had. A bare optimizer would have walked on.
"""

import argparse
import math
import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import ops
from keras.optimizers import schedules

import kmp

SKIPPED = (3, 4)  # of the steps, from 0


@keras.saving.register_keras_serializable(package="example")
class Lambda(schedules.LearningRateSchedule):
    """PyTorch's LambdaLR: a base rate times any function of the step, written in keras.ops."""

    def __init__(self, rate: float, function: Callable):
        self.rate, self.function = rate, function

    def __call__(self, step):
        """The rate of this step."""
        return self.rate * self.function(ops.cast(step, "float32"))


@keras.saving.register_keras_serializable(package="example")
class WarmUp(schedules.LearningRateSchedule):
    """A linear warm-up before any schedule, which then begins at its own step 0."""

    def __init__(self, steps: int, after: schedules.LearningRateSchedule):
        self.steps, self.after = steps, after

    def __call__(self, step):
        """The rate of this step."""
        step = ops.cast(step, "float32")
        rising = self.after(0) * (step + 1) / (self.steps + 1)
        return ops.where(step < self.steps, rising, self.after(ops.maximum(step - self.steps, 0)))


# In brackets what PyTorch calls it.
SCHEDULES: dict[str, Callable[[int], schedules.LearningRateSchedule]] = {
    "step (MultiStepLR)": lambda n: schedules.PiecewiseConstantDecay(
        [n // 2 - 1, 3 * n // 4 - 1], [1.0, 0.1, 0.01]
    ),
    "step (StepLR)": lambda n: schedules.ExponentialDecay(1.0, n // 4, 0.5, staircase=True),
    "exponential (ExponentialLR)": lambda n: schedules.ExponentialDecay(1.0, 1, 0.9),
    "cosine (CosineAnnealingLR)": lambda n: schedules.CosineDecay(1.0, n, alpha=0.01),
    "cosine with restarts": lambda n: schedules.CosineDecayRestarts(1.0, n // 4, t_mul=2.0),
    "polynomial (PolynomialLR)": lambda n: schedules.PolynomialDecay(1.0, n, 0.0, power=2.0),
    "lambda (LambdaLR)": lambda n: Lambda(1.0, lambda step: 1 / (1 + step / 4)),
    "warm-up, then cosine": lambda n: schedules.CosineDecay(
        0.0, n - n // 4, warmup_target=1.0, warmup_steps=n // 4
    ),
    "warm-up before anything": lambda n: WarmUp(n // 4, schedules.ExponentialDecay(1.0, 1, 0.9)),
}


def applied_rates(schedule: schedules.LearningRateSchedule, steps: int) -> list[float]:
    """The rate of each step, read off a weight; zero where the gradient overflowed."""
    optimizer = kmp.scaled(keras.optimizers.SGD, 1.0, learning_rate=schedule)
    weight = keras.Variable([0.0])
    optimizer.build([weight])
    rates = []
    for step in range(steps):
        before = float(ops.convert_to_numpy(weight.value)[0])
        gradient = ops.convert_to_tensor([math.inf if step in SKIPPED else 1.0])
        optimizer.apply([gradient], [weight])
        rates.append(before - float(ops.convert_to_numpy(weight.value)[0]))
    assert int(ops.convert_to_numpy(optimizer.iterations)) == steps - len(SKIPPED)
    return rates


def main() -> None:
    """Print each schedule's rates, and whether they are those of the steps that happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="eight steps instead of sixteen")
    steps = 8 if parser.parse_args().smoke else 16
    for name, make in SCHEDULES.items():
        schedule = make(steps)
        rates = applied_rates(schedule, steps)
        happened = [rate for step, rate in enumerate(rates) if step not in SKIPPED]
        by_hand = [float(ops.convert_to_numpy(schedule(step))) for step in range(len(happened))]
        waited = np.allclose(happened, by_hand, atol=1e-6)  # float32 sums of the weight
        stood = all(rates[step] == 0.0 for step in SKIPPED)
        print(f"{name:28s}", *(f"{rate:.3f}" for rate in rates))
        assert stood and waited, f"{name}: {happened} applied, {by_hand} expected"
    print(f"Steps {SKIPPED} were skipped; no schedule advanced on them.")


if __name__ == "__main__":
    main()
