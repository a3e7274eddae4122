"""How often `SpikeDetector` takes ordinary noise for divergence.

    python benchmarks/experiments/false_alarms.py     10,000 curves a kind of noise, 15 minutes

Each curve is what a healthy run shows: a power law that decays from 1 to a floor,

    loss(t) = floor + (1 - floor) * (1 + t / tau) ** -alpha

with floor, tau and alpha drawn for each curve, times noise with a median or mean of 1 whose spread,
too, is drawn for each curve. 1,000 readings a curve; an alarm is a spike anywhere in it.
"""

import argparse
import math
import time

import numpy as np

from kmp.callbacks import SpikeDetector
from kmp.callbacks.spike_detector import SpikeState

READINGS = 1_000


def draw_noise(kind: str, random: np.random.Generator) -> np.ndarray:
    """Multiplicative noise, float64[READINGS]."""
    if kind == "normal, 1-20%":
        return np.clip(random.normal(1.0, random.uniform(0.01, 0.2), READINGS), 0.01, None)
    if kind == "lognormal, 5-50%":
        return np.exp(random.normal(0.0, random.uniform(0.05, 0.5), READINGS))
    if kind == "heavy tails":  # Student's t with 4 degrees of freedom in the exponent
        return np.exp(random.uniform(0.05, 0.3) * random.standard_t(4, READINGS))
    if kind == "correlated":  # neighbours share batches of like difficulty
        spread, keep = random.uniform(0.05, 0.3), random.uniform(0.5, 0.9)
        walk = np.zeros(READINGS)
        for i, step in enumerate(random.normal(0.0, spread * math.sqrt(1 - keep**2), READINGS)):
            walk[i] = (keep * walk[i - 1] if i else 0.0) + step
        return np.exp(walk)
    if kind == "lognormal, 100%":  # beyond the ordinary: a loss that jumps by factors of e
        return np.exp(random.normal(0.0, 1.0, READINGS))
    raise ValueError(f"`kind` must be one of {KINDS}. Received: kind={kind!r}.")


KINDS = ("normal, 1-20%", "lognormal, 5-50%", "heavy tails", "correlated", "lognormal, 100%")


def draw_curve(kind: str, seed: int) -> np.ndarray:
    """A healthy loss curve, float64[READINGS]."""
    random = np.random.default_rng([KINDS.index(kind), seed])
    floor, alpha = 10 ** random.uniform(-3, -0.3), random.uniform(0.3, 1.5)
    tau = 10 ** random.uniform(0, 2)
    decay = floor + (1 - floor) * (1 + np.arange(READINGS) / tau) ** -alpha
    return decay * draw_noise(kind, random)


def alarms(detector: SpikeDetector, curve: np.ndarray) -> int:
    """How many spikes the detector sees in a curve."""
    state, count = SpikeState(), 0
    for reading in curve.tolist():
        state = detector.next(state, reading)
        count += detector.is_spike(state)
    return count


def main() -> None:
    """Print, for each kind of noise, the share of curves with an alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=int, default=10_000)
    parser.add_argument("--patience", type=int, default=SpikeDetector.patience)
    arguments = parser.parse_args()
    detector = SpikeDetector(patience=arguments.patience)
    print(
        f"{detector}: {arguments.curves:,} curves of {READINGS:,} readings for each kind of noise"
    )
    for kind in KINDS:
        start = time.time()
        counts = [alarms(detector, draw_curve(kind, seed)) for seed in range(arguments.curves)]
        wrong = sum(count > 0 for count in counts)
        print(
            f"  {kind:18s} {wrong:6d} curves with an alarm = {wrong / arguments.curves:8.4%}, "
            f"{sum(counts)} alarms; {time.time() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
