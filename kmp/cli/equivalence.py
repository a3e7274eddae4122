"""Whether two ways of training are equal within a margin: two one-sided tests."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

ALPHA = 0.05  # the risk of calling equivalent what is not


class Equivalence(NamedTuple):
    """What the paired differences of a metric say; see `equivalence`.

    Attributes:
        mean: float, of the differences; NaN if one of them is not finite.
        low: float, the lower end of the interval that holds the true mean difference.
        high: float, its upper end.
        margin: float, the largest difference that does not matter.
        p_value: float, the larger of the two tests' p-values: the probability of differences like
            these if the true mean difference were as large as the margin.
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

    A test that finds no difference does not prove equality: with few and noisy runs it never finds
    one. Here the burden of proof is reversed. Both of these hypotheses have to be rejected, each by
    Student's t test at 5%:

        the true mean difference <= -margin
        the true mean difference >= +margin

    This is the case exactly when the 90% confidence interval of the mean lies within the margin.

    Args:
        differences: `[runs]`, the metric of one way of training minus that of the other, for runs
            with the same initial weights and the same data in the same order. If one is not finite,
            the two ways are not equivalent.
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
    half = error * float(student_t().ppf(1 - ALPHA, runs - 1))
    distance = margin - abs(mean)  # to the nearer bound; its test has the larger p-value
    if error > 0:
        p_value = float(student_t().cdf(-distance / error, runs - 1))
    else:
        p_value = 0.0 if distance > 0 else 1.0
    return Equivalence(mean, mean - half, mean + half, margin, p_value, p_value < ALPHA)


def student_t() -> Any:
    """SciPy's Student's t distribution, imported when it is needed.

    Raises:
        ModuleNotFoundError: SciPy is not installed.

    Example:

    >>> round(float(student_t().ppf(0.95, 4)), 3)
    2.132
    """
    try:
        from scipy.stats import t
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The test for equivalence needs SciPy, which is not installed. Write "
            "pip install 'kmp[examples]', or pip install scipy."
        ) from error
    return t
