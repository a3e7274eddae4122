"""The range test on paper: which learning rates are tried, and what their losses say."""

import io
import math
from collections.abc import Sequence

import numpy as np

from kmp.summaries import check_installed

_MEMORY = 0.9  # how much less a neighbour weighs than the point before it
_DIVERGED = 4.0  # times the best smoothed loss
_LEAST_POINTS = 10  # fewer are no curve

_SIZE, _MARGIN = (640, 400), 50
_RAW, _SMOOTH, _CHOSEN = (190, 190, 190), (31, 119, 180), (214, 39, 40)


def learning_rate(point: int, min_lr: float, max_lr: float, steps: int) -> float:
    """The learning rate of the `point`-th of `steps` points, from 0, evenly in its logarithm."""
    return min_lr * (max_lr / min_lr) ** (point / (steps - 1))


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Average each loss with its neighbours on both sides, which weigh 0.9 ** distance.

    An average over the past alone, as is usual while a test runs, lags behind by 9 points, and so
    would place everything at learning rates that are too high.
    """
    distance = np.abs(np.subtract.outer(np.arange(len(losses)), np.arange(len(losses))))
    weights = _MEMORY**distance
    return (weights @ np.asarray(losses, "float64")) / weights.sum(axis=1)


def has_diverged(losses: Sequence[float]) -> bool:
    """Tell whether the average over the past is 4 times what it was at its best."""
    if len(losses) < _LEAST_POINTS:
        return False
    average, weight, averages = 0.0, 0.0, []
    for loss in losses:
        average, weight = _MEMORY * average + loss, _MEMORY * weight + 1.0
        averages.append(average / weight)
    best = min(averages)
    return averages[-1] > best + (_DIVERGED - 1.0) * abs(best)


def steepest(learning_rates: Sequence[float], losses: Sequence[float]) -> int | None:
    """Find the point, no later than the best one, at which the smoothed loss falls fastest.

    Args:
        learning_rates: increasing.
        losses: the loss at each of them, finite.

    Returns:
        Its place; None if the loss falls by no more than its noise.
    """
    if len(losses) < _LEAST_POINTS:
        return None
    smoothed = smooth(losses)
    best = int(smoothed.argmin())
    noise = float(np.std(np.asarray(losses)[: best + 1] - smoothed[: best + 1]))
    if best < 2 or smoothed[:best].max() - smoothed[best] <= noise:
        return None
    slopes = np.gradient(smoothed[: best + 1], np.log(learning_rates[: best + 1]))
    return int(slopes.argmin())


def draw(
    learning_rates: Sequence[float], losses: Sequence[float], suggestion: float | None
) -> tuple[bytes, tuple[int, int]]:
    """Draw the losses over the logarithm of the learning rate, the suggestion as a red line.

    Returns:
        A PNG, and its width and height in pixels.
    """
    check_installed(["PIL"], "The picture of a sweep")
    from PIL import Image, ImageDraw  # only here, since it takes time to import

    rates, smoothed = np.log10(learning_rates), smooth(losses)
    low, high = smoothed.min(), np.max(smoothed)
    reach = max(high - low, 1e-12) * 0.1  # raw losses that stick out further are cut
    left, right, top, bottom = _MARGIN, _SIZE[0] - _MARGIN, _MARGIN, _SIZE[1] - _MARGIN

    def place(log_rate: float, loss: float) -> tuple[float, float]:
        across = (log_rate - rates[0]) / (rates[-1] - rates[0])
        up = (min(max(loss, low - reach), high + reach) - low + reach) / (high - low + 2 * reach)
        return left + across * (right - left), bottom - up * (bottom - top)

    image = Image.new("RGB", _SIZE, "white")
    pen = ImageDraw.Draw(image)
    pen.rectangle((left, top, right, bottom), outline="black")
    for exponent in range(math.ceil(rates[0]), math.floor(rates[-1]) + 1):
        x, _ = place(exponent, low)
        pen.line((x, bottom, x, bottom + 4), fill="black")
        pen.text((x - 12, bottom + 6), f"1e{exponent}", fill="black")
    for loss in (low, high):
        pen.text((2, place(rates[0], loss)[1] - 6), f"{loss:.3g}", fill="black")
    for curve, colour, width in ((losses, _RAW, 1), (smoothed, _SMOOTH, 3)):
        pen.line([place(*each) for each in zip(rates, curve, strict=True)], colour, width)
    title = "loss over learning rate"
    if suggestion is not None:
        x, _ = place(math.log10(suggestion), low)
        pen.line((x, top, x, bottom), fill=_CHOSEN, width=2)
        title += f"; steepest at {suggestion:.2g}"
    pen.text((left, top // 2), title, fill="black")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), _SIZE
