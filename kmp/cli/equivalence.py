"""Whether two ways of training are equal within a margin: two one-sided tests."""

import math
from collections.abc import Sequence
from typing import NamedTuple

ALPHA = 0.05  # how often what is not equivalent may pass for it


class Equivalence(NamedTuple):
    """What the paired differences of a metric say; see `equivalence`.

    Attributes:
        mean: float, of the differences; NaN if one of them is not finite.
        low: float, the lower end of the interval that holds the true mean difference.
        high: float, its upper end.
        margin: float, the largest difference that does not matter.
        p_value: float, the larger one of the two tests': how likely differences like these would be
            if the true one were as large as the margin.
        equivalent: bool, whether `p_value` is below 0.05: the interval lies within the margin.
    """

    mean: float
    low: float
    high: float
    margin: float
    p_value: float
    equivalent: bool


def equivalence(differences: Sequence[float], margin: float) -> Equivalence:
    """Test whether paired differences are zero up to a margin that was stated beforehand.

    A test that finds no difference proves no equality: with few and noisy runs nothing is ever
    found. Here the burden is the other way round. Both of these have to be rejected, each by
    Student's t test at 5%:

        the true mean difference <= -margin
        the true mean difference >= +margin

    which is so exactly when the 90% confidence interval of the mean lies within the margin.

    Args:
        differences: `[runs]`, the metric of one way minus that of the other, run by run (same
            weights to begin with, same data in the same order). One that is not finite makes the
            two ways not equivalent.
        margin: the largest difference that does not matter, in the metric's units.

    Returns:
        An `Equivalence`.

    Raises:
        ValueError: there are fewer than two differences, or `margin` is not a positive number.

    Example:

    >>> result = equivalence([0.002, -0.004, 0.001, 0.0, -0.002], margin=0.01)
    >>> result.equivalent, round(result.low, 4), round(result.high, 4)
    (True, -0.0029, 0.0017)
    >>> equivalence([0.02, -0.04, 0.01, 0.0, -0.02], margin=0.01).equivalent  # too noisy to tell
    False

    Source: Schuirmann 1987, "A comparison of the two one-sided tests procedure and the power
    approach".
    """
    runs = len(differences)
    if runs < 2:
        raise ValueError(
            "`differences` must hold at least two runs: one has no spread. Received: "
            f"{runs} of them. Write for example five seeds."
        )
    if not 0 < margin < math.inf:
        raise ValueError(
            "`margin` must be a positive number, the largest difference that does not matter. "
            f"Received: margin={margin!r}. Write for example 0.01 for one point of accuracy."
        )
    if not all(map(math.isfinite, differences)):
        return Equivalence(math.nan, math.nan, math.nan, margin, 1.0, False)
    mean = math.fsum(differences) / runs
    variance = math.fsum((d - mean) ** 2 for d in differences) / (runs - 1)
    error = math.sqrt(variance / runs)
    half = error * student_t_quantile(1 - ALPHA, runs - 1)
    distance = margin - abs(mean)  # to the nearer of the two, whose test has the larger p
    if error > 0:
        p_value = student_t_cdf(-distance / error, runs - 1)
    else:
        p_value = 0.0 if distance > 0 else 1.0
    return Equivalence(mean, mean - half, mean + half, margin, p_value, p_value < ALPHA)


def student_t_cdf(t: float, degrees: int) -> float:
    """The probability that Student's t is at most `t`, exact up to rounding (about 1e-15).

    Args:
        t: any float.
        degrees: of freedom, a whole number of at least 1, for which there is a finite sum.

    Example:

    >>> round(student_t_cdf(2.132, 4), 4)
    0.95

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1, degrees // 2 + 1):
        total += term
        term *= cosine**2 * (2 * k - 1 + odd) / (2 * k + odd)
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + within) / 2


def student_t_quantile(probability: float, degrees: int) -> float:
    """The value that Student's t is below with this probability, by bisection of its CDF.

    Example:

    >>> round(student_t_quantile(0.95, 4), 3)
    2.132
    """
    if not 0 < probability < 1:
        raise ValueError(
            f"`probability` must lie between 0 and 1. Received: probability={probability!r}. "
            "Write for example 0.95."
        )
    low, high = -1.0, 1.0
    while student_t_cdf(low, degrees) > probability:
        low *= 2
    while student_t_cdf(high, degrees) < probability:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (
            (middle, high) if student_t_cdf(middle, degrees) < probability else (low, middle)
        )
    return high
